"""Settings that decide whether a run resumes, and whether a control or a phase continues it."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from tests.relations import test_controls as controls
from tests.relations.leaves import leaves, others, with_value
from trainer.common.errors import UserError
from trainer.data.config import SourceConfig, TokenizerConfig
from trainer.runs import directory
from trainer.runs.arms import control_problems
from trainer.runs.config import RunConfig
from trainer.runs.directory import check_run_directory, open_run_directory
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import branch_problems, phases_of
from trainer.workflows import watch
from trainer.workflows.recalibrate import Asked, recipe_for, write_record
from trainer.workflows.recipe import Choice
from trainer.workflows.recipe import Recipe as Chosen

FREE_LEAVES = {
    "name", "overwrite", "label", "controls", "data.num_workers", "data.cache_dir",
    "data.prepared", "data.about", "data.bad_rows", "model.attention_backend", "trainer.compile",
    "trainer.micro_batch_size", "trainer.deterministic",
    "trainer.accelerator", "trainer.threads", "trainer.log_every", "trainer.checkpoint_every",
    "trainer.checkpoint_minutes", "trainer.keep_checkpoints", "trainer.keep_every",
    "trainer.keep_best", "trainer.async_checkpoint", "trainer.max_time", "trainer.step_timeout",
    "trainer.rewind_after", "trainer.gc_every", "trainer.profile_steps",
}  # fmt: skip
"""Leaves that a resumed run may change, since they do not affect training. Of ``controls`` whole
controls alone: see tests/runs/test_directory.py."""
FREE_GROUPS = {"logger", "evaluation", "monitor", "callbacks", "strategy"}
"""Groups whose leaves a resumed run may all change."""


def test_a_run_resumes_with_all_leaves_that_decide_on_what_is_trained(tmp_path, monkeypatch):
    values = {"run_dir": str(tmp_path / "run"), "model": {"vocab_size": 300}, "drop": {"at": 5}}
    config = parse(RunConfig, values)
    open_run_directory(config)
    monkeypatch.setattr(directory, "saved_run", lambda place: config)
    accepted = set()
    for path, kind, value in leaves(config):
        if path == "run_dir":
            continue
        other = with_value(config, path, next(others(kind, value)))
        try:
            check_run_directory(other)
        except UserError as error:
            keys = [problem.key for problem in error.problems if problem.key]
            assert len(keys) == 1, path
            assert keys[0].startswith(path), path
        else:
            accepted.add(path)
    in_free_groups = {path for path, *_ in leaves(config) if path.split(".")[0] in FREE_GROUPS}
    assert accepted == FREE_LEAVES | in_free_groups


def test_a_control_reads_the_text_and_the_tokens_of_its_run():
    run = parse(RunConfig, {"model": {"vocab_size": 300}})
    refused = set()
    for path, kind, value in leaves(run):
        if path.startswith(("data.", "tokenizer.")) and path != "data.mixture":
            other = with_value(run, path, next(others(kind, value)))
            keys = {problem.key for problem in control_problems({"main": run, "x": other})}
            refused |= {path} if keys & {"controls.x.data", "controls.x.tokenizer"} else set()
    source = {f"data.{item.name}" for item in fields(SourceConfig)} | {"data.prepared"}
    tokens = {f"tokenizer.{item.name}" for item in fields(TokenizerConfig)}
    assert refused == (source | tokens) - {"data.about", "data.bad_rows"}


CHOSEN = Chosen((Choice("optimizer.lr", 0.1, "why"),), 4, 5, 6.0, 7.0)


def test_a_recalibration_that_was_begun_goes_on_for_the_same_request_alone(tmp_path):
    asked = Asked("model", 3.0, ("a.txt",))
    chosen = SimpleNamespace(config=SimpleNamespace(run_dir=str(tmp_path)), asked=asked, to="x")
    chosen.recipe = CHOSEN
    write_record(chosen, exported=False)
    assert recipe_for(asked, tmp_path, {}, overwrite=False) == CHOSEN
    others = {"model": "other", "minutes": 4.0, "text": ("b.txt",)}
    assert others.keys() == {item.name for item in fields(Asked)}
    for name, value in others.items():
        with pytest.raises(UserError, match=name if name != "model" else "MODEL"):
            recipe_for(replace(asked, **{name: value}), tmp_path, {}, overwrite=False)


def phased(**changes):
    """Return two phases; ``changes``: of the second."""
    values = {"steps": 4, "batch_size": 4, "micro_batch_size": 4, "log_every": 4}
    phases = {"a": values, "b": {**values, **changes}}
    data = {"mixture": {"x": {}, "y": {}}}
    return phases_of(parse(RunConfig, {"phases": phases, "data": data, "drop": {"at": None}}))


APART = {
    "batch_size": 8, "micro_batch_size": 2, "log_every": 2, "sequence_length": 32,
    "weights": {"x": 1.0}, "until": {"flat": 0.1, "every": 2},
}  # fmt: skip
TOGETHER = {
    "steps": 5, "tokens": 4096, "schedule": {"peak": 0.5}, "drop": {}, "rescale": {"factor": 2.0},
    "optimizer_state": "reset",
}  # fmt: skip


@pytest.mark.parametrize("key", [*APART, *TOGETHER])
def test_phases_are_one_stretch_unless_they_differ_in_their_batches(key):
    first, second = phased(**{key: (APART | TOGETHER)[key]})
    assert (first.stretch == second.stretch) == (key in TOGETHER)
    assert (second.change != ()) == (key in ("drop", "rescale", "optimizer_state"))


def test_a_file_that_is_watched_is_read_again_if_its_size_or_its_time_changes(tmp_path):
    path, stamps = tmp_path / "metrics.csv", set()
    for text, time in (("a", 1), ("ab", 1), ("b", 2)):
        path.write_text(text)
        os.utime(path, ns=(time, time))
        stamps.add(watch._stamp(path))
    assert len(stamps) == 3


BEFORE = {
    "model": {"attention_backend"},
    "positional": set(),
    "data": {"num_workers", "cache_dir", "about"},
    "seed": set(),
}
"""Groups that a control which branches off has from its run, and what it may change in them."""


@pytest.mark.parametrize("name", [*controls.CHANGES])
def test_a_control_that_branches_off_has_read_and_been_changed_like_its_run(name):
    run = parse(RunConfig, controls.RUN)
    control = parse(RunConfig, merged(controls.RUN, controls.CHANGES[name]))
    before_drop = branch_problems(run, control, 6)
    group, _, key = name.partition(".")
    refused = group in BEFORE and key not in BEFORE[group]
    refused = refused or name in ("trainer.batch_size", "optimizer.name", "drop.at_tokens")
    refused = refused or (name == "phases" and bool(before_drop))
    assert bool(before_drop) == refused
