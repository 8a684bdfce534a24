"""The check of oldest and newest versions: what it installs, and what it says of the tests."""

from __future__ import annotations

import json
import sys
import tomllib

import pytest

from scripts import check_versions
from scripts.check_versions import lower_bounds, oldest_versions, table
from tests.program import ROOT

INSTALLED = [
    {"name": "torch", "version": "2.13.0+cpu"},
    {"name": "PyYAML", "version": "6.0"},
    {"name": "huggingface_hub", "version": "1.3.0"},
]
PASSED = "....  [100%]\n============== slowest 15 durations ==============\n4 passed in 3.21s\n"
FAILED = (
    "..F.  [100%]\n=== short test summary info ===\n"
    "FAILED tests/test_a.py::test_b - assert 1 == 2\n"
    "1 failed, 3 passed, 2 warnings in 63.20s (0:01:03)\n"
)


def test_the_oldest_versions_are_those_behind_the_first_bound():
    bounds = lower_bounds(
        ["torch>=2.10,<2.14", "PyYAML>=6,<7", "huggingface_hub >= 1.3", "pyyaml>=6", "a.b>=1.0rc1"]
    )
    assert bounds == {"torch": "2.10", "pyyaml": "6", "huggingface-hub": "1.3", "a-b": "1.0rc1"}
    assert oldest_versions(bounds, None) == ["pyyaml==6", "huggingface-hub==1.3", "a-b==1.0rc1"]
    assert oldest_versions(bounds, "2.11.0")[-1] == "torch==2.11.0"


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy<3,>=1.26", "numpy~=1.26"])
def test_a_requirement_without_an_oldest_version_is_refused(requirement):
    with pytest.raises(ValueError, match="does not begin with NAME>=VERSION"):
        lower_bounds([requirement])


def test_bounds_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"gguf from 0\.17 and from 0\.18"):
        lower_bounds(["gguf>=0.17,<1", "gguf>=0.18"])


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """What an environment would run; pip and pytest answer as the test says by ``answers``."""
    done, answers = [], {"install": (0, ""), "pytest": (0, PASSED)}

    def run(environment, *words):
        done.append([environment.name, *map(str, words)])
        kind = "install" if "install" in words else "pytest"
        code, text = (
            answers[kind, environment.name]
            if (kind, environment.name) in answers
            else (answers[kind])
        )
        with environment.log.open("a") as log:
            log.write(text)
        return code

    listed = "A note of pip's.\n" + json.dumps(INSTALLED) + "\n"
    monkeypatch.setattr(check_versions.Environment, "run", run)
    monkeypatch.setattr(check_versions.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(
        check_versions.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": listed})
    )
    monkeypatch.setattr(check_versions, "PAGE", tmp_path / "versions.md")
    return done, answers


def check(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["check_versions.py", *words])
    with pytest.raises(SystemExit) as end:
        check_versions.main()
    return end.value.code


def test_both_environments_are_installed_tested_and_written_down(
    commands, tmp_path, monkeypatch, capsys
):
    assert check(monkeypatch, "--write", "--keep", str(tmp_path / "kept"), "tests/data") == 0
    done, _ = commands
    assert [(name, words[words.index("-m") + 1]) for name, *words in done] == [
        ("oldest", "pip"), ("oldest", "pytest"), ("newest", "pip"), ("newest", "pytest"),
    ]  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["dependencies"]) <= set(done[2])
    assert "pyyaml==6" in done[0]
    assert not [word for word in done[0] if word.startswith(("torch==", "wandb-workspaces"))]
    assert all(words[-1] == "tests/data" for _, *words in (done[1], done[3]))
    said = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in said if line.startswith("[")] == [
        "oldest: installing", "oldest: 3 packages; running the tests", "oldest: 4 passed",
        "newest: installing", "newest: 3 packages; running the tests", "newest: 4 passed",
    ]  # fmt: skip
    assert max(map(len, said)) <= 100
    page = (tmp_path / "versions.md").read_text()
    assert "\n".join(line for line in said if line.startswith("|")) in page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said if line[0] == "|"]
    assert ["huggingface-hub", "1.3.0", "1.3.0"] in [[name, *tried] for name, _, *tried in rows]
    assert rows[-1] == ["**tests**", "", "4 passed", "4 passed"]


def test_a_failed_test_is_named_and_ends_with_an_error(commands, monkeypatch, capsys):
    commands[1]["pytest", "newest"] = (1, FAILED)
    assert check(monkeypatch) == 1
    said = capsys.readouterr().out
    assert "4 passed" in said
    assert "1 failed, 3 passed, 2 warnings" in said
    assert "newest: FAILED tests/test_a.py::test_b - assert 1 == 2\n" in said


def test_versions_that_cannot_be_installed_are_an_error_and_not_tested(
    commands, monkeypatch, capsys
):
    commands[1]["install", "oldest"] = (1, "ERROR: no matching distribution for wonderwords==3\n")
    assert check(monkeypatch, "--only", "oldest") == 1
    assert [words[0] for words in commands[0]] == ["oldest"]
    said = capsys.readouterr().out
    assert "oldest: not installed: ERROR: no matching distribution for wonderwords==3" in said


def test_a_page_is_not_written_of_one_environment(commands, monkeypatch, capsys):
    assert check(monkeypatch, "--write", "--only", "newest") == 2
    assert commands[0] == []


def test_every_dependency_of_the_project_has_an_oldest_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [*project["dependencies"], *(r for e in check_versions.EXTRAS for r in extras[e])]
    bounds = lower_bounds(used)
    assert {"torch", "transformers", "lm-eval", "tensorboard", "gguf"} <= set(bounds)
    empty = check_versions.Environment("oldest", ROOT)
    assert max(map(len, table(bounds, empty, empty).splitlines())) <= 100


def test_the_tests_that_it_runs_are_there():
    assert all((ROOT / name).exists() for name in check_versions.TESTS)
