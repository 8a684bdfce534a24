#!/usr/bin/env python
"""Collect raw numbers of the ladder's runs and make its tables and figures.

    python scripts/summarize_ladder.py runs/ladder_5 runs/ladder_6 runs/ladder_7

Given runs, writes their numbers to cells.csv, arms.csv and claims.csv under docs/results/ladder,
replacing those of the same rung, seed and arm. Then prints the tables of docs/results/ladder.md
from these files alone and draws the figures next to them.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from scipy.stats import t

from trainer.evaluation.outcomes import Outcomes, Result
from trainer.evaluation.results import Arm, Drop, Report
from trainer.plotting.lines import Frame, Panel, Series, draw, side_by_side
from trainer.plotting.style import STYLE_NUMBERS, paper_style, save
from trainer.report.claims import ROLES, observe
from trainer.runs.checkpoints import find_checkpoint
from trainer.runs.saved_state import read_saved

RAW = Path(__file__).resolve().parent.parent / "docs" / "results" / "ladder"
HEADS = {
    "cells": ("rung", "seed", "arm", "length", "factor", "retrieval", "loss"),
    "arms": (
        *(
            "rung",
            "seed",
            "arm",
            "share",
            "parameters",
            "steps",
            "tokens",
            "before",
            "after",
            "end",
        ),
        *("recovered", "coefficient"),
    ),
    "claims": ("rung", "seed", "arm", "claim", "source", "shown", "evidence"),
}
SHARE = re.compile(r"DroPE (\d+)%")
TEMPERED = " + temperature"
ORDER = ", order"
"""Suffix of rungs whose task needs the order of statements."""
Row = dict[str, str]


def share(arm: str) -> str:
    """Return the percentage of steps that an arm trains without an encoding; empty for none."""
    if match := SHARE.match(arm):
        return match[1]
    return "100" if arm == "NoPE from scratch" else ""


def effect_of_drop(run: Path, arm: Arm) -> Drop | None:
    """Return an arm's effect of the drop on every held-out sequence; None without a drop."""
    for place in (run, *sorted((run / "controls").glob("*"))):
        state = read_saved(find_checkpoint(str(place)))
        if state["config"]["label"] == arm.name:
            effects = state["effects"]
            return Drop.from_dict(next(iter(effects.values()))) if effects else None
    return None


def rows_of(run: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a run, each with the name of its file."""
    report = Report.read(run / "report.json")
    size = f"{report.arms[0].parameters / 1e6:.1f}M"
    needs_order = report.config["evaluation"]["needles"].get("changes", 0) > 0
    place = {"rung": size + ORDER * needs_order, "seed": report.config["seed"]}
    results = Outcomes(report).results()
    for result in results:
        yield (
            "cells",
            {
                **place,
                "arm": result.name,
                "length": result.length,
                "factor": f"{result.factor:g}",
                "retrieval": "" if result.retrieval is None else f"{result.retrieval.mean:.6f}",
                "loss": "" if result.loss is None else f"{result.loss:.6f}",
            },
        )
    arms = {arm.name: arm for arm in report.arms}
    for arm in report.arms:
        drop = effect_of_drop(run, arm)
        yield "arms", {**place, **_arm_row(arm, drop, report.temperature.get(arm.name + TEMPERED))}
        if drop is not None and "RoPE" in arms:
            yield from (("claims", {**place, **row}) for row in _claims(report, results, arm, drop))


def _arm_row(arm: Arm, drop: Drop | None, coefficient: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "arm": arm.name,
        "share": share(arm.name),
        "parameters": arm.parameters,
        "steps": arm.steps,
        "tokens": arm.tokens,
        "coefficient": "" if coefficient is None else f"{coefficient:.4f}",
    }
    if drop is None or None in (drop.loss_before, drop.loss_after, drop.loss_end):
        return row
    before, after, end = drop.loss_before, drop.loss_after, drop.loss_end
    row |= {"before": f"{before:.6f}", "after": f"{after:.6f}", "end": f"{end:.6f}"}
    return row | {"recovered": f"{(after - end) / (after - before):.4f}"}  # type: ignore[operator]


def _claims(
    report: Report, results: list[Result], arm: Arm, drop: Drop
) -> Iterator[dict[str, Any]]:
    """Judge the papers' observations with this arm as the DroPE model."""
    models = {"rope": "RoPE", "drope": arm.name, "nope": "NoPE from scratch", "rope_id": "RoPE-ID"}
    names = {result.name for result in results}
    titles = {"": "", **{f"_{key}": f" + {title}" for key, title in report.methods.items()}}
    roles = {
        f"{role}{key}": name + title
        for role, name in models.items()
        for key, title in titles.items()
        if name + title in names and f"{role}{key}" in ROLES
    }
    trained = {role: a for role, name in models.items() for a in report.arms if a.name == name}
    for observation in observe(
        results, roles, drop=drop, arms=trained, temperature=report.temperature
    ):
        shown = {True: "shown", False: "not shown", None: "not judged"}[observation.shown]
        row = {"arm": arm.name, "claim": observation.claim, "source": observation.source}
        yield row | {"shown": shown, "evidence": observation.evidence}


def collect(runs: Iterable[Path]) -> None:
    """Write the raw numbers of the runs, replacing earlier ones of the same arms."""
    collected: dict[str, list[dict[str, Any]]] = {name: [] for name in HEADS}
    for run in runs:
        for name, row in rows_of(run):
            collected[name].append(row)
    RAW.mkdir(parents=True, exist_ok=True)
    for name, rows in collected.items():
        new = {_arm_key(row) for row in rows}
        path = RAW / f"{name}.csv"
        earlier = [row for row in (read(name) if path.exists() else []) if _arm_key(row) not in new]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, HEADS[name], lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted([*earlier, *rows], key=lambda row: _rung_order(row["rung"])))


def _arm_key(row: dict[str, Any]) -> tuple[str, str, str]:
    """Identify an arm; rows of methods, such as "RoPE + YaRN", belong to their arm."""
    return row["rung"], str(row["seed"]), row["arm"].split(" + ")[0]


def _rung_order(rung: str) -> tuple[float, bool]:
    return float(rung.removesuffix(ORDER)[:-1]), rung.endswith(ORDER)


def read(name: str) -> list[Row]:
    """Return the rows of a file of raw numbers."""
    with (RAW / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


class Numbers:
    """Raw numbers by rung, seed and arm."""

    def __init__(self) -> None:
        self.cells = read("cells")
        self.arms = read("arms")
        self.claims = read("claims")
        self.rungs = sorted({row["rung"] for row in self.arms}, key=_rung_order)

    def names(self, rung: str) -> list[str]:
        """Return the arms of a rung in order: RoPE, DroPE with QK-norm, DroPE without, others."""
        arms = dict.fromkeys(row["arm"] for row in self.arms if row["rung"] == rung)
        return sorted(
            arms,
            key=lambda a: (a != "RoPE", not SHARE.match(a), "no norm" in a, int(share(a) or 0)),
        )

    def by_seed(self, rung: str, arm: str, factor: str, key: str) -> dict[str, float]:
        """Return the retrieval in %, or the loss, of a row at one length by seed."""
        scale = 100 if key == "retrieval" else 1
        return {
            row["seed"]: scale * float(row[key])
            for row in self.cells
            if (row["rung"], row["arm"], row["factor"]) == (rung, arm, factor) and row[key]
        }

    def recovered(self, rung: str, arm: str) -> dict[str, float]:
        """Return the percentage of the drop's loss increase that is won back, by seed."""
        return {
            row["seed"]: 100 * float(row["recovered"])
            for row in self.arms
            if (row["rung"], row["arm"]) == (rung, arm) and row["recovered"]
        }

    def over_rope(self, rung: str, arm: str) -> dict[str, float]:
        """Return the excess of the text loss at C over RoPE's in %, by seed."""
        arm_losses, rope_losses = (self.by_seed(rung, name, "1", "loss") for name in (arm, "RoPE"))
        return {
            seed: 100 * (loss / rope_losses[seed] - 1)
            for seed, loss in arm_losses.items()
            if seed in rope_losses
        }


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the mean over seeds and its 95% interval (Student's t), of zero width for one seed."""
    values = list(values)
    middle = mean(values)
    if len(values) < 2:
        return middle, middle, middle
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return middle, middle - half, middle + half


def in_cell(values: Iterable[float], form: str = ".1f") -> str:
    """Write ``mean (lowest to highest)`` over seeds."""
    values = list(values)
    if not values:
        return ""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return f"{mean(values):{form}}" + (f" ({low} to {high})" if low != high else "")


def with_interval(values: Iterable[float], form: str = "+.1f") -> str:
    """Write ``mean [low, high]``, with the 95% interval over seeds."""
    values = list(values)
    if not values:
        return ""
    middle, low, high = (f"{value:{form}}" for value in interval(values))
    return middle + (f" [{low}, {high}]" if len(values) > 1 else "")


def table(numbers: Numbers) -> str:
    """Write a row for every arm of every rung."""
    head = [
        *("rung", "arm", "seeds", "text loss at C", "over RoPE, %", "won back, %"),
        *("retrieval 1x, %", "8x, %", "8x with temperature, %"),
    ]
    rows = [head, ["---"] * len(head)]
    for rung in numbers.rungs:
        for arm in numbers.names(rung):
            loss = numbers.by_seed(rung, arm, "1", "loss")
            row = [rung, arm, str(len(loss)), in_cell(loss.values(), ".3f")]
            row.append(
                "" if arm == "RoPE" else with_interval(numbers.over_rope(rung, arm).values())
            )
            row.append(in_cell(numbers.recovered(rung, arm).values(), ".0f"))
            for name, factor in ((arm, "1"), (arm, "8"), (arm + TEMPERED, "8")):
                row.append(in_cell(numbers.by_seed(rung, name, factor, "retrieval").values()))
            rows.append(row)
    return as_markdown(rows)


def claims(numbers: Numbers) -> str:
    """Write the number of seeds that show each observation.

    Columns are the two largest shares of each rung; claims.csv has all.
    """
    counts: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for row in numbers.claims:
        column = (row["rung"], row["arm"])
        verdicts = counts.setdefault((row["claim"], row["source"]), {})
        verdicts.setdefault(column, []).append(row["shown"])
    columns = []
    for rung in numbers.rungs:
        judged = [(rung, arm) for arm in numbers.names(rung)]
        columns += [c for c in judged if any(c in verdicts for verdicts in counts.values())][-2:]
    head = ["claim", *(f"{rung}, {arm.removeprefix('DroPE ')}" for rung, arm in columns)]
    rows = [head, ["---"] * len(head)]
    for (claim, source), verdicts in counts.items():
        cells = [_count(verdicts.get(column, [])) for column in columns]
        rows.append([f"{claim} ({source})", *cells])
    return as_markdown(rows)


def _count(verdicts: list[str]) -> str:
    judged = [verdict for verdict in verdicts if verdict != "not judged"]
    return f"{judged.count('shown')} of {len(judged)}" if judged else "–"


def as_markdown(rows: list[list[str]]) -> str:
    """Write rows of cells as a table; the second row is the rule below the head."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def recovery_figure(numbers: Numbers) -> None:
    """Draw excess text loss and retrieval at 8x over the share of steps without an encoding."""
    lines = [
        (f"{rung}{', no norm' if plain else ''}", rung, plain)
        for rung in numbers.rungs
        for plain in (False, True)
        if any(SHARE.match(a) and ("no norm" in a) is plain for a in numbers.names(rung))
    ]
    panels = [
        Panel(
            "",
            [_curve(numbers, line, style, quantity) for style, line in enumerate(lines)],
            Frame("", label, limits),
        )
        for quantity, label, limits in (
            (numbers.over_rope, "text loss over RoPE's (%)", _shares(None)),
            (_far(numbers), "retrieval at 8x, with temperature (%)", _shares(103)),
        )
    ]
    with paper_style():
        keep(side_by_side(panels, height=2.9, x_label="steps without an encoding (%)"), "recovery")


def _far(numbers: Numbers) -> Any:
    return lambda rung, arm: numbers.by_seed(rung, arm + TEMPERED, "8", "retrieval")


def _curve(numbers: Numbers, line: tuple[str, str, bool], style: int, quantity: Any) -> Series:
    label, rung, plain = line
    arms = [
        arm
        for arm in numbers.names(rung)
        if share(arm) and (not SHARE.match(arm) or ("no norm" in arm) is plain)
    ]
    points = sorted((int(share(arm)), *interval(quantity(rung, arm).values())) for arm in arms)
    x, y, low, high = zip(*points, strict=True)
    return Series(label, style, x, y, low, high)


def _shares(top: float | None) -> Callable[[Axes], None]:
    """Return a function that sets the scales of a panel over shares of steps."""

    def prepare(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([5, 10, 20, 40, 100]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0, top)

    return prepare


def reach_figure(numbers: Numbers, rung: str) -> None:
    """Draw retrieval over length at one rung."""
    shown = ["RoPE", "RoPE + YaRN", "NoPE from scratch"]
    shown += [a + TEMPERED for a in numbers.names(rung) if SHARE.match(a) and "no norm" not in a]
    series = []
    for number, name in enumerate(shown):
        cells = [r for r in numbers.cells if (r["rung"], r["arm"]) == (rung, name)]
        if not cells:
            continue
        lengths = sorted({(int(r["length"]), r["factor"]) for r in cells})
        intervals = [
            interval(numbers.by_seed(rung, name, f, "retrieval").values()) for _, f in lengths
        ]
        y, low, high = zip(*intervals, strict=True)
        low, high = [max(v, 0) for v in low], [min(v, 100) for v in high]
        style = STYLE_NUMBERS.get(name, 7 + number)
        series.append(Series(name, style, [n for n, _ in lengths], y, low, high))

    def prepare(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(series[0].x))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(0, 103)

    with paper_style():
        keep(draw(series, Frame("tokens", "retrieval (%)", prepare)), f"reach_{rung.lower()}")


def keep(figure: Figure, name: str) -> None:
    """Save a figure as SVG, without its PNG, next to the raw numbers."""
    save(figure, RAW / re.sub("[., ]+", "_", name)).with_suffix(".png").unlink()


def main() -> None:
    """Collect the runs, then print the tables and draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    if runs := parser.parse_args().runs:
        collect(runs)
    numbers = Numbers()
    print(table(numbers), claims(numbers), sep="\n\n")
    recovery_figure(numbers)
    for rung in numbers.rungs:
        reach_figure(numbers, rung)


if __name__ == "__main__":
    main()
