"""Every experiment, in two layers on a little text, trains in all its phases and is evaluated."""

from __future__ import annotations

import pytest

from tests.program import ROOT
from trainer.checkpoint import find_checkpoint, read_state
from trainer.commands import compose_words
from trainer.positional.layout import Layout
from trainer.runs.directory import read_metrics, saved_config
from trainer.runs.parsing import configured_layout, merged, parse
from trainer.runs.phases import layout_of_phase, phases_of
from trainer.workflows import evaluate
from trainer.workflows.experiment import run_experiment

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
STEPS, C = 4, 64
"""Of a phase; tokens of the shortest sequences."""


def small(words, base, tmp_path):
    """The values that a command's words compose, with a model, text and lengths for seconds."""
    values = compose_words(words).values
    drops = values["drop"]["at"] is not None
    own = values["data"]["sequence_length"]
    phases = {
        key: {
            **phase,
            "steps": STEPS, "batch_size": 2, "micro_batch_size": 1,
            # Longer where it is, but not as much.
            "sequence_length": C * ((phase.get("sequence_length") or own) // own).bit_length(),
        }
        for key, phase in values["phases"].items()
    }  # fmt: skip
    changes = {
        "run_dir": str(tmp_path / "run"),
        "model": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": None,
            "vocab_size": None, "from_pretrained": None, "from_run": None,
        },
        "data": {
            "source": "files", "files": base["data"]["files"], "hub_name": None, "hub_config": None,
            "validation": 0.03, "test": 0.07, "sequence_length": C, "num_workers": 0,
            "cache_dir": base["data"]["cache_dir"],
        },
        "tokenizer": {"path": None, "vocab_size": 300},
        "drop": {"at": STEPS, "effect_sequences": 2} if drops else {},
        "phases": phases,
        "trainer": {
            "max_steps": 2 * STEPS, "batch_size": 4, "micro_batch_size": 2,
            "compile": False, "threads": 1, "log_every": 1, "checkpoint_every": 100,
            "keep_every": None, "precision": "fp32", "accelerator": "cpu",
        },
        "strategy": {"name": "single", "activation_checkpointing": "none", "shard_size": None},
        "logger": {"wandb": False, "tensorboard": False},
        "benchmarks": {"every": None, "tasks": []},
        "controls": {},
        "evaluation": {
            "enabled": True, "methods": ["none"], "tasks": ["perplexity"], "lengths": [1, 2],
            "windows": 1, "fit_windows": 1,
        },
    }  # fmt: skip
    if values["positional"]["layers"] == ["rope_id"]:
        # The paper's fastest wavelength of 32 tokens is the slowest at this length.
        changes["positional"] = {"encodings": {"rope_id": {"fastest_wavelength": 8.0}}}
    windows = [window and min(window, C) for window in values["positional"]["windows"]]
    changes.setdefault("positional", {})["windows"] = windows
    result = merged(values, changes)
    result["data"]["mixture"] = {}
    return result | {"phases": phases, "controls": _few(values["controls"])}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_crosses_every_boundary_and_is_evaluated(name, base, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "write_renderings", lambda *_: [])  # half of the time
    trained = parse(small([f"+experiment={name}"], base, tmp_path))
    report = run_experiment(trained)
    config, phases, run_dir = trained.config, trained.phases, trained.directory
    rows = read_metrics(run_dir / "metrics.csv")
    assert [row["step"] for row in rows] == [*range(1, phases[-1].end + 1)]
    assert {row["phase"] for row in rows} == {*range(len(phases))}
    run, *others = report.runs
    assert len(others) == len(config.controls)
    dropped = [phase.start for phase in phases if phase.drop]
    assert {change["step"] for change in run.changes} >= {*dropped}
    assert all(change["loss_end"] is not None for change in run.changes)
    assert set(report.rows.length) == {phases[-1].length, 2 * phases[-1].length}
    assert (run_dir / "facts.json").is_file()
    for place in (run_dir, *(run_dir / "controls" / control for control in config.controls)):
        state = read_state(find_checkpoint(str(place)))
        saved = saved_config(state["config"])
        layout = configured_layout(saved)
        for phase in phases_of(saved):
            layout = layout_of_phase(saved, phase, layout)
        assert layout == Layout.from_dict(state["layout"])  # as was foreseen


def _few(controls):
    """The last control alone, which branches off after two steps where it did after more."""
    for name, control in list(controls.items())[-1:]:
        changed = dict(control)
        if isinstance(changed.get("branch"), int):
            changed["branch"] = 2
        if "from_run" in changed.get("model", {}):  # and its steps are of that run
            changed |= {"model": {"from_run": None}, "trainer": {}}
        if changed.get("drop", {}).get("at") is not None:
            changed["drop"] = {**changed["drop"], "at": 2}
        return {name: changed}
    return {}
