"""The effect of rescaled frequencies on a head's attention (DroPE Sec. 4.1, Fig. 6, 7, 8, 11).

For YaRN, a text is read twice in a row: in the second reading every token has occurred before, a
known number of tokens back. A head that attends by content finds that occurrence, or the token
after it. The distance is half the training length, so that no position is beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.arrays import Array
from trainer.analysis.attention import head_attention
from trainer.analysis.capture import Heads, NeedlePrompt, capture
from trainer.analysis.studies.section import Part, Picture, long_rows, wide_rows
from trainer.model.language_model import LanguageModel
from trainer.plotting.lines import Frame, Panel, Series, side_by_side
from trainer.plotting.points import HeadCloud, head_points
from trainer.plotting.style import STYLE_NUMBERS
from trainer.positional.rescaling import (
    Rescaling,
    ntk_aware,
    ntk_by_parts_turns,
    position_interpolation,
    yarn_turns,
)
from trainer.positional.spectrum import Spectrum

LAYOUTS = {"trained": "as trained", "yarn": "YaRN, s = 2"}
STYLES = {
    "trained": STYLE_NUMBERS["RoPE"],
    "yarn": STYLE_NUMBERS["RoPE + YaRN"],
    "pi": STYLE_NUMBERS["RoPE + PI"],
    "ntk": STYLE_NUMBERS["RoPE + NTK-aware"],
}
BESIDE = 32
"""Number of distances that a profile shows."""

BLOCK = 256
METHODS: dict[str, Rescaling] = {
    "pi": position_interpolation,
    "ntk": ntk_aware,
    "yarn": ntk_by_parts_turns,
}
"""Rescalings in Fig. 6 and 11 (Eq. 9 to 11; the last has a ramp over the frequency)."""
TITLES = {"pi": "PI", "ntk": "NTK-aware", "yarn": "YaRN"}
FACTORS = (2.0, 3.0, 4.0)


def scaling_factors(spectrum: Spectrum, training_length: int, factor: float) -> dict[str, Array]:
    """Compute gamma ``[pairs]`` of Eq. 3, the factor on every frequency, for each of
    :data:`METHODS`.

    Frequencies are taken at a length of C tokens. Pairs that do not rotate have the factor 1.
    """
    inv_freq = spectrum.at(training_length, training_length).inv_freq
    before = np.array(inv_freq)
    still = before == 0
    return {
        name: np.where(
            still,
            1.0,
            np.array(rescaling(inv_freq, training_length).frequencies(inv_freq, factor))
            / np.where(still, 1.0, before),
        )
        for name, rescaling in METHODS.items()
    }


def attention_by_distance(heads: Heads, head: int, distances: int) -> Array:
    """Average attention ``[distances]`` on the key 0, 1, 2, ... tokens back, over queries with such
    a key (Fig. 7)."""
    T = heads.q.shape[2]
    distances = min(distances, T)
    total = torch.zeros(distances, dtype=torch.float64)
    back = torch.arange(distances, device=heads.q.device)
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        attention = head_attention(heads, head, slice(start, stop))
        j = torch.arange(start, stop, device=back.device)[:, None] - back
        picked = attention.gather(-1, j.clamp(min=0).expand(len(attention), -1, -1))
        total += (picked * (j >= 0)).double().sum(dim=(0, 1)).cpu()
    return (total / (heads.q.shape[0] * torch.arange(T, T - distances, -1))).numpy()


def attention_around(heads: Heads, head: int, half: int, reach: int) -> Array:
    """Average attention ``[2 reach + 1]`` of repeated tokens on keys around their first occurrence.

    The last ``half`` tokens of the texts repeat the ``half`` tokens before them. ``reach``: number
    of keys before and after the first occurrence, less than ``half``. Entry ``reach`` is the
    occurrence, the next one the token after it.
    """
    T = heads.q.shape[2]
    attention = head_attention(heads, head, slice(T - half, T))
    first = T - 2 * half
    diagonals = [
        attention.diagonal(first + offset, -2, -1).double().mean()
        for offset in range(-reach, reach + 1)
    ]
    return torch.stack(diagonals).cpu().numpy()


def attention_shift(heads: Heads, others: Heads, queries: slice) -> Array:
    """Compute the total variation distance ``[Hq]``, 0 to 1, between a layer's attention in two
    readings of the same texts, mean over some queries."""

    def shift(head: int) -> Tensor:
        first, second = (head_attention(reading, head, queries) for reading in (heads, others))
        return (first - second).abs().sum(dim=-1).mean() / 2

    shifts = [shift(head) for head in range(heads.q.shape[1])]
    return torch.stack(shifts).double().cpu().numpy()


FACTOR = 2.0
REACH = 8
KEPT = 1024
"""Largest number of tokens whose queries and keys are kept, in all layers."""


@dataclass(frozen=True)
class YarnShift:
    """Attention as trained and under YaRN on a text read twice (Fig. 7 and 8).

    ``half``: number of repeated tokens. ``recall`` ``[layers, query heads]``: attention on a
    token's first occurrence and on the token after it; ``uniform``: the same for uniform attention.
    ``shift`` ``[layers, query heads]``: attention that moves to other keys under YaRN, by queries
    of the second reading. ``positional`` and ``semantic``: (layer, head) of the rotating head with
    the highest positional bias, and of the head with the highest recall among the others.
    ``profile``: mean attention of the positional head by distance; ``near_repeat``: of the semantic
    head from 8 tokens before the occurrence to 8 after it; each as ``trained`` and under ``yarn``.
    """

    half: int
    uniform: float
    recall: Array
    shift: Array
    positional: tuple[int, int]
    semantic: tuple[int, int]
    profile: dict[str, Array]
    near_repeat: dict[str, Array]


@torch.no_grad()
def yarn_shift(model: LanguageModel, ids: Tensor, bias: Array) -> YarnShift | None:
    """Read the beginning of ``ids`` ``[B, T]`` twice in a row, as trained and under YaRN with s =
    2.

    ``bias``: positional bias ``[layers, query heads]``, the larger of both kinds. Returns None if
    fewer than two heads rotate, or the texts have fewer than 19 tokens.
    """
    half = (min(ids.shape[1], model.layout.training_length, KEPT) - 1) // 2
    rotating = rotating_heads(model)
    if rotating.sum() < 2 or half <= REACH:
        return None
    texts = ids[: max(1, KEPT // (2 * half + 1))]
    text = torch.cat([texts[:, : half + 1], texts[:, 1 : half + 1]], dim=1)

    trained: list[Heads] = []
    capture(model, text, lambda heads: trained.append(_encoded(heads)))
    recall = np.array(
        [
            [attention_around(heads, head, half, 1)[1:].sum() for head in range(bias.shape[1])]
            for heads in trained
        ]
    )
    positional = _highest(bias, rotating)
    rotating[positional] = False
    semantic = _highest(recall, rotating)

    shift: list[Array] = []
    scaled: dict[int, Heads] = {}

    def compare(heads: Heads) -> None:
        queries = slice(half + 1, 2 * half + 1)
        shift.append(attention_shift(trained[heads.layer], heads, queries))
        if heads.layer in (positional[0], semantic[0]):
            scaled[heads.layer] = _encoded(heads)

    with model.using(model.layout.rescaled(yarn_turns, FACTOR, "all")):
        capture(model, text, compare)
    readings = {"trained": dict(enumerate(trained)), "yarn": scaled}
    return YarnShift(
        half=half,
        uniform=float((2 / np.arange(half + 2, 2 * half + 2)).mean()),
        recall=recall,
        shift=np.array(shift),
        positional=positional,
        semantic=semantic,
        profile={
            name: attention_by_distance(layers[positional[0]], positional[1], half)
            for name, layers in readings.items()
        },
        near_repeat={
            name: attention_around(layers[semantic[0]], semantic[1], half, REACH)
            for name, layers in readings.items()
        },
    )


def rotating_heads(model: LanguageModel) -> Array:
    """Return which query heads rotate, ``[layers, query heads]``."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    key_heads = [[s.rotates for s in layer.spectra] for layer in model.layout.layers]
    return np.repeat(np.array(key_heads), group, axis=1)


def _highest(values: Array, among: Array) -> tuple[int, int]:
    layer, head = np.unravel_index(np.where(among, values, -np.inf).argmax(), values.shape)
    return int(layer), int(head)


def _encoded(heads: Heads) -> Heads:
    """Keep only the encoded tensors, to free the others."""
    q, k = heads.rotated_q, heads.rotated_k
    return replace(heads, q=q, k=k, rotated_q=q, rotated_k=k)


def yarn_part(measured: YarnShift | None, bias: Array) -> Part:
    """Report attention under YaRN (Fig. 7 and 8)."""
    if measured is None:
        return Part(
            (
                "Attention under YaRN was left out: it takes two heads that rotate, and a text and "
                "a training length of 19 tokens or more.",
            )
        )
    positional, semantic = _head(measured.positional), _head(measured.semantic)
    moved, moved_semantic = measured.shift[measured.positional], measured.shift[measured.semantic]
    recall = measured.recall[measured.semantic]
    findings = [
        f"The head that finds repeated tokens best is {semantic}: "
        f"{100 * recall:.1f}% of its attention lies on the earlier occurrence and the token "
        f"after it, where uniform attention has {100 * measured.uniform:.1f}%"
        + ("." if recall >= 2 * measured.uniform else ", too little to call it a semantic one."),
        f"YaRN with s = 2 puts {100 * moved:.1f}% of the attention of the strongest positional "
        f"head ({positional}) on other keys, and {100 * moved_semantic:.1f}% of the attention of "
        "the head that finds repeated tokens, "
        f"{moved_semantic / max(moved, 1e-12):.2g} times as much.",
    ]
    correlation = rank_correlation(bias, measured.shift)
    if np.isfinite(correlation):
        findings.append(
            f"Over all {bias.size} heads, the rank correlation between positional bias and the "
            f"attention that YaRN moves is {correlation:+.2f}"
            + (": the more positional, the less it moves." if correlation < -0.3 else ".")
        )
    reading = f"on a text whose first {measured.half} tokens are read twice in a row"
    offsets = range(-REACH, REACH + 1)
    beside = {name: curve[:BESIDE] for name, curve in measured.profile.items()}
    by_distance = Frame("distance (tokens back)", "mean attention")
    near_repeat = Frame("key, tokens from the earlier occurrence", "mean attention")
    curves = Picture(
        name="attention_under_yarn",
        figure=side_by_side(
            [
                Panel(f"positional: {positional}", _lines(beside, range(BESIDE)), by_distance),
                Panel(
                    f"finds repeated tokens: {semantic}",
                    _lines(measured.near_repeat, offsets),
                    near_repeat,
                ),
            ]
        ),
        caption=(
            f"Mean attention as trained and under YaRN, {reading}. Left: the head with the "
            "strongest positional bias, by distance. Right: the head that attends most to the "
            "earlier occurrence, on the keys around a token's first occurrence (0) and the token "
            "that followed it (1). YaRN also sharpens attention by its temperature."
        ),
        header=("head", "layout", "offset", "attention"),
        rows=[
            *long_rows({("positional", name): curve for name, curve in measured.profile.items()}),
            *long_rows(
                {("semantic", name): curve for name, curve in measured.near_repeat.items()},
                places=offsets,
            ),
        ],
    )
    label = "attention on other keys\n(total variation)"
    cloud = HeadCloud.of_layers(bias, measured.shift, "Aᶜ, the larger of the two", label)
    heads = Picture(
        name="shift_under_yarn",
        figure=head_points([cloud], len(bias)),
        caption=(
            "Every head: its positional bias, the larger of both kinds, and how much of its "
            "attention lies on other keys under YaRN with s = 2 (half the sum of absolute "
            f"differences, mean over queries), {reading}. DroPE expects positional heads, on the "
            "right, to be low."
        ),
        header=("layer", "head", "bias", "shift", "recall"),
        rows=wide_rows([bias, measured.shift, measured.recall]),
    )
    numbers = {
        "repeated_tokens": measured.half,
        "positional_head": measured.positional,
        "semantic_head": measured.semantic,
        "uniform_recall": measured.uniform,
        "recall": measured.recall,
        "shift": measured.shift,
        "rank_correlation": correlation,
        "profile": measured.profile,
        "around": measured.near_repeat,
    }
    return Part(tuple(findings), (curves, heads), numbers={"yarn": numbers})


@torch.no_grad()
def needle_part(model: LanguageModel, prompt: NeedlePrompt | None) -> Part:
    """Report the attention of the prompts' last token around the needle, as trained and under YaRN
    with s = 2, in the rotating head that attends most to the needle (Fig. 8)."""
    if prompt is None:
        return Part(
            (
                "Attention on a needle under YaRN was left out: texts and the training length have "
                "no room for a statement and its question.",
            )
        )
    needle, T = prompt.needle, prompt.ids.shape[1]
    shown = slice(max(0, needle.start - REACH), min(T, needle.stop + REACH))
    inside = slice(needle.start - shown.start, needle.stop - shown.start)

    def last_token() -> Array:
        """Return ``[layers, query heads, shown]``, mean over the prompts."""
        attention: list[Array] = []

        def on_layer(heads: Heads) -> None:
            rows = [
                head_attention(heads, head, slice(T - 1, T))[:, 0, shown].double().mean(dim=0)
                for head in range(heads.q.shape[1])
            ]
            attention.append(torch.stack(rows).cpu().numpy())

        capture(model, prompt.ids, on_layer)
        return np.stack(attention)

    trained = last_token()
    with model.using(model.layout.rescaled(yarn_turns, FACTOR, "all")):
        scaled = last_token()
    place = _highest(trained[..., inside].sum(axis=-1), rotating_heads(model))
    curves = {"trained": trained[place], "yarn": scaled[place]}
    on_needle = {name: float(curve[inside].sum()) for name, curve in curves.items()}
    token = f"The last token of a needle prompt of {T:,} tokens"
    offsets = range(shown.start - needle.start, shown.stop - needle.start)
    frame = Frame("key, tokens from the needle's first", "attention of the last token")
    picture = Picture(
        name="needle_under_yarn",
        figure=side_by_side([Panel(_head(place), _lines(curves, offsets), frame)]),
        caption=(
            f"{token}: its attention on the tokens around the needle, which begins at 0, in the "
            "head that attends most to it, as trained and under YaRN."
        ),
        header=("layout", "offset", "attention"),
        rows=long_rows({(name,): curve for name, curve in curves.items()}, places=offsets),
    )
    numbers = {"head": place, "tokens": T, "on_needle": on_needle, "around": curves}
    finding = (
        f"{token} attends most to the needle in {_head(place)}, with "
        f"{100 * on_needle['trained']:.1f}%; under YaRN with s = 2 it is "
        f"{100 * on_needle['yarn']:.1f}%."
    )
    return Part((finding,), (picture,), numbers={"needle": numbers})


def factors_part(spectrum: Spectrum, training_length: int) -> Part:
    """Report the factor on every frequency (Fig. 6 and 11)."""
    spectrum = spectrum.at(training_length, training_length)
    factors = {s: scaling_factors(spectrum, training_length, s) for s in FACTORS}
    turns = np.array(spectrum.inv_freq) * training_length / (2 * math.pi)
    moving = turns > 0
    slow = moving & (turns < 1)

    def means(among: Array) -> str:
        gammas = factors[2.0].items()
        return ", ".join(f"{TITLES[name]} {gamma[among].mean():.2f}" for name, gamma in gammas)

    groups = [(slow, "less than one turn"), (moving & ~slow, "a turn or more")]
    findings = [
        f"{among.sum()} of {moving.sum()} pairs make {turning} in the training length; with s = 2 "
        f"their frequencies are multiplied by {means(among)} on average."
        for among, turning in groups
        if among.any()
    ]

    def prepare(axes: Axes) -> None:
        axes.set_ylim(0, 1.05)

    first_slow = (int(np.argmax(slow)) - 0.5, "right of it: less than one turn")
    frame = Frame(
        "pair, fastest first", "frequency factor γ", prepare, first_slow if slow.any() else None
    )
    pairs = range(len(turns))
    picture = Picture(
        name="rescaling_factors",
        figure=side_by_side(
            [
                Panel(f"s = {s:g}", _lines(gammas, pairs, TITLES), frame)
                for s, gammas in factors.items()
            ]
        ),
        caption=(
            "PI's, NTK-aware scaling's and YaRN's factor on every frequency, for texts 2, 3 and 4 "
            "times as long. All of them slow the low frequencies down by s, on the right, which is "
            "where content is compared over long distances; PI slows all. YaRN's ramp is linear in "
            "the frequency (Eq. 11); the usual implementation has one over the pair's index."
        ),
        header=("s", "method", "pair", "wavelength", "factor"),
        rows=[
            (s, TITLES[name], pair, spectrum.wavelengths[pair], float(gamma[pair]))
            for s, gammas in factors.items()
            for name, gamma in gammas.items()
            for pair in pairs
        ],
    )
    numbers = {f"{s:g}": gammas for s, gammas in factors.items()}
    return Part(tuple(findings), (picture,), numbers={"rescaling_factors": numbers})


def _lines(
    curves: Mapping[str, Array], x: Iterable[float], names: Mapping[str, str] = LAYOUTS
) -> list[Series]:
    """Return a line for each layout or method; a curve may end before ``x`` does."""
    places = list(x)
    return [
        Series(names[name], STYLES[name], places[: len(curve)], curve.tolist())
        for name, curve in curves.items()
    ]


def rank_correlation(x: Array, y: Array) -> float:
    """Compute Spearman's rank correlation; NaN for fewer than three values, or if all of ``x`` or
    ``y`` are equal."""
    if x.size < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(_mean_ranks(x), _mean_ranks(y))[0, 1])


def _mean_ranks(values: Array) -> Array:
    """Rank the flattened values; equal values share the mean of their ranks."""
    _, index, counts = np.unique(values.ravel(), return_inverse=True, return_counts=True)
    ranks: Array = (counts.cumsum() - (counts - 1) / 2)[index]
    return ranks


def _head(place: tuple[int, int]) -> str:
    return f"layer {place[0]} head {place[1]}"
