"""Text becomes shards: the same bytes, whoever does it and whatever comes between."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import write_texts
from trainer.common.errors import UserError
from trainer.common.locks import locked
from trainer.data import plan, units
from trainer.data.config import SourceConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.files import BadRow
from trainer.data.plan import make_plan
from trainer.data.prepared import open_prepared
from trainer.data.preparing import Preparation
from trainer.data.sources import list_source
from trainer.data.units import DocumentBatch, batches_of

BPE = TokenizerConfig(vocab_size=300)


@pytest.fixture
def many_pieces(monkeypatch):
    """Every file a unit, a few documents a batch, a shard every few batches."""
    monkeypatch.setattr(plan, "UNIT", 1)
    monkeypatch.setattr(units, "BATCH", 300)
    monkeypatch.setattr(units, "SHARD", 600)


def work_of(config, **kwargs):
    return Preparation.find(config, BPE, None, **kwargs)


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*") if path.is_file()}


@pytest.fixture
def whole(config, many_pieces, tmp_path):
    """What one process writes without being disturbed."""
    work = work_of(replace(config, cache_dir=str(tmp_path / "whole")))
    assert work.run(workers=1)
    return bytes_of(work.directory)


def test_an_error_without_a_number_of_the_system_is_named_by_its_own_text():
    """Libraries raise such ones, as for a damaged Parquet file."""
    message = r"'there' cannot be written \(Couldn't read\)\.$"
    with pytest.raises(UserError, match=message), units.reporting_failures(Path("there")):
        raise OSError("Couldn't read.")


def test_there_are_shards_of_every_split_with_their_documents(config, many_pieces):
    work = work_of(config)
    assert work.run(workers=1)
    text = open_prepared(work.directory)
    assert len(text.train.places) > 6
    streams = (text.train, text.validation, text.test)
    documents = [d for stream in streams for d in stream.documents(10**6)]
    texts = [text.tokenizer.decode(ids[:-1].tolist()) for ids in documents]
    assert all(ids[-1] == text.end_of_text for ids in documents)
    expected = [f"Document {i} says something. " * (1 + i % 7) for i in range(120)]
    assert sorted(texts) == sorted(expected)
    trained = texts[: len(text.train.documents(10**6))]
    assert trained == [s for s in expected if s in set(trained)]  # in the order of the source
    manifest = text.manifest
    assert sum(manifest.documents.values()) == 120
    assert manifest.source["files"][0][0] == "0.jsonl"
    assert text.train.places[0].ids.dtype == "<u2"


def test_several_processes_write_the_same_bytes(config, whole, monkeypatch):
    monkeypatch.setattr(units, "SMALL", 0)
    work = work_of(config)
    assert work.run(workers=2)
    assert bytes_of(work.directory) == whole


def test_parts_write_the_same_bytes_in_any_order(config, whole):
    assert [work_of(config).run((part, 3), workers=1) for part in (3, 1, 2)] == [False, False, True]
    assert bytes_of(work_of(config).directory) == whole
    assert not any("tmp" in name for name in whole)


def exit_code_of(process):
    """Of a process that ends within a minute."""
    process.join(60)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"{process.name} did not end")
    return process.exitcode


@pytest.mark.parametrize("writes", range(1, 60, 7))
def test_an_interrupted_preparation_goes_on_to_the_same_bytes(config, whole, monkeypatch, writes):
    """Killed before its ``writes``-th write to disk."""
    work = work_of(config)
    process = get_context("fork").Process(target=_killed_at, args=(work, writes))
    process.start()
    assert exit_code_of(process) == -signal.SIGKILL
    finals = work.directory.glob("*.bin")
    assert all(whole[path.name] == path.read_bytes() for path in finals)
    work = work_of(config)
    assert not work.is_done
    assert work.run(workers=1)
    assert bytes_of(work.directory) == whole


def _killed_at(work, writes):
    count = 0
    original = os.fsync

    def fsync(descriptor):
        nonlocal count
        count += 1
        if count == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        original(descriptor)

    os.fsync = fsync
    work.run(workers=1)


def test_no_worker_outlives_a_reader_that_is_killed(config, monkeypatch):
    monkeypatch.setattr(units, "SMALL", 0)
    receiver, sender = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=_killed_with_workers, args=(config, sender))
    process.start()
    assert receiver.poll(60)
    workers = receiver.recv()
    assert exit_code_of(process) == -signal.SIGKILL
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _killed_with_workers(config, sender):
    plan = make_plan(config, BPE, None, list_source(config))
    with units.encoders(plan, 2) as encode:
        batch = DocumentBatch(["Some text."])
        next(encode(iter([batch] * 20)))
        sender.send([child.pid for child in active_children()])
        os.kill(os.getpid(), signal.SIGKILL)


def _runs(pid):
    process = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return process.stdout.strip()[:1] not in {"", "Z"}


def test_a_finished_text_is_not_touched_again(config, many_pieces, monkeypatch):
    work = work_of(config)
    work.run(workers=1)
    monkeypatch.setattr(plan, "read_source", lambda *_: pytest.fail("it was read again"))
    assert work_of(config).run(workers=1)


def test_a_full_disk_is_one_line_and_the_same_command_resumes(config, whole, monkeypatch):
    original, count = units.ShardWriter.add, 0

    def add(self, encoded):
        nonlocal count
        count += 1
        if count == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, encoded)

    monkeypatch.setattr(units.ShardWriter, "add", add)
    work = work_of(config)
    with pytest.raises(UserError, match=r"no room left .* the same command resumes") as error:
        work.run(workers=1)
    assert len(error.value.problems) == 1
    assert not list(work.directory.glob(".*.tmp"))
    assert work_of(config).run(workers=1)
    assert bytes_of(work.directory) == whole


def test_malformed_rows_are_named_ten_at_once(config, tmp_path):
    path = tmp_path / "texts" / "1.jsonl"
    path.write_text(path.read_text() + "{\n" * 14)
    with pytest.raises(UserError) as error:
        work_of(config).run(workers=1)
    *named, last = map(str, error.value.problems)
    assert len(named) == 10
    assert "1.jsonl' line 41 is not JSON" in named[0]
    assert last.startswith("data.bad_rows: 10 of the first 90 rows are malformed")


def test_a_share_of_malformed_rows_may_be_left_out_and_is_counted(config, tmp_path):
    path = tmp_path / "texts" / "1.jsonl"
    path.write_text(path.read_text() + "{\n" * 14)
    work = work_of(replace(config, bad_rows=0.2))
    assert work.run(workers=1)
    manifest = open_prepared(work.directory).manifest
    assert manifest.bad_rows == 14
    with pytest.raises(UserError, match=r"14 of the first 94 rows|11 of the first 91 rows"):
        work_of(replace(config, bad_rows=0.01, min_characters=1)).run(workers=1)


def test_a_source_that_changes_between_two_parts_is_noticed(config, many_pieces, tmp_path):
    work_of(config).run((1, 3), workers=1)
    path = tmp_path / "texts" / "1.jsonl"
    unfinished = Preparation.find(config, BPE, None)
    path.write_text(path.read_text() + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(UserError, match=r"1\.jsonl' has .* bytes, and had"):
        unfinished.run((2, 3), workers=1)


def test_a_damaged_plan_of_another_state_of_the_source_stops_no_preparation(config, tmp_path):
    begun = work_of(config).directory
    begun.mkdir(parents=True)
    (begun / "plan.json").write_text("{")
    path = tmp_path / "texts" / "1.jsonl"
    path.write_text(path.read_text() + json.dumps({"text": "more"}) + "\n")
    assert work_of(config).run(workers=1)


def test_a_file_behind_a_network_is_tried_again(config, whole, monkeypatch):
    waits, calls = [], 0
    original = units.rows_of

    def rows_of(*arguments):
        nonlocal calls
        calls += 1
        rows = list(original(*arguments))
        yield from rows[:25]
        if calls < 3:
            raise units.UnreachableError.at("data.files", "'hf://x' cannot be read.")
        yield from rows[25:]

    monkeypatch.setattr(units, "rows_of", rows_of)
    monkeypatch.setattr(units.time, "sleep", waits.append)
    work = work_of(config)
    assert work.run(workers=1)
    assert waits == [5.0, 20.0]
    assert bytes_of(work.directory) == whole


@pytest.mark.parametrize("part", [(1, 1), (2, 2)])
def test_two_processes_do_not_prepare_the_same(config, many_pieces, part):
    """However each of them cuts the work into parts."""
    work = work_of(config)
    (work.directory / "pieces").mkdir(parents=True)
    with (
        locked(work.directory / "pieces" / ".00001.lock", "data", "is busy"),
        pytest.raises(UserError, match=r"process \d+ of .* prepares .* already; wait"),
    ):
        work_of(config).run(part, workers=1)
    assert work_of(config).run(workers=1)


def test_a_run_waits_for_another_that_prepares_the_same_text(config, many_pieces):
    processes = [get_context("fork").Process(target=_prepare, args=(config,)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [exit_code_of(process) for process in processes] == [0, 0, 0]


def _prepare(config):
    assert len(prepare_corpus(config, BPE).train)


def test_a_source_that_does_not_say_its_size_may_be_large(config, whole, monkeypatch):
    """Read once, by several processes, and split by shares alone."""
    from trainer.data import sources

    texts = [f"Poem {i} is about a number. " * 3 for i in range(2000)]
    monkeypatch.setitem(sources.TEXT_SOURCES, "poems", lambda: iter(texts))
    monkeypatch.setattr(plan, "SMALL", 1000)
    work = work_of(replace(config, source="poems"))
    assert work.run(workers=2)
    documents = open_prepared(work.directory).manifest.documents
    assert sum(documents.values()) == 2000
    assert abs(documents["test"] - 400) < 100
    assert abs(documents["validation"] - 200) < 80


def test_special_tokens_in_text_are_text(config, tmp_path):
    path = tmp_path / "texts" / "0.jsonl"
    path.write_text(json.dumps({"text": "before <|endoftext|> after " * 5}) + "\n")
    work = work_of(config)
    work.run(workers=1)
    text = open_prepared(work.directory)
    for stream in (text.train, text.validation, text.test):
        for document in stream.documents(10**6):
            assert (document == text.end_of_text).sum() == 1


def test_memory_for_a_document_does_not_depend_on_it(monkeypatch):
    from trainer.data import encoding

    monkeypatch.setattr(encoding, "LONGEST_WORK", 100)
    text = "some words and more of them " * 50 + "x" * 350
    parts = encoding.cut(text)
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 100
    assert all(part.startswith(" ") for part in parts[1:14])
    assert encoding.cut("") == [""]


def test_text_without_a_usable_row_says_why(tmp_path, config):
    rows = [{"body": "x"}] * 2 + [{"text": ""}] + [{"text": "short"}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(config, files=[str(tmp_path / "rows.jsonl")], min_characters=9, bad_rows=1.0)
    with pytest.raises(UserError) as error:
        work_of(config).run(workers=1)
    first, second, whole = map(str, error.value.problems)
    assert "rows.jsonl' line 1 has no 'text' (data.text_field); it has 'body'" in first
    assert "line 2" in second
    assert "2 rows are malformed; 1 are empty; 3 have less than data.min_characters=9" in whole


def test_a_vocabulary_with_holes_has_ids_as_large_as_its_largest(tmp_path, config):
    first = prepare_corpus(config, BPE)
    ids = first.train.windows(np.array([0]), len(first.train))
    token = first.tokenizer.id_to_token(int(ids[ids != first.end_of_text][0]))
    vocabulary = json.loads(first.tokenizer.to_str())
    vocabulary["model"]["vocab"][token] = 100_000
    path = tmp_path / "holes.json"
    path.write_text(json.dumps(vocabulary))
    corpus = prepare_corpus(config, TokenizerConfig(path=str(path)))
    assert corpus.train.windows(np.array([0]), len(corpus.train)).max() == 100_000


def test_text_too_short_leaves_nothing_behind(tmp_path, config):
    write_texts(tmp_path / "few", files=1, documents=2)
    config = replace(config, files=[str(tmp_path / "few")])
    with pytest.raises(UserError, match=r"too few different documents \(2\)"):
        work_of(config).run(workers=1)
    assert not (tmp_path / "cache").exists()


def bad(number):
    return BadRow(f"row {number}", "is not JSON")


def rows():
    """Two documents, two malformed rows between them and one after; then a document too short."""
    return ["a" * 9, bad(2), bad(3), "b" * 12, bad(5), "c", "d" * 3]


CONFIG = SourceConfig(bad_rows=1.0, min_characters=2)


def in_batches(rows, start=None, config=CONFIG):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "BATCH", 8)  # characters
        return [*batches_of(iter(rows), config, start or DocumentBatch())]


def test_a_batch_has_its_own_documents_and_counts_all_rows_up_to_its_end():
    named = ["row 2 is not JSON.", "row 3 is not JSON.", "row 5 is not JSON."]
    assert in_batches(rows()) == [
        DocumentBatch(["a" * 9], rows=1, bad=0, named=[], text_bytes=9),
        DocumentBatch(["b" * 12], rows=4, bad=2, named=named[:2], text_bytes=12),
        DocumentBatch(["d" * 3], rows=7, bad=3, named=named, text_bytes=3),
    ]


def test_small_documents_fill_a_batch_again_after_the_first():
    result = in_batches(["aa"] * 9)
    assert [len(batch.texts) for batch in result] == [4, 4, 1]
    assert [batch.text_bytes for batch in result] == [8, 8, 2]


def test_batches_go_on_where_a_checkpoint_was_and_leave_it_as_it_is():
    """Whatever was counted before, the second call counts the same as one call would."""
    whole = in_batches(rows())
    start = whole[1]
    named = list(start.named)
    assert in_batches(rows()[4:], start) == whole[2:]
    assert start.named == named
    assert in_batches(rows()[4:], start) == whole[2:]


def test_malformed_rows_of_the_batches_before_count_in_the_share():
    """One in ten may be malformed, of more than ten: with 4 before, 7 more are too many."""
    config = SourceConfig(bad_rows=0.1)
    few = [bad(n) for n in range(7)]
    assert in_batches(few, config=config)[-1].bad == 7
    with pytest.raises(UserError, match=r"11 of the first 27 rows are malformed"):
        in_batches(few, DocumentBatch(rows=20, bad=4), config)


@pytest.mark.parametrize("interrupted", [False, True])
def test_malformed_rows_are_counted_once_whatever_comes_between(
    config, many_pieces, tmp_path, monkeypatch, interrupted
):
    monkeypatch.setattr(units, "NAMED", 1)
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"Document {i} says it. "} for i in range(150)]
    path.write_text("\n".join(map(json.dumps, [*rows[:20], *[{}] * 15, *rows[20:]])))
    work = work_of(replace(config, files=[str(path)], bad_rows=0.5))

    def stop(_):
        if len(list((work.directory / "pieces").glob("0*.json"))) >= 2:
            raise KeyboardInterrupt

    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            work.run(workers=1, report=stop)
    work.run(workers=1)
    assert open_prepared(work.directory).manifest.bad_rows == 15
