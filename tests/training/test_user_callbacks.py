"""A user's callbacks take part in training, are resumed with it, and are made by nothing else."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch

from tests.test_checkpoint import change_state
from tests.training.test_run import assert_same_state, checkpoint_of, rows_of
from trainer.checkpoint import BEFORE_DROP, find_checkpoint, load_decoder, read_state
from trainer.commands.composing import compose_words
from trainer.commands.run import read_run
from trainer.common.errors import UserError
from trainer.config import EvaluationRequest, ExportRequest, RunConfig
from trainer.runs.models import find_candidate
from trainer.runs.parsing import merged, parse
from trainer.training.user_callbacks import (
    callback_problems,
    load_states,
    make_callbacks,
    states_of,
)
from trainer.workflows.evaluate import evaluate_lengths
from trainer.workflows.experiment import run_experiment
from trainer.workflows.export import export_checkpoint

CODE = '''
import torch
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

class Shrink(L.Callback):
    """Multiplies the embeddings after every step, counts, and draws."""
    def __init__(self, factor, every=1, name="Shrink"):
        self.factor, self.every, self.steps, self.name = factor, every, 0, name
        self.sum = torch.zeros(2, dtype=torch.float64)
    @property
    def state_key(self):
        return self.name
    def state_dict(self):
        return {"steps": self.steps, "sum": self.sum}
    def load_state_dict(self, state):
        self.steps, self.sum = state["steps"], state["sum"]
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.steps += 1
        self.sum = self.sum + float(outputs["loss"]) + torch.rand(2)
        with torch.no_grad():
            module.model.embed_tokens.weight.mul_(self.factor)
        module.log("mine/steps", float(self.steps))

class Made(L.Callback):
    made = []
    def __init__(self):
        self.made.append(self)
    def on_fit_start(self, *_):
        self.trained = True

class Stops(L.Callback):
    def __init__(self, at):
        self.at = at
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == self.at

class Broken(L.Callback):
    def __init__(self, size=1):
        if size < 1:
            raise ValueError("too small")
    def state_dict(self):
        return {"f": print}

class Metrics(L.Callback):
    def state_dict(self):
        return {"own": 3}

class NotOne:
    pass
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """``my_callbacks.py``, importable."""
    directory = tmp_path / "code"
    directory.mkdir()
    (directory / "my_callbacks.py").write_text(CODE)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "my_callbacks", raising=False)
    yield directory
    for name in ("my_callbacks", "side_effect"):
        sys.modules.pop(name, None)


SHRINK = {"_target_": "my_callbacks.Shrink", "factor": 0.9}


def test_a_callback_changes_the_model_before_it_is_logged_and_saved(run, finished):
    plain, _ = finished
    config, _ = run(callbacks={"mine": SHRINK | {"factor": 0.0}})
    path = checkpoint_of(config)
    assert not load_decoder(path, read_state(path)).embed_tokens.weight.any()
    saved = read_state(path)["user_callbacks"]["Shrink"]
    assert saved["steps"] == 12
    assert saved["sum"]["dtype"] == "float64"
    assert [row["mine/steps"] for row in rows_of(config)] == [2, 4, 6, 8, 10, 12]
    norms = [[row["parameter_norm"] for row in rows_of(each)] for each in (plain, config)]
    assert all(changed < before for before, changed in zip(*norms, strict=True))
    assert "mine/steps" not in rows_of(plain)[0]
    assert len(rows_of(plain)) == len(rows_of(config))


@pytest.mark.parametrize("at", [4, 6, 9])
def test_a_resumed_run_with_callbacks_is_bitwise_the_uninterrupted_one(run, at):
    callbacks = {"a": SHRINK, "b": SHRINK | {"factor": 1.01, "name": "other"}}
    whole, _ = run("whole", callbacks=callbacks)
    stops = {"stops": {"_target_": "my_callbacks.Stops", "at": at}}
    changes = {"trainer": {"checkpoint_every": 1}}
    with pytest.raises(UserError, match=f"stopped the run after step {at} of 12; leave it out"):
        run("stopped", callbacks=callbacks | stops, **changes)
    resumed, _ = run("stopped", callbacks=callbacks, **changes)
    assert_same_state(checkpoint_of(resumed), checkpoint_of(whole))
    assert rows_of(resumed) == rows_of(whole)
    states = [read_state(checkpoint_of(c))["user_callbacks"] for c in (whole, resumed)]
    assert states[0] == states[1]
    assert states[0].keys() == {"Shrink", "other"}
    before = read_state(Path(whole.run_dir) / "checkpoints" / BEFORE_DROP)["user_callbacks"]
    assert before["Shrink"]["steps"] == 6


def test_callbacks_may_come_and_go_between_resumes(run, caplog, tmp_path, base):
    """As monitors may; a state that belongs to none is said to be unused."""
    with pytest.raises(UserError):
        run(callbacks={"a": SHRINK, "stops": {"_target_": "my_callbacks.Stops", "at": 6}})
    with caplog.at_level(logging.WARNING):
        config, _ = run(callbacks={"b": SHRINK | {"name": "new"}})
    assert "states of callbacks that this command does not have: Shrink" in caplog.text
    assert read_state(checkpoint_of(config))["user_callbacks"]["new"]["steps"] == 6


def test_a_run_directory_takes_other_callbacks(base, tmp_path):
    values = {**base, "run_dir": str(tmp_path / "run"), "evaluation": {"enabled": False}}
    stops = {"_target_": "my_callbacks.Stops", "at": 6}
    with pytest.raises(UserError, match="stopped the run after step 6"):
        run_experiment(parse(RunConfig, merged(values, {"callbacks": {"stops": stops}})))
    report, existing = run_experiment(parse(RunConfig, values))
    assert not existing
    assert report.drop.step == 6


def test_the_callback_that_was_checked_is_the_one_that_trains(base, tmp_path):
    values = {**base, "run_dir": str(tmp_path / "run"), "evaluation": {"enabled": False}}
    run_experiment(
        parse(RunConfig, {**values, "callbacks": {"m": {"_target_": "my_callbacks.Made"}}})
    )
    (made,) = sys.modules["my_callbacks"].Made.made
    assert made.trained


WRONG = {
    "no target": ({"every": 3}, r"callbacks\.mine\._target_: expected a class as package"),
    "no module": ({"_target_": "no_such.Thing"}, "there is no module 'no_such'.*PYTHONPATH"),
    "no package": ({"_target_": "my_callbacks.deep.Thing"}, "module 'my_callbacks.deep'"),
    "a bare name": ({"_target_": "Shrink"}, "expected a class as .*, got 'Shrink'"),
    "no attribute": ({"_target_": "my_callbacks.Shrnk"}, "has no 'Shrnk'. Did you mean 'Shrink'"),
    "no class": ({"_target_": "my_callbacks.CODE"}, "has no 'CODE'"),
    "no callback": ({"_target_": "my_callbacks.NotOne"}, "is no subclass of lightning.Callback"),
    "an argument too many": (SHRINK | {"evry": 3}, "unexpected .* 'evry'; it takes factor, every"),
    "an argument missing": ({"_target_": "my_callbacks.Shrink"}, "missing .* argument: 'factor'"),
    "refused by the class": (
        {"_target_": "my_callbacks.Broken", "size": 0},
        r"could not be made: ValueError\('too small'\)",
    ),
    "Lightning's checkpoints": (
        {"_target_": "my_callbacks.ModelCheckpoint"},
        "has no place here: checkpoints are written by the run itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_callback_is_one_problem_before_anything_is_prepared(base, tmp_path, case):
    values, message = WRONG[case]
    wrong = {"run_dir": str(tmp_path / "run"), "callbacks": {"mine": values}}
    wrong["data"] = {"cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=message) as error:
        run_experiment(parse(RunConfig, merged(base, wrong)))
    (problem,) = map(str, error.value.problems)
    assert problem.startswith("callbacks.mine")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


def test_a_class_may_have_the_name_of_one_of_the_runs_callbacks(run):
    config, _ = run(callbacks={"mine": {"_target_": "my_callbacks.Metrics"}})
    assert read_state(checkpoint_of(config))["user_callbacks"] == {"Metrics": {"own": 3}}


def test_all_problems_are_reported_together():
    configured = {"a": SHRINK, "b": SHRINK, "c": {"_target_": "no_such.Thing"}}
    (missing,) = map(str, callback_problems(configured))
    with pytest.raises(UserError) as error:
        make_callbacks(configured)
    _, same = map(str, error.value.problems)
    assert "no_such" in missing
    assert "callbacks.b: its state has the same key 'Shrink' as callbacks.a;" in same
    assert "state_key" in same


def test_a_module_that_fails_to_import_is_named(module):
    (module / "failing.py").write_text("import not_installed_here")
    (problem,) = map(str, callback_problems({"mine": {"_target_": "failing.Thing"}}))
    assert "'failing' failed to import: ModuleNotFoundError" in problem
    (module / "leaving.py").write_text("raise SystemExit(0)")
    (problem,) = map(str, callback_problems({"mine": {"_target_": "leaving.Thing"}}))
    assert "'leaving' failed to import: SystemExit(0)" in problem


def test_a_state_that_json_cannot_hold_is_refused():
    (callback,) = make_callbacks({"mine": {"_target_": "my_callbacks.Broken"}})
    with pytest.raises(UserError, match="its state_dict holds a builtin_function"):
        states_of([callback])


def test_states_come_back_as_they_were():
    (callback,) = make_callbacks({"mine": SHRINK})
    for value in (torch.tensor([0.1, float("inf")]), torch.tensor(3), torch.tensor([True])):
        callback.sum = value
        states = json.loads(json.dumps(states_of([callback])))
        (other,) = make_callbacks({"mine": SHRINK})
        assert load_states([other], states) == []
        assert other.sum.dtype == value.dtype
        assert torch.equal(other.sum, value)
    callback.sum = torch.zeros(100_000)
    with pytest.raises(UserError, match="a Tensor of 100,000 elements"):
        states_of([callback])
    callback.sum = {1: 2}
    with pytest.raises(UserError, match="keys that are no strings"):
        states_of([callback])


def test_a_callback_of_lightnings_own(run):
    config, _ = run(callbacks={"t": {"_target_": "lightning.pytorch.callbacks.Timer"}})
    (state,) = read_state(checkpoint_of(config))["user_callbacks"].values()
    assert state["time_elapsed"]["train"] > 0


def test_a_class_in_a_plugin_file(run, tmp_path):
    """Plugins are loaded under a module name of the package, wherever they lie."""
    path = tmp_path / "elsewhere.py"
    path.write_text(CODE)
    target = {"_target_": "unrope_plugin_elsewhere.Shrink", "factor": 1.0}
    config, _ = run(plugins=[str(path)], callbacks={"mine": target})
    assert read_state(checkpoint_of(config))["user_callbacks"]["Shrink"]["steps"] == 12


def test_from_an_experiment_of_one_s_own(tmp_path):
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(
        "# @package _global_\ncallbacks:\n  mine: {_target_: my_callbacks.Shrink, factor: 0.5}\n"
    )
    words = ["+experiment=mine", "callbacks.mine.factor=0.25"]
    composed = compose_words(words, config_dir=str(tmp_path))
    (callback,) = make_callbacks(read_run(composed).callbacks)
    assert callback.factor == 0.25


def test_none_and_something_else(base):
    assert parse(RunConfig, {**base, "callbacks": None}).callbacks == {}
    with pytest.raises(UserError, match=r"callbacks\.mine: expected a group of keys, got 3"):
        parse(RunConfig, {**base, "callbacks": {"mine": 3}})


READERS = {
    "evaluate": lambda config: evaluate_lengths(EvaluationRequest(config.run_dir)),
    "analyze, generate": lambda config: find_candidate(config.run_dir).load(),
    "export": lambda config: export_checkpoint(
        ExportRequest(checkpoint=config.run_dir, to=f"{config.run_dir}/exported")
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_callback_that_a_checkpoint_names_is_imported(run, module, tmp_path, reader):
    config, _ = run()
    marker = tmp_path / "was_imported"
    (module / "side_effect.py").write_text(f"open({str(marker)!r}, 'w')\n{CODE}")
    callbacks = {"mine": {"_target_": "side_effect.Shrink", "factor": 1.0}}
    change_state(checkpoint_of(config), lambda state: state["config"].update(callbacks=callbacks))
    assert read_state(find_checkpoint(config.run_dir))["config"]["callbacks"] == callbacks
    READERS[reader](config)
    assert not marker.exists()
    make_callbacks(callbacks)
    assert marker.exists()
