"""Coqui's package of the same import name is noticed before a command starts."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.program import ROOT
from trainer.__main__ import main


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A directory on ``sys.path``, in which a test pretends to install packages."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize("name", ["trainer-0.0.36", "coqui_tts_trainer-0.4.0"])
def test_another_package_of_the_name_elsewhere_is_a_warning(name, packages, capsys):
    (packages / f"{name}.dist-info").mkdir()
    main(["--help"])
    printed = capsys.readouterr()
    shown = name.replace("_", "-").replace("r-0", "r 0")
    assert printed.err == (
        f"warning: Coqui's package {shown} in {packages} has the same import name as Unrope, "
        "trainer. Install Unrope in a virtual environment of its own.\n"
    )
    assert "experiment" in printed.out


def test_only_the_first_rank_warns(packages, capsys, monkeypatch):
    (packages / "trainer-0.0.36.dist-info").mkdir()
    monkeypatch.setenv("RANK", "1")
    main(["--help"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "name", ["trainer", "trainer-0.0.36", "unrope-0.2.0.dist-info", "trainer_tools-1.dist-info"]
)
def test_other_directories_are_no_such_package(name, packages, capsys):
    (packages / name).mkdir()
    main(["--help"])
    assert capsys.readouterr().err == ""


def test_one_in_the_same_directory_is_an_error(tmp_path):
    shutil.copytree(ROOT / "trainer", tmp_path / "trainer")
    shutil.copytree(ROOT / "conf", tmp_path / "trainer" / "conf")
    (tmp_path / "trainer-0.0.36.dist-info").mkdir()
    words = [sys.executable, "-m", "trainer", "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: Coqui's package trainer 0.0.36 is installed in the same directory as Unrope, "
        f"{tmp_path}, and has the same import name, trainer: one has overwritten files of the "
        "other. Install Unrope in a virtual environment of its own.\n"
    )
