"""The first hour's commands are ones that the program takes, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import first_hour
from trainer.commands.evaluate import COMMAND
from trainer.commands.hydra import composing as configuration
from trainer.commands.train import read_config
from trainer.runs.phases import phases_of
from trainer.runs.spread import spread_problems

BY_COMMANDS = [c for c in first_hour.CHECKS if c.name not in ("attention", "kernels")]
ROWS = [{"loss": 1.0, "tokens_per_second": 1.0, "phase": phase} for phase in (0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("check", "ranks", "nodes", "quick"),
    [
        pytest.param(check, *place, id=f"{check.name} on {place[0]}")
        for check in BY_COMMANDS
        for place in ((1, 1, False), (2, 1, True), (8, 1, False), (32, 4, False))
        if place[0] > 1 or "ranks" not in check.needs
    ],
)
def test_every_command_of_a_check_is_taken(tmp_path, monkeypatch, check, ranks, nodes, quick):
    commands = []

    def run(self, name, *words, ranks=1, env=None):
        commands.append((words, ranks))
        marks = [word.rpartition("mark: ")[2].rstrip("}") for word in words if "mark: " in word]
        for mark in marks:
            Path(mark).touch()
            (self.out / name / "checkpoints" / "step-000010").mkdir(parents=True, exist_ok=True)
        return len(marks)

    monkeypatch.setattr(first_hour.Place, "run", run)
    monkeypatch.setattr(first_hour, "read_metrics", lambda _: ROWS)
    monkeypatch.setattr(first_hour, "compare", lambda *_, **__: "")
    monkeypatch.setattr(first_hour, "_losses", lambda _: [1.0])
    check.measure(first_hour.Place(tmp_path, ranks, nodes, quick))
    assert commands
    for words, processes in dict.fromkeys(commands):
        if words[0] == "evaluate":
            composed = configuration.compose_words(list(words[1:]), COMMAND.root)
            assert COMMAND.read(composed).request.evaluation.tasks == ["perplexity"]
            continue
        config = read_config([word for word in words if word != "prepare"])
        for phase in phases_of(config) if words[0] != "prepare" else ():
            assert not spread_problems(phase.config, processes, max(processes // nodes, 1))
