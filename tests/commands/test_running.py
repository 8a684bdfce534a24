"""The one path of all commands: help, what was composed, several jobs, options."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from trainer.__main__ import main
from trainer.commands import COMMANDS, analyze, evaluate, export, train
from trainer.commands.hydra import jobs as hydra_main
from trainer.commands.hydra.files import ConfigFiles
from trainer.commands.hydra.running import run_command
from trainer.common.errors import UserError
from trainer.positional import encodings
from trainer.runs.config import RunConfig

MODULES = {name: importlib.import_module(f"trainer.commands.{name}") for name in COMMANDS}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def done(monkeypatch):
    """Evaluations and exports as they would be made."""
    made = []
    for module in (analyze, evaluate, export, train):
        command = module.COMMAND
        monkeypatch.setattr(module, "COMMAND", replace(command, execute=made.append))
    return made


def refused(name, *words):
    with pytest.raises(UserError) as error:
        run_command(MODULES[name].COMMAND, list(words))
    return tuple(map(str, error.value.problems))


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_lines_about_words_keys_and_options(name, word, capsys, place):
    run_command(MODULES[name].COMMAND, [word])
    said = capsys.readouterr().out
    assert all(f in said for f in ("python -m trainer", "Keys (KEY=VALUE)", "--cfg job"))
    assert max(map(len, said.splitlines())) <= 100
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "--help"], "  evaluation.windows=96"),
        (["evaluate", "+evaluation=niah", "--help"], "  evaluation.lengths=[1, 2]     Lengths in"),
        (["analyze", "--help"], "  sinks                         Attention on the first token"),
        (["generate", "--help"], "  top_p=1.0                     Draw from the likeliest"),
        (["slurm", "--help"], "  slurm.gpus_per_node=null      GPUs and workers of a node"),
        (["slurm", "--help"], "  --submit                      hand the scripts to sbatch"),
        (["--help"], "  positional: alibi, gemma3, half_rope"),
        (
            ["--help"],
            "  encoding_zoo_demo             Every encoding, the same model, text and number",
        ),
        (["help"], "  run_dir=runs/${name}          Directory of the run; the same"),
        (["help", "evaluate"], "  evaluation.windows=96"),
        (["help", "slurm", "prepare"], "  slurm.prepare=0"),
        (
            ["optimizer=muon", "--help"],
            "  optimizer.lr=3e-3             Learning rate of AdamW, times",
        ),
        (["prepare", "positional=nope", "--help"], "  positional.layers=[nope]      "),
        (["+experiment=drope_demo", "--help"], "  drop.at=0.75                  RoPE retrieves"),
        (["+experiment=drope_demo", "--help"], "  controls.nope.positional.layers=[nope]\n"),
    ],
)
def test_help_describes_keys_as_their_files_do(words, said, capsys):
    main(words)
    assert said in capsys.readouterr().out


def test_help_shows_options_of_ones_own(place, capsys):
    (place / "my/evaluation").mkdir(parents=True)
    text = "# Mine alone.\ndefaults: [ruler, _self_]\nwindows: 3   # few\n"
    (place / "my/evaluation/mine.yaml").write_text(text)
    main(["evaluate", "--config-dir", "my", "evaluation=mine", "--help"])
    said = capsys.readouterr().out
    assert "  mine                          Mine alone." in said
    assert "  evaluation.windows=3          few" in said
    assert "  evaluation.tasks=[ruler]" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluate", "+evaluation=niah", "checkpoint=x"], ["kind: lengths", "checkpoint: x"]),
        (["analyze", "analysis=sinks"], ["kind: sinks", "checkpoint: null"]),
        (["generate", "seed=4"], ["seed: 4", "max_new_tokens: 128"]),
        (["export", "to=out"], ["to: out"]),
        (["drill", "seed=7"], ["seed: 7", "hidden_size: 64"]),
        (["slurm", "slurm.nodes=3"], ["nodes: 3", "hidden_size: 64"]),
        (["slurm", "slurm.nodes=3", "--package", "slurm"], ["# @package slurm", "nodes: 3"]),
    ],
)
def test_cfg_job_prints_the_values(words, said, capsys, place):
    main([*words, "--cfg", "job"])
    out = capsys.readouterr().out
    assert all(f"{line}\n" in out for line in said)
    assert ("--package" in words) == ("hidden_size" not in out and "checkpoint" not in out)
    assert not list(place.iterdir())


@pytest.mark.parametrize("name", COMMANDS)
def test_words_are_checked_before_values_are_shown(name):
    found = refused(name, "sede=1", "--cfg", "job")
    assert any("sede: unknown key" in problem for problem in found)


def choices(schema, path=""):
    """Every key below a dataclass that takes one of some words, with these."""
    for name, kind in get_type_hints(schema).items():
        where = f"{path}.{name}" if path else name
        if get_origin(kind) is Literal:
            yield where, get_args(kind)
        elif is_dataclass(kind):
            yield from choices(kind, where)


def test_help_names_the_words_that_a_key_takes(capsys):
    defaults = ConfigFiles().default_groups("config")
    main([*(f"{group}={option}" for group, option in defaults.items()), "--help"])
    entries = re.split(r"\n  (?=[a-z_.]+=)", capsys.readouterr().out)
    said = dict(entry.split("=", 1) for entry in entries[1:])
    known = dict(choices(RunConfig))
    assert len(known) > 20
    for key, words in known.items():
        assert [word for word in words if word not in said[key].split("\n\n")[0]] == [], key


def test_without_a_word_nothing_is_trained(capsys, place):
    with pytest.raises(SystemExit) as stop:
        main([])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert (
        said
        == """\
error: name an experiment, or say what a run of your own is:
  python -m trainer +experiment=drope_demo  RoPE, its drop and two controls: minutes on two cores
  python -m trainer name=run                the defaults alone, in runs/run, without a drop:
        rope, 3 layers of width 64, 1,000 steps of 32 x 64 tokens of stdlib_docs
  python -m trainer --help                  experiments, commands, groups and keys
"""
    )
    assert not list(place.iterdir())


@pytest.mark.parametrize("words", [["--version"], ["evaluate", "--version"]])
def test_version(words, capsys):
    main(words)
    assert capsys.readouterr().out == "unrope 0.2.0\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--multrun"], "unknown flag '--multrun'. Did you mean '--multirun'?"),
        (["--config-dir"], "--config-dir: expected one argument."),
        (["--cfg", "jobs"], "--cfg: invalid choice: 'jobs'"),
        (["--package", "model"], "--package, --resolve: only with --cfg job."),
        (["--multirun", "--cfg", "job"], "--multirun: it cannot be joined with --cfg."),
    ],
)
def test_a_wrong_option_is_one_sentence(words, said):
    (problem,) = refused("train", *words)
    assert said in problem


@pytest.mark.parametrize("name", ["generate", "drill", "slurm"])
def test_commands_of_one_job_refuse_several(name):
    (problem,) = refused(name, "--multirun", "seed=0,1")
    assert problem.startswith("--multirun: ")


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@pytest.mark.parametrize("name", ["analyze", "drill", "export", "generate"])
def test_commands_that_share_no_work_refuse_several_processes(name, launcher, monkeypatch):
    """Each would read all, and write the same files."""
    given = {"torchrun": {"RANK": "3", "WORLD_SIZE": "8"}, "srun": {"SLURM_STEP_NUM_TASKS": "8"}}
    for variable, value in given[launcher].items():
        monkeypatch.setenv(variable, value)
    (problem,) = refused(name)
    assert problem == "this command uses one process, and 8 were started; start one."


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_a_sweep_refuses_several_processes(name, monkeypatch):
    """The second job could not form a process group on torchrun's store."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (problem,) = refused(name, "--multirun", "seed=0,1", "name=a_${seed}")
    assert problem == (
        "--multirun: it starts all jobs from one process, and 2 were started; start torchrun for "
        "each job, or an array of jobs (slurm/array.sbatch)."
    )


def test_multirun_starts_a_job_for_every_choice(done, place):
    words = ["checkpoint=x", "+evaluation=niah,ruler", "threads=1,2"]
    run_command(evaluate.COMMAND, ["--multirun", *words])
    assert [(job.name, job.request.threads) for job in done] == [
        ("niah", 1), ("niah", 2), ("ruler", 1), ("ruler", 2),
    ]  # fmt: skip
    assert done[0].request.evaluation.tasks != done[2].request.evaluation.tasks
    assert [path.name for path in place.iterdir()] == ["multirun"]


def test_multirun_takes_groups_of_ones_own(done, place):
    (place / "my conf/model").mkdir(parents=True)
    (place / "my conf/model/mine.yaml").write_text("defaults: [nano, _self_]\nhidden_size: 96\n")
    run_command(
        train.COMMAND,
        ["--config-dir", "my conf", "-m", "model=nano,mine", "name=m${model.hidden_size}"],
    )
    assert [job.request.run_dir for job in done] == ["runs/m64", "runs/m96"]


def test_multirun_takes_the_options_that_a_pattern_matches(done):
    words = ["positional=glob([rope*,nope],exclude=rope_id)", "name=${positional.name}"]
    run_command(train.COMMAND, ["--multirun", *words])
    assert [job.request.name for job in done] == ["nope", "rope"]
    (problem,) = refused("train", "--multirun", "model=glob(huge*)")
    assert problem.startswith("model=glob(huge*): no option matches. Choose from: drope_494m, ")


def test_multirun_refuses_values_that_its_sweeper_cannot_draw(done):
    (problem,) = refused("train", "--multirun", "optimizer.lr=interval(0,1)")
    assert problem == (
        "optimizer.lr=interval(0,1): Hydra's basic sweeper draws no values; list them, as in "
        "optimizer.lr=1,2, or choose a sweeper that does, such as hydra/sweeper=optuna."
    )
    assert not done


def test_multirun_checks_all_jobs_before_the_first(done, place):
    words = ["to=${threads}${dtype}", "checkpoint=x", "threads=1,0,-1", "dtype=float32,float3"]
    found = refused("export", "--multirun", *words)
    assert len(found) == 3
    assert any("threads: expected 1 or more, got 0" in problem for problem in found)
    assert any("threads: expected 1 or more, got -1" in problem for problem in found)
    assert any("Did you mean 'float32'" in problem for problem in found)
    assert not done
    assert not list(place.iterdir())


def test_multirun_chooses_in_a_group_without_a_default(done):
    run_command(analyze.COMMAND, ["--multirun", "checkpoint=x", "+analysis=sinks,drop"])
    assert [(job.name, job.request.analysis.kind) for job in done] == [
        ("sinks", "sinks"),
        ("drop", "drop"),
    ]


def test_two_jobs_do_not_write_one_directory(done):
    (problem,) = refused("train", "--multirun", "seed=0,1,2", "name=a")
    assert problem.startswith("--multirun: several jobs would write 'runs/a'; let its name hold")
    run_command(train.COMMAND, ["--multirun", "seed=0,1", "name=a_${seed}"])
    assert [job.request.seed for job in done] == [0, 1]
    # By which settings are told of that do nothing, as in a single run.
    assert [job.words[0] for job in done] == ["seed=0", "seed=1"]


def test_multirun_names_a_launcher_that_is_not_there(done, place):
    words = ["to=a", "checkpoint=x", "hydra/launcher=submitit_slum"]
    (problem,) = refused("export", "--multirun", *words)
    assert "Could not find 'hydra/launcher/submitit_slum'" in problem
    assert "\n" not in problem
    assert not list(place.iterdir())


def test_help_and_requests_need_neither_torch_nor_lightning():
    modules = [f"trainer.commands.{name}" for name in COMMANDS]
    modules += ["trainer.workflows.requests", "trainer.workflows.watch"]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_commands_start_without_numpy():
    """A quarter of a second of every --help."""
    modules = ", ".join(f"trainer.commands.{name}" for name in COMMANDS)
    code = f"import sys, {modules}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("tokens", "gpu", "told"),
    [(10**9 + 1, False, True), (10**9, False, False), (10**10, True, False)],
)
def test_who_lacks_published_weights_hears_what_else_is_missing_and_what_shows_the_same(
    capsys, place, monkeypatch, tokens, gpu, told
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as stop:
        main(["+experiment=drope_smollm", f"trainer.max_tokens={tokens}"])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()
    begins = ["model.from_pretrained: the weights 'HuggingFaceTB/SmolLM-360M' are not on", "data: "]
    begins.insert(1, "experiment: on any machine +experiment=drope_smollm2_135m_local drops")
    begins[1:1] = [f"trainer.max_tokens: {tokens:,} tokens take GPUs, and torch"] if told else []
    assert [line[: len(start) + 7] for line, start in zip(said, begins, strict=True)] == [
        f"error: {start}" for start in begins
    ]


def test_an_evaluation_that_no_run_ends_with_hides_no_other_mistake(capsys, place):
    with pytest.raises(SystemExit) as stop:
        main(["+evaluation=multiple_choice", "optimizer.lr=-1", "name=a/b"])
    assert stop.value.code == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith(
        "'multiple_choice' is for the evaluate command, not for the end of a run."
    )
    assert sorted(line.split(":")[1].strip() for line in others) == ["name", "optimizer.lr"]


class BegunError(Exception):
    """The work would have begun."""


WORK = {
    "analyze": ("analyze.analyze", logging.INFO),
    "train": ("experiment.run_experiment", logging.INFO),
    "drill": ("drill.drill", logging.CRITICAL),
    "evaluate": ("evaluate.evaluate_lengths", logging.INFO),
    "export": ("export.export_checkpoint", logging.INFO),
    "inspect": ("inspect_step.inspect_step", logging.INFO),
    "plan": ("plan.plan", logging.ERROR),
    "prepare": ("prepare.prepare", logging.INFO),
}
NEEDED = {
    "analyze": ["checkpoint=x", "+analysis=all"],
    "evaluate": ["checkpoint=x"],
    "export": ["checkpoint=x", "to=out"],
    "inspect": ["checkpoint=x", "step=1"],
}


@pytest.mark.parametrize("name", WORK)
def test_what_the_program_tells_of_its_work_is_shown_while_it_works(name, monkeypatch, place):
    """But by those that print all they find."""
    logger = logging.getLogger("trainer")

    def work(*_):
        seen.append((logger.level, len(logger.handlers)))
        raise BegunError

    seen = []
    (place / "x").mkdir()
    work_of, level = WORK[name]
    monkeypatch.setattr(f"trainer.workflows.{work_of}", work)
    with pytest.raises(BegunError):
        run_command(MODULES[name].COMMAND, NEEDED.get(name, ["seed=1"]))
    assert seen == [(level, 1)]


@pytest.mark.parametrize("outcome", [None, ("a report", True), ("a report", False)])
def test_a_run_is_reported_on_its_first_rank_alone(monkeypatch, outcome):
    printed = []
    monkeypatch.setattr("trainer.workflows.experiment.run_experiment", lambda config: outcome)
    monkeypatch.setattr("trainer.commands.console.print_report", lambda *told: printed.append(told))
    run_command(train.COMMAND, ["name=mine"])
    assert printed == ([] if outcome is None else [(outcome[0], "runs/mine", outcome[1])])


@pytest.mark.parametrize(("jobs", "compared"), [("seed=0", 0), ("seed=0,1", 1), ("seed=0,1,2", 1)])
def test_runs_of_a_sweep_are_compared_where_there_are_several(monkeypatch, jobs, compared):
    places = []
    command = replace(train.COMMAND, execute=lambda named: None, together=places.append)
    monkeypatch.setattr(train, "COMMAND", command)
    run_command(command, ["--multirun", jobs, "name=a_${seed}"])
    assert len(places) == compared


@pytest.mark.parametrize("name", ["evaluate", "analyze", "export"])
def test_the_other_jobs_start_after_a_job_with_a_mistake(name, monkeypatch):
    """The threads tell the jobs apart; the exit code is the failed job's."""
    begun = []

    def fail_first(named):
        begun.append(named)
        if len(begun) == 1:
            raise UserError.at("checkpoint", "the run has none.")

    command = replace(MODULES[name].COMMAND, execute=fail_first)
    words = {
        "evaluate": ["checkpoint=x", "+evaluation=niah", "threads=1,2"],
        "analyze": ["checkpoint=x", "+analysis=sinks,drop"],
        "export": ["checkpoint=x", "to=a,b"],
    }
    with pytest.raises(SystemExit) as stop:
        run_command(command, ["--multirun", *words[name]])
    assert stop.value.code == 2
    assert len(begun) == 2


def test_a_sweep_with_a_failed_job_is_compared_under_its_own_command(monkeypatch):
    words = ["--multirun", "seed=0,1", "name=a_${seed}"]
    monkeypatch.setattr("sys.argv", ["trainer/__main__.py", "train", *words])
    seen = []

    def fail(named):
        raise RuntimeError("a GPU was lost")

    command = replace(train.COMMAND, execute=fail, together=lambda _: seen.append([*sys.argv]))
    with pytest.raises(SystemExit) as stop:
        run_command(command, words)
    assert stop.value.code == 1
    assert seen == [["trainer/__main__.py", "train", *words]]


@pytest.mark.parametrize(
    ("outputs", "settings"),
    [
        (
            {"a": ["model=nano", "seed=0", "name=a"], "b": ["model=nano", "seed=1", "name=b"]},
            [{"seed": "0"}, {"seed": "1"}],
        ),
        (
            {"a": ["+x=1", "run_dir=a"], "b": ["+x=1", "run_dir=b"]},
            [{"run_dir": "a"}, {"run_dir": "b"}],
        ),
    ],
)
def test_a_run_of_a_sweep_is_known_by_the_words_that_differ(outputs, settings):
    assert [(one.run_dir, one.settings) for one in hydra_main._swept(outputs)] == list(
        zip("ab", settings, strict=True)
    )


ENCODING = """
from trainer.positional.encodings import encoding
from trainer.positional.spectrum import Spectrum

@encoding
def my_turns(head_dim, training_length, *, turns=8.0):
    return Spectrum((turns / training_length,) * (head_dim // 2))
"""


@pytest.fixture
def plugin(place):
    (place / "my.py").write_text(ENCODING)
    yield "plugins=[my.py]"
    encodings.ENCODINGS.pop("my_turns", None)


def test_an_encoding_of_a_plugin_is_an_option_also_of_a_sweep(done, plugin):
    words = ["positional=rope,my_turns,irope", plugin, "name=zoo_${positional.name}"]
    run_command(train.COMMAND, ["--multirun", *words])
    assert [job.request.name for job in done] == ["zoo_rope", "zoo_my_turns", "zoo_irope"]
    assert done[1].request.positional.layers == ["my_turns"]
    done.clear()
    turned = "positional.encodings.my_turns.turns=2"
    run_command(train.COMMAND, ["positional=my_turns", plugin, turned, "name=own"])
    assert done[0].request.positional.encodings == {"my_turns": {"turns": 2}}
    (problem,) = refused("train", "positional=my_turn", plugin, "name=a")
    assert problem == "positional: there is no positional 'my_turn'. Did you mean 'my_turns'?"
    (problem,) = refused(
        "train", "--multirun", "positional=rope,my_turns", "plugins=[no.py]", "name=a"
    )
    assert problem == "plugins: there is no file 'no.py'."


@pytest.mark.parametrize("name", ["train", "plan", "slurm"])
def test_help_lists_what_plugins_add(plugin, name, capsys):
    run_command(MODULES[name].COMMAND, ["--help", plugin])
    text = capsys.readouterr().out
    assert "llama4, my_turns" in " ".join(text.split())
    assert "Values that plugins add:\n  positional: my_turns\n" in text
    run_command(MODULES[name].COMMAND, ["--help", plugin, "positional=my_turns"])
    assert "  positional.encodings.my_turns.turns=8.0\n" in capsys.readouterr().out
    run_command(MODULES[name].COMMAND, ["--help"])
    assert "my_turns" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("plugins=[no.py]", "plugins: there is no file 'no.py'."),
        (
            "plugins=no.py",
            "plugins: expected a list in brackets, got 'no.py'. To give this one alone: "
            "'plugins=[no.py]'.",
        ),
    ],
)
def test_help_refuses_a_plugin_that_cannot_be_loaded(word, message):
    assert refused("plan", "--help", word) == (message,)
    assert refused("evaluate", "help", word) == (message,)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["positional=rope,alibi", "name=a_${positional}"],
            "name: ${positional} is a group of keys; write 'name=a_${positional.name}'.",
        ),
        (
            ["seed=0,1", "name=a_${positional.layers}"],
            "name: ${positional.layers} is a list; write 'name=a_${positional.layers[0]}'.",
        ),
        (
            ["positional=rope,alibi", "seed=0,1", "name=zoo"],
            "--multirun: several jobs would write 'runs/zoo'; let its name hold what differs, for "
            "instance 'name=zoo_${positional.name}_${seed}'.",
        ),
        (
            ["seed=0,1", "name=zoo", "run_dir=/x/r"],
            "--multirun: several jobs would write '/x/r'; let its name hold what differs, for "
            "instance 'run_dir=/x/r_${seed}'.",
        ),
        (
            ["seed=0,1", "+experiment=fixed", "--config-dir", "mine"],
            "--multirun: several jobs would write 'runs/zoo'; let its name hold what differs, for "
            "instance 'run_dir=runs/zoo_${seed}'.",
        ),
        (
            ["seed=0,1", "+experiment=following", "--config-dir", "mine"],
            "--multirun: several jobs would write '/x/zoo'; let its name hold what differs, for "
            "instance 'name=zoo_${seed}'.",
        ),
        (
            ["+experiment=fixed,following", "--config-dir", "mine", "run_dir=/x/r"],
            "--multirun: several jobs would write '/x/r'; let its name hold what differs.",
        ),
    ],
)
def test_a_sweep_says_how_its_runs_are_named(done, place, words, said):
    (place / "mine/experiment").mkdir(parents=True)
    for name, run_dir in (("fixed", "runs/zoo"), ("following", "/x/${name}")):
        text = f"# @package _global_\nname: zoo\nrun_dir: {run_dir}\n"
        (place / f"mine/experiment/{name}.yaml").write_text(text)
    assert refused("train", "--multirun", *words) == (said,)


def test_a_sweep_of_exports_is_told_to_vary_their_directory(done):
    words = ["checkpoint=x", "to=runs/x", "dtype=float32,bfloat16"]
    (problem,) = refused("export", "--multirun", *words)
    assert problem.endswith("for instance 'to=runs/x_${dtype}'.")


def test_a_group_with_a_name_of_its_own_keeps_it(done):
    run_command(
        train.COMMAND, ["strategy=ddp", "optimizer=muon", "name=${strategy.name}_${optimizer.name}"]
    )
    assert done[0].request.name == "ddp_muon"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("evaluate", []),
        ("export", ["to=out"]),
        ("analyze", ["+analysis=sinks"]),
        ("generate", ["prompt=a b", "stop=[c]"]),
        ("inspect", ["step=2"]),
    ],
)
def test_a_word_alone_is_the_checkpoint(name, words):
    requests = []
    command = replace(MODULES[name].COMMAND, execute=requests.append)
    for path in ("runs/x", "runs/it's [a] (b), c", "hf:x", "a b.gguf"):
        run_command(command, [*words, path])
        assert getattr(requests[-1], "request", requests[-1]).checkpoint == path


def test_an_existing_path_with_an_equals_sign_is_a_path(done, place):
    Path("runs/lr=0.1").mkdir(parents=True)
    run_command(MODULES["evaluate"].COMMAND, ["runs/lr=0.1"])
    assert done[-1].request.checkpoint == "runs/lr=0.1"
    assert "runs/lr: unknown key" in str(refused("evaluate", "runs/lr=0.2"))


@pytest.mark.parametrize("name", ["evaluate", "export", "analyze", "generate", "inspect"])
def test_a_second_word_alone_is_refused(name):
    said = "'runs/b': expected KEY=VALUE, since checkpoint=runs/a is given already."
    meant = " A prompt is given as prompt=runs/b." if name == "generate" else ""
    assert f"{said}{meant}" in refused(name, "runs/a", "runs/b")
    assert f"{said}{meant}" in refused(name, "checkpoint=runs/a", "runs/b")


def test_a_text_behind_a_checkpoint_is_one_mistake_with_its_remedy():
    """The prompt is not said to be missing as well."""
    (said,) = refused("generate", "runs/a", "Once upon")
    assert said == (
        "'Once upon': expected KEY=VALUE, since checkpoint=runs/a is given already. A prompt is "
        "given as 'prompt=Once upon'."
    )


def test_a_dry_run_is_a_plan():
    (problem,) = refused("train", "+experiment=drope_demo", "data.files=[a b.txt]", "--dry-run")[:1]
    assert problem == (
        "--dry-run: to see what a run needs without starting it: python -m trainer plan "
        "+experiment=drope_demo 'data.files=[a b.txt]'"
    )


def test_lengths_are_given_in_tokens_or_in_multiples():
    gives = "evaluation.tokens=[64] gives the lengths already"
    said = f"evaluation.lengths: {gives}; leave out one of them."
    words = ["evaluation.lengths=[1]", "evaluation.tokens=[64]"]
    assert refused("evaluate", "runs/x", *words) == (said,)
    assert refused("train", "name=a", *words) == (said,)
    assert refused("train", "name=a", "evaluation.tokens=[1]") != (said,)


def test_files_that_are_not_there_are_missed_before_torch(place):
    (place / "text.txt").write_text("text")
    code = (
        "import sys; from trainer.__main__ import main\n"
        "try: main(['data=files', 'data.files=[texd.txt,text.txt,c*.txt]', 'name=a'])\n"
        "finally: print('torch' in sys.modules)"
    )
    run = [sys.executable, "-c", code]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    said = "error: data.files: there is no file 'texd.txt'. Did you mean 'text.txt'?\n"
    assert ended.stderr == said
    assert ended.stdout == "False\n"


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "runs/nope"],
        ["analyze", "runs/nope", "+analysis=all"],
        ["generate", "runs/nope", "prompt=a"],
        ["inspect", "runs/nope"],
        ["export", "runs/nope", "to=x"],
        ["compare", "runs/nope"],
        ["watch", "runs/nope"],
        ["model.from_run=runs/nope", "name=a"],
    ],
)
def test_a_run_that_does_not_exist_is_missed_before_torch(place, words):
    (place / "runs/nose").mkdir(parents=True)
    code = (
        "import sys; from trainer.__main__ import main\n"
        f"try: main({words})\n"
        "finally: print('torch' in sys.modules)"
    )
    run = [sys.executable, "-c", code]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.stderr.endswith(f" Looked in {str(place / 'runs')!r}. Did you mean 'runs/nose'?\n")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == "False\n"


def test_models_to_compare_with_are_missed_with_the_first():
    assert [
        problem.partition(" is")[0]
        for problem in refused("evaluate", "a", "compare=[b,c.gguf,hf:y]")
    ] == ["checkpoint: 'a'", "compare: 'b'"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("drope_demo", "unknown command 'drope_demo'. Did you mean +experiment="),
        ("drop_demo", "unknown command 'drop_demo'. Did you mean +experiment=drope_demo?"),
        ("my_zo", "unknown command 'my_zo'. Did you mean +experiment=my_zoo?"),
        ("evalute", "unknown command 'evalute'. Did you mean 'evaluate'? The commands:\n  train "),
    ],
)
def test_an_experiment_in_the_place_of_a_command_is_recognised(place, capsys, word, message):
    (place / "mine/experiment").mkdir(parents=True)
    (place / "mine/experiment/my_zoo.yaml").write_text("# @package _global_\nname: zoo\n")
    with pytest.raises(SystemExit) as stop:
        main([word, "--config-dir", "mine"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_the_commands_in_help_and_messages_stand_in_two_columns(capsys):
    run_command(train.COMMAND, ["--help"])
    rows = re.findall(r"^(python -m trainer .*?\S {2,})\S", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == len(COMMANDS) + 1
    assert len({*map(len, rows)}) == 1
    with pytest.raises(SystemExit):
        main(["unknown"])
    rows = re.findall(r"^  (\w+ +)", capsys.readouterr().err, re.MULTILINE)
    assert len(rows) == len(COMMANDS)
    assert len({*map(len, rows)}) == 1


def test_a_key_that_a_command_takes_by_itself_is_suggested():
    assert "promt: unknown key. Did you mean 'prompt'?" in refused("generate", "x", "promt=a")
    assert "promps: unknown key. Did you mean 'prompts'?" in refused("generate", "x", "promps=a")
    assert "promt: unknown key. Choose" in " ".join(refused("inspect", "x", "promt=a"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--max-steps=3", "unknown flag '--max-steps=3'. A key has no dashes: max_steps=3."),
        ("--prompt", "unknown flag '--prompt'. A key has no dashes: prompt=VALUE."),
        ("--config-di=x", "unknown flag '--config-di=x'. Did you mean '--config-dir'?"),
    ],
)
def test_a_key_that_is_written_as_a_flag_gets_its_spelling(word, message):
    assert message in refused("generate", "runs/x", "prompt=a", word)


def test_files_that_the_source_does_not_read_are_refused(done, place):
    (place / "a.txt").write_text("text")
    files = "data.files=[a.txt]"
    message = "data.files: data.source=stdlib_docs reads no files; write data=files as well."
    assert refused("train", files, "name=a") == (message,)
    assert refused("plan", files) == (message,)
    assert refused("prepare", files) == (message,)
    run_command(train.COMMAND, [files, "data=files", "name=a"])
    run_command(train.COMMAND, ["data.files=[]", "name=a"])
    assert len(done) == 2
