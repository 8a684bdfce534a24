"""The program and the scripts in processes of their own, as a person starts them.

Each is forked from a process that has imported torch and Lightning once (tests/preloaded.py): an
interpreter that imports them anew takes longer than most runs of the tests. Figures are left blank
unless FIGURES is in the environment.
"""

from __future__ import annotations

import atexit
import base64
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from contextlib import chdir
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"/>'
BLANK = {"png": base64.b64decode(f"{PNG}=="), "svg": SVG.encode(), "pdf": b"%PDF-1.4"}


def blank(figure, suffix, **_):
    """In the place of a figure, which is made: to render it takes most of a report's time."""
    return BLANK[suffix]


class Started:
    """``python *words`` in the directory ``cwd``, with changes to the environment."""

    def __init__(self, *words: object, cwd: Path, **environment: str) -> None:
        self.words = [str(word) for word in words]
        self.directory = tempfile.TemporaryDirectory(prefix="said-")
        arguments = (self.words, str(cwd), os.environ | environment, self.directory.name)
        self.process = FORKS.Process(target=_become, args=arguments)
        with chdir(ROOT):  # from where it finds what it has to import
            forkserver.ensure_running()
        self.process.start()

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def running(self) -> bool:
        return self.process.exitcode is None

    def said(self, stream: str) -> str:
        """What it has written so far to ``stdout`` or ``stderr``."""
        path = Path(self.directory.name, stream)
        return path.read_text() if path.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def finish(self, timeout: float = 300) -> CompletedProcess[str]:
        """Wait for its end; its exit code and what it said."""
        self.process.join(timeout)
        if self.running():
            self.process.kill()
            raise TimeoutError(f"{self.words}\n{self.said('stderr')}")
        code = self.process.exitcode
        return CompletedProcess(self.words, code, self.said("stdout"), self.said("stderr"))


def run(*words: object, cwd: Path, **environment: str) -> CompletedProcess[str]:
    """``python *words``, to its end."""
    return Started(*words, cwd=cwd, **environment).finish()


def start_ranks(count: int, *words: object, cwd: Path, **environment: str) -> list[Started]:
    """``torchrun --nproc-per-node=count *words``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        Started(
            *words,
            cwd=cwd,
            **environment,
            **{name: str(value) for name, value in group.items()},
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        )
        for rank in range(count)
    ]


def run_ranks(
    count: int, *words: object, cwd: Path, **environment: str
) -> list[CompletedProcess[str]]:
    """``torchrun --nproc-per-node=count *words``, to the end of all ranks."""
    return [rank.finish() for rank in start_ranks(count, *words, cwd=cwd, **environment)]


def _become(words: list[str], cwd: str, environment: dict[str, str], said: str) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with Path(said, name).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if "FIGURES" not in environment:
        from trainer import plotting

        plotting._rendered = blank
    try:
        if words[0] == "-m":
            sys.path.insert(0, cwd)
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a forked process leaves out
