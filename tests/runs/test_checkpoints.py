"""Checkpoints are whole or not there, and a damaged one is never trusted."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.program import run_ranks
from tests.training.test_run import assert_same_state, checkpoint_of, rows_of
from trainer.errors import TransientError, UserError
from trainer.runs import checkpoint_files, saved_state
from trainer.runs import state as saved
from trainer.runs.checkpoint_files import MANIFEST, damage, digests, publish
from trainer.runs.checkpoints import (
    check_same_model,
    find_checkpoint,
    load_decoder,
    newest_sound_checkpoint,
    read_state,
    regular_checkpoints,
    step_name,
)
from trainer.runs.models import find_candidate
from trainer.runs.saved_state import read_saved
from trainer.training.callbacks import checkpointing


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated": (truncate, "bytes instead of"),
    "flipped bit": (flip, "has changed"),
    "missing shard": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(
    run, finished, tmp_path, caplog, kind
):
    whole, _ = finished
    shutil.copytree(whole.run_dir, tmp_path / "hurt")
    last = tmp_path / "hurt" / "checkpoints" / step_name(12)
    harm, said = DAMAGES[kind]
    harm(next(last.glob("__0_*")))
    with caplog.at_level(logging.WARNING):
        hurt, _ = run("hurt")
    assert f"{step_name(12)} is damaged" in caplog.text
    assert said in caplog.text
    assert_same_state(checkpoint_of(hurt), checkpoint_of(whole))
    assert rows_of(hurt) == rows_of(whole)
    assert (last.parent / f"unused-{step_name(12)}" / MANIFEST).is_file()


@pytest.fixture
def hashed(monkeypatch):
    """The files that were hashed; those that this process knows already count as unknown."""
    found, original = [], checkpoint_files.checksum
    monkeypatch.setattr(checkpoint_files, "_known", {})
    monkeypatch.setattr(
        checkpoint_files, "checksum", lambda path: found.append(path) or original(path)
    )
    return found


def files_of(checkpoint):
    return sorted(path for path in checkpoint.iterdir() if path.name != MANIFEST)


def test_a_resume_hashes_each_file_of_the_newest_checkpoint_once(run, hashed):
    config, _ = run()
    checkpoint_files._known.clear()
    hashed.clear()
    run()
    read_state(checkpoint_of(config))
    assert sorted(hashed) == files_of(checkpoint_of(config))


def test_what_this_process_wrote_is_read_without_hashing_it_again(run, hashed):
    config, _ = run()
    hashed.clear()
    find_candidate(config.run_dir)
    assert not hashed
    flip(checkpoint_of(config) / ".metadata")
    with pytest.raises(UserError, match=r"\.metadata has changed"):
        find_candidate(config.run_dir)


def test_a_file_that_cannot_be_read_is_damage(run, monkeypatch):
    config, _ = run()

    def broken(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint_files, "_known", {})
    monkeypatch.setattr(checkpoint_files, "checksum", broken)
    assert "cannot be read (Input/output error)" in damage(checkpoint_of(config))


def test_what_fails_while_weights_are_read_may_not_fail_again(run, monkeypatch):
    """The files were held against their checksums just before: it is a disk, or another rank."""
    path = checkpoint_of(run()[0])

    def lost(*_, **__):
        raise CheckpointException("", {0: (ConnectionError("Connection closed by peer"), [])})

    monkeypatch.setattr(saved.dcp, "load", lost)
    with pytest.raises(TransientError, match="'step-000012' cannot be read: "):
        load_decoder(path, read_state(path))


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, TransientError), (errno.ENOENT, UserError)]
)
def test_a_description_that_a_disk_does_not_give_may_be_read_another_time(
    tmp_path, monkeypatch, number, kind
):
    def failing(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(saved_state, "read_plain", failing)
    with pytest.raises(UserError, match=r"state\.json of .* is damaged") as raised:
        read_saved(tmp_path)
    assert type(raised.value) is kind


def test_two_processes_share_the_files_and_agree_on_the_newest_sound_checkpoint(tmp_path):
    """The second process alone reads the file that is damaged; both take the one before."""
    for step in (3, 6):
        partial = tmp_path / "checkpoints" / f".{step}.partial"
        partial.mkdir(parents=True)
        for size in range(1, 7):
            (partial / f"__{size}_0.distcp").write_bytes(bytes(size))
        publish(partial, partial.with_name(step_name(step)), digests(partial))
    flip(tmp_path / "checkpoints" / step_name(6) / "__1_0.distcp")
    script = Path(__file__).with_name("newest_of_two.py")
    said = [rank.stdout.split("\n") for rank in run_ranks(2, script, tmp_path, cwd=tmp_path)]
    # Largest first, one after the other.
    assert said[0][:3] == [f"{step_name(6)}/__{i}_0.distcp" for i in (6, 4, 2)]
    assert sorted(said[1][:3]) == [f"{step_name(6)}/__{i}_0.distcp" for i in (1, 3, 5)]
    for rank in said:
        assert len(rank) == 3 + 3 + 2
        assert rank[-2] == step_name(3)


def test_when_all_are_damaged_the_run_does_not_start_again_in_silence(run):
    config, _ = run()
    for path in regular_checkpoints(Path(config.run_dir) / "checkpoints"):
        flip(path / ".metadata")
    with pytest.raises(UserError, match=r"every checkpoint .* is damaged .*overwrite=true"):
        run()


def test_evaluation_refuses_a_damaged_checkpoint_and_names_others(run):
    config, _ = run()
    path = find_checkpoint(config.run_dir)
    truncate(path / "state.json")
    with pytest.raises(UserError, match=r"step-000012.*damaged.*Others.*step-000009"):
        read_state(path)


def test_a_full_disk_stops_no_run_and_hurts_no_older_checkpoint(run, monkeypatch, caplog):
    whole, _ = run("whole")
    original = checkpointing.save

    def full(tensors, directory, group):
        if "000006" in directory.name or "000009" in directory.name:
            directory.mkdir(parents=True)
            (directory / "__0_0.distcp").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(tensors, directory, group)

    monkeypatch.setattr(checkpointing, "save", full)
    with caplog.at_level(logging.WARNING):
        config, _ = run("full")
    warnings = [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()]
    assert len(warnings) == 2
    assert all("older checkpoints are untouched" in text for text in warnings)
    directory = Path(config.run_dir) / "checkpoints"
    assert [p.name for p in regular_checkpoints(directory)] == [step_name(3), step_name(12)]
    assert not list(directory.glob(".*"))
    assert_same_state(checkpoint_of(config), checkpoint_of(whole))


def test_the_last_checkpoint_must_be_written(run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpointing, "save", full)
    with pytest.raises(UserError, match=r"step 12 could not be written .*No space left"):
        run()


def test_what_a_killed_process_left_is_swept_and_never_taken(run):
    config, _ = run()
    directory = Path(config.run_dir) / "checkpoints"
    shutil.copytree(directory / step_name(12), directory / ".step-000015.partial")
    shutil.copytree(directory / step_name(12), directory / ".step-000002.removed")
    assert newest_sound_checkpoint(Path(config.run_dir)).name == step_name(12)
    run()
    assert not list(directory.glob(".*"))


def test_publishing_replaces_a_checkpoint_of_the_same_name(tmp_path):
    for text in ("old", "new"):
        partial = tmp_path / ".a.partial"
        partial.mkdir()
        (partial / "file").write_text(text)
        publish(partial, tmp_path / "a", digests(partial))
    assert (tmp_path / "a" / "file").read_text() == "new"
    assert damage(tmp_path / "a") is None
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({"keep_checkpoints": 2}, [9, 12]),
        ({"keep_checkpoints": 1, "keep_every": 6}, [6, 12]),
        ({"keep_checkpoints": 1, "checkpoint_every": 2, "keep_every": 4}, [4, 8, 12]),
    ],
)
def test_checkpoints_rotate(run, keep, expected):
    config, _ = run(trainer=keep)
    found = regular_checkpoints(Path(config.run_dir) / "checkpoints")
    assert [p.name for p in found] == [step_name(step) for step in expected]


def test_the_best_by_training_loss_stay(run):
    config, _ = run("best", trainer={"keep_checkpoints": 1, "keep_best": 2, "log_every": 1})
    every, _ = run("every", trainer={"log_every": 1})
    losses = {row["step"]: row["loss"] for row in rows_of(every) if row["step"] % 3 == 0}
    found = {p.name for p in regular_checkpoints(Path(config.run_dir) / "checkpoints")}
    best = sorted(losses, key=losses.get)[:2]
    assert found == {step_name(step) for step in {*best, 12}}


def test_a_checkpoint_says_what_made_it(run):
    config, _ = run()
    state = read_state(checkpoint_of(config))
    assert state["tokens"] == 12 * 4 * 32
    assert state["versions"]["torch"] == torch.__version__
    assert set(state["data"]) == {"corpus", "order", "texts"}
    assert state["config"]["drop"]["at"] == 6
    assert state["callbacks"]["Transitions"]["effects"]["recalibrate"]["step"] == 6


def test_other_text_or_another_order_is_refused(run):
    run()
    with pytest.raises(UserError, match="trained on other text, or in another order"):
        run(data={"needles": {"weight": 3.0}})


def test_a_key_that_an_earlier_version_did_not_know_is_as_by_default(tiny_decoder):
    model = tiny_decoder()
    saved = asdict(model.config)
    del saved["initializer_by_depth"], saved["softmax"]
    check_same_model({"model": saved}, model, "step-1")
    other = tiny_decoder(model={"initializer_by_depth": False})
    with pytest.raises(UserError, match=r"initializer_by_depth: the checkpoint 'step-1' has True"):
        check_same_model({"model": saved}, other, "step-1")
