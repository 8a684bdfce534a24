"""Prepare a source: read, tokenize on all cores, write shards piece by piece, resume.

A plan divides the source into units of whole files. A unit is written as pieces, each a shard of
every split that has text in it. A piece is complete once its record is in ``pieces/``. After an
interruption a unit resumes after its last record, and all processes that follow the plan write the
same bytes. The manifest is written when all units are done.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from trainer.common.errors import Problem, UserError, os_reason
from trainer.common.files import synchronise, write_atomically
from trainer.common.locks import locked
from trainer.data.config import SourceConfig
from trainer.data.encoding import SPLITS, Encoded, Encoder, Split, encode, start_worker
from trainer.data.files import BadRow, File, UnreachableError
from trainer.data.plan import BYTES_PER_TOKEN, FORMAT, NAMED, SMALL, Plan, is_kept, rows_of
from trainer.data.shards import Manifest, Piece, Place, ShardWriter, read_json

log = logging.getLogger(__name__)

SHARD = 512 << 20
"""Bytes after which a shard of training text is finished."""
WAITS = (5.0, 20.0, 60.0)
"""Seconds before a file behind a network is tried again."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
BATCH = 1 << 18
"""Characters of the documents that are tokenised together."""


@dataclass
class DocumentBatch:
    """Documents to tokenize together, and row counts of the unit up to the last of them."""

    texts: list[str] = field(default_factory=list)
    rows: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)
    text_bytes: int = 0


Map = Callable[[Iterator[DocumentBatch]], Iterator[tuple[DocumentBatch, dict[Split, Encoded]]]]


def batches_of(
    rows: Iterable[str | BadRow], config: SourceConfig, start: DocumentBatch
) -> Iterator[DocumentBatch]:
    """Group documents into batches; the last batch holds the rest and may be empty.

    Raises:
        UserError: too many rows are malformed.
    """
    batch = DocumentBatch(rows=start.rows, bad=start.bad, named=list(start.named))
    size = 0
    rows = iter(rows)
    for row in rows:
        batch.rows += 1
        if isinstance(row, BadRow):
            batch.bad += 1
            if len(batch.named) < NAMED:
                batch.named.append(f"{row.place} {row.problem}.")
            _check_bad(batch, config, rows)
        elif is_kept(row, config):
            batch.texts.append(row)
            size += len(row)
            if size >= BATCH:
                batch.text_bytes = size
                yield batch
                batch = DocumentBatch(rows=batch.rows, bad=batch.bad, named=list(batch.named))
                size = 0
    batch.text_bytes = size
    yield batch


def _check_bad(batch: DocumentBatch, config: SourceConfig, rows: Iterator[str | BadRow]) -> None:
    allowed = config.allowed_bad
    if allowed and batch.bad <= max(NAMED, allowed * batch.rows):
        return
    for row in rows if not allowed else ():  # report several bad rows in one error
        batch.rows += 1
        if isinstance(row, BadRow):
            batch.bad += 1
            batch.named.append(f"{row.place} {row.problem}.")
            if len(batch.named) >= NAMED:
                break
    raise UserError(
        *(Problem("data", named) for named in batch.named),
        Problem(
            "data.bad_rows",
            f"{batch.bad} of the first {batch.rows:,} rows are malformed, and a share of "
            f"{allowed:g} may be.",
        ),
    )


@contextmanager
def encoders(plan: Plan, workers: int) -> Iterator[Map]:
    """Yield a function that tokenizes batches in order, in other processes if the text is large."""
    arguments = (plan.tokenizer, plan.end, plan.thresholds, plan.dtype)
    few = plan.tokens is not None and plan.tokens * BYTES_PER_TOKEN <= SMALL // 4
    if workers == 1 or few:
        encoder = Encoder(*arguments)
        yield lambda batches: ((batch, encoder(batch.texts)) for batch in batches)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker, arguments)

    def several(
        batches: Iterator[DocumentBatch],
    ) -> Iterator[tuple[DocumentBatch, dict[Split, Encoded]]]:
        waiting: deque[tuple[DocumentBatch, Future[dict[Split, Encoded]]]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(encode, batch.texts)))
            batch.texts = []  # the pool has a copy: free the memory
            if len(waiting) > 3 * workers:
                first, encoded = waiting.popleft()
                yield first, encoded.result()
        for batch, encoded in waiting:
            yield batch, encoded.result()

    try:
        yield several
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Advance:
    """Progress since the last report: bytes of source text, and tokens."""

    text_bytes: int
    tokens: int


Report = Callable[[Advance], None]


def prepare_units(
    plan: Plan,
    config: SourceConfig,
    directory: Path,
    *,
    part: tuple[int, int] = (1, 1),
    workers: int = 1,
    report: Report = lambda _: None,
    wait: bool = False,
) -> bool:
    """Prepare one part of a plan's units; return whether the units of all parts are done.

    ``part``: (which, of how many) parts, from 1. ``wait``: wait for another process that does the
    same work, instead of raising an error.

    Raises:
        UserError: a file cannot be read, or too many rows are malformed.
    """
    (directory / "pieces").mkdir(parents=True, exist_ok=True)
    number, parts = part
    mine = range(number - 1, len(plan.units), parts)
    doing = f"prepares {str(directory)!r} already; wait for it, or stop it"
    is_left = any(not _is_done(directory, unit) for unit in mine)
    with encoders(plan, workers if is_left else 1) as tokenised:
        for unit in mine:
            # A unit has its own lock, as others may cut the work into other parts.
            with locked(directory / "pieces" / f".{unit:05d}.lock", "data", doing, wait=wait):
                if _is_done(directory, unit):
                    done = sum(plan.files[i].text_bytes for i in plan.units[unit])
                    report(Advance(done, _tokens(directory, unit)))
                else:
                    _with_patience(
                        partial(_prepare_unit, plan, config, directory, unit, tokenised, report)
                    )
    return all(_is_done(directory, unit) for unit in range(len(plan.units)))


@contextmanager
def reporting_failures(directory: Path) -> Iterator[None]:
    """Turn errors of the disk and of worker processes into one that names the directory.

    Raises:
        UserError: the disk is full, the directory cannot be written, or a process was killed.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise UserError.at(
                "data.cache_dir",
                f"there is no room left in {str(directory)!r}; finished files stay, and the same "
                "command resumes.",
            ) from error
        raise UserError.at(
            "data.cache_dir", f"{str(directory)!r} cannot be written ({os_reason(error)})."
        ) from error
    except BrokenProcessPool as error:
        raise UserError.at(
            "prepare",
            "a process that tokenizes was killed, perhaps for lack of memory; finished files "
            "stay, and the same command resumes (prepare.workers= for fewer processes).",
        ) from error


def write_manifest(plan: Plan, directory: Path) -> None:
    """Write the manifest after all units are done.

    Raises:
        UserError: there is no text to train on.
    """
    units = [_records(directory, unit) for unit in range(len(plan.units))]
    records = [record for unit in units for record in unit]
    shards = {split: [r.shards[split] for r in records if split in r.shards] for split in SPLITS}
    if missing := [split for split in SPLITS if not shards[split]]:
        raise UserError.at(
            "data",
            f"the text holds nothing for {' and '.join(missing)}; give more text, or larger "
            "data.validation and data.test.",
        )
    for shard in (shard for split in SPLITS for shard in shards[split]):
        sizes = (file.size_problem() for file in Place(directory, shard, plan.dtype).files)
        if problem := next(filter(None, sizes), None):
            raise UserError.at(
                "data.cache_dir",
                f"{str(directory)!r}: {problem}; remove the directory and prepare the text again.",
            )
    tokenizer = json.dumps(json.loads(plan.tokenizer), ensure_ascii=False, indent=1)
    write_atomically(directory / "tokenizer.json", tokenizer, durable=True)
    manifest = Manifest(
        format=FORMAT,
        request=plan.request,
        source=plan.identity,
        dtype=plan.dtype,
        end_of_text=plan.end,
        tokenizer_sha256=hashlib.sha256(tokenizer.encode()).hexdigest(),
        bad_rows=sum(unit[-1].bad for unit in units if unit),  # a piece counts those before it, too
        tokens={split: sum(shard.tokens for shard in shards[split]) for split in SPLITS},
        documents={split: sum(shard.documents for shard in shards[split]) for split in SPLITS},
        shards=shards,
    )
    for leftover in directory.glob(".plan.*.tmp"):
        leftover.unlink(missing_ok=True)
    write_atomically(directory / "manifest.json", json.dumps(asdict(manifest)) + "\n", durable=True)


def _records(directory: Path, unit: int) -> list[Piece]:
    """Return the finished pieces of a unit, in order."""
    records: list[Piece] = []
    while True:
        path = _record_path(directory, unit, len(records))
        try:
            records.append(read_json(path, Piece))
        except FileNotFoundError:
            return records
        except ValueError as error:
            raise UserError.at(
                "data.cache_dir", f"{str(path)!r} is damaged ({error}); remove it."
            ) from None


def _record_path(directory: Path, unit: int, piece: int) -> Path:
    return directory / "pieces" / f"{unit:05d}-{piece:04d}.json"


def _is_done(directory: Path, unit: int) -> bool:
    records = _records(directory, unit)
    return bool(records) and records[-1].last


def _tokens(directory: Path, unit: int) -> int:
    return sum(s.tokens for r in _records(directory, unit) for s in r.shards.values())


def _with_patience(work: Callable[[], None]) -> None:
    """Retry after network failures; finished pieces are not repeated."""
    for wait in (*WAITS, None):
        try:
            return work()
        except UnreachableError as error:
            if wait is None:
                raise
            log.warning("%s Trying again in %.0f s.", error, wait)
            time.sleep(wait)
    return None


def _prepare_unit(
    plan: Plan, config: SourceConfig, directory: Path, unit: int, tokenised: Map, report: Report
) -> None:
    for pattern in (f".*-{unit:05d}-*.tmp", f"pieces/.{unit:05d}-*.tmp"):
        for leftover in directory.glob(pattern):
            leftover.unlink(missing_ok=True)
    files = [plan.files[index] for index in plan.units[unit]]
    _check_sizes(config, files)
    records = _records(directory, unit)
    last = records[-1] if records else Piece(0, 0, [], False, {})
    expected = sum(file.text_bytes for file in files)
    start = DocumentBatch(rows=last.rows, bad=last.bad, named=list(last.named))
    batches = batches_of(islice(rows_of(config, files), start.rows, None), config, start)
    writers: dict[Split, ShardWriter] = {}
    piece, done, batch = len(records), 0, start
    try:
        for batch, encoded in tokenised(batches):
            for split, documents in encoded.items():
                if split not in writers:
                    name = f"{split}-{unit:05d}-{piece:04d}"
                    writers[split] = ShardWriter(directory, name)
                writers[split].add(documents)
            step = min(batch.text_bytes, expected - done)
            done += step
            report(Advance(step, sum(len(documents.ids) for documents in encoded.values())))
            train = writers.get("train")
            if train is not None and train.ids.count * np.dtype(plan.dtype).itemsize >= SHARD:
                _commit(directory, unit, piece, writers, batch, last=False)
                piece += 1
        _commit(directory, unit, piece, writers, batch, last=True)
    finally:
        for writer in writers.values():
            writer.discard()
    report(Advance(expected - done, 0))


def _commit(
    directory: Path,
    unit: int,
    piece: int,
    writers: dict[Split, ShardWriter],
    batch: DocumentBatch,
    *,
    last: bool,
) -> None:
    """Finish the shards of a piece, then write its record; empties ``writers``."""
    shards = {split: writer.finish() for split, writer in writers.items()}
    writers.clear()
    synchronise(directory)
    record = Piece(batch.rows, batch.bad, batch.named, last, shards)
    write_atomically(_record_path(directory, unit, piece), json.dumps(asdict(record)), durable=True)


def _check_sizes(config: SourceConfig, files: Iterable[File]) -> None:
    """Check that the files still have their planned sizes."""
    if config.source != "files":
        return
    for file in files:
        try:
            size = Path(file.path).stat().st_size if "://" not in file.path else file.size
        except OSError as error:
            raise UserError.at(
                "data.files", f"{file.path!r} is gone ({os_reason(error)})."
            ) from error
        if size != file.size:
            raise UserError.at(
                "data.files",
                f"{file.path!r} has {size:,} bytes, and had {file.size:,} when preparing it "
                "began; remove the unfinished directory, or bring the file back.",
            )
