"""The dashboard shows what runs log, and its script says what it lacks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import wandb_dashboard
from trainer.runs.metrics_file import COLUMNS, SECTIONS

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--entity", "team", "--project", "needles", "--name", "Lengths"]


def names(section):
    """The metrics and patterns of a section's plots."""
    return [name for plot in SECTIONS[section] for name in (*plot.metrics, plot.pattern) if name]


@pytest.mark.parametrize("section", ["Training", "Drop", "System"])
def test_metrics_of_training_bear_the_names_of_the_metrics_file(section):
    assert set(names(section)) <= set(COLUMNS)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_metric_is_explained(section):
    page = (ROOT / "docs" / "dashboard.md").read_text()
    assert f"**{section}**" in page
    for name in names(section):
        prefix = re.split(r"\.\+|\[", name)[0]
        assert f"`{prefix}" in page, name


def refusal(monkeypatch, capsys):
    """What the script says before it ends with code 2."""
    monkeypatch.setattr(sys, "argv", ["wandb_dashboard.py", *ARGUMENTS])
    with pytest.raises(SystemExit) as end:
        wandb_dashboard.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(wandb_dashboard, "find_spec", lambda _: None)
    assert "pip install 'unrope[dashboards]'" in refusal(monkeypatch, capsys)


def test_a_missing_key_is_named(monkeypatch, capsys):
    monkeypatch.setattr(wandb_dashboard, "find_spec", lambda _: object())
    monkeypatch.setattr(wandb_dashboard, "workspace", lambda *_: None)
    monkeypatch.setattr("trainer.training.loggers.has_wandb_key", lambda: False)
    assert "WANDB_API_KEY" in refusal(monkeypatch, capsys)


def test_dry_run_prints_the_workspace():
    pytest.importorskip("wandb_workspaces")
    result = subprocess.run(
        [sys.executable, "scripts/wandb_dashboard.py", *ARGUMENTS, "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_BASE_URL": "http://127.0.0.1:9"},
    )
    made = json.loads(result.stdout)
    assert (made["entity"], made["project"], made["name"]) == ("team", "needles", "Lengths")
    shown = {
        section["name"]: [
            name
            for panel in section["panels"]
            for name in panel.get("y") or panel.get("metrics") or [panel["metric_regex"]]
        ]
        for section in made["sections"]
    }
    assert shown == {section: names(section) for section in SECTIONS}
    (lengths,) = (s for s in made["sections"] if s["name"] == "Length generalisation")
    assert all(panel["x"] == "evaluation/length" for panel in lengths["panels"])
