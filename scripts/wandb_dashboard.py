#!/usr/bin/env python
"""Create the Weights & Biases workspace of a project of the metrics in docs/files.md.

    python scripts/wandb_dashboard.py --entity my-team
    python scripts/wandb_dashboard.py --entity my-team --dry-run

Each call saves a new view in the project and prints its address. ``--dry-run`` prints the workspace
as JSON instead and uses no network.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainer.training.dashboards import LENGTH

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

STEP = "trainer/global_step"
"""Name that Lightning's logger gives the optimizer step."""


@dataclass(frozen=True)
class Panel:
    """Panel of lines of ``metrics`` and of all that match ``pattern``, against ``x``; without ``x``
    bars of the last values."""

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str | None = None
    x: str | None = STEP


SECTIONS = {
    "Training": (
        Panel("Loss (nats per token)", ("loss",)),
        Panel("Learning rate", ("learning_rate",)),
        Panel("Gradient norm", ("gradient_norm",)),
        Panel("Parameter norm", ("parameter_norm",)),
        Panel("Tokens per second", ("tokens_per_second",)),
        Panel("Model FLOPs utilisation", ("mfu",)),
        Panel("Skipped steps", ("skipped_steps",)),
    ),
    "Drop": (
        Panel(
            "Held-out loss around the drop (nats per token)",
            ("drop/loss_before", "drop/loss_after", "drop/loss_end"),
            x=None,
        ),
        Panel("Phase", ("phase",)),
    ),
    "Length generalisation": (
        Panel(
            "Retrieval by length (fraction of trials)",
            pattern="evaluation/retrieval/.+",
            x=LENGTH,
        ),
        Panel("Loss by length (nats per token)", pattern="evaluation/loss/.+", x=LENGTH),
    ),
    "While training": (
        Panel("Perplexity by length", pattern="benchmark/perplexity/.+"),
        # All others: regular expressions of RE2 have no lookahead.
        Panel("Mean score by task and length", pattern="benchmark/([^p]|p[^e]).+"),
    ),
    "System": (Panel("Peak memory (GiB)", ("memory",)),),
}
"""Panels by section, in the order in which they are shown."""


def workspace(entity: str, project: str, name: str) -> Workspace:
    """Build the workspace with all sections open."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def panel(plot: Panel) -> wr.LinePlot | wr.BarPlot:
        if plot.x is None:
            return wr.BarPlot(title=plot.title, metrics=list(plot.metrics))
        return wr.LinePlot(
            title=plot.title,
            x=plot.x,
            y=list(plot.metrics),
            metric_regex=plot.pattern,
            log_x=True if plot.x == LENGTH else None,
        )

    sections = []
    for title, plots in SECTIONS.items():
        columns = min(3, len(plots))
        rows = 1 + (len(plots) - 1) // 3
        sections.append(
            ws.Section(
                name=title,
                panels=[panel(plot) for plot in plots],
                is_open=True,
                layout_settings=ws.SectionLayoutSettings(columns=columns, rows=rows),
            )
        )
    return ws.Workspace(entity=entity, project=project, name=name, sections=sections)


def main() -> None:
    """Save the workspace, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entity", required=True, help="user or team that owns the project")
    parser.add_argument("--project", default="unrope", help="WANDB_PROJECT of the runs")
    parser.add_argument("--name", default="Unrope", help="name of the view")
    parser.add_argument("--dry-run", action="store_true", help="print the workspace as JSON")
    options = parser.parse_args()
    if find_spec("wandb_workspaces") is None:
        parser.exit(2, "wandb-workspaces is not installed; pip install 'unrope[dashboards]'.\n")
    made = workspace(options.entity, options.project, options.name)
    if options.dry_run:
        from pydantic import TypeAdapter

        print(TypeAdapter(type(made)).dump_json(made, indent=2, exclude_defaults=True).decode())
        return
    import wandb

    try:
        made.save()
    except wandb.Error as error:
        parser.exit(2, f"wandb did not save the workspace: {error}\n")


if __name__ == "__main__":
    main()
