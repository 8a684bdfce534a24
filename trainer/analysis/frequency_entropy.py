"""Frequency entropy of rotary pairs, and perplexity with pairs of extreme entropy attenuated.

Source: Probing Rotary Position Embeddings through Frequency Entropy, Sec. 3 and 5.2, Fig. 1 to 10
and 15 to 21.

The signal of a pair is its l2 norm at every position (Eq. 4). Both entropies lie between 0, a pure
tone, and 1, white noise. SpectrumFE is low where a pair's norm stays high or low throughout (a
frequency band), SequenceFE where it oscillates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.attention import (
    SIDES,
    Array,
    HeadIndex,
    Heads,
    Side,
    by_name,
    capture,
    cell_means,
    head_vectors,
    pair_counts,
    pair_norms,
    stack_heads,
    stack_layers,
    view_heads,
)
from trainer.analysis.results import Findings, analysis, tidy
from trainer.analysis.target import Target
from trainer.analysis.weighted_rope import apply, count_pairs, factors_of
from trainer.common.errors import UserError
from trainer.config import DEFAULT_FRAMES, ShortTime, WeightedRopeSettings
from trainer.model.language_model import LanguageModel
from trainer.plotting import (
    ColourScale,
    Grid,
    Line,
    Panel,
    Plot,
    draw,
    graded,
    heat_maps,
    log_if_wide,
)
from trainer.positional.layout import Intervention, Layout

CELLS = 256
"""Largest number of cells of a map along the text."""
_from_0_to_1 = partial(Axes.set_ylim, bottom=0, top=1.02)
COLUMNS = 4
"""Largest number of layers or heads beside each other."""
PAIR_INDEX = "pair index, from the fastest on"
HEADS: dict[Side, str] = {"query": "head", "key": "key head"}
"""Words in titles."""
TAPERS: dict[str, Callable[..., Tensor]] = {
    "hann": torch.hann_window,
    "hamming": torch.hamming_window,
    "blackman": torch.blackman_window,
    "rectangular": torch.ones,
}
"""Windows by their names in :data:`~trainer.config.Window`."""


def spectrum_fe(signal: Tensor, frames: ShortTime = DEFAULT_FRAMES) -> Tensor:
    """Compute SpectrumFE (Eq. 5 to 7), the entropy of the mean power of overlapping whole frames of
    the ``signal`` ``[..., T]``: ``[...]`` float64, between 0 and 1; raise a UserError if the signal
    is shorter than a frame."""
    if signal.shape[-1] < frames.frame:
        raise UserError(
            f"SpectrumFE: expected a text of {frames.frame} tokens (one frame) or more, got "
            f"{signal.shape[-1]}"
        )
    taper = TAPERS[frames.window](frames.frame, dtype=torch.float64, device=signal.device)
    cut = signal.double().unfold(-1, frames.frame, frames.step) * taper
    return _normalised_entropy(torch.fft.rfft(cut).abs().square().mean(dim=-2))


def sequence_fe(signal: Tensor) -> Tensor:
    """Compute SequenceFE ``[...]`` of a signal ``[..., T]`` (Eq. 8 to 10).

    It is the entropy of the power at 1 <= k < floor(T / 2), between 0 and 1, in float64. A signal
    with fewer than two such frequencies raises a UserError."""
    length = signal.shape[-1]
    if length < 6:
        raise UserError(f"SequenceFE: expected a text of 6 tokens or more, got {length}")
    power = torch.fft.rfft(signal.double()).abs().square()
    return _normalised_entropy(power[..., 1 : length // 2])


def _normalised_entropy(power: Tensor) -> Tensor:
    """Compute the entropy of ``[..., K]`` over log K; 0 if there is no power."""
    share = power / power.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(power.dtype).tiny)
    return (torch.special.entr(share).sum(dim=-1) / math.log(power.shape[-1])).clamp(max=1)


NAMES = {"spectrum": "SpectrumFE", "sequence": "SequenceFE"}
MEASURES: dict[str, Callable[..., Tensor]] = {
    "spectrum": spectrum_fe,
    "sequence": lambda signal, frames=DEFAULT_FRAMES: sequence_fe(signal),
}
"""Functions of a signal and the frames; SequenceFE ignores the frames."""


FrequencyEntropy = dict[tuple[str, Side], Tensor]
"""Entropies of the pairs of one layer by measure and side, ``[H, pairs]`` float64 on the CPU; NaN
where a head has fewer pairs than another of its layer."""


def frequency_entropies(
    model: LanguageModel,
    ids: Tensor,
    measures: Sequence[str] = tuple(MEASURES),
    frames: ShortTime = DEFAULT_FRAMES,
) -> list[FrequencyEntropy]:
    """Compute the frequency entropies of every layer, with one text in memory at a time.

    ``ids``: ``[B, T]`` texts; entropies are averaged over them. ``measures``: in :data:`MEASURES`.
    Raise a UserError if the texts are too short for a measure.
    """

    def measure(heads: Heads) -> FrequencyEntropy:
        entropies: FrequencyEntropy = {}
        sides: dict[Side, Tensor] = {"query": heads.q, "key": heads.k}
        for side, x in sides.items():
            counts = pair_counts(heads.encoding, x.shape[1], x.shape[-1])
            rows: dict[str, list[Tensor]] = {name: [] for name in measures}
            # Head by head: the frames of all heads would take several times their memory.
            for head, pairs in zip(x.unbind(1), counts, strict=True):
                signal = pair_norms(head, pairs)
                for name in measures:
                    rows[name].append(MEASURES[name](signal, frames).mean(dim=0))
            entropies |= {(name, side): stack_heads(values).cpu() for name, values in rows.items()}
        return entropies

    texts = [capture(model, text[None], measure) for text in ids]
    means = []
    for of_texts in zip(*texts, strict=True):  # layer by layer
        values = by_name(of_texts)
        means.append({key: torch.stack(x).mean(dim=0) for key, x in values.items()})
    return means


def choose_factors(
    model: LanguageModel, ids: Tensor, rules: Sequence[WeightedRopeSettings], layout: Layout
) -> tuple[Intervention, ...]:
    """Choose the factors of Weighted RoPE for every layer by mean entropies on texts ``[B, T]``.

    ``model`` has its layout as trained; ``layout``: the rescaled one, or the same. Raises a
    UserError if the text is too short.
    """
    measures = sorted({rule.entropy for rule in rules})
    with model.using(layout):
        entropies = frequency_entropies(model, ids, measures)
    return factors_of(model.layout, entropies, rules, model.config.head_size)


Entropies = dict[tuple[str, Side], Array]
"""Entropies ``[layers, heads, pairs]`` by measure and side, NaN where a head has no such pair."""


@analysis("frequency_entropy", "Frequency entropy")
def analyze_frequency_entropy(target: Target) -> Findings:
    """Compute SpectrumFE and SequenceFE of every pair, also on the configured prefixes, and
    perplexity with extreme pairs attenuated."""
    target.require(6)  # with fewer than a frame, only SpectrumFE is left out
    frames = target.config.frequency_entropy
    by_length: dict[int, Entropies] = {}
    # The whole text is the last one.
    for n in sorted({n for n in target.config.prefixes if n < target.length} | {target.length}):
        measures = [m for m in MEASURES if m != "spectrum" or n >= frames.frame]
        layers = frequency_entropies(target.model, target.ids[:, :n], measures, frames)
        by_length[n] = {key: stack_layers(values) for key, values in by_name(layers).items()}
    values = by_length[target.length]
    # The head with the most concentrated pair of each layer.
    lowest = np.nan_to_num(values[measures[0], "query"], nan=1.0).min(axis=-1).argmin(axis=-1)
    chosen = target.config.chosen
    shown = chosen or [(layer, int(lowest[layer])) for layer in target.shown_layers]
    norms = view_heads(target.model, target.ids[:1], shown, norm_maps)
    plots = [_layers_plot(m, values[m, "query"], chosen) for m in measures]
    for side, kind in HEADS.items():
        readers = values["sequence", "query"].shape[1] // values["sequence", side].shape[1]
        # Query heads that read one key head share its title.
        titled = {f"layer {i}, {kind} {j // readers}": (i, j) for i, j in shown}
        places = {title: (i, j // readers) for title, (i, j) in titled.items()}
        plots.append(_heads_plot(by_length, side, places))
        maps = {title: norms[place][side] for title, place in titled.items()}
        plots.append(_norms_plot(maps, side, target.length))
    attenuated = attenuated_perplexity(target, measures, layers)
    tables = []
    for n, entropies in by_length.items():
        for (m, side), of_pairs in entropies.items():
            if side == "query" or n == target.length:  # prefixes have rows for queries alone
                named = {NAMES[m]: of_pairs}
                tables.append(tidy(named, "layer", "head", "pair", variant=SIDES[side], length=n))
    notes = [*attenuated.notes]
    if "spectrum" not in measures:
        notes.append(f"No SpectrumFE: the text is shorter than a frame of {frames.frame} tokens.")
    return Findings(plots + attenuated.plots, tables + attenuated.tables, notes)


def norm_maps(heads: Heads, head: int) -> dict[Side, Array]:
    """Return norms ``[pairs, cells]`` of the pairs of a query head and of the keys that it reads,
    means over neighbouring tokens of the first text."""
    pairs = pair_counts(heads.encoding, heads.q.shape[1], heads.q.shape[-1])[head]
    cell = -(-heads.q.shape[2] // CELLS)
    vectors = head_vectors(heads, head)
    return {side: cell_means(pair_norms(x, pairs), cell).numpy() for side, x in vectors.items()}


def _layers_plot(measure: str, values: Array, chosen: Sequence[HeadIndex]) -> Plot:
    """Draw queries of all heads of all layers, ``values`` ``[layers, heads, pairs]``, or of the
    layers of the chosen heads."""
    shown = list(dict.fromkeys(layer for layer, _ in chosen)) or list(range(len(values)))
    heads, pairs = map(np.arange, values.shape[1:])
    panels = [
        graded(f"layer {i}", pairs, values[i], heads[:, None], prepare=_from_0_to_1) for i in shown
    ]
    grid = Grid(COLUMNS, 1.75, x=PAIR_INDEX, y=NAMES[measure], share=True)
    if len(shown) > COLUMNS:
        grid = replace(grid, columns=6, height=0.95)
    return Plot(
        f"frequency_entropy_layers_{measure}",
        draw(panels, grid, index="head"),
        f"{NAMES[measure]} of every pair of the queries of layers (Frequency Entropy, Fig. 3, 6 "
        "and 7).",
    )


def _heads_plot(
    by_length: Mapping[int, Entropies], side: Side, places: Mapping[str, HeadIndex]
) -> Plot:
    """Draw single query or key heads, whose places have titles, by the length of the text."""
    whole = by_length[max(by_length)]
    lengths = [*by_length] if side == "query" else [max(by_length)]
    measures = [measure for measure, of_side in whole if of_side == side]
    titles = [*places]
    panels = []
    for start in range(0, len(titles), COLUMNS):
        for measure, title in product(measures, titles[start : start + COLUMNS]):
            points = {}
            for n in lengths:
                if (measure, side) in by_length[n]:
                    values = by_length[n][measure, side][places[title]]
                    points[f"{n:,} tokens"] = np.column_stack([np.arange(len(values)), values])
            y = NAMES[measure]
            panels.append(Panel(title, y=y, prepare=_from_0_to_1, points=points))
    grid = Grid(min(COLUMNS, len(titles)), 1.75, x=PAIR_INDEX, share=True)
    return Plot(
        f"frequency_entropy_heads_{SIDES[side]}",
        draw(panels, grid),
        f"Entropy of every pair of the {SIDES[side]} of single heads, by the length of the text "
        "(Frequency Entropy, Fig. 1, 2, 5, 8-10, 18-21, above; App. F, Fig. 15-17).",
    )


def _norms_plot(maps: Mapping[str, Array], side: Side, length: int) -> Plot:
    """Draw the norms of pairs along the first text by title, see :func:`norm_maps`."""
    colours = ColourScale("l2 norm of the pair", log=True)
    grid = Grid(COLUMNS, 2.0, x="token", y=PAIR_INDEX)
    return Plot(
        f"frequency_entropy_norms_{SIDES[side]}",
        heat_maps(maps, colours, grid, cell=(-(-length // CELLS), 1)),
        f"Norms of the pairs of these {SIDES[side]} along the first text (Frequency Entropy, Fig. "
        "1, 2, 5, 8-10, 18-21, below).",
    )


def attenuated_perplexity(
    target: Target, measures: Sequence[str], entropies: Sequence[FrequencyEntropy]
) -> Findings:
    """Measure and draw perplexity of the target's first text by gate, factor and number of tokens
    (Sec. 5.2, Fig. 4).

    ``measures``: measures for which the text is long enough; gates of others are skipped.
    ``entropies``: entropies on the target's texts. A model without rotation, or with an
    intervention, is not measured, which a note says.
    """
    settings = target.config.attenuation
    model = target.model
    layout = model.layout
    gates = [rules for rules in settings.gates if _needed([rules]) <= {*measures}]
    if not layout.rotates or any(layer.intervention for layer in layout.layers):
        note = "No attenuation: no head rotates, or a method has its own factors."
        return Findings([], [], [note])
    if not settings.alphas or not gates:
        return Findings([], [])
    if target.choice is not None:
        frames = target.config.frequency_entropy
        entropies = frequency_entropies(model, target.choice, sorted(_needed(gates)), frames)

    def weighted(rules: Sequence[WeightedRopeSettings], alpha: float) -> tuple[Intervention, ...]:
        with_alpha = [replace(rule, alpha=alpha) for rule in rules]
        return factors_of(layout, entropies, with_alpha, model.config.head_size)

    chosen_pairs = [count_pairs(weighted(rules, 0)) for rules in gates]
    alphas = sorted({*settings.alphas} - {1.0}, reverse=True)
    most = target.length - 1
    tables = []
    panels = []
    lengths = settings.tokens or [most]
    for n in dict.fromkeys(min(n, most) for n in lengths):
        ids = target.ids[:1, : n + 1]
        plain = _perplexity(model, layout, ids)
        lines = []
        for number, (rules, pairs) in enumerate(zip(gates, chosen_pairs, strict=True)):
            curve = dict.fromkeys([1.0, *alphas], plain)
            if pairs:
                for alpha in alphas:
                    curve[alpha] = _perplexity(model, apply(layout, weighted(rules, alpha)), ids)
                label = f"{in_words(rules)} ({pairs:,})"
                # Steps of 7 change colour and dashes: curves that cover each other stay visible.
                lines.append(Line(label, 1 + 7 * number, [*curve], [*curve.values()]))
            numbers = {f"perplexity, alpha={alpha:g}": value for alpha, value in curve.items()}
            numbers["attenuated_pairs"] = float(pairs)
            tables.append(tidy(numbers, variant=in_words(rules), length=n))
        if lines:
            x = "factor α on the chosen pairs"
            panels.append(Panel(f"{n:,} tokens", lines, x, "perplexity", log_if_wide))
    idle = {in_words(rules) for rules, n in zip(gates, chosen_pairs, strict=True) if n == 0}
    notes = [f"No pair has {gate}, so attenuation changes nothing." for gate in sorted(idle)]
    if not panels:
        return Findings([], tables, notes)
    plot = Plot(
        "attenuation",
        draw(panels, Grid(columns=2)),
        "Perplexity by the factor on pairs of extreme entropy; in brackets the number of pairs "
        "(Frequency Entropy, Sec. 5.2, Fig. 4).",
    )
    return Findings([plot], tables, notes)


def _needed(gates: Sequence[Sequence[WeightedRopeSettings]]) -> set[str]:
    """Return the entropies that gates choose by."""
    return {rule.entropy for rules in gates for rule in rules}


@torch.no_grad()
def _perplexity(model: LanguageModel, layout: Layout, ids: Tensor) -> float:
    """Return the perplexity of texts ``[B, T]`` under a layout, without their first token."""
    ids = ids.to(model.device)
    with model.using(layout):
        return float(model.token_losses(ids[:, :-1], ids[:, 1:]).double().mean().exp())


def in_words(gate: Sequence[WeightedRopeSettings]) -> str:
    """Describe the rules of a gate in words."""
    signs = {"below": "<", "above": ">"}
    return " or ".join(f"{NAMES[r.entropy]} {signs[r.side]} {r.tau:g}" for r in gate)
