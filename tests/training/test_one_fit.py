"""A run of several phases is one training for Lightning's callbacks, also across a stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, Timer

from tests.comparing import (
    assert_same_state,
    assert_same_tensors,
    checkpoint_of,
    contents_of,
    during,
    rows_of,
)
from trainer.checkpoint import BEFORE_DROP, MANIFEST, STATE, check_sound, read_state
from trainer.common.errors import PreemptedError, UserError
from trainer.common.files import checksum
from trainer.lightning.module import LanguageModule
from trainer.training import internals

AVERAGE = {"_target_": "lightning.pytorch.callbacks.EMAWeightAveraging", "decay": 0.8}


class Hooks(Callback):
    """Notes the hooks that are called, and epochs, steps and batches."""

    notes: list = []  # noqa: RUF012 - a run makes its own object

    def on_train_start(self, trainer, module):
        self.notes.append("start")

    def on_train_end(self, trainer, module):
        self.notes.append("end")

    def on_train_epoch_start(self, trainer, module):
        self.notes.append(("epoch", trainer.current_epoch, trainer.global_step))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.notes.append((trainer.current_epoch, trainer.global_step, index))


HOOKS = {"_target_": f"{__name__}.Hooks"}
HALVES = {"trainer": {"micro_batch_size": 2, "checkpoint_every": 1}}


@pytest.fixture
def notes():
    Hooks.notes = []
    return Hooks.notes


def stopped(run, monkeypatch, name, update, **changes):
    """Stop a run in an update, and resume it."""
    with monkeypatch.context() as patch:
        during(patch, lambda: os.kill(os.getpid(), signal.SIGTERM), update)
        with pytest.raises(PreemptedError):
            run(name, **changes)
    return run(name, **changes)


def test_callbacks_see_one_start_two_epochs_and_one_end(run, notes):
    run(callbacks={"hooks": HOOKS})
    first = [(0, step, step - 1) for step in range(1, 7)]
    second = [(1, step, step - 7) for step in range(7, 13)]
    assert notes == ["start", ("epoch", 0, 0), *first, ("epoch", 1, 6), *second, "end"]


@pytest.mark.parametrize("update", [2, 5, 8])
def test_a_resumed_run_counts_epochs_updates_and_batches_on(run, monkeypatch, notes, update):
    """Stopped within the first phase, at its end and within the second."""
    run("whole", callbacks={"hooks": HOOKS}, **HALVES)
    whole, Hooks.notes[:] = [*notes], []
    stopped(run, monkeypatch, "stopped", update, callbacks={"hooks": HOOKS}, **HALVES)
    # The hooks of the stopped run come first; those of the resumed one begin with its start.
    resumed = len(notes) - notes[::-1].index("start")
    assert notes[: resumed - 1] == whole[: resumed - 1]
    assert notes[resumed:] == whole[resumed - 1 :]


@pytest.mark.parametrize("update", [2, 5, 8])
def test_an_average_is_the_same_on_both_sides_of_a_stop(run, monkeypatch, tmp_path, update):
    changes = {"callbacks": {"average": AVERAGE}, **HALVES}
    whole, trained = run("whole", **changes)
    resumed, again = stopped(run, monkeypatch, "stopped", update, **changes)
    assert_same_state(again, trained)
    assert rows_of(resumed) == rows_of(whole)


def test_an_average_is_that_of_the_weights_after_every_update(run, monkeypatch):
    weights = []
    original = EMAWeightAveraging.on_train_batch_end

    def noted(self, trainer, module, *args):
        weights.append([p.detach().clone() for p in module.model.parameters()])
        original(self, trainer, module, *args)

    monkeypatch.setattr(EMAWeightAveraging, "on_train_batch_end", noted)
    _, trained = run(callbacks={"average": AVERAGE})
    average = weights[0]
    for after in weights[1:]:
        average = [0.8 * old + 0.2 * new for old, new in zip(average, after, strict=True)]
    saved = [x for name, x in contents_of(trained).items() if name.startswith("model.")]
    for mean, value in zip(average, saved, strict=True):
        torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-7)


def test_a_model_checkpoint_of_lightning_is_a_directory_that_a_run_reads(run, tmp_path):
    kept = {
        "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
        "dirpath": str(tmp_path / "kept"),
        "every_n_train_steps": 4,
        "save_top_k": -1,
    }
    _, trained = run(callbacks={"kept": kept})
    paths = {}
    for path in (tmp_path / "kept").iterdir():
        paths[read_state(check_sound(path))["step"]] = path
    assert sorted(paths) == [4, 8, 12]
    assert_same_tensors(paths[12], trained)
    assert read_state(trained)["lightning"]["callbacks"].keys() == {
        ModelCheckpoint(**{k: v for k, v in kept.items() if k != "_target_"}).state_key
    }


@pytest.mark.slow
def test_a_timer_counts_the_time_of_all_processes(run, monkeypatch):
    timer = {"_target_": "lightning.pytorch.callbacks.Timer", "duration": {"hours": 1}}
    _, trained = stopped(run, monkeypatch, "timed", 8, callbacks={"timer": timer})
    times = []
    for path in (trained.with_name("step-000009"), trained):
        (state,) = read_state(path)["lightning"]["callbacks"].values()
        times.append(state["time_elapsed"]["train"])
    assert 0 < times[0] < times[1]
    assert Timer(duration={"hours": 1}).state_dict().keys() == state.keys()


class Odd(Callback):
    """Has a state that no file holds."""

    def state_dict(self):
        return {"function": print}


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        ({"_target_": f"{__name__}.Odd"}, r"callbacks\.Odd\.function is a builtin_function"),
        (
            {
                "_target_": "lightning.pytorch.callbacks.StochasticWeightAveraging",
                "swa_lrs": 1e-3,
            },
            "learning rates and batches of a run are its own",
        ),
    ],
)
def test_a_callback_that_would_be_wrong_is_refused_before_the_first_update(
    run, monkeypatch, callback, message
):
    def step(*_):
        raise AssertionError("trained")

    monkeypatch.setattr(LanguageModule, "training_step", step)
    with pytest.raises(UserError, match=message):
        run(callbacks={"mine": callback})


def test_a_run_that_has_only_the_checkpoint_before_its_drop_resumes_from_it(run, finished):
    config, trained = run(trainer={"checkpoint_every": 100})
    directory = Path(config.run_dir) / "checkpoints"
    for path in (trained, checkpoint_of(config, 6)):
        shutil.rmtree(path)
    assert [path.name for path in directory.iterdir()] == [BEFORE_DROP]
    again, trained = run(trainer={"checkpoint_every": 100})
    assert_same_state(trained, checkpoint_of(finished[0]))
    assert rows_of(again) == rows_of(finished[0])


def test_a_run_resumes_from_a_checkpoint_of_version_0_3_0(run, finished):
    """Written as it was then: its format has the number 4, and keeps states of callbacks apart."""
    config, trained = run(trainer={"checkpoint_every": 9})
    shutil.rmtree(trained)
    path = checkpoint_of(config, 9)
    state = read_state(path)
    del state["lightning"]
    (path / STATE).write_text(json.dumps(state | {"format": 4, "user_callbacks": {}}))
    manifest = json.loads((path / MANIFEST).read_text())
    manifest[STATE] = [(path / STATE).stat().st_size, checksum(path / STATE)]
    (path / MANIFEST).write_text(json.dumps(manifest))
    _, trained = run(trainer={"checkpoint_every": 9})
    assert_same_state(trained, checkpoint_of(finished[0]))


def test_names_that_lightning_does_not_document_are_there():
    trainer = L.Trainer(
        accelerator="cpu", max_steps=8, logger=False, enable_checkpointing=False, barebones=False
    )
    assert callable(trainer._signal_connector.register_signal_handlers)
    assert callable(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    loops = internals.loops_at(trainer, epoch=1, batches=4, batches_before=6, step=5)
    trainer.fit_loop.load_state_dict(loops["fit_loop"])
    assert (trainer.current_epoch, trainer.global_step) == (1, 5)
    assert (trainer.fit_loop.batch_idx, trainer.fit_loop.total_batch_idx) == (3, 9)
    strategy = L.pytorch.strategies.ModelParallelStrategy()
    assert callable(strategy._setup_distributed)
    logger = L.pytorch.loggers.WandbLogger
    assert "_wandb_init" in logger.__init__.__code__.co_names
