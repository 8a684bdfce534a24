"""Numbers of training under their names: scores of benchmarks, losses, speed on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from trainer.common.processes import Ranks
from trainer.data.corpus import prepare_corpus
from trainer.evaluation.task import Task
from trainer.lightning.module import Tally
from trainer.lightning.optimizers import make_optimizer
from trainer.model.flops import training_flops
from trainer.runs.directory import read_metrics, write_metrics
from trainer.runs.parsing import merged, parse
from trainer.training import measurements, rows
from trainer.training.measurements import Measurements
from trainer.training.rows import Rows

PHASES = {
    "short": {"steps": 3, "batch_size": 4},
    "long": {"steps": 5, "batch_size": 2, "sequence_length": 64},
    "dropped": {"steps": 4, "batch_size": 4, "sequence_length": 64, "drop": {}},
}


@pytest.fixture(scope="module")
def of_run(base):
    values = {"run_dir": "x", "drop": {"at": None}, "phases": PHASES}
    return parse(merged(base, values | {"evaluation": {"batch_tokens": 999}}))


@pytest.fixture(scope="module")
def corpus(of_run):
    return prepare_corpus(of_run.config.data, of_run.config.tokenizer)


def asked(key, length, *batches, metric="score", more=()):
    """A task with values of its trials in batches; ``read``: tokens of a forward pass."""
    titles = {key: key} | {name: name for name, _ in more}
    values, number = [], 0
    for batch in batches:
        of_batch = []
        for value in batch:
            of_batch.append((number, key, value))
            of_batch += [(number, name, other) for name, other in more]
            number += 1
        values.append(of_batch)
    read = []

    def made(model, batch_tokens):
        read.append(batch_tokens)
        return [partial(list, of_batch) for of_batch in values]

    task = Task(titles, length, "", pd.DataFrame(index=range(number)), made, metric)
    return task, read


@pytest.mark.parametrize(
    ("step", "tokens"), [(2, 2 * 4 * 32), (5, 3 * 4 * 32 + 2 * 2 * 64)], ids=["short", "long"]
)
def test_scores_are_named_by_task_and_length_in_those_of_the_last_phase(
    of_run, corpus, tiny_decoder, step, tokens
):
    """Whatever the length of the present one."""
    tasks = [
        asked("a", 32, [1.0, 0.0], [1.0], more=[("a_norm", 0.5)]),
        asked("perplexity", 128, [2.0], [3.0], metric="loss"),
        asked("none", 64),
    ]
    measured = Measurements(of_run, corpus, {"benchmarks": [{"step": 0}]})
    measured.tasks = [task for task, _ in tasks]
    measured.measure_benchmarks(tiny_decoder(), step)
    before, milestone = measured.milestones
    assert before == {"step": 0}
    assert math.isnan(milestone["scores"].pop("none/1x"))
    assert milestone == {
        "step": step,
        "tokens": tokens,
        "dropped": False,
        "scores": {
            "a/0.5x": pytest.approx(2 / 3),
            "a_norm/0.5x": 0.5,
            "perplexity/2x": pytest.approx(math.exp(2.5)),
        },
    }
    scores = {f"benchmark/{key}": score for key, score in milestone["scores"].items()}
    assert measured.pending == scores
    assert [read for _, read in tasks] == [[999]] * 3


def test_tasks_of_benchmarks_are_of_the_last_phase_and_few_questions(
    base, corpus, monkeypatch, caplog
):
    """At 2/3 and twice its 64 tokens, each length once; beside other windows of the evaluation."""
    values = {
        **{"run_dir": "x", "drop": {"at": None}, "phases": PHASES},
        "evaluation": {"windows": 50, "limit": 60, "batch_tokens": 999},
        "benchmarks": {
            **{"every": 3, "tasks": ["perplexity"], "limit": 7},
            "lengths": [2.0, 2 / 3, 2],
        },
    }
    asked = []
    notes = ["One is left out."]
    monkeypatch.setattr(measurements, "make_tasks", lambda *given: (asked.append(given), notes))
    measurements.benchmark_tasks(parse(merged(base, values)), corpus)
    assert caplog.messages == ["benchmarks: One is left out."]
    ((text, evaluation, lengths, training_length),) = asked
    assert (lengths, training_length) == ([43, 128], 64)
    assert (evaluation.tasks, evaluation.windows, evaluation.limit) == (["perplexity"], 7, 7)
    assert evaluation.batch_tokens == 999
    assert text.corpus is corpus
    assert text.training_share == 0.5
    ((_, tokens),) = text.split.parts
    assert tokens.tolist() == corpus.validation.parts[0][1].tolist()
    never = parse(merged(base, {**values, "benchmarks": {"every": None}}))
    assert measurements.benchmark_tasks(never, corpus) == []


def test_ranks_read_every_nth_batch_and_have_the_mean_of_all(
    of_run, corpus, tiny_decoder, monkeypatch
):
    task, read = asked("a", 64, [1.0], [0.25, 0.5], [1.0], [1.0])
    mine = []

    def all_gather(scores):
        mine.append(scores)
        return [[0.0, 0.0], scores]

    monkeypatch.setattr(measurements, "current_ranks", lambda: Ranks(1, 2))
    monkeypatch.setattr(measurements, "all_gather", all_gather)
    measured = Measurements(of_run, corpus, {})
    measured.tasks = [task]
    measured.measure_benchmarks(tiny_decoder(), 12)
    assert mine == [[0.25, 0.5, 1.0]]
    assert read == [499]
    assert measured.milestones[0]["scores"] == {"a/1x": pytest.approx(1.75 / 5)}


def test_losses_around_a_change_are_named_by_its_phase(of_run, corpus, monkeypatch, tiny_decoder):
    """A drop has a name of its own; what a checkpoint holds goes on."""
    _, long, dropped = of_run.phases
    measured = Measurements(of_run, corpus, {"pending_metrics": {"mine": 1.0}})
    measured.note_change(long, [1.0, 2.0], [3.0, 5.0])
    assert not measured.has_dropped
    measured.note_change(dropped, [1.5], [2.5])
    assert measured.has_dropped
    monkeypatch.setattr(measurements, "losses_of", lambda model, probe: [6.0, 8.0])
    measured.measure_end(tiny_decoder(), long)
    assert measured.pending == {
        "mine": 1.0,
        "phase_long/loss_before": 1.5,
        "phase_long/loss_after": 4.0,
        "phase_long/loss_end": 7.0,
        "drop/loss_before": 1.5,
        "drop/loss_after": 2.5,
    }
    effect = measured.effects["long"]
    assert effect["sequences"] == {"before": [1.0, 2.0], "after": [3.0, 5.0], "end": [6.0, 8.0]}
    losses = [effect[f"loss_{when}"] for when in ("before", "after", "end")]
    assert (effect["step"], effect["length"], losses) == (3, 64, [1.5, 4.0, 7.0])
    again = Measurements(of_run, corpus, {"effects": measured.effects})
    assert again.effects == measured.effects
    assert again.has_dropped


def test_speed_memory_and_share_of_the_peak_of_all_gpus(of_run, corpus, monkeypatch, tiny_decoder):
    """Two steps of 2 x 64 tokens in 4 s on four H100, whose dense peak is 989.4 TFLOP/s."""
    model, phase = tiny_decoder(), of_run.phases[1]
    module = SimpleNamespace(device=SimpleNamespace(type="cuda"), model=model)
    seconds = iter([10.0, 14.0])
    monkeypatch.setattr(rows, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(rows, "current_ranks", lambda: Ranks(0, 4))
    monkeypatch.setattr(rows, "precision_of", lambda settings: "bf16")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 1024**3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    of_speed = Rows(of_run, corpus, SimpleNamespace(advance_to=lambda step: None), 0)
    of_speed.start(4)
    batch = {"input_ids": torch.zeros(2, 64, dtype=torch.long)}
    rate = 2 * 2 * 64 / 4
    flops = training_flops(model.config, model.layout, 64) / 64
    assert of_speed.lap(module, phase, 6, batch) == {
        "tokens_per_second": rate,
        "memory": 3.0,
        "mfu": pytest.approx(rate * flops / (4 * 989.4e12)),
    }


def test_the_learning_rate_of_a_row_is_of_the_first_group(of_run, corpus, tmp_path, tiny_decoder):
    """Muon's, which other parameters do not have."""
    model = tiny_decoder()
    optimizer = make_optimizer(model, name="muon", lr=0.5, muon_lr=0.125)
    trainer = SimpleNamespace(global_step=2, optimizers=[optimizer], logged_metrics={}, loggers=[])
    module = SimpleNamespace(tally=Tally(), parameters=model.parameters, device=model.device)
    run = replace(of_run, config=replace(of_run.config, run_dir=str(tmp_path)))
    write_metrics(tmp_path / "metrics.csv", [])
    progress = SimpleNamespace(advance_to=lambda step, loss=None: None)
    Rows(run, corpus, progress, 0).write(trainer, module, run.phases[0], {}, {})
    (row,) = read_metrics(tmp_path / "metrics.csv")
    assert (row["step"], row["learning_rate"]) == (2, 0.125)
