"""The effect of rescaled frequencies on heads: parts of a section (DroPE, Fig. 6, 7, 8 and 11)."""

from __future__ import annotations

import math

import numpy as np

from trainer.analysis.averages import Array
from trainer.analysis.needle_prompt import NeedleShift
from trainer.analysis.rescaled_attention import scaling_factors
from trainer.analysis.studies.bias_figures import (
    factor_figure,
    needle_figure,
    rescaled_figure,
    shift_figure,
)
from trainer.analysis.studies.section import Part, Picture
from trainer.analysis.yarn_shift import YarnShift
from trainer.positional.spectrum import Spectrum

METHODS = {"pi": "PI", "ntk": "NTK-aware", "yarn": "YaRN"}
LAYOUTS = {"trained": "as trained", "yarn": "YaRN, s = 2"}
FACTORS = (2.0, 3.0, 4.0)


def yarn_part(found: YarnShift | None, bias: Array) -> Part:
    """Attention under YaRN (Fig. 7 and 8)."""
    if found is None:
        return Part(
            (
                "Attention under YaRN was left out: it takes two heads that rotate, and a text and "
                "a training length of 19 tokens or more.",
            )
        )
    moved = {name: found.shift[getattr(found, name)] for name in ("positional", "semantic")}
    ratio = moved["semantic"] / max(moved["positional"], 1e-12)
    recall = found.recall[found.semantic]
    findings = [
        f"The head that finds repeated tokens best is {_head(found.semantic)}: {100 * recall:.1f}% "
        f"of its attention lies on the earlier occurrence and the token behind it, where uniform "
        f"attention has {100 * found.uniform:.1f}%"
        + ("." if recall >= 2 * found.uniform else ", too little to call it a semantic one."),
        f"YaRN with s = 2 puts {100 * moved['positional']:.1f}% of the attention of the strongest "
        f"positional head ({_head(found.positional)}) on other keys, and "
        f"{100 * moved['semantic']:.1f}% of that of the head that finds repeated tokens, "
        f"{ratio:.2g} times as much.",
    ]
    correlation = rank_correlation(bias, found.shift)
    if np.isfinite(correlation):
        findings.append(
            f"Over all {bias.size} heads, the rank correlation between positional bias and the "
            f"attention that YaRN moves is {correlation:+.2f}"
            + (": the more positional, the less it moves." if correlation < -0.3 else ".")
        )
    titles = (
        f"positional: {_head(found.positional)}",
        f"finds repeated tokens: {_head(found.semantic)}",
    )
    rows = [
        (head, layout, offset, float(value))
        for head, curves, first in (
            ("positional", found.profile, 0),
            ("semantic", found.around, -(len(found.around["yarn"]) // 2)),
        )
        for layout, curve in curves.items()
        for offset, value in enumerate(curve, first)
    ]
    reading = f"on a text whose first {found.half} tokens are read twice in a row"
    pictures = (
        Picture(
            "attention_under_yarn",
            rescaled_figure(found.profile, found.around, LAYOUTS, titles),
            f"Mean attention as trained and under YaRN, {reading}. Left: the head with the "
            "strongest positional bias, by distance. Right: the head that attends most to what "
            "stood there before, on the keys around a token's first occurrence (0) and what "
            "followed it (1). YaRN also sharpens attention by its temperature.",
            ("head", "layout", "offset", "attention"),
            rows,
        ),
        Picture(
            "shift_under_yarn",
            shift_figure(bias, found.shift),
            f"Every head: its positional bias, the larger of both kinds, and how much of its "
            f"attention lies on other keys under YaRN with s = 2 (half the sum of absolute "
            f"differences, mean over queries), {reading}. DroPE expects positional heads, on the "
            "right, to be low.",
            ("layer", "head", "bias", "shift", "recall"),
            [
                (*at, float(bias[at]), float(found.shift[at]), float(found.recall[at]))
                for at in np.ndindex(bias.shape)
            ],
        ),
    )
    return Part(
        tuple(findings),
        pictures,
        numbers={
            "yarn": {
                "repeated_tokens": found.half,
                "positional_head": list(found.positional),
                "semantic_head": list(found.semantic),
                "uniform_recall": found.uniform,
                "recall": found.recall.tolist(),
                "shift": found.shift.tolist(),
                "rank_correlation": correlation if np.isfinite(correlation) else None,
                "profile": {name: curve.tolist() for name, curve in found.profile.items()},
                "around": {name: curve.tolist() for name, curve in found.around.items()},
            }
        },
    )


def needle_part(found: NeedleShift | None) -> Part:
    """The last token of a needle prompt under YaRN (Fig. 8)."""
    if found is None:
        return Part(
            (
                "Attention on a needle under YaRN was left out: texts and the training length have "
                "no room for a statement and its question.",
            )
        )
    before, after = (100 * found.on_needle[name] for name in LAYOUTS)
    where = f"The last token of a needle prompt of {found.tokens:,} tokens"
    rows = [
        (layout, offset, float(value))
        for layout, curve in found.around.items()
        for offset, value in enumerate(curve, found.first)
    ]
    picture = Picture(
        "needle_under_yarn",
        needle_figure(found.around, found.first, LAYOUTS, _head(found.head)),
        f"{where}: its attention on the tokens around the needle, which begins at 0, in the head "
        "that attends most to it, as trained and under YaRN.",
        ("layout", "offset", "attention"),
        rows,
    )
    numbers = {
        "head": list(found.head),
        "tokens": found.tokens,
        "on_needle": found.on_needle,
        "around": {name: curve.tolist() for name, curve in found.around.items()},
    }
    finding = (
        f"{where} attends most to the needle in {_head(found.head)}, with {before:.1f}%; under "
        f"YaRN with s = 2 that is {after:.1f}%."
    )
    return Part((finding,), (picture,), numbers={"needle": numbers})


def factors_part(spectrum: Spectrum, training_length: int) -> Part:
    """What every frequency is multiplied by (Fig. 6 and 11)."""
    spectrum = spectrum.at(training_length, training_length)
    factors = {s: scaling_factors(spectrum, training_length, s) for s in FACTORS}
    turns = np.array(spectrum.inv_freq) * training_length / (2 * math.pi)
    moving = turns > 0
    slow = moving & (turns < 1)

    def means(among: Array) -> str:
        of = {METHODS[name]: gamma[among].mean() for name, gamma in factors[2.0].items()}
        return ", ".join(f"{name} {mean:.2f}" for name, mean in of.items())

    groups = [(slow, "less than one turn"), (moving & ~slow, "a turn or more")]
    findings = [
        f"{among.sum()} of {moving.sum()} pairs make {turning} in the training length; with s = 2 "
        f"their frequencies are multiplied by {means(among)} on average."
        for among, turning in groups
        if among.any()
    ]
    rows = [
        (s, METHODS[name], pair, spectrum.wavelengths[pair], float(value))
        for s, methods in factors.items()
        for name, gamma in methods.items()
        for pair, value in enumerate(gamma)
    ]
    picture = Picture(
        "rescaling_factors",
        factor_figure(factors, int(np.argmax(slow)) if slow.any() else None, METHODS),
        "What PI, NTK-aware scaling and YaRN multiply every frequency by, for texts 2, 3 and 4 "
        "times as long. All of them slow the low frequencies down by s, on the right, which is "
        "where content is compared over long distances; PI slows all. YaRN's ramp is linear in "
        "the frequency (Eq. 11); the usual implementation has one over the pair's index.",
        ("s", "method", "pair", "wavelength", "factor"),
        rows,
    )
    numbers = {
        f"{s:g}": {name: gamma.tolist() for name, gamma in methods.items()}
        for s, methods in factors.items()
    }
    return Part(tuple(findings), (picture,), numbers={"rescaling_factors": numbers})


def rank_correlation(x: Array, y: Array) -> float:
    """Spearman's, of arrays without ties; not a number for fewer than three values."""
    if x.size < 3:
        return math.nan
    ranks_of_x, ranks_of_y = (v.ravel().argsort().argsort() for v in (x, y))
    return float(np.corrcoef(ranks_of_x, ranks_of_y)[0, 1])


def _head(at: tuple[int, int]) -> str:
    return f"layer {at[0]} head {at[1]}"
