"""The program as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.program import ROOT, run

MISTAKES = {
    "misspelt key": (["model.hiden_size=3"], "Did you mean 'hidden_size'"),
    "wrong type": (["optimizer.lr=fast"], "optimizer.lr"),
    "odd head_dim": (["model.head_dim=15"], "model.head_dim"),
    "heads not divisible": (["model.num_attention_heads=5"], "model.num_attention_heads"),
    "drop beyond the end": (["drop.at=5000"], "drop.at"),
    "rotary fraction 1.5": (["positional.encodings.rope.rotary_fraction=1.5"], "rotary_fraction"),
    "unknown experiment": (["+experiment=drope_dem"], "Did you mean 'drope_demo'"),
    "unknown command": (["evalute"], "Did you mean 'evaluate'"),
    "empty text file": (["data=files", "data.files=[empty.txt]"], "'empty.txt' is empty"),
    "missing text file": (["data=files", "data.files=[none.txt]"], "there is no file 'none.txt'"),
    "negative length": (["data.sequence_length=-1"], "data.sequence_length"),
    "window beyond the context": (["positional=alibi", "positional.windows=[99]"], "window of 99"),
    "flash without the package": (
        ["model.attention_backend=flash", "trainer.precision=bf16"],
        "needs the package flash-attn",
    ),
    "flex without a GPU": (["model.attention_backend=flex"], "needs a GPU"),
    "no GPU": (["trainer.accelerator=gpu"], "torch sees no GPU"),
    "missing tokenizer": (["tokenizer.path=none.json"], "there is no file 'none.json'"),
    "run_dir is a file": (["run_dir=empty.txt"], "run_dir"),
    "run_dir not writable": (["run_dir=/proc/run"], "cannot be written"),
    "no checkpoint": (["evaluate", "checkpoint=runs/none"], "neither a run directory"),
    "checkpoint not given": (["evaluate"], "checkpoint: give checkpoint="),
    "damaged checkpoint": (["evaluate", "checkpoint=damaged"], "file.bin is missing"),
    "output not writable": (
        ["evaluate", "checkpoint=damaged", "output=/proc/x"],
        "output: '/proc/x' cannot be written",
    ),
    "text too short": (["data=files", "data.files=[short.txt]"], "too few different documents"),
}


def trainer(*words, cwd):
    return run("-m", "trainer", *words, cwd=cwd, UNROPE_CACHE=str(cwd / "cache"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_gives_a_clear_message_and_leaves_nothing(mistake, tmp_path):
    words, said = MISTAKES[mistake]
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("Three short words.")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text('{"file.bin": [3, "0"]}')
    before = sorted(tmp_path.rglob("*"))
    result = trainer(*words, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error:") == 1 or mistake == "heads not divisible"
    left = [p for p in sorted(tmp_path.rglob("*")) if p not in before and "cache" not in p.parts]
    assert not left
    assert not list(tmp_path.rglob("*partial*"))


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
    *said, imported = result.stdout.splitlines()
    assert imported == ""
    for word in ("drope_demo", "encoding_zoo_demo", "evaluate", "positional:", "rope_id"):
        assert word in "\n".join(said)
    assert not list(tmp_path.iterdir())


def test_cfg_job_prints_the_values(tmp_path):
    result = trainer("+experiment=drope_demo", "seed=7", "--cfg", "job", cwd=tmp_path)
    assert result.returncode == 0
    assert "seed: 7" in result.stdout
    assert "hidden_size: 64" in result.stdout
    assert not list(tmp_path.iterdir())
