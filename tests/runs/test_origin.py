"""Where a page comes from."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

import trainer
from trainer.runs.origin import command, commit, origin


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (
            ["/a/trainer/__main__.py", "evaluate", "name=a b"],
            "python -m trainer evaluate 'name=a b'",
        ),
        (["/env/bin/unrope", "+experiment=x"], "unrope +experiment=x"),
    ],
)
def test_the_command_can_be_typed_again(argv, typed):
    assert command(argv) == typed


def test_the_commit_is_that_of_the_package_s_own_repository(tmp_path):
    def git(*words):
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *name, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert commit(tmp_path) == ""
    git("init", "--quiet")
    assert commit(tmp_path) == ""  # nothing in it yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "--quiet", "-m", "a")
    assert commit(tmp_path) == f", commit {git('rev-parse', '--short', 'HEAD')}"
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path).endswith(" and changes since")
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") == ""  # a package that is installed in someone's repository


def test_an_origin_names_time_program_and_steps_and_nobody_s_home():
    path = Path.home() / "runs/a/last"
    run = SimpleNamespace(name="DroPE", path=path, state={"step": 1600}, computed_by=None)
    published = SimpleNamespace(
        name="SmolLM", path=Path("models/s"), state={}, computed_by="transformers 5.23"
    )
    result = origin([run, published])
    assert result["Of"] == (
        "DroPE: ~/runs/a/last, step 1,600; SmolLM: models/s, computed by transformers 5.23"
    )
    assert result["Program"].startswith(f"unrope {trainer.__version__}")
    made = datetime.strptime(result["Made"], "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - made).total_seconds()) < 3600
