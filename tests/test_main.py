"""The command line: help, errors in a line, exit codes, bare words, sweeps."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.program import ROOT
from trainer.__main__ import main
from trainer.commands import run
from trainer.commands.composing import compose_words
from trainer.commands.help import COMMANDS, split_words
from trainer.commands.run import read_config
from trainer.common.errors import PreemptedError, UserError


def error_of(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_and_its_options(capsys, name):
    main([name, "--help"])
    said = capsys.readouterr().out
    assert f"python -m trainer {'' if name == 'train' else name}" in said
    assert ("drope_demo" in said) == (name == "train")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["model.num_atention_heads=4"],
            "Key 'num_atention_heads' is not in struct, full_key: model.num_atention_heads; the "
            "nearest is 'num_attention_heads'",
        ),
        (["model=nanoo"], "In 'config': Could not find 'model/nanoo'; the nearest is 'nano'"),
        (
            ["schedule.name=cosin"],
            "schedule.name: input should be 'cosine', 'wsd' or 'constant', got 'cosin'",
        ),
        (["evaluate"], "Missing mandatory value: checkpoint, full_key: checkpoint"),
        (["data=files", "data.files=[no.txt]"], "data.files: there is no file 'no.txt'"),
        (["+evaluation=harness"], "evaluation.kind: input should be 'lengths', got 'harness'"),
    ],
)
def test_a_wrong_word_is_one_line(capsys, words, said):
    lines = error_of(capsys, *words)
    assert said in lines


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["value", "file"])
def test_a_wrong_word_or_an_empty_file_is_told_without_torch(tmp_path, wrong):
    (tmp_path / "empty.txt").touch()
    words = "trainer.max_steps=x" if wrong == "value" else f"data.files=[{tmp_path}/empty.txt]"
    code = f"import sys; from trainer.__main__ import main\ntry: main(['data=files', '{words}'])\n"
    code += "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"], done.stderr


def test_the_first_bare_word_is_the_key_of_the_command(tmp_path):
    place = tmp_path / "lr=0.1"
    place.mkdir()
    assert split_words(["runs/a", "seed=1"], "checkpoint")[1] == ["checkpoint=runs/a", "seed=1"]
    assert split_words([str(place)], "checkpoint")[1] == [f"checkpoint='{place}'"]
    assert split_words(["a", "b"], "runs")[1] == ["runs=[a,b]"]
    words = ["x", "--config-dir", "d", "seed=1"]
    assert split_words(words, "checkpoint")[:2] == (
        ["--config-dir", "d"],
        ["checkpoint=x", "seed=1"],
    )
    assert split_words(["prompt=It's {1}, x=2"], "checkpoint") == ([], [], ["It's {1}, x=2"])


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Names of the jobs that ran in place of training."""
    monkeypatch.chdir(tmp_path)
    ran = []

    def execute(composed):
        config = run.read_run(composed)
        ran.append((config.name, config.positional.layers))
        if config.name == "failing":
            raise UserError("trainer: it does not fit")
        if config.name == "stopped":
            raise PreemptedError("Stopped.")

    monkeypatch.setitem(run.EXECUTE, "train", execute)
    return ran


def test_a_command_runs_once_and_a_sweep_for_each_value(jobs):
    main(["name=one"])
    main(["--multirun", "positional=rope,nope", "name=${positional.layers[0]}"])
    assert jobs == [("one", ["rope"]), ("rope", ["rope"]), ("nope", ["nope"])]


@pytest.mark.parametrize("name", ["2026_12_01", "2026", "1e3", "007"])
def test_names_are_text(jobs, name):
    main([f"name={name}"])
    assert jobs == [(name, ["rope"])]


def test_digits_with_underscores_are_text_and_numbers_where_these_are_expected():
    words = ["run_dir=2026_12", "trainer.max_steps=1_000", "data.files=[1_2,a/1_2]"]
    values = compose_words(words).values
    assert (values["run_dir"], values["data"]["files"]) == ("2026_12", ["1_2", "a/1_2"])
    assert read_config(words[:2]).trainer.max_steps == 1000


def test_a_failing_job_is_an_exit_code_and_the_others_run(jobs, capsys):
    assert error_of(capsys, "--multirun", "name=failing,fine") == ["trainer: it does not fit"]
    assert [name for name, _ in jobs] == ["failing", "fine"]


def test_a_stopped_run_exits_with_the_code_to_requeue(jobs):
    with pytest.raises(SystemExit) as stopped:
        main(["name=stopped"])
    assert stopped.value.code == 85


@pytest.mark.parametrize(
    ("words", "workflow", "code"),
    [
        (["name=long"], "experiment.run_experiment", 85),
        (["evaluate", "x", "+evaluation=multiple_choice"], "benchmarks.run_benchmarks", 143),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_process_requeues_what_can_resume(monkeypatch, words, workflow, code, rank):
    asked = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_PROCID", rank)
    monkeypatch.setattr("trainer.common.processes.requeue", lambda: asked.append(rank))
    monkeypatch.setattr(
        f"trainer.workflows.{workflow}", lambda *_: signal.raise_signal(signal.SIGUSR1)
    )
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == code
    assert asked == (["0"] if (code, rank) == (85, "0") else [])


def test_cfg_prints_the_whole_configuration(capsys):
    main(["+experiment=drope_demo", "--cfg", "job"])
    said = capsys.readouterr().out
    assert "name: drope_demo" in said
    assert "muon_lr" in said
