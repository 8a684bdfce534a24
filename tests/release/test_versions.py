"""The version, the locked versions and the citation agree with pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import tomllib
from datetime import date

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import trainer
from tests.program import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED_EXTRAS = "test", "gguf", "transformers", "export", "eval", "tensorboard", "dashboards"
PYTHONS = "3.11", "3.12", "3.13"
PLATFORMS = ("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")
LINES = (ROOT / "requirements.lock").read_text().splitlines()
LOCKED = [Requirement(line) for line in LINES if not line.startswith("#")]


def applies(requirement, python, platform, machine):
    """Whether a line of the lock or of the project holds there."""
    place = {
        "python_version": python, "python_full_version": f"{python}.5",
        "sys_platform": platform, "platform_machine": machine,
    }  # fmt: skip
    return requirement.marker is None or requirement.marker.evaluate(place)


@pytest.mark.parametrize(("platform", "machine"), PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_one_admitted_version_of_every_dependency(python, platform, machine):
    here = [line for line in LOCKED if applies(line, python, platform, machine)]
    versions = {canonicalize_name(r.name): next(iter(r.specifier)).version for r in here}
    assert len(versions) == len(here)
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(r for extra in LOCKED_EXTRAS for r in extras[extra])]
    for requirement in map(Requirement, asked):
        if requirement.name != "torch":
            version = Version(versions[canonicalize_name(requirement.name)])
            assert version in requirement.specifier, requirement


def test_the_lock_leaves_the_build_of_torch_and_what_depends_on_it_to_pip():
    """An older torch that is installed stays; torch 2.11 and 2.12 need setuptools before 82."""
    *pinned, torch = LOCKED
    assert str(torch) == "torch<2.14"
    names = {canonicalize_name(requirement.name) for requirement in pinned}
    build = re.compile(r"torch|triton|setuptools|(nvidia|cuda)-.*")
    assert not {name for name in names if build.fullmatch(name)}
    assert all(re.fullmatch(r"==[^*,]+", str(requirement.specifier)) for requirement in pinned)
    assert not {requirement.name for requirement in LOCKED if requirement.extras or requirement.url}


def test_the_command_that_made_the_lock_stands_in_the_guide():
    """A shell makes of the guide's braces the options that uv wrote at the head of the lock."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    command = re.search(r"uv pip compile (?:.*\\\n)*.*", guide)[0]
    shell = ["bash", "-c", f"printf '%s\\n' {command}"]
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split()
    words.remove("--upgrade")  # uv leaves it out
    assert sorted(words) == sorted(LINES[1].removeprefix("#").split())


def test_one_version_stands_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+) - (\S+)$", changes, re.MULTILINE)
    assert {trainer.__version__, citation["version"], newest[1]} == {PROJECT["version"]}
    assert citation["date-released"] == date.fromisoformat(newest[2])


def test_the_citation_names_the_papers_that_the_readme_names():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    sources = (ROOT / "README.md").read_text().partition("## Sources")[2]
    titles = {title.lower() for title in re.findall(r"^- .*: \*(.*)\*$", sources, re.MULTILINE)}
    assert len(titles) == 5
    cited = {paper["title"].lower().removeprefix("dope: ") for paper in citation["references"]}
    assert cited == titles
    assert all(paper["authors"] for paper in citation["references"])
