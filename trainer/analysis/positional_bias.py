"""Positional bias of attention heads, its gradients, prefix spreads, the same for the model's shape
before training, and attention under rescaled frequencies (DroPE Sec. 3 and 4.1, App. B).

A head is measured on the key s tokens back, s = 0 (diagonal) or 1 (previous token). The centred
weights of Def. 3.1 are c_ij = 1 at j = i - s and -1 / (n_i - 1) at the other n_i - 1 keys that
query i sees. With a_i the attention on that key, A^c = mean_i (a_i n_i - 1) / (n_i - 1). With a
learned sink it is mean_i (a_i n_i - S_i) / (n_i - 1), where S_i is the attention left for the keys.
A query that does not see such a key, or sees no other, counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.attention import (
    Array,
    Heads,
    NeedlePrompt,
    Place,
    Rows,
    attention_blocks,
    capture,
    head_attention,
    last_attention,
    visible_keys,
)
from trainer.model.decoder import Decoder
from trainer.model.language_model import LanguageModel
from trainer.positional.encodings import rope
from trainer.positional.layout import Layout, drop
from trainer.positional.rescaling import (
    Rescaling,
    ntk_aware,
    ntk_by_parts_turns,
    position_interpolation,
    yarn_turns,
)
from trainer.positional.spectrum import Spectrum


def _has_target(visible: Tensor, shift: int) -> Tensor:
    """Return which queries see the key ``shift`` tokens back and another one."""
    return (visible > max(shift, 1)).to(torch.float64)


def positional_biases(rows: Rows) -> dict[str, Tensor]:
    """Compute A^c ``[B, query heads]`` towards the ``diagonal`` and the ``previous`` token."""

    def bias(weight: Tensor, shift: int) -> Tensor:
        values = (weight.double() * rows.visible - 1 + rows.learned) / (rows.visible - 1).clamp(
            min=1
        )
        return (values * _has_target(rows.visible, shift)).mean(dim=-1)

    return {"diagonal": bias(rows.diagonal, 0), "previous": bias(rows.previous, 1)}


def bias_gradients(model: Decoder, ids: Tensor) -> Array:
    """Compute norms of the gradients of A^c, ``[2, 2, layers, query heads]`` (Fig. 4).

    First axis: A^c towards the diagonal, and towards the previous token. Second axis: gradients by
    W_Q and by W_K, of which this is the Frobenius norm. It is averaged over the texts ``ids``
    ``[B, T]``, whose attention is held as a whole. A^c is
    the head's, and the states that enter its layer are constants.
    """
    measured: list[Tensor] = []  # [heads, 2, 2] of every layer of every text

    def observe(layer: int, q: Tensor, k: Tensor, rotated_q: Tensor, rotated_k: Tensor) -> None:
        attention, encoding = model.layers[layer].self_attn, model.layout.layers[layer]
        projections = [attention.q_proj.weight, attention.k_proj.weight]
        C = model.layout.training_length
        heads = Heads(layer, encoding, q, k, rotated_q, rotated_k, C)
        visible = visible_keys(q.shape[2], encoding.window, model.device)
        norms = []
        for head in range(q.shape[1]):
            weights = head_attention(heads, head, slice(None))[0]
            for shift in (0, 1):
                share = _has_target(visible, shift) * visible / (visible - 1).clamp(min=1)
                bias = (weights.diagonal(-shift) * share[shift:]).sum() / len(visible)
                # This is A^c less a constant.
                gradients = torch.autograd.grad(bias, projections, retain_graph=True)
                norms.append(torch.stack([gradient.double().norm() for gradient in gradients]))
        measured.append(torch.stack(norms).unflatten(0, (-1, 2)))

    # Detached inputs: no gradient crosses layers.
    hooks = [
        block.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
        for block in model.layers
    ]
    with torch.enable_grad(), model.observed(observe):
        for row in ids.to(model.device):
            model.hidden_states(row[None])
    for hook in hooks:
        hook.remove()
    means = torch.stack(measured).unflatten(0, (len(ids), -1)).mean(dim=0)
    return means.permute(2, 3, 0, 1).cpu().numpy()


@torch.no_grad()
def prefix_spreads(model: LanguageModel, ids: Tensor) -> Array:
    """Compute max over j <= i of |mean(h_1 .. h_i) - h_j| (Theorem 3.4), averaged over the texts
    ``ids`` ``[B, T]``.

    Returns ``[layers + 1]``: for the input of the attention of every block, which is the output of
    its norm (App. A and Prop. B.3), and for the last norm's output, the input of the head.
    """
    spreads: list[Tensor] = []

    def note(layer: int, states: Tensor) -> None:
        spreads.append(torch.stack([_prefix_spread(x) for x in states]).mean())

    with model.feeding(note):
        last = model.hidden_states(ids.to(model.device))
    note(len(model.layout.layers), last)
    return torch.stack(spreads).cpu().numpy()


def _prefix_spread(states: Tensor) -> Tensor:
    """Compute max over j <= i of |mean(h_1 .. h_i) - h_j|, ``states`` being h ``[T, d]``."""
    # The common mean is subtracted first; otherwise rounding hides the small differences.
    states = states.double() - states.double().mean(dim=0)
    means = states.cumsum(dim=0) / torch.arange(1, len(states) + 1, device=states.device)[:, None]
    return torch.cdist(means, states).tril().amax()


TOKENS, FEWEST, SEEDS = 512, 32, 3
BUDGET = 1e12
"""Largest number of floating-point operations in gradients, about a minute of one core."""


class FreshResult(NamedTuple):
    """Results for decoders of a model's shape before training, with positions (``encoded``) and
    without (``nope``), on ``tokens`` tokens.

    ``gradients``: by version, norms of the gradients of A^c by W_Q and W_K together, means over
    heads, ``[seeds, 2, layers]`` for the diagonal and the previous token. ``spreads``: by version,
    prefix spreads ``[seeds, layers + 1]``.
    """

    tokens: int
    gradients: dict[str, Array]
    spreads: dict[str, Array]


def fresh_decoders(model: LanguageModel, ids: Tensor) -> FreshResult | None:
    """Measure a model's shape before training, with an encoding and without (DroPE Sec. 3, Fig. 4,
    Thm. 3.4).

    The decoders have the model's depth, width, heads, windows and encoding (RoPE of base 10,000 if
    it has none). All matrices are drawn with a standard deviation of 0.02, the paper's "fixed
    variance" (Table 5); if the matrices that write to the residual stream were divided by depth,
    the versions would differ in late layers only. The vocabulary is limited to the tokens of the
    text: embeddings are independent, so others change nothing.

    At most 512 tokens or the training length of the first text are read. Returns None if the shape
    is too large to be measured on a useful number of tokens.
    """
    config, layout = model.config, model.layout
    wanted = min(TOKENS, ids.shape[1], layout.training_length)
    # Operations for one token: gradients of both biases in both versions, in every head.
    projected = (config.num_attention_heads + config.num_key_value_heads) * config.head_size
    heads = config.num_hidden_layers * config.num_attention_heads
    cost = 4 * heads * 2.0 * config.hidden_size * projected
    tokens = min(wanted, int(BUDGET / cost))
    if tokens < min(FEWEST, wanted):
        return None
    words, text = torch.unique(ids[:1, :tokens], return_inverse=True)
    if not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra):
        layout = drop(layout, to=rope(config.head_size))
    normed = config.qk_norm.when == "always"
    layers = (replace(layer, qk_norm=normed, intervention=None) for layer in layout.layers)
    layout = replace(layout, layers=tuple(layers))
    versions = {"encoded": layout, "nope": drop(layout)}
    fresh = replace(
        config,
        vocab_size=len(words),
        initializer="normal",
        initializer_by_depth=False,
        tie_word_embeddings=True,
        from_pretrained=None,
        from_run=None,
    )
    gradients: dict[str, list[Array]] = {name: [] for name in versions}
    spreads: dict[str, list[Array]] = {name: [] for name in versions}
    for seed in range(max(1, min(SEEDS, int(BUDGET / (cost * tokens))))):
        decoder = Decoder(fresh, versions["nope"], seed).to(model.device)
        for name, decoder.layout in versions.items():
            by_query, by_key = bias_gradients(decoder, text).swapaxes(0, 1)
            gradients[name].append(np.hypot(by_query, by_key).mean(axis=-1))
            spreads[name].append(prefix_spreads(decoder, text))
    gathered = ({k: np.stack(v) for k, v in seeds.items()} for seeds in (gradients, spreads))
    return FreshResult(tokens, *gathered)


RESCALINGS: dict[str, Rescaling] = {
    "pi": position_interpolation,
    "ntk": ntk_aware,
    "yarn": ntk_by_parts_turns,
}
"""Rescalings in Fig. 6 and 11 (Eq. 9 to 11; the last has a ramp over the frequency)."""


def scaling_factors(spectrum: Spectrum, training_length: int, factor: float) -> dict[str, Array]:
    """Compute gamma ``[pairs]`` of Eq. 3, the factor on every frequency, for each of
    :data:`RESCALINGS`.

    Frequencies are taken at a length of C tokens. Pairs that do not rotate have the factor 1.
    """
    inv_freq = spectrum.at(training_length, training_length).inv_freq
    moving = np.array(inv_freq) > 0
    factors = {}
    for name, rescaling in RESCALINGS.items():
        scaled = rescaling(inv_freq, training_length).frequencies(inv_freq, factor)
        factors[name] = np.divide(scaled, inv_freq, out=np.ones(len(moving)), where=moving)
    return factors


def attention_by_distance(heads: Heads, head: int) -> Array:
    """Average attention ``[T]`` on the key 0, 1, 2, ... tokens back, over queries with such a key
    (Fig. 7)."""
    T = heads.q.shape[2]
    total = torch.zeros(T, dtype=torch.float64)
    back = torch.arange(T, device=heads.q.device)
    for start, attention in attention_blocks(heads, head):
        j = torch.arange(start, attention.shape[-1], device=back.device)[:, None] - back
        picked = attention.gather(-1, j.clamp(min=0).expand(len(attention), -1, -1))
        total += (picked * (j >= 0)).double().sum(dim=(0, 1)).cpu()
    return (total / (heads.q.shape[0] * torch.arange(T, 0, -1))).numpy()


def highest_rotating(values: Array, layout: Layout) -> Place:
    """Return the rotating head with the highest of ``values`` ``[layers, query heads]``."""
    rotates = np.array([[s.rotates for s in layer.spectra] for layer in layout.layers])
    among = rotates.repeat(values.shape[1] // rotates.shape[1], axis=1)
    layer, head = np.unravel_index(np.where(among, values, -np.inf).argmax(), values.shape)
    return int(layer), int(head)


def under_yarn(model: LanguageModel, read: Callable[[], Array]) -> dict[str, Array]:
    """Return what ``read`` measures as ``trained`` and under ``yarn`` with s = 2."""
    trained = read()
    with model.using(model.layout.rescaled(yarn_turns, 2.0, "all")):
        return {"trained": trained, "yarn": read()}


def profiles(model: LanguageModel, ids: Tensor, place: Place) -> dict[str, Array]:
    """Return :func:`attention_by_distance` of one head in texts ``[B, T]``, as trained and under
    YaRN."""
    layer, head = place

    def measure(heads: Heads) -> Array:
        return attention_by_distance(heads, head) if heads.layer == layer else np.empty(0)

    return under_yarn(model, lambda: capture(model, ids, measure)[layer])


def needle_attention(model: LanguageModel, prompt: NeedlePrompt) -> dict[str, Array]:
    """Return the attention ``[layers, query heads, T]`` of needle prompts' last token, mean over
    the prompts, as trained and under YaRN (Fig. 8)."""

    def measure(heads: Heads) -> Array:
        return last_attention(heads)[:, :, 0].double().mean(dim=0).cpu().numpy()

    return under_yarn(model, lambda: np.stack(capture(model, prompt.ids, measure)))
