"""Packages that pip downloads, and their checksums."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from scripts.wheels import check_sum, download_wheel
from trainer.common.errors import UserError


@pytest.fixture
def pip(monkeypatch):
    """A function that says what pip leaves and answers; returns the commands that it got."""
    asked = []

    def answers(code, stderr="", file=None):
        def run(command, **options):
            asked.append(command)
            assert options == {"capture_output": True, "text": True, "check": False}
            if file:
                file.touch()
            return subprocess.CompletedProcess(command, code, "", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return asked

    return answers


def test_a_wheel_is_downloaded_without_what_it_depends_on(pip, tmp_path):
    asked = pip(0, file=tmp_path / "a-1.whl")
    assert download_wheel("a==1", tmp_path) == tmp_path / "a-1.whl"
    assert asked == [
        [
            sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "a==1",
            "--dest", str(tmp_path),
        ]
    ]  # fmt: skip


def test_what_pip_says_last_is_passed_on(pip, tmp_path):
    pip(1, stderr="x" * 400 + "no a\n", file=tmp_path / "a.whl")
    with pytest.raises(UserError) as error:
        download_wheel("a==1", tmp_path)
    assert str(error.value) == f"pip could not download a==1: {'x' * 296}no a"


def test_no_wheel_is_an_error_too(pip, tmp_path):
    pip(0)
    with pytest.raises(UserError, match=r"^pip could not download a==1: $"):
        download_wheel("a==1", tmp_path)


def test_another_file_than_the_expected_one_is_refused(tmp_path):
    (tmp_path / "a").write_text("a")
    right = hashlib.sha256(b"a").hexdigest()
    check_sum(tmp_path / "a", right)
    with pytest.raises(UserError, match=f"^a has the SHA-256 {right}, not 00.$"):
        check_sum(tmp_path / "a", "00")
