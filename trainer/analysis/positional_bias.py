"""Positional bias of attention heads, its gradients, prefix spreads, and the same for the model's
shape before training (DroPE Sec. 3, App. B).

A head is measured on the key s tokens back, s = 0 (diagonal) or 1 (previous token). The centred
weights of Def. 3.1 are c_ij = 1 at j = i - s and -1 / (n_i - 1) at the other n_i - 1 keys that
query i sees. With a_i the attention on that key, A^c = mean_i (a_i n_i - 1) / (n_i - 1). With a
learned sink it is mean_i (a_i n_i - S_i) / (n_i - 1), where S_i is the attention left for the keys.
A query that does not see such a key, or sees no other, counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.arrays import Array, Averages
from trainer.analysis.attention import Rows, head_attention, visible_keys
from trainer.analysis.capture import Heads
from trainer.model.decoder import Decoder
from trainer.model.language_model import LanguageModel
from trainer.positional.drop import drop
from trainer.positional.encodings import rope
from trainer.positional.layout import Layout

BLOCK = 256


def _has_target(visible: Tensor, shift: int) -> Tensor:
    """Return which queries see the key ``shift`` tokens back and another one."""
    return (visible > max(shift, 1)).to(torch.float64)


def positional_bias(
    weight: Tensor, visible: Tensor, shift: int, learned: Tensor | float = 0.0
) -> Tensor:
    """Compute A^c ``[...]`` from the attention ``weight`` ``[..., T]`` on the key ``shift`` tokens
    back.

    ``visible``: ``[T]``, number of keys that each query sees. ``learned``: attention on a learned
    sink.
    """
    bias = (weight.double() * visible - 1 + learned) / (visible - 1).clamp(min=1)
    return (bias * _has_target(visible, shift)).mean(dim=-1)


def positional_biases(rows: Rows) -> dict[str, Tensor]:
    """Compute A^c ``[B, query heads]`` towards the ``diagonal`` and the ``previous`` token."""
    return {
        "diagonal": positional_bias(rows.diagonal, rows.visible, 0, rows.learned),
        "previous": positional_bias(rows.previous, rows.visible, 1, rows.learned),
    }


def bias_gradients(model: Decoder, ids: Tensor, shift: int) -> tuple[Array, Array]:
    """Compute the Frobenius norms ``[layers, query heads]`` of dA^c/dW_Q and of dA^c/dW_K (Fig. 4),
    averaged over the texts ``ids`` ``[B, T]``.

    A^c is the head's, and the states that enter its layer are constants. ``shift``: 0 for the
    diagonal head, 1 for the previous token.
    """
    averages = Averages()

    def observe(
        layer: int, q: Tensor, k: Tensor, rotated_q: Tensor, rotated_k: Tensor, **softmax: Any
    ) -> None:
        attention = model.layers[layer].self_attn
        projections = [attention.q_proj.weight, attention.k_proj.weight]
        heads = Heads.of_layer(model.layout, layer, q, k, rotated_q, rotated_k, **softmax)
        norms = []
        for head in range(q.shape[1]):
            grad_q, grad_k = _score_gradients(heads, head, shift)
            full_q, full_k = torch.zeros_like(rotated_q), torch.zeros_like(rotated_k)
            full_q[:, head] = grad_q
            full_k[:, head // heads.queries_per_key] = grad_k
            gradients = torch.autograd.grad(
                (rotated_q, rotated_k), projections, (full_q, full_k), retain_graph=True
            )
            norms.append(torch.stack([gradient.double().norm() for gradient in gradients]))
        query, key = torch.stack(norms, dim=-1)
        averages.add(layer, query=query[None], key=key[None])

    with _graph_of_one_layer(model, observe):
        for row in ids.to(model.device):
            model.hidden_states(row[None])
    return averages.stacked("query"), averages.stacked("key")


@torch.no_grad()
def _score_gradients(heads: Heads, head: int, shift: int) -> tuple[Tensor, Tensor]:
    """Compute dA^c/dq and dA^c/dk ``[1, T, D]`` of one head's rotated queries and keys.

    The gradient of sum_m c_im alpha_im with respect to the score of key j is alpha_ij times (c_ij
    minus that sum), times 1 - (score / cap)^2 if scores are capped.
    """
    q, k = heads.rotated_q[:, head], heads.rotated_k[:, head // heads.queries_per_key]
    T, root = q.shape[1], math.sqrt(q.shape[-1])
    visible = visible_keys(T, heads.encoding.window, q.device)
    share = _has_target(visible, shift) / (visible - 1).clamp(min=1) / T / root
    grad_q, grad_k = torch.zeros_like(q), torch.zeros_like(k)
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        alpha = head_attention(heads, head, slice(start, stop))
        i = torch.arange(start, stop, device=q.device)
        target = (i - shift).clamp(min=0)
        a = alpha.gather(-1, target[None, :, None])
        seen = a * visible[start:stop, None]
        of_scores = alpha * (alpha.sum(dim=-1, keepdim=True) - 1 - seen)
        of_scores.scatter_add_(-1, target[None, :, None], seen)
        of_scores *= share[start:stop, None].to(q.dtype)
        if heads.softcap is not None:
            products = q[:, start:stop] @ k[:, :stop].mT / root
            of_scores *= 1 - (products / heads.softcap).tanh().square()
        grad_q[:, start:stop] = of_scores @ k[:, :stop]
        grad_k[:, :stop] += of_scores.mT @ q[:, start:stop]
    return grad_q, grad_k


@contextmanager
def _graph_of_one_layer(model: Decoder, observe: Callable[..., None]) -> Iterator[None]:
    """Call ``observe`` in every layer, with inputs detached so no gradient crosses layers."""
    hooks = [
        block.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
        for block in model.layers
    ]
    try:
        for index, block in enumerate(model.layers):
            block.self_attn.observe = partial(observe, index)
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for block in model.layers:
            block.self_attn.observe = None
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def prefix_spreads(model: LanguageModel, ids: Tensor) -> Array:
    """Compute max over j <= i of |mean(h_1 .. h_i) - h_j| (Theorem 3.4), averaged over the texts
    ``ids`` ``[B, T]``.

    Returns ``[layers + 1]``: for the input of the attention of every block, which is the output of
    its norm (App. A and Prop. B.3), and for the last norm's output, the input of the head.
    """
    averages = Averages()

    def note(layer: int, states: Tensor) -> None:
        averages.add(layer, spread=torch.stack([_prefix_spread(x) for x in states]))

    with model.feeding(note):
        last = model.hidden_states(ids.to(model.device))
    note(len(model.layout.layers), last)
    return averages.stacked("spread")


def _prefix_spread(states: Tensor) -> Tensor:
    """Compute max over j <= i of |mean(h_1 .. h_i) - h_j|, ``states`` being h ``[T, d]``."""
    T = len(states)
    # The common mean is subtracted first; otherwise rounding hides the small differences.
    states = states.double()
    states = states - states.mean(dim=0)
    means = states.cumsum(dim=0) / torch.arange(1, T + 1, device=states.device)[:, None]
    states, means = states.float(), means.float()
    squares, widest = states.square().sum(dim=-1), states.new_zeros(())
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        mean = means[start:stop]
        distances = squares[:stop] + mean.square().sum(dim=-1, keepdim=True)
        distances.addmm_(mean, states[:stop].T, alpha=-2)
        widest = torch.maximum(widest, distances.tril(start).amax())
    return widest.clamp(min=0).sqrt()


TOKENS, FEWEST, SEEDS = 512, 32, 3
BUDGET = 1e12
"""Largest number of floating-point operations in gradients, about a minute of one core."""


@dataclass(frozen=True)
class FreshResult:
    """Results for decoders of a model's shape before training, with positions (``encoded``) and
    without (``nope``).

    ``encoding``: name of the encoding of ``encoded``. ``tokens``: number of tokens read.
    ``gradients``: by version, norms of the gradients of A^c by W_Q and W_K together, means over
    heads, ``[seeds, 2, layers]`` for the diagonal and the previous token. ``spreads``: by version,
    prefix spreads ``[seeds, layers + 1]``.
    """

    encoding: str
    tokens: int
    gradients: dict[str, Array]
    spreads: dict[str, Array]


def fresh_decoders(model: LanguageModel, ids: Tensor) -> FreshResult | None:
    """Measure a model's shape before training, with an encoding and without (DroPE Sec. 3, Fig. 4,
    Thm. 3.4).

    The decoders have the model's depth, width and heads. All matrices are drawn with a standard
    deviation of 0.02, the paper's "fixed variance" (Table 5); if the matrices that write to the
    residual stream were divided by depth, the versions would differ in late layers only. The
    vocabulary is limited to the tokens of the text: embeddings are independent, so others change
    nothing.

    ``model``: gives the shape, the windows and the encoding (without an encoding: RoPE of base
    10,000). At most 512 tokens or the training length of the first text are read. Returns None if
    the shape is too large to be measured on a useful number of tokens.
    """
    wanted = min(TOKENS, ids.shape[1], model.layout.training_length)
    cost = _cost_of_a_token(model)
    tokens = min(wanted, int(BUDGET / cost))
    if tokens < min(FEWEST, wanted):
        return None
    seeds = max(1, min(SEEDS, int(BUDGET / (cost * tokens))))
    words, text = torch.unique(ids[:1, :tokens], return_inverse=True)
    name, layout = encoded_layout(model)
    versions = {"encoded": layout, "nope": drop(layout)}
    measured = [_measure(model, seed, versions, text, len(words)) for seed in range(seeds)]
    gradients, spreads = (
        {version: np.stack([seed[version][kind] for seed in measured]) for version in versions}
        for kind in (0, 1)
    )
    return FreshResult(encoding=name, tokens=tokens, gradients=gradients, spreads=spreads)


def encoded_layout(model: LanguageModel) -> tuple[str, Layout]:
    """Return the name and the layout of the model's encoding, or of RoPE if it has none."""
    layout = model.layout
    if not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra):
        return "RoPE, base 10,000", drop(layout, to=rope(model.config.head_size))
    everywhere = len(layout.spectra) == 1
    full = layout.spectra[0].rotary_dim == model.config.head_size
    return "RoPE" if everywhere and full else "own encoding", layout


def _cost_of_a_token(model: LanguageModel) -> float:
    """Count the operations of one token's gradients: both biases, both versions."""
    config = model.config
    outputs = (config.num_attention_heads + config.num_key_value_heads) * config.head_size
    gradient = 2 * config.hidden_size * outputs
    return 4.0 * config.num_hidden_layers * config.num_attention_heads * gradient


def _measure(
    model: LanguageModel, seed: int, versions: dict[str, Layout], text: Tensor, vocab: int
) -> dict[str, tuple[Array, Array]]:
    """Return gradients ``[2, layers]`` and spreads ``[layers + 1]`` of one seed, by version."""
    config = replace(
        model.config,
        vocab_size=vocab,
        initializer="normal",
        initializer_by_depth=False,
        tie_word_embeddings=True,
        from_pretrained=None,
        from_run=None,
    )
    normed = config.qk_norm.when == "always"
    decoder = Decoder(config, drop(model.layout), seed).to(model.device)
    measured = {}
    for version, layout in versions.items():
        layers = (replace(layer, qk_norm=normed, intervention=None) for layer in layout.layers)
        decoder.layout = replace(layout, layers=tuple(layers))
        norms = [np.hypot(*bias_gradients(decoder, text, shift)).mean(axis=1) for shift in (0, 1)]
        measured[version] = np.stack(norms), prefix_spreads(decoder, text)
    return measured
