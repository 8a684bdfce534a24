"""The program as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.program import ROOT, run


def test_mistake_gives_a_clear_message_and_leaves_nothing(tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text('{"file.bin": [3, "0"]}')
    before = sorted(tmp_path.rglob("*"))
    words = ["-m", "trainer", "evaluate", "checkpoint=damaged"]
    result = run(*words, cwd=tmp_path, UNROPE_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 1, result.stderr
    assert "'damaged' is damaged" in result.stderr
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
