"""How runs are getting on, read from directories as training leaves them at any time."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests.training.test_run import checkpoint_of
from trainer.__main__ import main
from trainer.commands import console
from trainer.common.errors import UserError
from trainer.common.words import duration
from trainer.runs.checkpoints import read_state
from trainer.runs.config import RunConfig
from trainer.runs.directory import open_run_directory, plain
from trainer.runs.metrics_file import PARTS, SECTIONS, write_metrics
from trainer.runs.parsing import control_config, parse
from trainer.runs.run_lock import LEASE, RunLock
from trainer.runs.sweep import Swept, noting_failure, open_sweep
from trainer.workflows import watch as watch_module
from trainer.workflows.watch import Line, lines, recovery, retrievals, watch
from trainer.workflows.watch_view import curve

NOT_SHOWN = {"step", "tokens", "parameter_norm", "loss_spikes", "gradient_spikes"}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(name="a", steps=20, **changes):
    drop = {"enabled": True, "at": 10}
    base = {"name": name, "run_dir": f"runs/{name}", "drop": drop, "trainer": {"max_steps": steps}}
    return parse(RunConfig, {**base, **changes})


def row(config, step, **more):
    """A row in the middle of a run: each step takes half a second."""
    phase = 0 if config.drop_step is None or step <= config.drop_step else 1
    times = dict.fromkeys((f"time/{part}" for part in PARTS), 0.1)
    tokens = step * config.tokens_per_step
    shown = {"loss": 5 - step / 10, "learning_rate": 1e-3, "tokens_per_second": 99.0}
    return {"step": step, "tokens": tokens, "phase": phase, **shown, **times, **more}


def fabricate(config, steps=20, extra=None):
    """A run directory with a row for every second step, without its controls' rows."""
    directory = open_run_directory(config)
    extra = extra or {}
    rows = [row(config, step, **extra.get(step, {})) for step in range(2, steps + 1, 2)]
    write_metrics(directory / "metrics.csv", rows)
    beat = {"step": steps, "time": time.time() - 30, "pid": 1}
    (directory / "heartbeat.json").write_text(json.dumps(beat))
    return directory


def shown(*words):
    """What the command prints, on a console that is no terminal."""
    out = StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "report_console", lambda: Console(file=out, width=100))
        main(["watch", *words])
    return out.getvalue()


def test_panels_name_all_that_a_monitored_run_logs_and_won_back_is_that_of_its_effect(run):
    trained, _ = run(monitor={"lengths_every": 4, "lengths": [1, 2], "trials": 4, "probe_every": 4})
    record = Path(trained.run_dir) / "config.yaml"
    record.write_text(yaml.safe_dump(plain(trained)))
    (watched,) = watch([trained.run_dir])
    (arm,) = watched.arms
    shown_in_panels = {
        name
        for panels in SECTIONS.values()
        for panel in panels
        for name in (*panel.metrics, *(arm.metrics_like(panel.pattern) if panel.pattern else ()))
    }
    logged = {key for row in arm.rows for key in row}
    assert logged - shown_in_panels == NOT_SHOWN | {
        *(f"loss/quarter_{i}" for i in range(1, 5)),
        "epochs/text",
    }
    assert [line.metric for line in lines(arm)] == [
        *("loss", "learning_rate", "length/retrieval_1x", "length/retrieval_2x"),
        *("length/loss_1x", "length/loss_2x"),
    ]
    (effect,) = read_state(checkpoint_of(trained))["effects"].values()
    before, after, end = (effect[f"loss_{when}"] for when in ("before", "after", "end"))
    found = recovery(arm)
    assert (found.before, found.after, found.end) == (before, after, end)
    assert found.is_final
    rises = after - before > 0.01 * before
    won = pytest.approx((after - end) / (after - before)) if rises else None
    assert found.share == won
    assert arm.is_trained
    assert [length for length, _ in retrievals(arm)] == ["1x", "2x"]
    assert "(2 of 2)" in shown(trained.run_dir)


DROPPED = {
    10: {"length/loss_1x": 3.0},
    12: {"drop/loss_before": 3.1, "drop/loss_after": 4.1, "length/loss_1x": 4.0},
    16: {"length/loss_1x": 3.25},
}


@pytest.mark.parametrize(
    ("without", "share"),
    [(None, 0.75), (10, None), (16, None)],
    ids=["measured on both sides", "no row at the drop", "not measured since"],
)
def test_won_back_is_estimated_only_from_measurements_on_both_sides(without, share):
    extra = {step: values for step, values in DROPPED.items() if step != without}
    fabricate(config(), 18, extra)
    (arm,) = watch(["runs/a"])[0].arms
    found = recovery(arm)
    assert (found.share, found.is_final) == (share, False)
    said = shown("runs/a")
    assert ("about 75% of the rise won back" in said) == (share is not None)
    assert "held-out loss 3.100 → 4.100 nats per token" in said


@pytest.mark.parametrize("end", [None, 3.05], ids=["recalibrating", "finished"])
def test_a_drop_that_costs_nothing_has_no_share_won_back(end):
    effect = {"drop/loss_before": 3.1, "drop/loss_after": 3.101, "length/loss_1x": 3.1}
    ended = {"length/loss_1x": 3.0} if end is None else {"drop/loss_end": end}
    fabricate(config(), 18, {10: {"length/loss_1x": 3.099}, 12: effect, 16: ended})
    (arm,) = watch(["runs/a"])[0].arms
    assert recovery(arm).share is None
    assert "nats per token, a rise of at most 1%, nothing to win back" in shown("runs/a")


def test_before_the_drop_nothing_is_won_back():
    fabricate(config(), 8)
    (arm,) = watch(["runs/a"])[0].arms
    assert recovery(arm) is None
    assert "Drop" not in shown("runs/a")


def test_rows_of_a_file_that_grows_are_kept_once():
    whole = config()
    directory = fabricate(whole, 10)
    shown("runs/a", "once=true")
    before = len(watch_module._newest)
    for steps in (12, 14, 16):
        write_metrics(directory / "metrics.csv", [row(whole, step) for step in range(2, steps, 2)])
        assert f"step {steps - 2}" in shown("runs/a", "once=true")
    assert len(watch_module._newest) == before


def test_a_row_cut_short_is_left_out():
    path = fabricate(config(), 8) / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-20])
    (arm,) = watch(["runs/a"])[0].arms
    assert (arm.step, arm.problem) == (6, "")


def test_damage_is_named_and_the_other_runs_are_shown():
    path = fabricate(config("a"), 8) / "metrics.csv"
    path.write_text(path.read_text().replace("\n4,", "\nx,"))
    (fabricate(config("b"), 8) / "config.yaml").write_text("name: [")
    fabricate(config("c"), 8)
    said = " ".join(shown("runs").split())
    assert "'runs/a/metrics.csv' is damaged in row 2" in said
    assert "'runs/b/config.yaml' is damaged: line 1: " in said
    assert "8/20" in said


def test_time_left_is_that_of_all_tokens_that_are_left():
    controls = {
        "rope": {"branch": 10, "drop": {"enabled": False}},
        "nope": {"positional": {"layers": ["nope"]}, "drop": {"enabled": False}},
    }
    whole = config(controls=controls)
    fabricate(whole, 20)
    fabricate(control_config(plain(whole), "rope"), 14)
    (watched,) = watch(["runs/a"])
    assert [arm.start for arm in watched.arms] == [0, 10, 0]
    assert watched.current is watched.arms[1]
    assert [arm.tokens_left / whole.tokens_per_step for arm in watched.arms[:2]] == [0, 6]
    assert watched.seconds_left == pytest.approx(0.5 * 6)  # the last has no directory yet
    assert re.search(r" nope +waiting", shown("runs/a"))
    open_run_directory(control_config(plain(whole), "nope"))
    assert watch(["runs/a"])[0].seconds_left == pytest.approx(0.5 * (6 + 20))
    assert "NoPE" in shown("runs/a")


def test_a_phase_that_ended_early_shifts_the_next():
    phases = {
        "short": {"steps": 10, "until": {"flat": 0.1, "every": 2, "patience": 1}},
        "long": {"steps": 10, "optimizer_state": "reset", "schedule": {"warmup_steps": 1}},
    }
    run = config(phases=phases, drop={"enabled": False})
    directory = open_run_directory(run)
    steps = [(2, 0), (4, 0), (6, 1), (8, 1)]
    rows = [row(run, step, phase=phase) for step, phase in steps]
    write_metrics(directory / "metrics.csv", rows)
    (arm,) = watch(["runs/a"])[0].arms
    assert [(phase.name, phase.start, phase.end) for phase in arm.phases] == [
        ("short", 0, 4),
        ("long", 4, 14),
    ]
    assert "step 8 of 14" in shown("runs/a")


def test_signs_of_life_tell_a_run_that_trains_from_one_that_is_dead():
    directory = fabricate(config(), 8)
    assert re.search(r"stopped; a step was logged 3\d s ago", shown("runs/a"))
    lock = RunLock()
    lock.acquire(directory)
    try:
        assert f"training (process {os.getpid()} of {os.uname().nodename}" in shown("runs/a")
        holder = json.loads((directory / ".lock").read_text())
        then = time.time() - LEASE - 60
        os.utime(directory / ".lock", (then, then))
        assert "seems dead" in shown("runs/a")
        assert watch(["runs/a"])[0].state == "seems dead"
        assert re.search(r"^ a +seems dead, ", shown("runs/a", "runs/a"), re.MULTILINE)
    finally:
        lock.release()
    for changes, dead in (({"process": 2**22 + 1}, True), ({"host": "another"}, False)):
        (directory / ".lock").write_text(json.dumps(holder | changes))
        assert ("seems dead" in shown("runs/a")) == dead, changes


def test_after_the_last_step_a_live_run_evaluates():
    directory = fabricate(config(), 20)
    (directory / "evaluation" / "cells").mkdir(parents=True)
    (directory / "evaluation" / "cells" / "loss-0.json").touch()
    lock = RunLock()
    lock.acquire(directory)
    try:
        assert "evaluating, 1 cell so far (process" in shown("runs/a")
        assert re.search(
            r"^ a +evaluating, 1 cell so far, ", shown("runs/a", "runs/a"), re.MULTILINE
        )
    finally:
        lock.release()


def test_runs_of_a_sweep_are_rows():
    fabricate(config("rate_1"), 20)
    (Path("runs/rate_1") / "report.json").touch()
    fabricate(config("rate_2"), 8)
    sweep = open_sweep(Path("multirun"), [Swept(f"runs/rate_{i}") for i in (1, 2, 3)])
    with pytest.raises(UserError), noting_failure(sweep, "runs/rate_3"):
        raise UserError.at("data", "no text.")
    said = shown("multirun/rate")
    assert [line.split()[:2] for line in said.splitlines() if line.startswith(" rate")] == [
        ["rate_1", "finished"],
        ["rate_2", "stopped,"],
        ["rate_3", "failed"],
    ]
    assert "rate_3: data: no text." in said


def test_a_control_is_watched_alone():
    whole = config(controls={"rope": {"branch": "drop", "drop": {"enabled": False}}})
    fabricate(whole)
    fabricate(control_config(plain(whole), "rope"), 12)
    (Path("runs/a") / "report.json").touch()
    said = shown("runs/a/controls/rope")
    assert "finished" in said
    assert "RoPE, step 12 of 20" in said
    assert "Report: runs/a/report.html" in said


@pytest.mark.parametrize("given", ["runs/lng", "lng"])
def test_an_unknown_path_gets_the_nearest_run(given, capsys):
    fabricate(config("long"), 2)
    with pytest.raises(SystemExit) as stop:
        main(["watch", given])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: runs: there is no directory '{given}'. Looked in '")
    assert line.endswith("Did you mean 'runs/long'?")


def test_nothing_is_written_and_no_line_is_wider_than_100_columns(place):
    whole = config(controls={"rope": {"branch": "drop", "drop": {"enabled": False}}})
    fabricate(whole, 18, DROPPED)

    def files():
        return {path: path.stat().st_mtime_ns for path in [place, *place.rglob("*")]}

    before = files()
    for words in (["runs/a"], ["runs"], ["runs/a", "runs/a"]):
        assert max(map(len, shown(*words).splitlines())) <= 100
    assert files() == before


def test_a_label_is_not_obeyed_by_the_terminal():
    controls = {"rope": {"branch": "drop", "drop": {"enabled": False}}}
    fabricate(replace(config(controls=controls), label="[red]\x1b[31mred"), 18)
    said = shown("runs/a")
    assert "[red]␛[31mred, step 18" in said
    assert re.search(r" \[red\]␛\[31mred +18 of 20", said)


def test_a_narrow_terminal_still_shows_curves(monkeypatch):
    fabricate(config(), 18, DROPPED)
    out = StringIO()
    monkeypatch.setattr(console, "report_console", lambda: Console(file=out, width=30))
    main(["watch", "runs/a"])
    assert "loss" in out.getvalue()


@pytest.fixture
def terminal(monkeypatch):
    out = StringIO()
    made = Console(file=out, width=100, height=60, force_terminal=True)
    monkeypatch.setattr(console, "report_console", lambda: made)
    return out


def test_on_a_terminal_it_refreshes_until_the_run_is_finished(terminal, monkeypatch):
    directory = fabricate(config(), 10)
    lock = RunLock()

    def finish(seconds):
        assert seconds >= 2
        fabricate(config(), 20)
        (directory / "report.json").touch()
        lock.release()

    monkeypatch.setattr(time, "sleep", finish)
    lock.acquire(directory)
    main(["watch", "runs/a", "every=2"])
    assert "step 10 of 20" in terminal.getvalue()
    assert "step 20 of 20" in terminal.getvalue()


def test_on_a_terminal_it_ends_with_a_run_that_has_stopped(terminal, monkeypatch):
    """It waits for one that has not begun."""
    directory, lock = fabricate(config(), 10), RunLock()
    monkeypatch.setattr(time, "sleep", lambda _: lock.release())
    lock.acquire(directory)
    main(["watch", "runs/a"])
    assert "training" in terminal.getvalue()
    assert "stopped; a step was logged" in terminal.getvalue().replace("\n", " ")
    assert "the same command resumes the run" in terminal.getvalue().replace("\n", " ")
    other = fabricate(config("b"), 0)
    (other / "heartbeat.json").unlink(missing_ok=True)
    monkeypatch.setattr(time, "sleep", lambda _: (other / "report.json").touch())
    main(["watch", "runs/b"])
    assert "not started" in terminal.getvalue()
    assert "finished" in terminal.getvalue()


def test_ctrl_c_ends_it_without_a_word(terminal, monkeypatch, capsys):
    directory, lock = fabricate(config(), 10), RunLock()
    lock.acquire(directory)

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    main(["watch", "runs/a"])
    lock.release()
    assert capsys.readouterr().err == ""


def test_once_prints_once_on_a_terminal(terminal, monkeypatch):
    fabricate(config(), 10)
    monkeypatch.setattr(time, "sleep", None)
    main(["watch", "runs/a", "once=true"])
    assert terminal.getvalue().count("step 10 of 20") == 1


def test_a_curve_is_drawn_in_dots():
    falling = Line("loss", ((0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0)), 1, (0.0, 3.0))
    assert curve(falling, 4, [], 2) == ["⠑⢄"]
    assert curve(replace(falling, points=((0, 3.0), (3, 0.0))), 4, [], 2) == ["⠉⢁"]  # holds
    assert curve(replace(falling, points=((0, 3.0),), rows=2), 4, [2], 2) == ["⠁⠅", "⠀⠅"]
    flat = Line("loss", ((0, 1.0), (3, 1.0)), 1, (1.0, 1.0))
    assert curve(flat, 4, [], 2) == ["⠤⠤"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2.0 hours")),
        *((200_000, "2.3 days"), (3.4e8, "10.8 years")),
    ],
)
def test_durations_have_the_unit_that_reads_best(seconds, text):
    assert duration(seconds) == text
