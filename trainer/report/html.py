"""The report as one HTML file that opens anywhere: no network, no scripts, figures inside."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from trainer.report.atomic import write_atomically
from trainer.report.results import Report
from trainer.report.summary import VERDICTS, factor_label, percent, summary

_MEDIA = {".svg": "image/svg+xml", ".png": "image/png"}
_OWN_COLUMN = "tokens_per_second"  # of the table of arms

# Name of a figure: what is plotted and how, and what someone who cannot see it should know of it.
_FIGURES = {
    "training": (
        "Training loss over training steps for each arm. Thick: centred mean over 1/40 of the "
        "logged points, taken on each side of the drop by itself; thin: as logged. The vertical "
        "line is the step at which the positional encoding was dropped. The training loss weighs "
        "needle statements and text as the configuration says, so it is not comparable with the "
        "held-out text loss.",
        "Line chart of the training loss of each arm over training steps.",
    ),
    "retrieval": (
        "Needle retrieval at multiples of the training length (logarithmic axis). Bars are 95% "
        "Wilson score intervals over trials, not over training seeds; methods at one length are "
        "set slightly apart where they share a panel. In small multiples grey lines are all other "
        "methods.",
        "Line chart of the retrieval rate of each method over sequence length; the same numbers "
        "are in the table of results.",
    ),
    "loss_by_position": (
        "Held-out text loss by position in the longest sequences, averaged over buckets of "
        "positions and drawn at their middles. Positions right of the dashed line were never seen "
        "in training.",
        "Line chart of the held-out loss of each method over the position in the sequence.",
    ),
    "reach": (
        "How far models reach while they train, on validation text: the run at every length, its "
        "controls at the longest. Where the encoding was dropped the run was measured on both "
        "sides.",
        "Line chart over training steps of retrieval, or of loss where that was not measured, with "
        "a line for each length.",
    ),
    "reach_by_position": (
        "Held-out loss of the run by position in its longest validation sequences, less the mean "
        "over the positions within the training length. A column is a measurement; steps are not "
        "to scale. Positions above the dotted line were never seen in training; the dashed line is "
        "the drop.",
        "Heat map of the excess loss over measurements and positions.",
    ),
}


def write_html(report: Report, figures: Mapping[str, Path], path: Path) -> None:
    """Write the page, complete or not at all.

    ``figures`` is what ``write_figures`` returned (SVG or PNG files, here embedded). The page
    holds nothing but the report's data and fixed text. Raises ``OSError`` when a figure cannot be
    read, ``ValueError`` when it is neither SVG nor PNG.
    """
    page = Environment(
        loader=PackageLoader("trainer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {
        "percent": percent,
        "factor": factor_label,
        "thousands": lambda number: f"{number:,}".replace(",", "\u202f"),
        "pretty": lambda data: json.dumps(data, indent=2, ensure_ascii=False),
    }
    text = page.get_template("report.html.j2").render(
        report=report,
        summary=summary(report),
        task=report.task,
        best=_best(report),
        figures=[_figure(name, figures[name]) for name in figures],
        verdicts=VERDICTS,
        rates=report.timing.get(_OWN_COLUMN, {}),
        timing={key: value for key, value in report.timing.items() if key != _OWN_COLUMN},
    )
    write_atomically(path, text)


def _best(report: Report) -> dict[int, float]:
    """The highest retrieval at each length."""
    best: dict[int, float] = {}
    for cell in report.table:
        if cell.retrieval is not None:
            best[cell.length] = max(cell.retrieval, best.get(cell.length, 0.0))
    return best


def _figure(name: str, path: Path) -> dict[str, Any]:
    if path.suffix not in _MEDIA:
        raise ValueError(f"a figure is {' or '.join(_MEDIA)}, not {path.name}")
    caption, alt = _FIGURES.get(name, (name.replace("_", " "), name.replace("_", " ")))
    data = b64encode(path.read_bytes()).decode()
    return {"source": f"data:{_MEDIA[path.suffix]};base64,{data}", "caption": caption, "alt": alt}
