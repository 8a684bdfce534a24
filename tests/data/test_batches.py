"""Documents in batches: what one batch counts, and what the next begins with."""

from __future__ import annotations

import pytest

from trainer.common.errors import UserError
from trainer.data import batches
from trainer.data.batches import Batch, batches_of
from trainer.data.config import SourceConfig
from trainer.data.rows import BadRow


def bad(number):
    return BadRow(f"row {number}", "is not JSON")


def rows():
    """Two documents, two malformed rows between them and one after; then a document too short."""
    return ["a" * 9, bad(2), bad(3), "b" * 12, bad(5), "c", "d" * 3]


CONFIG = SourceConfig(bad_rows=1.0, min_characters=2)


def in_batches(given, start=None, config=CONFIG):
    return [*batches_of(iter(given), config, start or Batch())]


@pytest.fixture(autouse=True)
def of_eight_characters(monkeypatch):
    monkeypatch.setattr(batches, "BATCH", 8)


def test_a_batch_has_its_own_documents_and_counts_all_rows_up_to_its_end():
    named = ["row 2 is not JSON.", "row 3 is not JSON.", "row 5 is not JSON."]
    assert in_batches(rows()) == [
        Batch(["a" * 9], rows=1, bad=0, named=[], text_bytes=9),
        Batch(["b" * 12], rows=4, bad=2, named=named[:2], text_bytes=12),
        Batch(["d" * 3], rows=7, bad=3, named=named, text_bytes=3),
    ]


def test_small_documents_fill_a_batch_again_after_the_first():
    found = in_batches(["aa"] * 9)
    assert [len(batch.texts) for batch in found] == [4, 4, 1]
    assert [batch.text_bytes for batch in found] == [8, 8, 2]


def test_batches_go_on_where_a_checkpoint_was_and_leave_it_as_it_is():
    """Whatever was counted before, the second call counts the same as one call would."""
    whole = in_batches(rows())
    start = whole[1]
    kept = list(start.named)
    assert in_batches(rows()[4:], start) == whole[2:]
    assert start.named == kept
    assert in_batches(rows()[4:], start) == whole[2:]


def test_malformed_rows_of_the_batches_before_count_in_the_share():
    """One in ten may be malformed, of more than ten: with 4 before, 7 more are too many."""
    config = SourceConfig(bad_rows=0.1)
    few = [bad(n) for n in range(7)]
    assert in_batches(few, config=config)[-1].bad == 7
    with pytest.raises(UserError, match=r"11 of the first 27 rows are malformed"):
        in_batches(few, Batch(rows=20, bad=4), config)
