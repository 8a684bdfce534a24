"""The command line: help, errors in a line, exit codes, bare words, sweeps."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.program import ROOT
from trainer import commands
from trainer.__main__ import main
from trainer.commands import (
    COMMANDS,
    check_alike,
    compose_words,
    explain,
    overrides_of,
    run_of,
    take_keys,
)
from trainer.common.errors import PreemptedError, UserError
from trainer.common.processes import requeue
from trainer.config import RecalibrateKeys
from trainer.interchange.hf_config import OWN
from trainer.runs.parsing import merged


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
        (
            ["schedule.name=cosin"],
            "schedule.name: Input should be 'cosine', 'wsd' or 'constant', got 'cosin'",
        ),
        (
            ["positional=nope", "drop=late", "model.qk_norm.when=after_drop"],
            "model.qk_norm.when: 'after_drop', but there is no drop",
        ),
        (
            ["trian"],
            f"expected a command of {', '.join(COMMANDS)}, got 'trian'; the nearest is 'train'",
        ),
        (
            ["export", "to=a"],
            "checkpoint: expected a value: python -m trainer export PATH to=DIRECTORY "
            "[KEY=VALUE ...]",
        ),
        (["evaluate", "a", "b"], "expected one model, got 'a' and 'b'"),
        (["evaluate", "a", "checkpoint=b"], "expected one model, got 'a' and 'b'"),
        (
            ["model=smollm_360m", "model.from_run=runs/t"],
            "model: the trained weights bring their shape",
        ),
        (["runs/a"], "expected KEY=VALUE, got 'runs/a'"),
        (
            ["data=files", "data.files=[no.txt]"],
            "FileNotFoundError: [Errno 2] No such file or directory: 'no.txt'",
        ),
    ],
)
def test_a_wrong_word_is_one_line(capsys, words, said):
    lines = error_of(capsys, *words)
    assert said in lines


def test_a_wrong_word_is_told_without_torch():
    code = "import sys; from trainer.__main__ import main\ntry: main(['trainer.max_steps=x'])\n"
    code += "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"], done.stderr


def test_an_unknown_option_is_a_line_with_those_that_there_are(capsys):
    (line,) = error_of(capsys, "optimizer=adam")
    assert line.startswith("In 'train': Could not find 'optimizer/adam', Available options")
    assert line.endswith("adamw, muon")


def test_paths_get_the_key_of_the_command(tmp_path):
    place = tmp_path / "lr=0.1"
    place.mkdir()
    assert overrides_of("evaluate", ["runs/a", "seed=1"]) == ['checkpoint="runs/a"', "seed=1"]
    for words in ([str(place), "to=b"], ["to=b", str(place)]):
        assert overrides_of("export", words) == [f'checkpoint="{place}"', "to=b"]
    options = ["--cfg", "job", "--config-dir", "c"]
    assert overrides_of("evaluate", [*options, "a"]) == ['checkpoint="a"', *options]
    assert overrides_of("compare", ["a", "b c"]) == ['runs=["a", "b c"]']
    words = ["it's, {1}", "+analysis=sinks", "analysis.length=64"]
    composed = compose_words(words, "analyze")
    assert composed.values["checkpoint"] == words[0]
    assert composed.choices["analysis"] == "sinks"
    assert compose_words(["a", "b,c"], "compare").values["runs"] == ["a", "b,c"]


@pytest.mark.parametrize("words", [["--cfg", "job"], ["-c", "job"], ["--cfg=job"]])
def test_recalibrate_shows_the_chosen_keys(capsys, monkeypatch, words):
    def choose(job, began):
        job.values["name"] = "chosen"
        return take_keys(job, RecalibrateKeys), {}

    monkeypatch.setattr(commands, "choose_keys", choose)
    main(["recalibrate", "llama", "minutes=3", *words])
    shown = yaml.safe_load(capsys.readouterr().out)
    keys = [shown[key] for key in ("name", "checkpoint", "minutes", "text", "to")]
    assert keys == ["chosen", "llama", 3, None, None]


def test_recalibrate_shows_the_keys_of_hydra(capsys):
    main(["recalibrate", "llama", "--cfg", "hydra"])
    assert capsys.readouterr().out.startswith("hydra:")


@pytest.mark.parametrize(
    ("to", "files", "exports"),
    [(None, [], True), (None, ["a"], False), ("new", None, True), ("empty", [], True)],
)
def test_recalibrate_exports_unless_it_has(monkeypatch, tmp_path, to, files, exports):
    run = SimpleNamespace(directory=tmp_path)
    place = tmp_path / (to or "export")
    if files is not None:
        place.mkdir()
        for name in files:
            (place / name).touch()
    report = SimpleNamespace(runs=[SimpleNamespace(tokens=1)])
    keys = RecalibrateKeys("llama", to=None if to is None else str(place))
    requests = []
    monkeypatch.setattr(commands, "choose_keys", lambda *_: (keys, {}))
    monkeypatch.setattr(commands, "run_of", lambda _: run)
    monkeypatch.setattr("trainer.report.terminal.print_report", lambda *_: None)
    monkeypatch.setattr("trainer.workflows.recalibrate.recalibrate", lambda *_: report)
    monkeypatch.setattr("trainer.workflows.export.export_checkpoint", requests.append)
    commands.recalibrate(None)
    places = [(request.checkpoint, request.to) for request in requests]
    assert places == ([(str(tmp_path), str(place))] if exports else [])


def test_a_prompt_is_text_with_any_characters(monkeypatch):
    prompts = []
    monkeypatch.setitem(COMMANDS, "generate", lambda job: prompts.extend(job.values["prompts"]))
    main(["generate", "x", "prompt=It's {1}, x=${2}", "prompt=3", "seed=1", "Of x = {1}"])
    assert prompts == ["Of x = {1}", "It's {1}, x=${2}", "3"]


def test_a_model_with_its_key_takes_no_text_for_its_path(monkeypatch):
    jobs = []
    monkeypatch.setitem(COMMANDS, "generate", lambda job: jobs.append(job.values))
    main(["generate", "checkpoint=runs/t", "Hello there", "World of"])
    ((path, prompts),) = [(values["checkpoint"], values["prompts"]) for values in jobs]
    assert (path, prompts) == ("runs/t", ["Hello there", "World of"])


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Names of the jobs that ran in place of training."""
    monkeypatch.chdir(tmp_path)
    ran = []

    def execute(job):
        config = run_of(job).config
        ran.append((config.name, config.positional.layers))
        if config.name == "failing":
            raise UserError("trainer: it does not fit")
        if config.name == "stopped":
            raise PreemptedError("Stopped.", "SIGUSR1")

    monkeypatch.setitem(COMMANDS, "train", execute)
    return ran


def test_a_command_runs_once_and_a_sweep_for_each_value(jobs):
    main(["name=one"])
    main(["--multirun", "positional=rope,nope", "name=${positional.layers[0]}"])
    assert jobs == [("one", ["rope"]), ("rope", ["rope"]), ("nope", ["nope"])]


def test_jobs_of_a_sweep_without_names_get_names_of_their_own(jobs):
    main(["--multirun", "seed=0,1", "positional=rope,nope", "trainer.max_steps=5"])
    main(["--multirun", "seed=0,1", "+experiment=ladder_1m"])
    assert [name for name, _ in jobs[:4]] == [
        "run-seed-0-positional-rope",
        "run-seed-0-positional-nope",
        "run-seed-1-positional-rope",
        "run-seed-1-positional-nope",
    ]
    assert [name for name, _ in jobs[4:]] == ["ladder_1m_0", "ladder_1m_1"]


def test_choices_of_a_sweep_may_stand_in_a_file_or_be_a_pattern(jobs, tmp_path, capsys):
    params = "hydra: {sweeper: {params: {seed: '1,2', optimizer.lr: '0.1,0.2'}}}"
    option = tmp_path / "conf" / "experiment" / "swept.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(f"# @package _global_\n{params}\n")
    words = ["--multirun", "--config-dir", str(option.parents[1]), "+experiment=swept"]
    main([*words, "optimizer.lr=0.3"])
    main([*words, "name=${seed}-${optimizer.lr}", "positional=glob(p_*)"])
    names = ["run-seed-1", "run-seed-2", "1-0.1", "1-0.2", "2-0.1", "2-0.2"]
    assert [name for name, _ in jobs] == names
    rows = [line for line in capsys.readouterr().out.splitlines() if "seed=" in line]
    assert rows[0].split() == ["ran", "0", "seed=1"]
    assert rows[-1].split() == ["ran", "3", "seed=2", "optimizer.lr=0.2", "positional=p_rope"]


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("=5", "'=5'"),
        ("+=5", "'+=5'"),
        ("plugins=[my.txt]", "plugins: "),
        ("controls=5", "controls: "),
        ("controls={x:{nokey:1}}", "+controls.x="),
        ("+controls.x=5", "controls.x: "),
        ("+controls.x={nokey:1}", "controls.x.nokey: "),
    ],
)
def test_a_mistake_in_a_word_is_a_line_that_names_it(capsys, tmp_path, monkeypatch, word, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("some words")
    (line,) = error_of(capsys, word)
    assert part in line


@pytest.mark.parametrize("name", ["2026_12_01", "2026", "1e3", "007"])
def test_names_are_text(jobs, name):
    main([f"name={name}"])
    assert jobs == [(name, ["rope"])]


def test_directories_are_text_and_numbers_may_have_underscores():
    words = ["run_dir=2026_12", "trainer.max_steps=1_000", "data.revision=2024"]
    config = run_of(compose_words(words)).config
    assert (config.run_dir, config.data.revision) == ("2026_12", "2024")
    assert config.trainer.max_steps == 1000


def test_a_failing_job_is_said_and_the_others_run(jobs, capsys):
    with pytest.raises(SystemExit) as failed:
        main(["--multirun", "name=failing,fine"])
    assert failed.value.code == 1
    said = capsys.readouterr()
    assert "error: trainer: it does not fit" in said.err
    rows = [line.split() for line in said.out.splitlines() if "name=" in line]
    assert rows == [["failed", "0", "name=failing"], ["ran", "1", "name=fine"]]
    assert [name for name, _ in jobs] == ["failing", "fine"]


def test_a_sweep_that_is_stopped_says_which_jobs_were_skipped(jobs, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--multirun", "name=fine,stopped,other", "seed=1"])
    assert stopped.value.code == 85
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "name=" in line]
    assert rows == ["ran", "stopped", "skipped"]


def test_a_stopped_run_exits_with_the_code_to_requeue(jobs):
    with pytest.raises(SystemExit) as stopped:
        main(["name=stopped"])
    assert stopped.value.code == 85


@pytest.mark.parametrize(
    ("exit_code", "code", "said"),
    [("no such plugin", 1, "no such plugin\n"), (3, 3, ""), (None, 0, "")],
)
def test_an_exit_in_a_command_has_its_code_and_its_message(
    monkeypatch, capsys, exit_code, code, said
):
    monkeypatch.setitem(COMMANDS, "evaluate", lambda _: sys.exit(exit_code))
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", "x"])
    assert stopped.value.code == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("reason", "code", "requeues"),
    [
        ("SIGUSR1", 85, True),
        ("time limit", 85, True),
        ("SIGTERM", 85, False),
        ("SIGINT", 130, False),
    ],
)
def test_only_what_slurm_announces_requeues_a_job(monkeypatch, capsys, reason, code, requeues):
    asked = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(subprocess, "run", lambda words, **_: asked.append(words))

    def stop(_):
        if not reason.startswith("SIG"):
            raise PreemptedError(f"Stopped ({reason}).", reason)
        signal.raise_signal(getattr(signal, reason))

    monkeypatch.setitem(COMMANDS, "evaluate", stop)
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", "x"])
    assert stopped.value.code == code
    assert asked == ([["scontrol", "requeue", "7"]] if requeues else [])
    assert "The same command resumes." in capsys.readouterr().err


def test_a_requeue_that_fails_is_a_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    requeue("SIGUSR1")
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho Invalid job id 1>&2\nexit 1\n")
    program.chmod(0o755)
    requeue("SIGUSR1")
    missing, refused = capsys.readouterr().err.splitlines()
    assert "No such file" in missing
    assert "scontrol requeue 7: Invalid job id" in refused


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({}, None),
        ({"trainer": {"threads": 4}}, None),
        ({"seed": 1}, r"\(seed: 1 there, 0 here\)"),
        ({"ranks of a node": 2}, r"\(ranks of a node: 2 there, 1 here\)"),
    ],
)
def test_ranks_are_started_with_the_same_keys(monkeypatch, other, problem):
    values = {"seed": 0, "trainer": {"threads": 1}}
    monkeypatch.setattr(
        "trainer.common.ranks.shared_value", lambda mine: mine() | merged(values, other)
    )
    expected = nullcontext()
    if problem is not None:
        expected = pytest.raises(UserError, match=problem)
    with expected:
        check_alike(values)


def test_a_finished_rank_exits_with_the_code_of_all_ranks(monkeypatch, capsys):
    watch = SimpleNamespace(rank=0, leave=lambda end: 3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("trainer.common.ranks.meeting_store", lambda: None)
    monkeypatch.setattr("trainer.__main__.Watch", lambda store: watch)
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 3


def test_a_missing_package_is_said_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "trainer.evaluation.harness", raising=False)
    with pytest.raises(ImportError) as missing:
        importlib.import_module("trainer.evaluation.harness")
    assert explain(missing.value).endswith("; pip install '.[eval]' brings it")


def test_cfg_prints_the_whole_configuration(capsys):
    main(["+experiment=drope_demo", "--cfg", "job"])
    said = capsys.readouterr().out
    assert "name: drope_demo" in said
    assert "muon_lr" in said


def test_an_evaluation_and_an_analysis_have_the_names_of_their_options(monkeypatch, tmp_path):
    named = []

    def workflow(request, name):
        named.append((request.checkpoint, name))
        return (None, tmp_path) if "analysis" not in vars(request) else ([], tmp_path / "page")

    monkeypatch.setattr("trainer.workflows.evaluate.evaluate_lengths", workflow)
    monkeypatch.setattr("trainer.workflows.analyze.analyze", workflow)
    monkeypatch.setattr("trainer.report.terminal.print_report", lambda *_: None)
    main(["evaluate", str(tmp_path), "+evaluation=ruler"])
    main(["analyze", str(tmp_path), "+analysis=sinks"])
    assert named == [(str(tmp_path), "ruler"), (str(tmp_path), "sinks")]


def test_models_to_compare_are_there_before_anything_is_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("trainer.workflows.evaluate.evaluate_lengths", None)
    (line,) = error_of(capsys, "evaluate", str(tmp_path), f"compare=[{tmp_path}/no]")
    assert line.startswith(f"checkpoint: '{tmp_path}/no' is no directory")


@pytest.mark.parametrize(("architecture", "is_ours"), [("Llama", False), (OWN, True)])
def test_the_line_after_an_export_loads_it(capsys, monkeypatch, tmp_path, architecture, is_ours):
    monkeypatch.setattr("trainer.workflows.export.export_checkpoint", lambda _: architecture)
    main(["export", str(tmp_path), f"to={tmp_path / 'new'}"])
    assert ("trust_remote_code=True" in capsys.readouterr().out) is is_ours


@pytest.mark.parametrize(("strategy", "gpus"), [("single", 1), ("ddp", 4)])
def test_a_plan_is_for_the_gpus_of_its_strategy(capsys, strategy, gpus):
    main(["plan", "gpus=4", f"strategy={strategy}"])
    assert f"Memory of each of {gpus} GPUs" in capsys.readouterr().out


def test_a_sweep_of_runs_is_compared_and_a_run_alone_is_not(monkeypatch):
    compared = []
    monkeypatch.setattr(commands, "compare", lambda job: compared.append(job.values))
    sweep = commands.Sweep([])
    sweep.outcomes = {0: "ran", 1: "ran"}
    for sweep.runs in (["a"], ["a", "b"]):
        sweep.show()
    assert compared == [{"runs": ["a", "b"], "output": "runs/sweep"}]


def test_only_a_command_that_resumes_says_so(monkeypatch, capsys):
    def stop(_):
        raise PreemptedError("Stopped.", "SIGTERM")

    for name, says in (("generate", False), ("prepare", True)):
        monkeypatch.setitem(COMMANDS, name, stop)
        with pytest.raises(SystemExit):
            main([name, "x"] if name == "generate" else [name])
        assert ("resumes" in capsys.readouterr().err) is says


def test_a_command_leaves_hydra_s_setting_as_it_was(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setitem(COMMANDS, "train", lambda job: None)
    main(["name=one"])
    assert os.environ["HYDRA_FULL_ERROR"] == "0"


@pytest.mark.parametrize(
    ("words", "source", "run_dir", "begun"),
    [
        (["owner/Llama-1B"], "from_pretrained", "runs/Llama-1B-drope", False),
        (["runs/old one"], "from_run", "runs/old-one-drope", False),
        (["runs/old one", "name=mine"], "from_run", "runs/mine", True),
        (["runs/old one", "name=mine", "overwrite=true"], "from_run", "runs/mine", False),
        (["runs/old one", "run_dir=runs/mine"], "from_run", "runs/mine", True),
    ],
)
def test_recalibrate_begins_with_its_model_where_it_is_asked_to(
    monkeypatch, tmp_path, words, source, run_dir, begun
):
    monkeypatch.chdir(tmp_path)
    for place in ("runs/old one", "runs/mine"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").touch()
    (tmp_path / "a.txt").write_text("Words.")
    asked = []

    def chosen_keys(*given):
        asked.extend(given)
        return {"optimizer.lr": 0.5}

    monkeypatch.setattr("trainer.workflows.recalibrate.chosen_keys", chosen_keys)
    job = compose_words([*words, "text=a.txt", "minutes=3", "optimizer.name=muon"], "recalibrate")
    _, chosen = commands.choose_keys(job, 7.0)
    record = Path(run_dir, "config.yaml") if begun else None
    assert asked == [words[0], 3.0, {"optimizer.name": "muon"}, 7.0, record]
    assert (job.values["model"][source], job.values["run_dir"]) == (words[0], run_dir)
    assert job.values["optimizer"]["lr"] == chosen["optimizer.lr"] == 0.5
    assert job.values["data"]["files"] == ["a.txt"]
