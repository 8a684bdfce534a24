"""When a run is measured, on hand-made steps; and the probe's numbers in the metrics."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.training.test_run import checkpoint_of, rows_of
from trainer.analysis.attention import MEASURES, probe
from trainer.data.corpus import prepare_corpus
from trainer.data.held_out import held_out_windows
from trainer.evaluation.results import Milestone, Reach
from trainer.runs.checkpoints import load_decoder, read_state
from trainer.runs.config import RunConfig
from trainer.runs.directory import _FILES_OF_A_RUN
from trainer.runs.ranks import Ranks
from trainer.training.callbacks import monitors as monitors_module
from trainer.training.callbacks.monitors import Monitors
from trainer.training.callbacks.stopping import SIGNALS, Notice, Stopping, _acknowledge


class Noting:
    """Notes the steps after which it measures, and whether the encoding was dropped."""

    def __init__(self, every):
        self.every, self.noted = every, []

    def is_due(self, module, step):
        return step % self.every == 0

    def measure(self, trainer, module, has_dropped):
        self.noted.append((trainer.global_step, has_dropped))
        return {"measured": trainer.global_step}


class StoppingStub:
    """Is asked to stop from the ``asked``-th question on."""

    def __init__(self, asked):
        self.asked, self.questions, self.measured = asked, 0, []
        self.notice = Notice()

    @property
    def request(self):
        return self.notice.signal_name

    def stops_now(self):
        self.questions += 1
        return self.questions >= self.asked

    def on_train_start(self):
        pass

    def add_measurement(self, parts):
        self.measured.append(parts)


def monitors(
    *measures, changes=(), ends=(), add_metrics=None, asked=100, run_dir="nowhere", rank=0
):
    """Monitors of a run whose model changes after such steps, and whose phases end so."""
    transitions = SimpleNamespace(
        phases=[
            SimpleNamespace(start=start, end=end)
            for start, end in zip((0, *ends), ends, strict=False)
        ],
        changed_at=changes.__contains__,
        has_dropped=False,
    )
    config, stopping = RunConfig(run_dir=str(run_dir)), StoppingStub(asked)
    callback = Monitors(config, None, Ranks(rank, 2), transitions, stopping, add_metrics)
    callback.measures = list(measures)
    return callback, transitions


@pytest.mark.parametrize(
    ("every", "crossed", "ends", "ended", "noted"),
    [
        (3, (), (8,), None, [3, 6, 8]),
        # Just before the drop and just after it.
        (100, (4,), (4, 8), None, [4, 4, 8]),
        (4, (4,), (8,), None, [4, 4, 8]),
        (100, (0,), (8,), None, [0, 8]),  # of trained weights
        (100, (), (8,), 5, [5]),  # at which its phase has ended early
    ],
)
def test_measures_are_taken_when_due_before_and_after_changes_and_at_ends(
    every, crossed, ends, ended, noted
):
    """Eight steps of two micro-batches."""
    added = []
    measure = Noting(every)
    callback, _ = monitors(measure, changes=crossed, ends=ends, add_metrics=added.append)
    trainer = SimpleNamespace(global_step=0, accumulate_grad_batches=2)
    module = SimpleNamespace(phase_ended=False)
    for index in range(16):
        callback.on_train_batch_start(trainer, module, None, index)
        trainer.global_step += index % 2
        module.phase_ended = trainer.global_step == ended
        callback.on_train_batch_end(trainer, module, None, None, index)
        if module.phase_ended and index % 2:
            break
    assert measure.noted == [(step, False) for step in noted]
    assert added == [{"measured": step} for step in noted]


def test_each_measure_has_its_own_schedule_and_a_change_is_measured_by_all():
    often, seldom = Noting(2), Noting(3)
    callback, transitions = monitors(often, seldom, changes=(4,), ends=(8,), add_metrics=len)
    trainer = SimpleNamespace(global_step=0, accumulate_grad_batches=1)
    module = SimpleNamespace(phase_ended=False)
    for index in range(8):
        transitions.has_dropped = trainer.global_step >= 4
        callback.on_train_batch_start(trainer, module, None, index)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, index)
    assert often.noted == [(2, False), (4, False), (4, True), (6, True), (8, True)]
    assert seldom.noted == [(3, False), (4, True), (6, True), (8, True)]


@pytest.mark.parametrize(
    ("step", "trained", "milestones", "measured"),
    [(0, True, [], True), (1, True, [], False), (0, False, [], False), (0, True, ["one"], False)],
)
def test_trained_weights_are_measured_before_the_first_step(step, trained, milestones, measured):
    measure, done = Noting(1), []
    callback, _ = monitors(measure, add_metrics=done.append)
    callback.first_measure = measure if trained else None
    callback.milestones = milestones
    module = SimpleNamespace(timer=SimpleNamespace(read=lambda: done.append("clock")))
    callback.on_train_start(SimpleNamespace(global_step=step), module)
    assert done == ([{"measured": 0}, "clock"] if measured else [])


class Second(Noting):
    """Another measure."""


def test_a_run_that_stops_takes_no_measure_and_the_resumed_one_takes_it_first():
    first, second, added = Noting(2), Second(2), []
    callback, _ = monitors(first, second, ends=(4, 8), add_metrics=added.append, asked=2)
    trainer, module = SimpleNamespace(global_step=2), SimpleNamespace(phase_ended=False)
    callback.end_step(trainer, module)
    assert (first.noted, second.noted, callback.skipped) == ([(2, False)], [], ["second"])
    resumed, _ = monitors(first, second, ends=(4, 8), add_metrics=added.append)
    resumed.restore(SimpleNamespace(lengths=[], benchmarks=[], skipped_measures=["second", "x"]))
    module.timer = SimpleNamespace(read=lambda: added.append("clock"))
    resumed.on_train_start(trainer, module)
    assert (first.noted, second.noted, resumed.skipped) == ([(2, False)], [(2, False)], [])
    assert added == [{"measured": 2}, {"measured": 2}, "clock"]
    assert len(callback.stopping.measured) == len(resumed.stopping.measured) == 1


@pytest.mark.parametrize(
    ("step", "ended", "taken"), [(4, False, False), (6, True, True), (8, False, True)]
)
def test_after_the_last_step_of_a_run_nothing_is_skipped(step, ended, taken):
    measure = Noting(100)
    callback, _ = monitors(measure, ends=(4, 8), add_metrics=len, asked=0)
    callback.end_step(SimpleNamespace(global_step=step), SimpleNamespace(phase_ended=ended))
    assert (bool(measure.noted), callback.skipped) == (taken, [] if taken else ["noting"])


class Breaking(Noting):
    """Asks for leave before each task, as benchmarks do, or runs out of memory."""

    ask = None

    def measure(self, trainer, module, has_dropped):
        if self.ask is None:
            raise MemoryError
        self.ask()
        return super().measure(trainer, module, has_dropped)


def test_benchmarks_are_broken_off_between_tasks_but_not_after_a_change(tmp_path):
    measure = Breaking(2)
    callback, _ = monitors(
        measure, changes=(2,), ends=(8,), add_metrics=len, asked=2, run_dir=tmp_path
    )
    measure.ask = callback._begin_part
    trainer, module = SimpleNamespace(global_step=2), SimpleNamespace(phase_ended=False)
    callback.end_step(trainer, module)
    assert (measure.noted, callback.skipped) == ([], ["breaking"])
    assert not [*tmp_path.iterdir()]
    callback.begin_step(trainer, module)
    assert measure.noted == [(2, False)]


def test_a_measurement_is_timed_in_the_parts_between_which_it_may_be_broken_off(monkeypatch):
    """Two tasks of 10 s and 30 s, after 2 s of preparation."""
    times = iter([100.0, 102.0, 112.0, 142.0])
    monkeypatch.setattr(monitors_module.time, "perf_counter", lambda: next(times))
    callback, _ = monitors(measure := Breaking(2), ends=(8,), add_metrics=len)
    measure.ask = lambda: [callback._begin_part() for _ in range(2)]
    callback.end_step(SimpleNamespace(global_step=2), SimpleNamespace(phase_ended=False))
    assert callback.stopping.measured == [[2.0, 10.0, 30.0]]


def test_a_measure_that_ended_two_processes_is_left_out_by_the_next(tmp_path, caplog):
    trainer, module = SimpleNamespace(global_step=2), SimpleNamespace(phase_ended=False)
    for times in range(3):
        callback, _ = monitors(Breaking(2), ends=(8,), run_dir=tmp_path)
        with pytest.raises(MemoryError) if times < 2 else nullcontext():
            callback.end_step(trainer, module)
    assert caplog.messages == ["Step 2: left out breaking, in which the run ended 2 times"]
    (mark,) = tmp_path.iterdir()
    assert _FILES_OF_A_RUN.fullmatch(mark.name)
    trainer.global_step = 4
    with pytest.raises(MemoryError):
        callback.end_step(trainer, module)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["before", "during", "during a call of C"])
def test_an_end_on_request_does_not_count_also_in_skipped_measures(tmp_path, number, moment):
    callback, _ = monitors(measure := Breaking(2), ends=(8,), run_dir=tmp_path)
    callback.skipped = ["breaking"]
    callback.stopping = Stopping(RunConfig(), SimpleNamespace(seconds=0.0), 0.0)
    notice = callback.stopping.notice

    def end():
        assert signal.getsignal(number) == notice.on_signal
        if moment == "during":
            signal.raise_signal(number)
        elif moment == "during a call of C":  # where no handler in Python runs, but the thread does
            reader, writer = os.pipe()
            os.write(writer, bytes([number, 0]))
            _acknowledge(reader, notice, speaks=False)
        raise InterruptedError

    measure.ask = end
    before = [signal.getsignal(each) for each in SIGNALS]
    if moment == "before":
        notice.on_signal(number, None)
    try:
        with pytest.raises(InterruptedError):
            callback.on_train_start(SimpleNamespace(global_step=2), None)
    finally:
        for each, handler in zip(SIGNALS, before, strict=True):
            signal.signal(each, handler)
    assert not [*tmp_path.iterdir()]


def test_a_mark_that_cannot_be_removed_stops_no_run(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise PermissionError

    monkeypatch.setattr(monitors_module.Path, "unlink", fail)
    callback, _ = monitors(measure := Noting(2), ends=(8,), add_metrics=len, run_dir=tmp_path)
    callback.end_step(SimpleNamespace(global_step=2), SimpleNamespace(phase_ended=False))
    assert measure.noted == [(2, False)]


def test_ranks_that_the_launcher_ends_do_not_hide_the_one_that_ran_out_of_memory(
    tmp_path, monkeypatch
):
    """The third process leaves the measure out on both ranks."""
    trainer, module = SimpleNamespace(global_step=2), SimpleNamespace(phase_ended=False)
    for _ in range(2):
        for rank in (1, 0):
            callback, _ = monitors(measure := Breaking(2), ends=(8,), run_dir=tmp_path, rank=rank)
            if rank == 0:
                callback.stopping.notice.on_signal(signal.SIGTERM, None)
            with pytest.raises(MemoryError):
                callback.end_step(trainer, module)
    (mark,) = tmp_path.iterdir()
    assert (mark.name, mark.stat().st_size) == (".measuring-breaking-2-rank-1", 2)
    monkeypatch.setattr(monitors_module, "all_gather", lambda mine: [mine, 3])
    callback, _ = monitors(measure, ends=(8,), run_dir=tmp_path)
    callback.end_step(trainer, module)


def test_a_run_without_measures_still_saves_earlier_measurements():
    reach = Reach(3, False, 32, (32,), (2.0,), (), (0, 32), (2.0,))
    milestone = Milestone(1, 64, False, {"a": 0.5})
    callback, _ = monitors()
    state = SimpleNamespace(lengths=[reach], benchmarks=[milestone], skipped_measures=[])
    callback.restore(state)
    assert (callback.reaches, callback.milestones) == ([reach], [milestone])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("graphs_as_they_are")
def test_the_last_row_is_the_probe_of_the_saved_model(run, compiled):
    config, _ = run(monitor={"probe_every": 4}, trainer={"compile": compiled})
    corpus = prepare_corpus(config.data, config.tokenizer)
    ids = held_out_windows(corpus.validation, 2, 32)
    ids[:, 0] = corpus.end_of_text
    model = load_decoder(checkpoint_of(config), read_state(checkpoint_of(config)))
    expected, row = probe(model, torch.from_numpy(ids)), rows_of(config)[-1]
    for name in MEASURES:
        for layer, value in enumerate(expected[name]):
            assert row[f"probe/{name}/layer_{layer:02}"] == pytest.approx(value, rel=1e-5)
        whole = max if name == "largest_logit" else lambda values: sum(values) / len(values)
        assert row[f"probe/{name}"] == pytest.approx(whole(expected[name]), rel=1e-5)
