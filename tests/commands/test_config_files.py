"""A user's own groups: what they can be, and one line for each fault in them, with the file."""

from __future__ import annotations

import pytest

from trainer.commands import analyze, evaluate, train
from trainer.commands.evaluate import read
from trainer.commands.hydra.composing import compose_words
from trainer.commands.hydra.files import ConfigFiles
from trainer.commands.hydra.running import run_command
from trainer.common.errors import UserError


@pytest.fixture
def option(tmp_path):
    """Writes an option, and returns the directory of all of them."""

    def write(name, text):
        path = tmp_path / "my_conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path / "my_conf"

    return write


def refused(module, *words):
    with pytest.raises(UserError) as error:
        run_command(module.COMMAND, list(words))
    assert all("\n" not in problem for problem in map(str, error.value.problems))
    return tuple(map(str, error.value.problems))


def test_an_option_of_ones_own_inherits_what_it_is(option):
    files = ConfigFiles(option("evaluation/mine", "defaults: [ruler, _self_]\nwindows: 3\n"))
    words = ["checkpoint=x", "+evaluation=mine", "evaluation.lengths=[4]"]
    named = read(compose_words(words, "evaluate", files))
    assert named.name == "mine"
    config = named.request.evaluation
    assert (config.tasks, config.windows, config.lengths) == (["ruler"], 3, [4])


@pytest.mark.parametrize(("written", "base"), [("24:00:00", True), ('"24:00:00"', False)])
def test_a_time_without_quotes_is_not_read_as_a_number(option, written, base):
    """YAML reads 86400, which SLURM would take for minutes."""
    files = ConfigFiles(option("slurm/mine", f"defaults: [default, _self_]\ntime: {written}\n"))
    composed = compose_words(["slurm=mine"], "slurm", files)
    said = [str(problem) for problem in composed.problems]
    path = option("slurm/mine", f"time: {written}\n") / "slurm/mine.yaml"
    wrong = 'YAML reads 24:00:00 as a number to the base 60; write "24:00:00".'
    assert said == ([f"{path}, line 2: {wrong}"] if base else [])
    assert base or composed.values["slurm"]["time"] == "24:00:00"


def test_an_experiment_and_a_group_of_ones_option(option):
    option(
        "experiment/mine", "# @package _global_\ndefaults:\n  - override /model: big\nname: mine\n"
    )
    files = ConfigFiles(option("model/big", "defaults: [nano, _self_]\nhidden_size: 128\n"))
    config = train.read_run(compose_words(["+experiment=mine"], files=files))
    assert (config.name, config.model.hidden_size) == ("mine", 128)


def test_an_analysis_of_ones_option(option):
    files = ConfigFiles(option("analysis/short", "defaults: [sinks, _self_]\nlength: 64\n"))
    words = ["checkpoint=x", "analysis=short"]
    named = analyze.read(compose_words(words, "analyze", files))
    assert named.name == "short"
    assert (named.request.analysis.kind, named.request.analysis.length) == ("sinks", 64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: [rular]\n", "there is no evaluation 'rular'. Did you mean 'ruler'?"),
        ("defaults: [{/modle: nano}]\n", "there is no group 'modle'. Did you mean 'model'?"),
        ("kind: lengths\nlast: ${oc.env:X_NOT}\n", "'X_NOT' not found"),
        ("kind: lengths\nlast: ${.last}\n", "evaluation.last: Recursive interpolation"),
        ("kind: lengths\nlast: ???\n", "evaluation.last: Missing mandatory value: last (FILE)"),
        ("last: 3\n", "evaluation: 'mine' does not say what it is"),
        ("kind: length\n", "of kind 'length'. Did you mean 'lengths'?"),
        ("kind: lengths\nlasst: 3\n", "evaluation.lasst: unknown key. Did you mean 'last'?"),
    ],
)
def test_a_fault_is_one_line(option, text, said):
    directory = option("evaluation/mine", text)
    words = ["checkpoint=x", "--config-dir", str(directory), "evaluation=mine"]
    (problem,) = refused(evaluate, *words)
    assert said.replace("FILE", str(directory / "evaluation/mine.yaml")) in problem


def test_options_that_inherit_from_each_other(option):
    option("evaluation/one", "defaults: [two]\n")
    directory = option("evaluation/two", "defaults: [one]\n")
    (problem,) = refused(evaluate, "checkpoint=x", f"--config-dir={directory}", "evaluation=one")
    assert "one.yaml: its defaults list leads back to itself (one -> two -> one)" in problem


def test_an_option_that_is_there_already(option):
    directory = option("model/nano", "hidden_size: 3\n")
    (problem,) = refused(train, f"--config-dir={directory}")
    assert "nano.yaml: there is a 'nano' in conf/model already" in problem


def test_a_directory_that_is_not_there(tmp_path):
    (problem,) = refused(train, "--config-dir", str(tmp_path / "none"), "seed=1")
    assert problem == f"--config-dir: there is no directory '{tmp_path / 'none'}'."


def test_faults_of_files_and_of_words_are_reported_together(option):
    directory = option("model/mine", "a: [\n")
    words = [f"--config-dir={directory}", "model=mine", "sede=1", "optimizer.lr=x", "--fresh"]
    assert len(refused(train, *words)) == 4
