"""Preparation of a run's text: every text of its mixture, or a part of each."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from trainer.common.errors import Problem, UserError
from trainer.common.processes import cores
from trainer.common.progress import Progress
from trainer.common.words import counted
from trainer.data.config import PrepareConfig
from trainer.data.packing import packing_problems
from trainer.data.plan import Plan
from trainer.data.prepared import open_prepared, verify
from trainer.data.preparing import Preparation, of_mixture
from trainer.data.sources import describe
from trainer.data.units import Advance
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import without_home
from trainer.workflows.training_text import readings, tokenizer_of_weights

log = logging.getLogger(__name__)

LARGE = 64 << 30
"""Bytes from which on a file is reported as too large for one process."""


@dataclass(frozen=True)
class PrepareRequest:
    """The run whose text is prepared; ``verify``: check checksums instead."""

    config: RunConfig
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    verify: bool = False


def prepare(request: PrepareRequest) -> Iterator[str]:
    """Prepare the text; yield a line for each text that is complete.

    Raises:
        UserError: a source cannot be read, or prepared files differ from what was written.
    """
    config = request.config
    for data in readings(config):
        tokenizer = tokenizer_of_weights(config)
        for name, (text, _) in data.texts.items():
            with of_mixture(data, name):
                work = Preparation.find(text, config.tokenizer, tokenizer, network=True)
                if request.verify:
                    line = _verified(work, request.prepare.workers or cores())
                elif work.is_done:
                    line = f"Nothing to do: {_described(work)}"
                elif _run(work, request):
                    line = f"Prepared {_described(work)}"
                else:
                    line = (
                        f"Part {request.prepare.part} of {describe(text)} is done; the last part "
                        "that is finishes the whole."
                    )
                if tokenizer is None and not config.tokenizer.path:
                    tokenizer = work.own_tokenizer  # shared by all texts of a mixture
            yield line


def _run(work: Preparation, request: PrepareRequest) -> bool:
    """Do a part of the work with a progress bar; return whether all parts are done."""
    began, done = time.perf_counter(), Advance(0, 0)
    progress: Progress | None = None
    number, parts = request.prepare.number_of

    def planned(plan: Plan) -> None:
        nonlocal progress
        size = sum(file.text_bytes for file in plan.files)
        log.info(
            "Preparing %s: about %s of text in %s, about %s tokens, into %s",
            describe(work.config),
            f"{size / 2**20:,.0f} MiB",
            counted(len(plan.files), "file"),
            "?" if plan.tokens is None else f"{plan.tokens:,}",
            without_home(str(work.directory)),
        )
        if large := [file for file in plan.files if file.size > LARGE]:
            log.warning(
                "%s has %.0f GiB, which one process prepares; parts are of whole files",
                *(large[0].path, large[0].size / 2**30),
            )
        mine = [plan.units[i] for i in range(number - 1, len(plan.units), parts)]
        total = sum(plan.files[index].text_bytes for unit in mine for index in unit)
        progress = shown.enter_context(Progress("Preparing text", max(total, 1)))
        progress.advance_to(0)

    def report(advance: Advance) -> None:
        nonlocal done
        done = Advance(done.text_bytes + advance.text_bytes, done.tokens + advance.tokens)
        if progress is not None:
            progress.advance_to(done.text_bytes, tokens=done.tokens)

    with ExitStack() as shown:
        # A requeued job may find the previous one still running.
        wait = "SLURM_JOB_ID" in os.environ
        finished = work.run((number, parts), request.prepare.workers, report, planned, wait)
    seconds = time.perf_counter() - began
    log.info("%s tokens in %.0f s", f"{done.tokens:,}", seconds)
    return finished


def _described(work: Preparation) -> str:
    text = open_prepared(work.directory)
    manifest = text.manifest
    counts = ", ".join(f"{split} {count:,}" for split, count in manifest.tokens.items())
    bad = f"; {counted(manifest.bad_rows, 'malformed row')} left out" if manifest.bad_rows else ""
    documents = counted(sum(manifest.documents.values()), "document")
    place = without_home(str(work.directory))
    return f"{describe(work.config)}: tokens {counts}; {documents}{bad}; in {place}"


def _verified(work: Preparation, threads: int) -> str:
    if not work.is_done:
        raise UserError(work.missing)
    text = open_prepared(work.directory)
    if problems := [*verify(text, threads), *packing_problems(work.directory)]:
        raise UserError(
            *(Problem("data", f"{str(work.directory)!r}: {problem}.") for problem in problems),
            Problem("", "Remove that directory and prepare the text again."),
        )
    return f"Every byte is as it was written: {_described(work)}"
