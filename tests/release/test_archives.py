"""What an installation gets: the wheel and the source archive, built as ``pip install .`` does."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import trainer
from tests.program import ROOT

NAME = f"unrope-{trainer.__version__}"
SMALL = [
    "trainer.max_steps=4", "trainer.batch_size=2", "trainer.micro_batch_size=2",
    "trainer.threads=1", "~controls.rope", "~controls.nope", "evaluation.enabled=false",
    "drop.effect_sequences=2",
]  # fmt: skip


def tracked(*directories: str) -> set[str]:
    """Return the files that lie in these directories of the checkout."""
    paths = (path for name in directories for path in (ROOT / name).rglob("*"))
    files = {str(path.relative_to(ROOT)) for path in paths if path.is_file()}
    return {name for name in files if "__pycache__" not in name}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The wheel and the source archive."""
    place = tmp_path_factory.mktemp("archives")
    words = [sys.executable, "-m", "hatchling", "build", "-d", str(place)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place / f"{NAME}-py3-none-any.whl", place / f"{NAME}.tar.gz"


def test_the_wheel_holds_the_package_with_its_configuration(archives):
    files = set(zipfile.ZipFile(archives[0]).namelist())
    metadata = {name for name in files if name.startswith(f"{NAME}.dist-info/")}
    assert files - metadata == tracked("trainer") | {
        f"trainer/{name}" for name in tracked("conf", "slurm")
    }
    assert {"trainer/py.typed", "trainer/conf/config.yaml", "trainer/slurm/train.sbatch"} <= files
    assert f"{NAME}.dist-info/licenses/LICENSE" in metadata


def test_the_source_archive_holds_what_the_wheel_is_built_from(archives):
    with tarfile.open(archives[1]) as archive:
        files = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    single = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "requirements.lock"}
    assert tracked("trainer", "conf", "slurm") | single <= files


def test_a_demo_runs_from_the_wheel_in_an_empty_directory(archives, tmp_path):
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(archives[0]).extractall(installed)
    variables = {
        **os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1",
        "UNROPE_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    where = "import trainer, trainer.commands.hydra.files as c; print(c.config_directory())"

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=empty, env=variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", where).strip() == str(installed / "trainer" / "conf")
    run("-m", "trainer", "+experiment=drope_demo", *SMALL)
    run_dir = empty / "runs" / "drope_demo"
    rows = (run_dir / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows][-1] == "4"
    assert (run_dir / "report.html").is_file()
    assert [path.name for path in empty.iterdir()] == ["runs"]
    assert Path(installed, "trainer", "py.typed").is_file()
