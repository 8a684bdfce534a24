"""The drill finds nothing in a sound program, and finds what is planted in a broken one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.program import run
from trainer.runs.config import RunConfig
from trainer.runs.parsing import parse
from trainer.workflows import drill
from trainer.workflows.small_copy import EVERY

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
    monkeypatch.setattr(drill, "compare", lambda *_, exactly: f"exactly: {exactly}")
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


@pytest.mark.parametrize(
    ("strategy", "ranks", "given"),
    [("single", 1, "single"), ("single", 2, "ddp"), ("fsdp2", 2, "fsdp2"), ("ddp", 1, "ddp")],
)
def test_ranks_are_processes_of_one_group(tmp_path, monkeypatch, strategy, ranks, given):
    config = parse(RunConfig, {"run_dir": str(tmp_path / "x"), "strategy": {"name": strategy}})
    forked = Forked([0] * ranks)
    monkeypatch.setattr(drill.multiprocessing, "get_context", lambda kind: forked)
    drill.start(config, "text", ranks, "fault")
    assert {target for target, _ in forked.made} == {drill._process}
    configs, texts, numbers, worlds, ports, faults, logs = zip(
        *(args for _, args in forked.made), strict=True
    )
    assert [one.strategy.name for one in configs] == [given] * ranks
    assert numbers == tuple(range(ranks))
    assert ({*texts}, {*worlds}, {*faults}) == ({"text"}, {ranks}, {"fault"})
    assert {*logs} == {tmp_path / "x.log"}
    assert len({*ports}) == 1
    hows = [(how, options) for _, how, options in forked.ended]
    ends = [("start", {}), ("join", {"timeout": 120}), ("kill", {})]
    assert hows == [end for end in ends for _ in range(ranks)]


def test_a_rank_that_hangs_or_ends_otherwise_is_told_of(tmp_path, monkeypatch):
    config = RunConfig(run_dir=str(tmp_path / "x"))
    (tmp_path / "x.log").write_text("first\nlast words\n")
    for codes, expected in (([0, None], 0), ([85, 0], 85), ([0, 0], 85)):
        monkeypatch.setattr(drill.multiprocessing, "get_context", lambda kind, c=codes: Forked(c))
        with pytest.raises(drill.DrillError) as error:
            drill.start(config, "text", 2, expected=expected)
        assert str(error.value) == f"exit codes {codes}, expected {expected}; last words"


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
