"""The drill finds nothing in a sound program, and finds what is planted in a broken one."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.program import run
from trainer.runs.checkpoints import step_name
from trainer.runs.config import RunConfig, TrainerConfig
from trainer.runs.directory import plain
from trainer.runs.metrics_file import write_metrics
from trainer.runs.parsing import parse
from trainer.runs.state import save
from trainer.runs.training_config import StrategyConfig
from trainer.workflows import drill
from trainer.workflows.drill import EVERY, first_difference, shrink

MODEL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
MODEL |= {"num_key_value_heads": 2, "vocab_size": 1024, "attention_backend": "sdpa"}
ALWAYS = {
    "data.num_workers": 1,
    "evaluation.enabled": False,
    "model.attention_backend": "auto",
    "model.hidden_size": 64,
    "model.intermediate_size": 96,
    "model.vocab_size": None,
    "drop.effect_sequences": 4,
    "run_dir": "copy",
    "tokenizer.vocab_size": 512,
    "trainer.accelerator": "cpu",
    "trainer.batch_size": 8,
    "trainer.checkpoint_every": 4,
    "trainer.keep_checkpoints": 3,
    "trainer.log_every": 1,
    "trainer.max_steps": 24,
    "trainer.micro_batch_size": 2,
    "trainer.threads": 1,
}


def flat(values, path=""):
    """Values by their keys, with dots."""
    leaves = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        leaves |= flat(value, where) if isinstance(value, dict) and value else {where: value}
    return leaves


def changes(values, tmp_path):
    """What is otherwise in the copy of a run."""
    config = parse(RunConfig, {"run_dir": "runs/big", **values})
    before, after = flat(plain(config)), flat(plain(shrink(config, tmp_path / "copy")))
    found = {
        key: value for key, value in after.items() if key not in before or before[key] != value
    }
    assert found.pop("run_dir") == str(tmp_path / "copy")
    return found | {"run_dir": "copy"}


def test_a_large_run_gets_small_and_keeps_its_kinds(tmp_path):
    values = {
        "overwrite": True,
        "model": MODEL | {"num_hidden_layers": 6},
        "positional": {"layers": ["rope", "rope", "nope"], "windows": [None, 256, 64]},
        "data": {"sequence_length": 512, "num_workers": 4, "document_mask": True}
        | {"cache_dir": "somewhere", "needles": {"share": 0.2}},
        "tokenizer": {"vocab_size": 1024},
        "schedule": {"name": "wsd", "warmup_steps": 100},
        "drop": {"at": 500, "layers": [0, 4, 5], "anneal_steps": 50, "effect_sequences": 64}
        | {"schedule": {"warmup_steps": 3}},
        "trainer": {"max_steps": 1000, "batch_size": 64, "gradient_clip": 0.5, "z_loss": 1e-4}
        | {"precision": "bf16", "keep_every": 100},
        "strategy": {"name": "hsdp", "shard_size": 2, "cpu_offload": True},
        "controls": {"other": {"seed": 1}},
        "logger": {"wandb": True},
    }
    assert changes(values, tmp_path) == ALWAYS | {
        "controls": {},
        "data.sequence_length": 128,
        "drop.anneal_steps": 6,
        "drop.at": 12,
        "drop.layers": [0, 2],
        "drop.schedule.warmup_steps": 2,
        "logger.wandb": False,
        "model.head_dim": 32,
        "model.num_hidden_layers": 3,
        "overwrite": False,
        "positional.windows": [None, 128, 64],
        "schedule.warmup_steps": 2,
        "strategy.cpu_offload": False,
        "strategy.shard_size": None,
        "trainer.keep_every": None,
    }


def test_phases_share_the_steps_and_keep_how_they_differ(tmp_path):
    """24 steps of five phases; lengths stay multiples, up to four; batches are as many, twice as
    many or half as many as the others'."""
    quick = {"warmup_steps": 1}
    phases = {
        "short": {"steps": 100, "sequence_length": 32, "batch_size": 64, "micro_batch_size": 4}
        | {"schedule": {"warmup_steps": 10}, "log_every": 5},
        "long": {"tokens": 1 << 20, "sequence_length": 1024, "batch_size": 16}
        | {"drop": {"layers": [-9, 1, -1], "anneal_steps": 10}, "until": {"every": 9, "flat": 0.1}},
        "same": {"steps": 5, "sequence_length": 128, "batch_size": 32, "schedule": quick},
        "least": {"steps": 5, "sequence_length": 2},
        "last": {"steps": 5},
    }
    values = {
        "model": MODEL | {"num_hidden_layers": 12, "hidden_size": 64},
        "positional": {"layers": ["rope"]},
        "data": {"sequence_length": 64, "num_workers": 0},
        "trainer": {"batch_size": 32},
        "phases": phases,
    }
    found = changes(values, tmp_path)
    of_phases = {key.removeprefix("phases."): v for key, v in found.items() if "phases" in key}
    assert of_phases == {
        "short.steps": 5,
        "short.batch_size": 16,
        "short.micro_batch_size": None,
        "short.schedule.warmup_steps": 2,
        "short.log_every": None,
        "long.steps": 5,
        "long.tokens": None,
        "long.sequence_length": 256,
        "long.batch_size": 4,
        "long.drop.layers": [-2, -1, 1],
        "long.drop.anneal_steps": 2,
        "long.until": None,
        "same.batch_size": 8,
        "last.steps": 4,
    }
    assert "data.sequence_length" not in found
    assert (found["model.num_hidden_layers"], found["model.head_dim"]) == (2, 16)


def test_a_single_phase_has_all_the_steps(tmp_path):
    found = changes({"phases": {"only": {"steps": 100}}}, tmp_path)
    assert found["phases.only.steps"] == found["trainer.max_steps"] == 24


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"phases": {"a": {"steps": 5}, "b": {"steps": 5, "drop": {"layers": [0]}}}},
    ],
    ids=["without a drop", "with one that a phase has"],
)
def test_a_copy_drops_only_where_its_run_does(tmp_path, values):
    config = parse(RunConfig, {"run_dir": "runs/big", **values})
    copy = shrink(config, tmp_path / "copy")
    assert (copy.drop.at, copy.drop.at_tokens) == (None, None)
    assert copy.drop_step == (12 if values else None)


SETUP = """
import signal, sys
from trainer.workflows import drill
from trainer.workflows.drill import Fault
KILL, STOP = Fault('kill', 14), Fault('stop', 12, signal.SIGTERM)
"""
PLANTS = {
    "nothing": "",
    "a sample skipped at resume": """
from trainer.data.dataset import CountingSampler
original = CountingSampler.__init__
def skipping(self, *args, start=0, **options):
    original(self, *args, start=start, **options)
    if start:
        first = self.first
        self.first = lambda step: first(step) + 1
CountingSampler.__init__ = skipping
""",
    "the optimizer reset once more": """
from trainer.training.step import Resume
original = Resume.on_fit_start
def forgetful(self, trainer, module):
    original(self, trainer, module)
    trainer.optimizers[0].state.clear()
Resume.on_fit_start = forgetful
""",
    "the drop forgotten": """
from trainer.training import run
class Forgetful:
    from_dict = staticmethod(lambda values: drill.LAYOUT)
run.Layout = Forgetful
original = run.make_decoder
def remember(*args):
    model = original(*args)
    drill.LAYOUT = model.layout
    return model
run.make_decoder = remember
""",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_drill_notices_what_is_planted(tmp_path, plant):
    sound = plant == "nothing"
    # Killed while it saves what it is before the drop; two ranks become one.
    some = "KILL, STOP, drill.FAULTS[6], drill.FAULTS[-1]" if sound else "STOP,"
    script = tmp_path / "script.py"
    script.write_text(
        f"{SETUP}drill.FAULTS = {some}\n{PLANTS[plant]}from trainer.__main__ import main\n"
        "main(['drill', '+experiment=drope_demo', 'optimizer=adamw'])\n"
    )
    done = run(script, cwd=tmp_path)
    assert done.returncode == (0 if sound else 1), done.stdout + done.stderr
    assert ("4 of 4 survived" in done.stdout) == sound
    assert ("equal to rounding" in done.stdout) == sound  # what is added up in another order
    assert "Training" not in done.stdout + done.stderr  # is in the logs of the runs
    assert ("instead of" in done.stdout) == (not sound)


def test_a_process_that_fails_is_told_of_with_its_last_words(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a planted failure")

    monkeypatch.setattr(drill, "train", fail)
    config = RunConfig(run_dir=str(tmp_path / "run"))
    with pytest.raises(drill.DrillError) as error:
        drill.start(config, SimpleNamespace(), 1)
    said = "exit codes [1], expected 0; RuntimeError: a planted failure"
    assert str(error.value) == said


def test_processes_are_none_of_the_job_that_the_drill_runs_in(tmp_path, monkeypatch):
    """Under sbatch and torchrun a fault's SIGTERM would have the whole job requeued."""
    asked = tmp_path / "requeue"
    for name in drill.OF_A_JOB:
        monkeypatch.setenv(name, str(asked))

    def train(*_, **__):
        (tmp_path / "seen").write_text(str({*drill.OF_A_JOB} & {*os.environ}))

    monkeypatch.setattr(drill, "train", train)
    drill.start(RunConfig(run_dir=str(tmp_path / "run")), SimpleNamespace(), 1)
    assert (tmp_path / "seen").read_text() == "set()"
    assert all(name in os.environ for name in drill.OF_A_JOB)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_a_run_on_one_device_is_drilled_on_one(tmp_path, monkeypatch, strategy, ranks):
    asked = []
    monkeypatch.setattr(drill, "FAULTS", (drill.Fault("one", 3),))
    monkeypatch.setattr(drill, "prepare_corpus", lambda *_: "text")
    monkeypatch.setattr(drill, "start", lambda *given: asked.append(given[1:]))

    def broken(config, *given):
        Path(config.run_dir).mkdir()
        asked.append(given)

    monkeypatch.setattr(drill, "break_and_resume", broken)
    monkeypatch.setattr(drill, "first_difference", lambda *_, exactly: f"exactly: {exactly}")
    config = parse(RunConfig, {"strategy": {"name": strategy}})
    (outcome,) = drill.drill(config, tmp_path)
    assert asked == [("text", ranks), ("text", drill.FAULTS[0], ranks)]
    assert outcome.difference == "exactly: True"
    assert not [*tmp_path.iterdir()]


STEPS_OF = {"before": range(1, drill.DROP), "at": [drill.DROP], "after": range(drill.DROP + 1, 24)}


def test_faults_happen_where_they_say():
    for fault in drill.FAULTS:
        when = next((word for word in STEPS_OF if f"{word} the drop" in fault.name), None)
        assert fault.step in STEPS_OF.get(when, range(24)), fault.name
        kind = next((name for name in ("SIGTERM", "SIGUSR1") if name in fault.name), None)
        assert fault.ranks or fault.signal == getattr(signal, kind or "SIGKILL")
        saved = not fault.step % EVERY or fault.step == drill.DROP
        assert fault.while_saving == ("is written" in fault.name) <= saved, fault.name
        done = {"cut short": drill.truncate, "flipped": drill.flip, "missing": Path.unlink}
        (corrupt,) = [act for word, act in done.items() if word in fault.name] or [None]
        assert fault.corrupt is corrupt
        assert corrupt is None or fault.step > EVERY  # where there is one before it
        numbers = {"one process becomes two": (1, 2), "two processes become one": (2, 1)}
        assert fault.ranks == next((n for word, n in numbers.items() if word in fault.name), None)
    assert drill.FAULTS[0].step < EVERY  # before the first checkpoint
    assert 24 - EVERY < next(f for f in drill.FAULTS if "near the end" in f.name).step < 24


class Forked:
    """In the place of processes: what they were started with, and how they were ended."""

    def __init__(self, codes):
        self.codes, self.made, self.ended = iter(codes), [], []

    def Process(self, target, args):
        self.made.append((target, args))
        code = next(self.codes)

        def ended(how, **options):
            self.ended.append((len(self.made), how, options))

        return SimpleNamespace(
            start=lambda: ended("start"),
            join=lambda **options: ended("join", **options),
            kill=lambda: ended("kill"),
            exitcode=code,
        )


def test_a_rank_that_hangs_or_ends_otherwise_is_told_of(tmp_path, monkeypatch):
    config = RunConfig(run_dir=str(tmp_path / "x"))
    (tmp_path / "x.log").write_text("first\nlast words\n")
    for codes, expected in (([0, None], 0), ([85, 0], 85), ([0, 0], 85)):
        monkeypatch.setattr(drill.multiprocessing, "get_context", lambda kind, c=codes: Forked(c))
        with pytest.raises(drill.DrillError) as error:
            drill.start(config, "text", 2, expected=expected)
        assert str(error.value) == f"exit codes {codes}, expected {expected}; last words"


@pytest.mark.parametrize(
    ("strategy", "ranks", "used"),
    [("single", 1, "single"), ("single", 2, "ddp"), ("fsdp", 2, "fsdp")],
)
def test_several_ranks_train_with_the_strategy_of_the_run_if_it_has_any(
    tmp_path, monkeypatch, strategy, ranks, used
):
    forked = Forked([0] * ranks)
    monkeypatch.setattr(drill.multiprocessing, "get_context", lambda kind: forked)
    config = RunConfig(run_dir=str(tmp_path), strategy=StrategyConfig(name=strategy))
    drill.start(config, "text", ranks)
    assert [arguments[0].strategy.name for _, arguments in forked.made] == [used] * ranks


def test_the_largest_file_of_the_newest_checkpoint_is_damaged(tmp_path, monkeypatch):
    started, hurt = [], []

    def start(config, corpus, ranks, fault=None, expected=0):
        for step in (4, 8):
            place = tmp_path / "checkpoints" / f"step-{step:06}"
            place.mkdir(parents=True, exist_ok=True)
            for size in (1, 3, 2):
                (place / f"__{size}_0.distcp").write_bytes(bytes(size))
        started.append((ranks, fault, expected))

    monkeypatch.setattr(drill, "start", start)
    config = RunConfig(run_dir=str(tmp_path))
    fault = drill.Fault("cut", 10, corrupt=hurt.append)
    drill.break_and_resume(config, "text", fault, 2)
    assert hurt == [tmp_path / "checkpoints" / "step-000008" / "__3_0.distcp"]
    assert started == [(2, fault, -9), (2, None, 0)]
    fault = drill.Fault("becomes", 9, signal.SIGTERM, ranks=(1, 2))
    drill.break_and_resume(config, "text", fault, 3)
    assert started[2:] == [(1, fault, 85), (2, None, 0)]


def test_a_run_is_killed_once_the_tensors_of_that_checkpoint_are_written(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(drill.saving, "save", lambda *given: done.append(given))
    monkeypatch.setattr(drill.os, "kill", lambda *given: done.append(given))
    drill._die_while_saving("step-000008")
    drill.saving.save({}, tmp_path / ".step-000004.partial", None)
    assert len(done) == 1
    drill.saving.save({}, tmp_path / ".step-000008.partial", None)
    assert done[1:] == [
        ({}, tmp_path / ".step-000008.partial", None), (os.getpid(), signal.SIGKILL),
    ]  # fmt: skip


FIRST = {"step": 1, "tokens": 64, "phase": 0, "loss": 2.0, "learning_rate": 0.1, "mfu": 0.5}
ROWS = [FIRST, FIRST | {"step": 2, "tokens": 128, "loss": 1.0, "gradient_norm": 4.0}]
TENSORS = {"model.a": torch.arange(3.0), "optimizer.a.step": torch.tensor(2)}


@pytest.fixture
def made(tmp_path):
    """A function that makes a finished run of two steps, with changes to it."""

    def make(name, rows=(), tensors=(), precision="fp32"):
        place = tmp_path / name
        changed = [row | dict(change) for row, change in zip(ROWS, rows or ({}, {}), strict=True)]
        place.mkdir()
        write_metrics(place / "metrics.csv", changed)
        save(TENSORS | dict(tensors), place / "checkpoints" / step_name(2), None)
        config = RunConfig(run_dir=str(place))
        return replace(config, trainer=TrainerConfig(max_steps=2, precision=precision))

    return make


def test_the_same_run_differs_in_its_times_alone(made):
    timed = [{"tokens_per_second": 9, "time/data": 1.0}, {"mfu": 0.1, "memory": 7.0}]
    assert first_difference(made("whole"), made("broken", timed), True) == ""


@pytest.mark.parametrize(
    ("rows", "tensors", "said"),
    [
        (({}, {"step": 3}), {}, "rows of steps [1, 3] instead of [1, 2]"),
        (({}, {"loss": 1.0000001}), {}, "loss at step 2: 1.0000001 instead of 1.0"),
        (({}, {"gradient_norm": 5.0}), {}, "gradient_norm at step 2: 5.0 instead of 4.0"),
        (({}, {"gradient_norm": ""}), {}, "gradient_norm at step 2: nan instead of 4.0"),
        ((), {"model.a": torch.tensor([0.0, 1.0, 3.0])}, "model.a differs in the last checkpoint"),
        (
            (), {"model.b": torch.ones(1)},
            "the last checkpoint holds other tensors: ['model.b']",
        ),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(made, rows, tensors, said):
    assert first_difference(made("whole"), made("broken", rows, tensors), True) == said


@pytest.mark.parametrize(
    ("precision", "loss", "said"),
    [
        ("fp32", 2.0019, ""),
        ("fp32", 2.0021, "loss at step 1: 2.0021 instead of 2.0"),
        ("bf16", 2.059, ""),
        ("bf16", 1.939, "loss at step 1: 1.939 instead of 2.0"),
    ],
)
def test_on_other_ranks_losses_are_the_same_up_to_rounding(made, precision, loss, said):
    broken = [{"loss": loss, "gradient_norm": 9.0}, {"gradient_norm": 1.0}]
    other = {"model.a": torch.zeros(3)}
    runs = made("whole", precision=precision), made("broken", broken, other, precision)
    assert first_difference(*runs, False) == said


def test_on_other_ranks_rows_count_too(made):
    broken = made("broken", ({}, {"phase": 1}))
    assert first_difference(made("whole"), broken, False) == "phase at step 2: 1 instead of 0"
