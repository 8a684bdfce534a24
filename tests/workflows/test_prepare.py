"""What a preparation says of its work while it goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.data.config import DataConfig, PrepareConfig
from trainer.data.units import Advance
from trainer.workflows import prepare

FILES = [
    SimpleNamespace(path=f"{i}.jsonl", size=size, text_bytes=10 * size)
    for i, size in enumerate((2 << 20, 3 << 20, 64 << 30, (64 << 30) + 1))
]


class Bar:
    """Notes how far it was moved, with how many tokens, and when it ends."""

    def __init__(self, title, total):
        self.seen = [(title, total)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.seen.append("ended")

    def advance_to(self, step, tokens=None):
        self.seen.append((step, tokens))


@pytest.fixture
def said(monkeypatch, caplog):
    """What is said and shown of a part of some work, in a job of a scheduler or not."""

    def of(files, units, part="1/1", tokens=None, failure=None):
        bars, asked = [], []

        def bar(*given):
            bars.append(Bar(*given))
            return bars[-1]

        def run(number, workers, report, planned, wait):
            asked.append((number, workers, wait))
            planned(SimpleNamespace(files=files, units=units, tokens=tokens))
            report(Advance(100, 7))
            report(Advance(20, 3))
            if failure is not None:
                raise failure
            return number[1] == 1

        monkeypatch.setattr(prepare, "Progress", bar)
        clock = iter((5.0, 17.0))
        monkeypatch.setattr(prepare.time, "perf_counter", lambda: next(clock))
        config = DataConfig(source="files", files=["*.jsonl"])
        work = SimpleNamespace(config=config, directory=Path.home() / "text", run=run)
        request = SimpleNamespace(prepare=PrepareConfig(part, workers=3))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            finished = prepare._run(work, request)
        (seen,) = (bar.seen for bar in bars)
        return asked, caplog.messages, seen, finished

    return of


def test_it_tells_of_the_whole_and_shows_its_own_part(said, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    units = ((0,), (1, 0), (0,), (1,))
    assert said(FILES[:2], units, "2/2", tokens=1234) == (
        [((2, 2), 3, False)],
        [
            "Preparing *.jsonl: about 50 MiB of text in 2 files, about 1,234 tokens, into ~/text",
            "10 tokens in 12 s",
        ],
        [
            ("Preparing text", 10 * (FILES[0].size + 2 * FILES[1].size)),
            (0, None), (100, 7), (120, 10), "ended",
        ],
        False,
    )  # fmt: skip


def test_a_job_waits_for_the_one_before_it_and_a_large_file_is_named(said, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    asked, messages, _, finished = said(FILES[2:], ((0,), (1,)))
    assert asked == [((1, 1), 3, True)]
    assert "about ? tokens" in messages[0]
    assert messages[1:-1] == [
        "3.jsonl has 64 GiB, which one process prepares; parts are of whole files"
    ]
    assert finished


def test_a_bar_ends_with_work_that_fails(said, monkeypatch):
    ended = []
    monkeypatch.setattr(Bar, "__exit__", lambda *_: ended.append(True))
    with pytest.raises(InterruptedError):
        said(FILES[:1], ((0,),), failure=InterruptedError())
    assert ended == [True]


def test_a_part_without_text_has_a_bar_all_the_same(said):
    _, _, seen, _ = said(FILES[:1], ((0,),), "2/2")
    assert seen[0] == ("Preparing text", 1)
