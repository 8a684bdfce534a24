"""Every command that the README and the documentation show runs, on a small budget."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TRAIN = [
    "trainer.max_steps=8", "trainer.batch_size=4", "trainer.micro_batch_size=2",
    "trainer.threads=1", "drop.effect_sequences=2", "evaluation.needles.trials=4",
    "evaluation.windows=2", "evaluation.fit_windows=1", "evaluation.temperature.grid=[0.0,0.1]",
]  # fmt: skip
BENCHMARK = [
    "--precision=fp32", "--vocab=64", "--warmup=0", "--repeats=1", "--no-compiled", "--no-memory",
]  # fmt: skip
SCRIPTS = {
    "scripts/benchmark_training.py": BENCHMARK,
    "scripts/benchmark_checkpoint.py": ["--model=nano", "--length=64", "--repeats=1"],
    "scripts/benchmark_generation.py": ["--quick"],
    "scripts/benchmark_needles.py": ["--trials=1", "--depths", "0.5", "--rounds=1", "--threads=1"],
    "scripts/benchmark_perplexity.py": ["--lengths", "64", "128"],
    "scripts/kill_runs.py": ["--kills=3", "--steps=100"],
}
LENGTHS = [
    "threads=1", "evaluation.windows=2", "evaluation.fit_windows=1",
    "evaluation.needles.trials=2", "evaluation.longrope.evaluations=2",
]  # fmt: skip


def commands(page: Path) -> list[list[str]]:
    """The words behind ``python``, or torchrun's, of every command line in the page's sh blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in line.split("&&")]
    parts = [re.sub("^torchrun ", "python -m torch.distributed.run ", part) for part in parts]
    return [shlex.split(part)[1:] for part in parts if part.startswith("python ")]


def yaml_files(page: Path) -> list[str]:
    """The files that a page shows; a comment in each says which it is."""
    return re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)


def small(words: list[str]) -> list[str]:
    """The command with the least budget."""
    if words[0] in SCRIPTS:
        return [words[0], *SCRIPTS[words[0]]]
    as_it_is = {"--help", "--cfg", "prepare", "inspect", "slurm"}
    if words[0].startswith("scripts/") or as_it_is & set(words):
        return words
    kinds = {word for word in words if word.startswith("+evaluation=")}
    lengths = kinds <= {"+evaluation=extension", "+evaluation=niah"}
    if "evaluate" in words and lengths:
        return [*words, *LENGTHS]
    if kinds or {"generate", "export", "analyze"} & set(words):
        return words
    if "+experiment=drope_smollm2_135m_local" in words:
        return [*words, *TRAIN, "data.sequence_length=32", "trainer.max_steps=2"]
    return [*words, *TRAIN]


def test_every_page_shows_commands():
    assert all(commands(page) for page in PAGES)


@pytest.fixture(scope="class")
def place(tmp_path_factory):
    """A directory with the files and the run that commands refer to, and the commands that ran."""
    directory = tmp_path_factory.mktemp("reader")
    lines = (f"Line number {i} of one's own.\n" * 10 for i in range(9000))
    (directory / "my_text.txt").write_text("".join(lines))
    (directory / "scripts").symlink_to(ROOT / "scripts")
    callback = re.search(
        r"```python\n(.*?)```", (ROOT / "docs/lightning.md").read_text(), re.DOTALL
    )
    (directory / "my_callbacks.py").write_text(callback[1])
    for text in yaml_files(ROOT / "docs" / "running.md"):
        path = directory / re.search(r"^# (my_conf/\S+)", text, re.MULTILINE)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = [["-m", "trainer", "+experiment=drope_demo"]]
    run(directory, done[0])
    return directory, done


def run(directory: Path, words: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, *small(words)],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"},
    )
    assert result.returncode == 0, f"{words}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


def run_commands(page: Path, place: tuple[Path, list[list[str]]]) -> None:
    directory, done = place
    for words in commands(page):
        if words not in done:
            run(directory, words)
            done.append(words)


SHARING = [page for page in PAGES if page.name in ("README.md", "geometry.md", "lengths.md")]
"""Pages that show some of the same commands; those run once."""


class TestPagesThatShareCommands:
    """Two classes, so that two processes share the pages."""

    @pytest.mark.parametrize("page", SHARING, ids=lambda page: page.name)
    def test_commands_run(self, page, place):
        run_commands(page, place)


class TestOtherPages:
    @pytest.mark.parametrize(
        "page", [p for p in PAGES if p not in SHARING], ids=lambda page: page.name
    )
    def test_commands_run(self, page, place):
        run_commands(page, place)
