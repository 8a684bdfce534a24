"""A run as a SLURM job: the script, the words in it, the code it keeps, and what sbatch is told."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from trainer.commands import sbatch as snapshots
from trainer.commands.hydra.running import run_command
from trainer.commands.slurm import COMMAND
from trainer.common.errors import Problem, UserError
from trainer.workflows import plan

SLURM = Path(__file__).parents[2] / "slurm"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Where plans need no rehearsal of a step, which takes seconds."""
    monkeypatch.setattr(plan, "step_memory", lambda *_: {"parameters": 1 << 30})
    monkeypatch.chdir(tmp_path)
    return tmp_path


ONE = "slurm.gpus_per_node=1"
TWO = "slurm.nodes=2", "strategy=ddp", "trainer.batch_size=8"
ODD = "+controls.odd.label=Odd"


def script(*words, name="run"):
    run_command(COMMAND, [ONE, *words])
    return Path(f"slurm_jobs/{name}/job.sbatch").read_text()


def options(text):
    """The words of the header, split as a shell splits them, which is how sbatch does it."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]


def problems(*words):
    with pytest.raises(UserError) as error:
        run_command(COMMAND, list(words))
    assert not Path("slurm_jobs").exists()
    return tuple(map(str, error.value.problems))


def fake_sbatch(place, monkeypatch, body):
    program = place / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def test_header_holds_the_settings_and_nothing_that_was_not_set(place):
    text = script(
        "name=mine", "strategy=ddp", "slurm.nodes=4", "slurm.gpus_per_node=2", "slurm.time=90",
        "slurm.mem=64G", 'slurm.exclude="n[1-3]"', "slurm.signal_seconds=300",
        "slurm.cpus_per_task=16", 'slurm.extra=["--reservation=a"]', name="mine",
    )  # fmt: skip
    assert options(text) == [
        "--job-name=mine", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=2",
        "--cpus-per-task=16", "--mem=64G", "--time=90", "--exclude=n[1-3]", f"--chdir={place}",
        "--signal=USR1@300", "--open-mode=append",
        f"--output={place}/slurm_jobs/mine/logs/%x-%j.log", "--requeue", "--reservation=a",
    ]  # fmt: skip
    assert (place / "slurm_jobs/mine/logs").is_dir()


def test_jobs_that_prepare_text_have_only_the_settings_that_fit_nodes_without_gpus(place, capsys):
    shared = "--time=1:00:00", "--account=a"
    own = "slurm.partition=p", "slurm.qos=q", "slurm.constraint=c", "slurm.exclude=n1"
    words = [f"slurm.{option[2:]}" for option in shared]
    words += ["slurm.gpus_per_node=0", "slurm.nodes=2", "strategy=ddp", "slurm.prepare=2", *own]
    words += ["slurm.cpus_per_task=3", "slurm.mem=9G", "slurm.job_name=other"]
    words += ["slurm.directory=jobs", "slurm.extra=['--nice=5']"]
    run_command(COMMAND, [*words, "slurm.prepare_options=['--partition=cpu']"])
    assert capsys.readouterr().out.splitlines() == [
        "Each waits for the NUMBER that sbatch prints for the one before; --submit does all.",
        "Job script: jobs/prepare.sbatch",
        "Submit it with: sbatch --parsable jobs/prepare.sbatch",
        "Job script: jobs/finish.sbatch",
        "Submit it with: sbatch --parsable --dependency=afterany:NUMBER jobs/finish.sbatch",
        "Job script: jobs/job.sbatch",
        "Submit it with: sbatch --parsable --dependency=afterok:NUMBER --kill-on-invalid-dep=yes "
        "jobs/job.sbatch",
    ]
    job, *prepare = (
        {*options(Path(f"jobs/{name}.sbatch").read_text())} for name in ("job", "prepare", "finish")
    )
    common = {*shared, "--cpus-per-task=3", "--ntasks-per-node=1", f"--chdir={place}"}
    common |= {"--open-mode=append", "--requeue"}
    logs = f"--output={place}/jobs/logs"
    assert job == common | {f"--{word[6:]}" for word in own} | {
        *("--job-name=other", "--nodes=2", "--mem=9G", "--nice=5", "--signal=USR1@120"),
        f"{logs}/%x-%j.log",
    }
    common |= {"--nodes=1", "--partition=cpu", "--signal=B:USR1@120"}
    assert prepare == [
        common | {"--job-name=other-prepare", "--array=1-2", f"{logs}/%x-%A_%a.log"},
        common | {"--job-name=other-finish", f"{logs}/%x-%j.log"},
    ]
    saved = yaml.safe_load((place / "jobs/config.yaml").read_text())
    assert list(saved)[:2] == ["name", "label"]  # in the order of the configuration


def test_the_array_that_prepares_can_be_written_alone(place):
    from trainer.commands.slurm_prepare import COMMAND as ARRAY

    run_command(ARRAY, [ONE, "name=mine", "slurm.prepare=3"])
    assert "--array=1-3" in options(Path("slurm_jobs/mine/prepare.sbatch").read_text())


def test_the_array_alone_leaves_an_earlier_job_as_it_is():
    from trainer.commands.slurm_prepare import COMMAND as ARRAY

    def files():
        return {path.name: path.read_text() for path in Path("slurm_jobs/mine").glob("*.*")}

    script(*TWO, "name=mine", name="mine")
    earlier = files()
    run_command(ARRAY, [ONE, "name=mine", "seed=3"])
    array = {"prepare.sbatch", "finish.sbatch"}
    assert {name: text for name, text in files().items() if name not in array} == earlier
    assert array < files().keys()


@pytest.mark.parametrize(("gpus", "cores"), [(0, 8), (1, 8), (8, 64)])
def test_cores_are_asked_for_by_the_worker_unless_they_are_given(gpus, cores):
    job = "strategy=ddp", f"slurm.gpus_per_node={gpus}"
    words = options(script(*job))
    assert f"--cpus-per-task={cores}" in words
    assert (
        (f"--gpus-per-node={gpus}" in words) == any("gpu" in word for word in words) == (gpus > 0)
    )
    assert "--cpus-per-task=24" in options(script(*job, "slurm.cpus_per_task=24"))


@pytest.mark.parametrize(
    ("strategy", "batch", "nodes", "gpus"),
    [("single", 64, 1, 1), ("ddp", 64, 1, 8), ("ddp", 64, 4, 2), ("ddp", 12, 1, 1)],
)
def test_a_node_has_as_many_gpus_as_the_batch_can_be_dealt_out_to(strategy, batch, nodes, gpus):
    words = f"strategy={strategy}", f"trainer.batch_size={batch}", f"slurm.nodes={nodes}"
    words += ("trainer.micro_batch_size=8" if batch == 64 else "trainer.micro_batch_size=12",)
    assert f"--gpus-per-node={gpus}" in options(script("slurm.gpus_per_node=null", *words))


def test_a_job_knows_how_often_it_may_fail():
    assert " UNROPE_MAX_RETRIES=5\n" in script("slurm.max_retries=5")


def test_body_is_that_of_the_script_by_hand():
    by_hand = (SLURM / "train.sbatch").read_text()
    assert script().endswith(by_hand[by_hand.index("# How a run stops") :])


def test_words_reach_the_program_as_they_were_given():
    words = ["data=files", "data.files=['a b.txt','$HOME.txt']", 'label="it\'s"', "name=mine"]
    assert "\nset -- name=run\n" in script()
    text = script(*words, "slurm.time=60", name="mine")
    line = next(line for line in text.splitlines() if line.startswith("set -- "))
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]
    result = subprocess.run(
        ["bash", "-c", f'{line}\n{shlex.join(show)} "$@"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(words)


def test_setup_comes_first_and_chooses_the_python():
    assert f"UNROPE_PYTHON={sys.executable}" in script()
    text = script('slurm.setup=["module load cuda","source \'my env/bin/activate\'"]')
    assert "\nmodule load cuda\nsource 'my env/bin/activate'\nexport " in text
    assert "export UNROPE_PYTHON" not in text


@pytest.mark.parametrize("named", ["caches/of mine", None])
def test_job_finds_the_cache_that_was_used_here(place, monkeypatch, named):
    monkeypatch.delenv("UNROPE_CACHE", raising=False)
    if named:
        monkeypatch.setenv("UNROPE_CACHE", named)
    said = [line for line in script().splitlines() if "UNROPE_CACHE" in line]
    assert said == ([f"export UNROPE_CACHE='{place}/{named}'"] if named else [])


def test_configuration_is_written_beside_the_script(place):
    run_command(COMMAND, [ONE, "+experiment=drope_demo", "seed=3", "slurm.directory=jobs/x"])
    values = yaml.safe_load((place / "jobs/x/config.yaml").read_text())
    assert (values["seed"], values["name"]) == (3, "drope_demo")


def test_snapshot_runs_where_another_package_of_that_name_lies(place):
    text = script()
    (place / "trainer").mkdir()
    (place / "trainer/__init__.py").write_text("raise RuntimeError('the checkout was imported')")
    code = next((place / "slurm_jobs/run/code").iterdir())
    exports = [line for line in text.splitlines() if line.startswith("export PYTHON")]
    show = f"{sys.executable} -m trainer +experiment=drope_demo --cfg job"
    where = f"{sys.executable} -c 'import trainer; print(trainer.__file__)'"
    result = subprocess.run(
        ["bash", "-c", "\n".join([*exports, show, where])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "name: drope_demo" in result.stdout
    assert result.stdout.splitlines()[-1] == f"{code}/trainer/__init__.py"


def test_snapshot_is_shared_until_the_code_changes(place, monkeypatch):
    first = snapshots.snapshot(place / "code")
    assert snapshots.snapshot(place / "code") == first
    (place / "conf").mkdir()
    (place / "conf/config.yaml").write_text("other: 1")
    monkeypatch.setattr(snapshots, "config_directory", lambda: place / "conf")
    second = snapshots.snapshot(place / "code")
    assert second != first
    assert (second / "trainer/conf/config.yaml").read_text() == "other: 1"
    (place / "conf/config.yaml").write_text("other: 2")
    third = snapshots.snapshot(place / "code")
    assert (third / "trainer/conf/config.yaml").read_text() == "other: 2"
    (place / "conf/config.yaml").rename(place / "conf/other.yaml")
    fourth = snapshots.snapshot(place / "code")
    assert (fourth / "trainer/conf/other.yaml").is_file()
    assert sorted((place / "code").iterdir()) == sorted([first, second, third, fourth])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm.node=2"], ["slurm.node: unknown key. Did you mean 'nodes'?"]),
        (["slurm.nodes=two"], ["slurm.nodes: expected a whole number, got 'two'"]),
        (["slurm.nodes=2"], ["strategy: 'single' uses one worker, and the job starts 2"]),
        (
            ["slurm.nodes=2", "strategy=ddp", "trainer.batch_size=9"],
            ["trainer.batch_size: 9 sequences do not divide into micro-batches of 1 on 2 ranks"],
        ),
        (["slurm.nodes=0"], ["slurm.nodes: expected 1 or more, got 0."]),
        (["slurm.max_retries=-1"], ["slurm.max_retries: expected 0 or more, got -1."]),
        (["slurm.time=soon"], ["slurm.time: expected minutes"]),
        (["slurm.signal_seconds=0"], ["slurm.signal_seconds: expected 1 or more"]),
        (["slurm.extra=[debug]"], ["slurm.extra: expected options"]),
        (["slurm.setup=[a"], ["'slurm.setup=[a': not readable"]),
        (["overwrite=true"], ["overwrite: true would start again"]),
        (["callbacks=3"], ["callbacks"]),
        (
            ["+callbacks.mine={_target_: my_callbacks.Mine}"],
            ["callbacks.mine: a job does not look for 'my_callbacks' in the directory"],
        ),
        (  # in a later phase alone
            [*TWO, "+phases.a={steps: 2}", "+phases.b={steps: 2, batch_size: 9}"],
            ["trainer.batch_size: 9 sequences do not divide into micro-batches of 1 on 2 ranks"],
        ),
        (  # in a control alone
            [*TWO, ODD, "+controls.odd.trainer.batch_size=9"],
            ["controls.odd.trainer.batch_size: 9 sequences do not divide"],
        ),
        (  # in a phase of a control alone
            [*TWO, ODD, "+controls.odd.phases={a: {steps: 2}, b: {steps: 2, batch_size: 9}}"],
            ["controls.odd.trainer.batch_size: 9 sequences do not divide"],
        ),
        ([ODD, "+controls.odd.overwrite=true"], ["controls.odd.overwrite: true would start again"]),
        (
            [*TWO, ODD, "+controls.odd.strategy.name=single"],
            ["controls.odd.strategy: 'single', but the processes of the run are started for 'ddp'"],
        ),
        (["+controls.odd.seed=1"], ["controls.odd.label: 'RoPE' is what main is called too"]),
        (
            [ODD, "+controls.odd.tokenizer.vocab_size=999"],
            ["controls.odd.tokenizer: a control reads the tokens of its run"],
        ),
        (
            [ODD, "+controls.odd.callbacks.mine={_target_: my_callbacks.Mine}"],
            ["controls.odd.callbacks.mine: a job does not look for 'my_callbacks'"],
        ),
        (["--sumbit"], ["unknown flag '--sumbit'. Did you mean '--submit'?"]),
        (["sede=1", "slurm.nodes=0"], ["sede: unknown key. Did you mean 'seed'?", "slurm.nodes"]),
    ],
)
def test_mistakes_are_named_together_and_nothing_is_written(words, said):
    found = problems(ONE, *words)
    assert len(found) == len(said)
    assert all(part in problem for part, problem in zip(said, found, strict=True))


def test_submit_prints_the_number_of_the_job(place, monkeypatch, capsys):
    fake_sbatch(place, monkeypatch, 'echo "$@" > told; echo "123;cluster"')
    run_command(COMMAND, [ONE, "--submit"])
    assert "Submitted job 123." in capsys.readouterr().out
    assert (place / "told").read_text() == "--parsable slurm_jobs/run/job.sbatch\n"


def test_refusal_of_sbatch_is_one_sentence(place, monkeypatch):
    fake_sbatch(place, monkeypatch, "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(UserError, match=r"sbatch refused the job: .*invalid partition"):
        run_command(COMMAND, [ONE, "--submit"])


def test_without_sbatch_the_message_says_where_to_submit(place, monkeypatch):
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(UserError, match=r"sbatch cannot be run here.*login node"):
        run_command(COMMAND, [ONE, "--submit"])


def test_a_users_own_groups_go_with_the_code(place):
    (place / "mine/experiment").mkdir(parents=True)
    (place / "mine/slurm").mkdir()
    text = "# @package _global_\nname: mine\nseed: 5\n"
    (place / "mine/experiment/mine.yaml").write_text(text)
    (place / "mine/slurm/cluster.yaml").write_text("defaults: [default, _self_]\npartition: gpu\n")
    words = ["--config-dir", "mine", "+experiment=mine", "slurm=cluster"]
    text = script(*words, name="mine")
    assert "--partition=gpu" in options(text)
    assert "\nset -- +experiment=mine\n" in text
    jobs = place / "slurm_jobs/mine"
    assert yaml.safe_load((jobs / "config.yaml").read_text())["seed"] == 5
    (code,) = (jobs / "code").iterdir()
    assert (code / "trainer/conf/experiment/mine.yaml").is_file()


def test_text_is_prepared_by_an_array_that_the_run_waits_for(place, monkeypatch, capsys):
    fake_sbatch(place, monkeypatch, 'echo "$@" >> told; echo 77')
    script("name=mine", "slurm.prepare=5", "--submit", name="mine")
    assert Path("told").read_text().splitlines() == [
        "--parsable slurm_jobs/mine/prepare.sbatch",
        "--parsable --dependency=afterany:77 slurm_jobs/mine/finish.sbatch",
        "--parsable --dependency=afterok:77 --kill-on-invalid-dep=yes slurm_jobs/mine/job.sbatch",
    ]
    array, finish = (
        Path(f"slurm_jobs/mine/{name}.sbatch").read_text() for name in ("prepare", "finish")
    )
    assert '-m trainer prepare name=mine prepare.part="$SLURM_ARRAY_TASK_ID/5" &\n' in array
    assert "-m trainer prepare name=mine &\n" in finish


@pytest.mark.parametrize("code", [0, 2])
def test_a_job_that_prepares_asks_to_be_started_again_before_its_time_is_up(
    place, monkeypatch, code
):
    """The code is the program's; a signal only asks for the requeue, and the work goes on."""
    script("name=mine", "slurm.prepare=1", name="mine")
    text = Path("slurm_jobs/mine/prepare.sbatch").read_text()
    program = place / "python"
    program.write_text(f"#!/usr/bin/env bash\ntouch began; sleep 1; echo $* > ended; exit {code}\n")
    scontrol = place / "scontrol"
    scontrol.write_text('#!/usr/bin/env bash\necho "$@" > asked\n')
    for path in (program, scontrol):
        path.chmod(0o755)
    text = re.sub("export UNROPE_PYTHON=.*", f"export UNROPE_PYTHON={program}", text)
    environment = os.environ | {"PATH": f"{place}:{os.environ['PATH']}"}
    # SLURM gives one task the number of its whole array.
    environment |= {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    job = subprocess.Popen(["bash", "-c", text], env=environment)
    while not Path("began").exists():
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    assert job.wait() == code
    assert Path("asked").read_text() == "requeue 7_1\n"
    assert Path("ended").read_text().strip().endswith("prepare name=mine prepare.part=1/1")


def test_what_the_job_will_need_is_printed_with_it(capsys):
    run_command(COMMAND, ["slurm.nodes=2", "strategy=fsdp2", "slurm.gpu=a100", "model=nano"])
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "GPUs 16, strategy fsdp2" in out
    assert "in all 1.0 GiB of 80 GiB at the peak, uncompiled" in out
    assert "16 x A100-SXM4-80GB" in out
    assert "H100" not in out
    assert "CPU" not in out
    assert out.index("Time at") < out.index("Submit it with: sbatch")
    run_command(COMMAND, ["slurm.gpus_per_node=0"])
    assert "Time at" not in capsys.readouterr().out


def test_settings_that_are_seldom_meant_are_named_before_the_job_is_submitted(caplog):
    script("model.hidden_size=2048", "model.intermediate_size=8192", "model.num_hidden_layers=16")
    assert "tokens are few for" in caplog.text


def test_a_job_is_written_where_its_plan_cannot_be_made(monkeypatch, capsys):
    def refuse(request):
        raise UserError(
            Problem("", "The vocabulary is not known."), Problem("", "Nor is the text.")
        )

    monkeypatch.setattr("trainer.workflows.plan.plan", refuse)
    script("name=mine", name="mine")
    said = capsys.readouterr().out.splitlines()
    assert said[-3:] == [
        "No plan: The vocabulary is not known. Nor is the text.",
        "Job script: slurm_jobs/mine/job.sbatch",
        "Submit it with: sbatch --parsable slurm_jobs/mine/job.sbatch",
    ]


def test_without_published_weights_the_message_says_why_the_job_would_stop(monkeypatch, place):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "hub"))
    problem, *others = problems("+experiment=drope_smollm", "optimizer.lr=-1")
    assert problem.startswith("optimizer.lr: ")
    (weights,) = others
    assert "hf download HuggingFaceTB/SmolLM-360M --local-dir DIR" in weights
    assert weights.endswith(
        "The job would stop without them, since few nodes reach the hub: DIR has to be on a file "
        "system that the nodes share with this machine. `python -m trainer plan` needs no weights."
    )
