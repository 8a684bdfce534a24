"""A run that is told to stop does so at a step boundary, and goes on as if nothing had been."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.program import Started
from tests.training.test_run import assert_same_state, checkpoint_of, rows_of
from trainer.checkpoint import read_state, regular_checkpoints, step_name
from trainer.common.errors import PreemptedError
from trainer.config import RunConfig, TrainerConfig
from trainer.training import run as runs
from trainer.training.callbacks import stopping
from trainer.training.callbacks.stopping import (
    MARGIN,
    Notice,
    Stopping,
    acknowledging,
    deadline,
    heeding_signals,
    stopping_between_files,
)
from trainer.training.module import LanguageModule


def signal_during(monkeypatch, number, update):
    """Raise a signal in the middle of the forward pass of update ``at`` (from 0), once."""
    original, done = LanguageModule.training_step, []

    def step(module, batch, index):
        if module.global_step == update and not done:
            done.append(True)
            # A scheduler signals every process of a job, workers of the loader too.
            for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
                os.kill(pid, number)
        return original(module, batch, index)

    monkeypatch.setattr(LanguageModule, "training_step", step)


@pytest.mark.parametrize(
    ("number", "update"),
    [(signal.SIGTERM, 4), (signal.SIGUSR1, 5), (signal.SIGINT, 8)],
    ids=["before the drop", "at the drop", "after it"],
)
def test_a_signal_saves_at_the_next_boundary_and_the_same_command_goes_on(
    run, monkeypatch, tmp_path, number, update
):
    data = {"num_workers": 2 if update == 5 else 0}
    whole, whole_run = run("whole", trainer={"checkpoint_every": 100})
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        signal_during(patch, number, update)
        with pytest.raises(PreemptedError, match=rf"after step {update + 1} \({number.name}\)"):
            run("stopped", trainer={"checkpoint_every": 100}, data=data)
    assert signal.getsignal(number) is before
    checkpoints = regular_checkpoints(tmp_path / "stopped" / "checkpoints")
    assert [p.name for p in checkpoints] == [step_name(update + 1)]
    resumed, trained = run("stopped", trainer={"checkpoint_every": 100})
    assert (whole_run.seconds > 0, trained.seconds) == (True, None)  # which began elsewhere
    assert_same_state(checkpoint_of(resumed), checkpoint_of(whole))
    assert rows_of(resumed) == rows_of(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_stops_after_it(run, monkeypatch, number):
    """While weights are read, under a batch script that has left the signal ignored."""
    original = runs.make_decoder
    before = signal.signal(number, signal.SIG_IGN)

    def make(*arguments):
        signal.raise_signal(number)
        return original(*arguments)

    monkeypatch.setattr(runs, "make_decoder", make)
    try:
        stopped = pytest.raises(PreemptedError, match=rf"after step 1 \({number.name}\)")
        with stopped, heeding_signals():
            run()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_training_that_fails_leaves_no_handler_behind(run, monkeypatch):
    def fail(*_):
        raise InterruptedError

    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    monkeypatch.setattr(LanguageModule, "training_step", fail)
    with pytest.raises(InterruptedError):
        run()
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before


def test_a_signal_during_the_last_step_changes_nothing(run, monkeypatch):
    signal_during(monkeypatch, signal.SIGTERM, 11)
    config, _ = run()
    assert checkpoint_of(config).is_dir()


def test_a_time_limit_stops_after_every_step_it_leaves_time_for(run):
    for step in (1, 2):
        with pytest.raises(PreemptedError, match=rf"after step {step} \(trainer.max_time\)"):
            run(trainer={"max_time": "00:00:00"})


def test_the_end_of_a_slurm_job_is_a_time_limit(monkeypatch):
    config = RunConfig(trainer=TrainerConfig(max_time="01:00:00"))
    assert deadline(RunConfig(), 1000.0)[0] == float("inf")
    assert deadline(config, 1000.0) == (4600.0, "trainer.max_time")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000")
    assert deadline(config, 1000.0) == (2000.0 - MARGIN, "the end of the SLURM job")


def test_a_run_of_long_steps_and_checkpoints_stops_earlier(monkeypatch):
    """Two steps until all ranks know, a checkpoint, and half as much again; of 20 steps at most."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "5000")
    cases = [(10.0, [0, 5, 11], MARGIN), (100.0, [0, 30, 80], 300.0)]
    cases += [
        (0.0, [0, 500, *range(501, end)], margin) for end, margin in ((519, 1500), (520, 120))
    ]
    for seconds, steps, margin in cases:
        callback = Stopping(RunConfig(), SimpleNamespace(seconds=seconds), start_time=0.0)
        callback._step_ends.extend(steps)
        assert callback._margin() == margin
        assert deadline(RunConfig(), 0.0, margin)[0] == 5000 - margin


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    """The first one raises the flag in a step that never ends."""
    script = tmp_path / "stuck.py"
    script.write_text(
        "import time\n"
        "from trainer.training.callbacks.stopping import Stopping\n"
        "from trainer.runs.config import RunConfig\n"
        "from trainer.training.callbacks import stopping\n"
        "stopping.ECHO = 1.0\n"
        "callback = Stopping(RunConfig(), None, 0.0)\n"
        "callback.on_train_start()\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    with Started(script, cwd=tmp_path) as process:
        deadline = time.monotonic() + 60
        while process.said("stdout") != "ready\n":
            assert process.running()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for number in (signal.SIGTERM, signal.SIGUSR1):  # one notice, by two ways
            process.signal(number)
            time.sleep(0.2)
            assert process.running()
        time.sleep(1)
        process.signal(signal.SIGTERM)
        assert process.finish(timeout=10).returncode == -signal.SIGTERM


def test_ctrl_c_is_acknowledged_at_once_and_a_second_one_ends_at_once(tmp_path):
    """While the main thread is in C, as in a backward pass, where no handler in Python runs."""
    script = tmp_path / "busy.py"
    script.write_text(
        "import hashlib, signal\n"
        "from trainer.training.callbacks.stopping import Notice, acknowledging\n"
        "notice = Notice()\n"
        "signal.signal(signal.SIGINT, notice.on_signal)\n"
        "with acknowledging(notice):\n"
        "    print('ready', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    with Started(script, cwd=tmp_path) as process:

        def wait_for(stream, words):
            deadline = time.monotonic() + 60
            while words not in process.said(stream):
                assert process.running()
                assert time.monotonic() < deadline
                time.sleep(0.01)

        wait_for("stdout", "ready")
        process.signal(signal.SIGINT)
        wait_for("stderr", "SIGINT: stopping after the current step, with a checkpoint")
        time.sleep(stopping.SAME_KEY + 0.1)
        assert process.running()
        process.signal(signal.SIGINT)
        assert process.finish(timeout=10).returncode in (128 + signal.SIGINT, -signal.SIGINT)


def test_a_signal_is_acknowledged_once_and_only_where_training_heeds_it(capfd):
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    wakeup, notice = signal.set_wakeup_fd(-1), Notice()
    signal.set_wakeup_fd(wakeup)
    try:
        signal.signal(signal.SIGUSR2, lambda *_: None)
        signal.signal(signal.SIGUSR1, notice.on_signal)
        with acknowledging(notice):
            for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1):
                signal.raise_signal(number)
        with acknowledging(Notice(), speaks=False):
            signal.raise_signal(signal.SIGUSR1)
        with acknowledging(notice, speaks=False):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)
    assert capfd.readouterr().err.split("\n")[1:] == [
        "SIGUSR1: stopping after the current step, with a checkpoint",
        "",
    ]
    assert signal.set_wakeup_fd(wakeup) == wakeup


def test_a_signal_while_evaluating_stops_at_once():
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(PreemptedError, match="SIGUSR1"), stopping_between_files():
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_dashboard_continues_the_same_run(run, monkeypatch, tmp_path):
    """Offline too: every piece carries the id of the first."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = {"wandb": True, "offline": True}
    with pytest.raises(PreemptedError):
        run(logger=logger, trainer={"max_time": "00:00:00"})
    config, _ = run(logger=logger)
    identity = (Path(config.run_dir) / "wandb_id").read_text()
    pieces = list(Path(config.run_dir).rglob("*.wandb"))
    assert len(pieces) == 2
    assert {path.stem for path in pieces} == {f"run-{identity}"}
    assert read_state(checkpoint_of(config))["wandb_id"] == identity


@pytest.mark.parametrize(
    ("second", "after", "ends"),
    [
        (signal.SIGTERM, 9.9, False),  # the same notice, passed on by another way
        (signal.SIGUSR1, 9.9, False),
        (signal.SIGTERM, 10.0, True),
        (signal.SIGINT, 0.1, True),  # a person
    ],
)
def test_the_first_signal_is_remembered_and_a_second_one_ends(monkeypatch, second, after, ends):
    now, sent = [100.0], []
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stopping.signal, "signal", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(stopping.os, "kill", lambda *arguments: sent.append(arguments))
    notice = Notice()
    assert notice.signal_name is None
    notice.on_signal(signal.SIGTERM, None)
    assert (notice.signal_name, sent) == ("SIGTERM", [])
    now[0] += after
    notice.on_signal(second, None)
    assert sent == ([(second, signal.SIG_DFL), (os.getpid(), second)] if ends else [])


@pytest.fixture
def stopped(monkeypatch):
    """Go through steps of two micro-batches that take so many seconds each, with what every step
    asks for: the step after which the run stops and why, and who has asked."""

    def go(steps, asks=(), *, seconds=1.0, agreed=None, limit="", **options):
        now = [0.0]
        monkeypatch.setattr(stopping.time, "time", lambda: now[0])
        saved = []
        if limit:
            monkeypatch.setenv("SLURM_JOB_END_TIME", limit)
        saving = SimpleNamespace(
            seconds=0.0, save_now=lambda trainer: saved.append(trainer.global_step)
        )
        config = RunConfig(trainer=TrainerConfig(max_steps=steps, **options))
        callback = Stopping(config, saving, start_time=0.0)
        if agreed:
            callback._vote = SimpleNamespace(agreed=agreed)
        trainer = SimpleNamespace(global_step=0, accumulate_grad_batches=2, should_stop=False)
        for index in range(2 * steps):
            now[0] += seconds / 2
            trainer.global_step += index % 2
            if trainer.global_step in asks and index % 2:
                callback.notice.on_signal(signal.SIGTERM, None)
            callback.on_train_batch_end(trainer, None, None, None, index)
            if trainer.should_stop:
                break
        assert len(saved) == bool(callback.reason) == trainer.should_stop
        return next(iter(saved), None), callback.reason, callback.request

    return go


def test_a_run_stops_after_the_step_that_was_asked_in_but_not_after_the_last(stopped):
    assert stopped(5, [3]) == (3, "SIGTERM", "SIGTERM")
    assert stopped(5, [5]) == (None, None, "SIGTERM")
    assert stopped(5) == (None, None, None)


def test_a_limit_is_named_where_no_signal_came_before_it(stopped):
    assert stopped(9, max_time="00:00:04") == (5, "trainer.max_time", "trainer.max_time")
    assert stopped(9, [2], max_time="00:00:04") == (2, "SIGTERM", "SIGTERM")
    # The end of the job at 130 s, less the margin of two minutes, is before that.
    end = "the end of the SLURM job"
    assert stopped(20, limit="130", max_time="00:00:11") == (11, end, end)


def test_a_run_of_long_steps_stops_long_before_the_end_of_its_job(stopped):
    """Steps of 100 s: the margin is 300 s as soon as two steps have shown it."""
    end = "the end of the SLURM job"
    assert stopped(20, seconds=100.0, limit="1000") == (8, end, end)


def test_another_rank_may_have_asked(stopped):
    votes = iter([False, True])
    assert stopped(5, agreed=lambda mine: next(votes)) == (2, "another rank", None)
    # Who asks here is heard where all know of it.
    cast = []

    def agreed(mine):
        cast.append(mine)
        return len(cast) == 4

    assert stopped(9, [2], agreed=agreed) == (4, "SIGTERM", "SIGTERM")
    assert cast == [False, True, True, True]
