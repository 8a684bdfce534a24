"""Positional bias of attention heads, its gradients, prefix spreads, the same for the model's shape
before training, and attention under rescaled frequencies (DroPE Sec. 3 and 4.1, App. B, Fig. 4, 6,
7, 8 and 11).

A head is measured on the key s tokens back, s = 0 (diagonal) or 1 (previous token). The centred
weights of Def. 3.1 are c_ij = 1 at j = i - s and -1 / (n_i - 1) at the other n_i - 1 keys that
query i sees. With a_i the attention on that key, A^c = mean_i (a_i n_i - 1) / (n_i - 1). With a
learned sink it is mean_i (a_i n_i - S_i) / (n_i - 1), where S_i is the attention left for the keys.
A query that does not see such a key, or sees no other, counts as 0.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from trainer.analysis.attention import (
    Array,
    AttentionStatistics,
    HeadIndex,
    Heads,
    NeedlePrompt,
    attention_blocks,
    attention_statistics,
    by_name,
    capture,
    head_attention,
    last_attention,
    view_heads,
    visible_keys,
)
from trainer.analysis.results import Findings, analysis, tidy
from trainer.analysis.target import Target, stacked
from trainer.model.decoder import Decoder
from trainer.model.language_model import LanguageModel
from trainer.plotting import (
    STYLE_NUMBERS,
    ColourScale,
    Grid,
    Line,
    Panel,
    Plot,
    draw,
    heat_maps,
    log_if_wide,
)
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

KINDS = {"diagonal": "its own token", "previous": "the previous token"}
"""Keys that A^c is towards, as :class:`AttentionStatistics` names the attention on them."""
VERSIONS = {
    "encoded": ("fresh, with positions", STYLE_NUMBERS["RoPE"]),
    "nope": ("fresh, NoPE", STYLE_NUMBERS["NoPE"]),
}
"""Labels and style numbers of a model before training."""
COMPARED: dict[str, Rescaling] = {
    "pi": position_interpolation,
    "ntk": ntk_aware,
    "yarn": ntk_by_parts_turns,
}
"""Rescalings in Fig. 6 and 11 (Eq. 9 to 11; the last has a ramp over the frequency)."""
METHODS = {
    "trained": ("as trained", STYLE_NUMBERS["RoPE"]),
    "yarn": ("YaRN", STYLE_NUMBERS["RoPE + YaRN"]),
    "pi": ("PI", STYLE_NUMBERS["RoPE + PI"]),
    "ntk": ("NTK-aware", STYLE_NUMBERS["RoPE + NTK-aware"]),
}
FACTORS = (2.0, 3.0, 4.0)
TOKENS = 512
"""Most tokens that are read before training."""
FEWEST = 32
"""Fewest of them; larger shapes are left out."""
SEEDS = 3
BUDGET = 1e12
"""Largest number of floating-point operations in gradients, about a minute of one core."""
BESIDE = 32
"""Distances that a profile shows."""
REACH = 8
"""Tokens that are shown on each side of a needle."""


@analysis("positional_bias", "Positional bias")
def analyze_positional_bias(target: Target) -> Findings:
    """Measure Aᶜ of heads within the training length, its causes and YaRN's effect on attention."""
    target.require(2)  # a single token attends to itself alone
    model = target.model
    C = target.training_length
    ids = target.ids[:, :C]
    bias = head_biases(target)
    tokens, fresh = fresh_decoders(model, target.ids)
    spreads = {"prefix_spread": prefix_spreads(model, ids[:1, :TOKENS])}
    tables = [
        tidy(bias, "layer", "head", length=ids.shape[1]),
        tidy(spreads, "layer", variant="this model"),
    ]
    for version, measures in fresh.items():
        seeds = [f"{VERSIONS[version][0]}, seed {seed}" for seed in range(SEEDS)]
        tables.append(tidy(measures, "variant", "layer", places={"variant": seeds}))
    plots = [biases_plot(bias, ids.shape[1])]
    notes = []
    if fresh:
        plots.append(gradients_plot(fresh, tokens))
    else:
        notes.append("No gradients before training: a model of this shape takes too long.")
    rotating = [spectrum for spectrum in model.layout.spectra if spectrum.rotates]
    if rotating:
        spectrum = rotating[0].at(C, C)
        most_positional = highest_rotating(np.maximum(*bias.values()), model.layout)
        curves, plot = under_yarn(target, most_positional)
        factors = {s: scaling_factors(spectrum, C, s) for s in FACTORS}
        plots += [plot, factors_plot(factors, spectrum, C)]
        tables += curves
        for s, by_method in factors.items():
            for name, gamma in by_method.items():
                variant = f"{METHODS[name][0]}, s = {s:g}"
                tables.append(tidy({"frequency_factor": gamma}, "pair", variant=variant))
    return Findings(plots, tables, notes)


def head_biases(target: Target) -> dict[str, Array]:
    """Compute Aᶜ of every head ``[layers, heads]``, by :data:`KINDS`."""
    # Read by themselves: in a longer text, temperatures and frequencies may differ.
    ids = target.ids[:, : target.training_length]

    def measure(heads: Heads) -> dict[str, Tensor]:
        return positional_biases(attention_statistics(heads))

    return stacked(capture(target.model, ids, measure))


def biases_plot(bias: Mapping[str, Array], tokens: int) -> Plot:
    """Draw Aᶜ of every head."""
    titled = {f"towards {KINDS[kind]}": values for kind, values in bias.items()}
    colours = ColourScale("positional bias", signed=True)
    return Plot(
        "positional_bias_heads",
        heat_maps(titled, colours, Grid(2, 2.0, x="query head", y="layer")),
        f"Positional bias Aᶜ of every head on {tokens:,} tokens; 1: all attention on that key, 0: "
        "uniform (DroPE, Def. 3.1).",
    )


def positional_biases(statistics: AttentionStatistics) -> dict[str, Tensor]:
    """Compute A^c ``[B, query heads]`` towards the ``diagonal`` and the ``previous`` token."""
    visible = statistics.visible
    biases = {}
    for kind in KINDS:
        excess = getattr(statistics, kind).double() * visible - 1 + statistics.learned
        by_query = excess / (visible - 1).clamp(min=1)
        biases[kind] = by_query.where(visible > 1, 0).mean(dim=-1)
    return biases


def bias_gradients(model: Decoder, ids: Tensor) -> Array:
    """Compute norms of the gradients of A^c, ``[2, 2, layers, query heads]`` (Fig. 4).

    First axis: A^c towards the diagonal, and towards the previous token. Second axis: Frobenius
    norms by W_Q and by W_K, means over the texts ``ids`` ``[B, T]``, whose attention is held as a
    whole. The states that enter a layer are constants.
    """
    measured: list[Tensor] = []  # [heads, 2, 2] of every layer of every text

    def observe(layer: int, q: Tensor, k: Tensor, rotated_q: Tensor, rotated_k: Tensor) -> None:
        attention = model.layers[layer].self_attn
        projections = [attention.q_proj.weight, attention.k_proj.weight]
        encoding = model.layout.layers[layer]
        C = model.layout.training_length
        heads = Heads(layer, encoding, q, k, rotated_q, rotated_k, C)
        visible = visible_keys(q.shape[2], encoding.window, model.device)
        share = (visible.double() / (visible - 1).clamp(min=1)).where(visible > 1, 0)
        norms = []
        for head in range(q.shape[1]):
            weights = head_attention(heads, head, slice(None))[0]
            for shift in (0, 1):
                bias = (weights.diagonal(-shift) * share[shift:]).sum() / len(visible)
                # This is A^c less a constant.
                gradients = torch.autograd.grad(bias, projections, retain_graph=True)
                norms.append(torch.stack([gradient.double().norm() for gradient in gradients]))
        measured.append(torch.stack(norms).unflatten(0, (-1, 2)))

    # Detached inputs: no gradient crosses layers.
    with ExitStack() as hooks, torch.enable_grad(), model.observed(observe):
        for block in model.layers:
            hooks.enter_context(
                block.register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))
            )
        for row in ids.to(model.device):
            model.hidden_states(row[None])
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

    def note(states: Tensor) -> None:
        spreads.append(torch.stack([_prefix_spread(x) for x in states]).mean())

    def before(index: int, module: nn.Module, args: Any, options: dict[str, Any]) -> None:
        states = args[0] if args else options["hidden_states"]
        note(states)

    with model.before_attention(before):
        last = model.hidden_states(ids.to(model.device))
    note(last)
    return torch.stack(spreads).cpu().numpy()


def _prefix_spread(states: Tensor) -> Tensor:
    """Compute max over j <= i of |mean(h_1 .. h_i) - h_j|, ``states`` being h ``[T, d]``."""
    # The common mean is subtracted first; otherwise rounding hides the small differences.
    states = states.double() - states.double().mean(dim=0)
    means = states.cumsum(dim=0) / torch.arange(1, len(states) + 1, device=states.device)[:, None]
    return torch.cdist(means, states).tril().amax()


FreshMeasures = dict[str, dict[str, Array]]
"""Numbers ``[seeds, layers]`` by version (:data:`VERSIONS`) and metric. ``gradient_diagonal``,
``gradient_previous``: norms of the gradients of A^c by W_Q and W_K together, means over heads;
``prefix_spread``: prefix spreads, also of the last norm."""


def fresh_decoders(model: LanguageModel, ids: Tensor) -> tuple[int, FreshMeasures]:
    """Measure a model's shape before training, with an encoding and without (DroPE Sec. 3, Fig. 4,
    Thm. 3.4); return the number of tokens that were read, and the measures.

    The decoders have the model's depth, width, heads, windows and encoding (RoPE of base 10,000 if
    it has none). All matrices are drawn with a standard deviation of 0.02, the paper's "fixed
    variance" (Table 5). The vocabulary is limited to the tokens of the text.

    At most 512 tokens of the first text are read, or the training length. There are no versions if
    the shape is too large to be measured on a useful number of tokens.
    """
    config = model.config
    layout = model.layout
    wanted = min(TOKENS, ids.shape[1], layout.training_length)
    # Operations for one token: gradients of both biases in both versions, in every head.
    projected = (config.num_attention_heads + config.num_key_value_heads) * config.head_size
    heads = config.num_hidden_layers * config.num_attention_heads
    cost = 4 * heads * 2.0 * config.hidden_size * projected
    tokens = min(wanted, int(BUDGET / cost))
    if tokens < min(FEWEST, wanted):
        return 0, {}
    words, text = torch.unique(ids[:1, :tokens], return_inverse=True)
    if not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra):
        layout = drop(layout, to=rope(config.head_size))
    normed = config.qk_norm.when == "always"
    layers = (replace(layer, qk_norm=normed, intervention=None) for layer in layout.layers)
    layout = replace(layout, layers=tuple(layers))
    versions = {"encoded": layout, "nope": drop(layout)}
    fresh_config = replace(
        config,
        vocab_size=len(words),
        initializer="normal",
        initializer_by_depth=False,
        tie_word_embeddings=True,
        from_pretrained=None,
        from_run=None,
    )
    by_seed: dict[str, list[dict[str, Array]]] = {name: [] for name in versions}
    for seed in range(max(1, min(SEEDS, int(BUDGET / (cost * tokens))))):
        decoder = Decoder(fresh_config, versions["nope"], seed).to(model.device)
        for name, version in versions.items():
            decoder.layout = version
            by_query, by_key = bias_gradients(decoder, text).swapaxes(0, 1)
            diagonal, previous = np.hypot(by_query, by_key).mean(axis=-1)
            measures = {"gradient_diagonal": diagonal, "gradient_previous": previous}
            by_seed[name].append(measures | {"prefix_spread": prefix_spreads(decoder, text)})
    fresh = {}
    for name, of_seeds in by_seed.items():
        fresh[name] = {metric: np.stack(values) for metric, values in by_name(of_seeds).items()}
    return tokens, fresh


def gradients_plot(fresh: FreshMeasures, tokens: int) -> Plot:
    """Draw gradients before training: means over seeds, least and largest value (Fig. 4)."""

    def prepare(axes: Axes) -> None:
        log_if_wide(axes)
        axes.locator_params(axis="x", integer=True)

    panels = []
    for kind, towards in KINDS.items():
        lines = []
        for version, measures in fresh.items():
            norms = measures[f"gradient_{kind}"]
            mean = norms.mean(axis=0).tolist()
            low = norms.min(axis=0).tolist()
            high = norms.max(axis=0).tolist()
            lines.append(Line(*VERSIONS[version], range(norms.shape[1]), mean, low, high))
        panels.append(Panel(f"towards {towards}", lines, "layer", "norm of the gradient", prepare))
    return Plot(
        "positional_bias_gradients",
        draw(panels),
        f"Gradient of Aᶜ by W_Q and W_K before training, mean over heads, on {tokens} tokens, with "
        "positions and without; bands: range of seeds (DroPE, Fig. 4).",
    )


def scaling_factors(spectrum: Spectrum, training_length: int, factor: float) -> dict[str, Array]:
    """Compute gamma ``[pairs]`` of Eq. 3, the factor on every frequency at C tokens, for each of
    :data:`COMPARED`; 1 for pairs that do not rotate."""
    inv_freq = spectrum.at(training_length, training_length).inv_freq
    moving = np.array(inv_freq) > 0
    factors = {}
    for name, rescaling in COMPARED.items():
        scaled = rescaling(inv_freq, training_length).frequencies(inv_freq, factor)
        factors[name] = np.divide(scaled, inv_freq, out=np.ones(len(moving)), where=moving)
    return factors


def attention_by_distance(heads: Heads, head: int) -> Array:
    """Average attention ``[T]`` on the key 0, 1, ... tokens back over queries with one (Fig. 7)."""
    T = heads.q.shape[2]
    total = torch.zeros(T, dtype=torch.float64)
    back = torch.arange(T, device=heads.q.device)
    for start, attention in attention_blocks(heads, head):
        j = torch.arange(start, attention.shape[-1], device=back.device)[:, None] - back
        picked = attention.gather(-1, j.clamp(min=0).expand(len(attention), -1, -1))
        total += (picked * (j >= 0)).double().sum(dim=(0, 1)).cpu()
    return (total / (heads.q.shape[0] * torch.arange(T, 0, -1))).numpy()


def highest_rotating(values: Array, layout: Layout) -> HeadIndex:
    """Return the rotating head with the highest of ``values`` ``[layers, query heads]``."""
    rotating = []
    for encoding in layout.layers:
        rotates = np.array([spectrum.rotates for spectrum in encoding.spectra])
        rotating.append(rotates.repeat(values.shape[1] // len(rotates)))
    layer, head = np.unravel_index(np.where(rotating, values, -np.inf).argmax(), values.shape)
    return int(layer), int(head)


def yarn_attention(
    model: LanguageModel, ids: Tensor, place: HeadIndex, prompt: NeedlePrompt | None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Measure attention as ``trained``, and under ``yarn`` with s = 2 from the longest length on
    that the layout reaches as trained (beyond C in published weights that extend it).

    Returns:
        :func:`attention_by_distance` ``[T]`` of one head in texts ``[B, T]`` (Fig. 7), and
        attention ``[layers, query heads, T]`` of the last token of needle prompts, the mean over
        the prompts (Fig. 8); empty without prompts.
    """

    def of_last(heads: Heads) -> Array:
        return last_attention(heads)[:, :, 0].double().mean(dim=0).cpu().numpy()

    by_distance = {}
    near_needle = {}
    factor = 2 * model.layout.longest / model.layout.training_length
    layouts = {"trained": model.layout, "yarn": model.layout.rescaled(yarn_turns, factor, "all")}
    for name, layout in layouts.items():
        with model.using(layout):
            by_distance[name] = view_heads(model, ids, [place], attention_by_distance)[place]
            if prompt is not None:
                near_needle[name] = np.stack(capture(model, prompt.ids, of_last))
    return by_distance, near_needle


def under_yarn(target: Target, place: HeadIndex) -> tuple[list[pd.DataFrame], Plot]:
    """Measure and draw attention as trained and under YaRN: of one head by distance, and near a
    needle of the head that attends to it most."""
    model = target.model
    prompt = target.prompt
    ids = target.ids[:, : target.training_length]
    by_distance, maps = yarn_attention(model, ids, place, prompt)
    beside = {name: curve[:BESIDE] for name, curve in by_distance.items()}
    title = "positional: layer {} head {}".format(*place)
    panels = [Panel(title, _lines(beside), "distance (tokens back)", "attention")]
    tables = [_curve_rows("attention_by_distance", place, by_distance)]
    caption = "of the most positional head by distance (DroPE, Fig. 7)"
    if prompt is not None:
        needle = prompt.needle
        place = highest_rotating(maps["trained"][..., needle].sum(axis=-1), model.layout)
        shown = slice(max(0, needle.start - REACH), needle.stop + REACH)
        near = {name: of_heads[place][shown] for name, of_heads in maps.items()}
        first = shown.start - needle.start
        title = "needle: layer {} head {}".format(*place)
        x = "key, tokens from the needle's first"
        panels.append(Panel(title, _lines(near, first), x, "attention"))
        tables.append(_curve_rows("attention_near_needle", place, near, first))
        caption += (
            ", and of a needle prompt's last token around the needle, in the head that attends to "
            "it most (DroPE, Fig. 8)"
        )
    caption = f"Attention as trained and under YaRN with s = 2: {caption}."
    return tables, Plot("attention_under_yarn", draw(panels), caption)


def _curve_rows(
    metric: str, place: HeadIndex, curves: Mapping[str, Array], first: int = 0
) -> pd.DataFrame:
    """Return the values of a head's curves by layout, and by position from ``first`` on."""
    layer, head = place
    values = np.stack([*curves.values()])
    places = {"variant": [*curves], "length": range(first, first + values.shape[1])}
    return tidy({metric: values}, "variant", "length", places=places, layer=layer, head=head)


def _lines(curves: Mapping[str, Array], first: int = 0) -> list[Line]:
    """Return a line from ``first`` on for each layout or method."""
    return [
        Line(*METHODS[name], range(first, first + len(curve)), curve.tolist())
        for name, curve in curves.items()
    ]


def factors_plot(
    factors: Mapping[float, Mapping[str, Array]], spectrum: Spectrum, training_length: int
) -> Plot:
    """Draw the factor on every frequency (Fig. 6 and 11)."""
    turns = np.array(spectrum.inv_freq) * training_length / (2 * math.pi)
    slow = (turns > 0) & (turns < 1)
    mark = None
    if slow.any():
        mark = int(np.argmax(slow)) - 0.5, "right of it: less than one turn"
    look: dict[str, Any] = {"prepare": partial(Axes.set_ylim, bottom=0, top=1.05), "vertical": mark}
    panels = [
        Panel(f"s = {s:g}", _lines(by_method), "pair, fastest first", "frequency factor γ", **look)
        for s, by_method in factors.items()
    ]
    return Plot(
        "rescaling_factors",
        draw(panels),
        "Factor on every frequency, for texts 2, 3 and 4 times as long (DroPE, Fig. 6, 11).",
    )
