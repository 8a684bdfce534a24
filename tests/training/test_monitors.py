"""When a run is measured, on hand-made steps; and the probe's numbers in the metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.training.test_run import checkpoint_of, rows_of
from trainer.analysis.attention import MEASURES, probe
from trainer.checkpoint import load_decoder, read_state
from trainer.config import RunConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.held_out import held_out_windows
from trainer.runs.ranks import Ranks
from trainer.training.callbacks.monitors import Monitors
from trainer.training.callbacks.stopping import Notice


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


def monitors(*measures, changes=(), ends=(), add_metrics=None):
    """Monitors of a run whose model changes after such steps, and whose phases end so."""
    transitions = SimpleNamespace(
        phases=[
            SimpleNamespace(start=start, end=end)
            for start, end in zip((0, *ends), ends, strict=False)
        ],
        changed_at=changes.__contains__,
        has_dropped=False,
    )
    config = RunConfig()
    callback = Monitors(config, None, Ranks(0, 2), transitions, add_metrics)
    callback.measures = list(measures)
    return callback, transitions


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


class Breaking(Noting):
    """Asks for leave before each task, as benchmarks do, or runs out of memory."""

    ask = None

    def measure(self, trainer, module, has_dropped):
        if self.ask is None:
            raise MemoryError
        self.ask()
        return super().measure(trainer, module, has_dropped)


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


def test_each_measure_has_its_own_schedule_and_a_change_is_measured_by_all():
    often, seldom = Noting(2), Noting(3)
    callback, transitions = monitors(often, seldom, changes=(4,), ends=(8,), add_metrics=len)
    trainer = SimpleNamespace(global_step=0, accumulate_grad_batches=1)
    module = SimpleNamespace()
    for index in range(8):
        transitions.has_dropped = trainer.global_step >= 4
        callback.on_train_batch_start(trainer, module, None, index)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, index)
    assert often.noted == [(2, False), (4, False), (4, True), (6, True), (8, True)]
    assert seldom.noted == [(3, False), (4, True), (6, True), (8, True)]
