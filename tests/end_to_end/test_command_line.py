"""The program as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.program import ROOT, run

MISTAKES = {
    "misspelt key": (["model.hiden_size=3"], "the nearest is 'hidden_size'"),
    "unknown command": (["evalute"], "error: "),
    "damaged checkpoint": (["evaluate", "checkpoint=damaged"], "'damaged' is damaged"),
}
"""As a shell sees them."""


def trainer(*words, cwd):
    return run("-m", "trainer", *words, cwd=cwd, UNROPE_CACHE=str(cwd / "cache"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_gives_a_clear_message_and_leaves_nothing(mistake, tmp_path):
    words, message = MISTAKES[mistake]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text('{"file.bin": [3, "0"]}')
    before = sorted(tmp_path.rglob("*"))
    result = trainer(*words, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


HELP = """
import sys
from trainer.__main__ import main
main(["--help"])
print(*{"torch", "lightning", "transformers", "datasets", "matplotlib"} & set(sys.modules))
"""


def test_help_says_what_there_is_and_imports_nothing_that_takes_seconds(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", HELP],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    *lines, imported = result.stdout.splitlines()
    assert imported == ""
    for word in ("drope_demo", "encoding_zoo_demo", "evaluate", "rope_id"):
        assert word in "\n".join(lines)
    assert not list(tmp_path.iterdir())


def test_cfg_job_prints_the_values(tmp_path):
    result = trainer("+experiment=drope_demo", "seed=7", "--cfg", "job", cwd=tmp_path)
    assert result.returncode == 0
    assert "seed: 7" in result.stdout
    assert "hidden_size: 64" in result.stdout
    assert not list(tmp_path.iterdir())
