"""Group documents into batches and tokenize them in order, with one process per core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context

from trainer.common.errors import Problem, UserError
from trainer.data.config import SourceConfig
from trainer.data.encoding import Encoded, Encoder, encode, start_worker
from trainer.data.manifest import Split
from trainer.data.plan import BYTES_PER_TOKEN, NAMED, SMALL, Plan, is_kept
from trainer.data.rows import BadRow

BATCH = 1 << 18
"""Characters of the documents that are tokenised together."""


@dataclass
class Batch:
    """Documents to tokenize together, and row counts of the unit up to the last of them."""

    texts: list[str] = field(default_factory=list)
    rows: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)
    text_bytes: int = 0


Map = Callable[[Iterator[Batch]], Iterator[tuple[Batch, dict[Split, Encoded]]]]


def batches_of(rows: Iterable[str | BadRow], config: SourceConfig, start: Batch) -> Iterator[Batch]:
    """Group documents into batches; the last batch holds the rest and may be empty.

    Raises:
        UserError: too many rows are malformed.
    """
    batch = Batch(rows=start.rows, bad=start.bad, named=list(start.named))
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
                batch = Batch(rows=batch.rows, bad=batch.bad, named=list(batch.named))
                size = 0
    batch.text_bytes = size
    yield batch


def _check_bad(batch: Batch, config: SourceConfig, rows: Iterator[str | BadRow]) -> None:
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

    def several(batches: Iterator[Batch]) -> Iterator[tuple[Batch, dict[Split, Encoded]]]:
        waiting: deque[tuple[Batch, Future[dict[Split, Encoded]]]] = deque()
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
