"""Checkpoints are whole or not there, and a damaged one is never trusted."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.program import run_ranks
from tests.training.test_run import assert_same_state, checkpoint_of, rows_of
from trainer.common.errors import UserError
from trainer.runs import checkpoints, saved_state
from trainer.runs import state as saved
from trainer.runs.checkpoints import (
    BEFORE_DROP,
    MANIFEST,
    check_same_model,
    damage,
    description,
    digests,
    find_checkpoint,
    healthy_checkpoints,
    is_healthy,
    load_decoder,
    newest_sound_checkpoint,
    read_state,
    regular_checkpoints,
    remove_leftovers,
    rotate,
    set_aside,
    step_name,
    training_loss,
    visible_damage,
    write_manifest_and_rename,
)
from trainer.runs.config import TrainerConfig
from trainer.runs.models import find_candidate
from trainer.runs.saved_state import read_saved
from trainer.training.callbacks import saving


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
    harm, message = DAMAGES[kind]
    harm(next(last.glob("__0_*")))
    with caplog.at_level(logging.WARNING):
        hurt, _ = run("hurt")
    assert f"{step_name(12)} is damaged" in caplog.text
    assert message in caplog.text
    assert_same_state(checkpoint_of(hurt), checkpoint_of(whole))
    assert rows_of(hurt) == rows_of(whole)
    assert (last.parent / f"unused-{step_name(12)}" / MANIFEST).is_file()


@pytest.fixture
def hashed(monkeypatch):
    """The files that were hashed; those that this process knows already count as unknown."""
    paths, original = [], checkpoints.checksum
    monkeypatch.setattr(checkpoints, "_known", {})
    monkeypatch.setattr(checkpoints, "checksum", lambda path: paths.append(path) or original(path))
    return paths


def files_of(checkpoint):
    return sorted(path for path in checkpoint.iterdir() if path.name != MANIFEST)


def test_a_resume_hashes_each_file_of_the_newest_checkpoint_once(run, hashed):
    config, _ = run()
    checkpoints._known.clear()
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

    monkeypatch.setattr(checkpoints, "_known", {})
    monkeypatch.setattr(checkpoints, "checksum", broken)
    assert "cannot be read (Input/output error)" in damage(checkpoint_of(config))


def test_what_fails_while_weights_are_read_may_not_fail_again(run, monkeypatch):
    """The files were held against their checksums just before: it is a disk, or another rank."""
    path = checkpoint_of(run()[0])

    def lost(*_, **__):
        raise CheckpointException("", {0: (ConnectionError("Connection closed by peer"), [])})

    monkeypatch.setattr(saved.dcp, "load", lost)
    with pytest.raises(UserError, match="'step-000012' cannot be read: "):
        load_decoder(path, read_state(path))


@pytest.mark.parametrize(("number", "transient"), [(errno.EIO, True), (errno.ENOENT, False)])
def test_a_description_that_a_disk_does_not_give_may_be_read_another_time(
    tmp_path, monkeypatch, number, transient
):
    def failing(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(saved_state, "read_plain", failing)
    with pytest.raises(UserError, match=r"state\.json of .* is damaged") as raised:
        read_saved(tmp_path)
    assert raised.value.is_transient == transient


def test_two_processes_share_the_files_and_agree_on_the_newest_sound_checkpoint(tmp_path):
    """The second process alone reads the file that is damaged; both take the one before."""
    for step in (3, 6):
        partial = tmp_path / "checkpoints" / f".{step}.partial"
        partial.mkdir(parents=True)
        for size in range(1, 7):
            (partial / f"__{size}_0.distcp").write_bytes(bytes(size))
        write_manifest_and_rename(partial, partial.with_name(step_name(step)), digests(partial))
    flip(tmp_path / "checkpoints" / step_name(6) / "__1_0.distcp")
    script = Path(__file__).with_name("newest_of_two.py")
    outputs = [rank.stdout.split("\n") for rank in run_ranks(2, script, tmp_path, cwd=tmp_path)]
    # Largest first, one after the other.
    assert outputs[0][:3] == [f"{step_name(6)}/__{i}_0.distcp" for i in (6, 4, 2)]
    assert sorted(outputs[1][:3]) == [f"{step_name(6)}/__{i}_0.distcp" for i in (1, 3, 5)]
    for rank in outputs:
        assert len(rank) == 3 + 3 + 2
        assert rank[-2] == step_name(3)


def test_processes_of_an_evaluation_hash_every_file_once(finished, tmp_path):
    path = checkpoint_of(finished[0])
    script, names = Path(__file__).with_name("verifying_ranks.py"), (path, "hf:none", tmp_path)
    ranks = run_ranks(2, script, *names, cwd=tmp_path)
    hashed = [rank.stdout.rpartition("hashed:")[2].split() for rank in ranks]
    assert all(hashed), ranks
    assert sorted(hashed[0] + hashed[1]) == sorted(json.loads((path / MANIFEST).read_text()))


def test_when_all_are_damaged_the_run_does_not_start_again_in_silence(run):
    config, _ = run()
    for path in regular_checkpoints(Path(config.run_dir) / "checkpoints"):
        flip(path / ".metadata")
    names = "step-000003, step-000006, step-000009, step-000012"
    message = (
        f"every checkpoint in '{config.run_dir}/checkpoints' is damaged ({names}). Restore one"
    )
    with pytest.raises(UserError) as error:
        run()
    assert tuple(map(str, error.value.problems)) == (
        f"checkpoint: {message}, or put a copy of 'before-drop', which is whole, in the place of "
        "'step-000006' to go on, or set overwrite=true to start again from nothing.",
    )
    flip(Path(config.run_dir) / "checkpoints" / BEFORE_DROP / ".metadata")
    with pytest.raises(UserError) as error:
        run()
    assert tuple(map(str, error.value.problems)) == (
        f"checkpoint: {message}, or set overwrite=true to start again from nothing.",
    )


def test_a_run_goes_on_from_a_copy_of_what_it_was_before_its_drop(run):
    whole, _ = run("whole")
    config, _ = run()
    directory = Path(config.run_dir) / "checkpoints"
    for path in regular_checkpoints(directory):
        flip(path / ".metadata")
    shutil.rmtree(directory / step_name(6))
    shutil.copytree(directory / BEFORE_DROP, directory / step_name(6))
    again, _ = run()
    assert_same_state(checkpoint_of(again), checkpoint_of(whole))
    assert rows_of(again) == rows_of(whole)
    for path in regular_checkpoints(directory):
        shutil.rmtree(path)
    message = f"there is no checkpoint in {config.run_dir!r} but '{directory / BEFORE_DROP}'."
    with pytest.raises(UserError, match=re.escape(message)):
        find_checkpoint(config.run_dir)


def test_evaluation_refuses_a_damaged_checkpoint_and_names_others(run):
    config, _ = run()
    path = find_checkpoint(config.run_dir)
    truncate(path / "state.json")
    with pytest.raises(UserError, match=r"step-000012.*damaged.*Others.*step-000009"):
        read_state(path)


def test_a_full_disk_stops_no_run_and_hurts_no_older_checkpoint(run, monkeypatch, caplog):
    whole, _ = run("whole")
    original = saving.save

    def full(tensors, directory, group):
        if "000006" in directory.name or "000009" in directory.name:
            directory.mkdir(parents=True)
            (directory / "__0_0.distcp").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(tensors, directory, group)

    monkeypatch.setattr(saving, "save", full)
    with caplog.at_level(logging.WARNING):
        config, _ = run("full")
    warnings = [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()]
    assert len(warnings) == 2
    assert all("older checkpoints are untouched" in text for text in warnings)
    directory = Path(config.run_dir) / "checkpoints"
    assert [p.name for p in regular_checkpoints(directory)] == [step_name(3), step_name(12)]
    assert not list(directory.glob(".*"))
    assert_same_state(checkpoint_of(config), checkpoint_of(whole))


def test_what_a_killed_process_left_is_swept_and_never_taken(run):
    config, _ = run()
    directory = Path(config.run_dir) / "checkpoints"
    shutil.copytree(directory / step_name(12), directory / ".step-000015.partial")
    shutil.copytree(directory / step_name(12), directory / ".step-000002.removed")
    assert newest_sound_checkpoint(Path(config.run_dir)).name == step_name(12)
    run()
    assert not list(directory.glob(".*"))


def test_a_new_checkpoint_replaces_one_of_the_same_name(tmp_path):
    for text in ("old", "new"):
        partial = tmp_path / ".a.partial"
        partial.mkdir()
        (partial / "file").write_text(text)
        write_manifest_and_rename(partial, tmp_path / "a", digests(partial))
    assert (tmp_path / "a" / "file").read_text() == "new"
    assert damage(tmp_path / "a") is None
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_best_by_training_loss_stay(run):
    config, _ = run("best", trainer={"keep_checkpoints": 1, "keep_best": 2, "log_every": 1})
    every, _ = run("every", trainer={"log_every": 1})
    losses = {row["step"]: row["loss"] for row in rows_of(every) if row["step"] % 3 == 0}
    result = {p.name for p in regular_checkpoints(Path(config.run_dir) / "checkpoints")}
    best = sorted(losses, key=losses.get)[:2]
    assert result == {step_name(step) for step in {*best, 12}}


def test_versions_of_packages_that_are_not_installed_are_left_out(monkeypatch):
    """A run of files or of Python's documentation needs no datasets."""

    def version(name):
        if name == "datasets":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(checkpoints, "version", version)
    assert checkpoints.versions().keys() == {
        "unrope", "python", "torch", "lightning", "numpy", "tokenizers",
    }  # fmt: skip


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


@pytest.fixture
def some(tmp_path):
    """A directory of checkpoints with the last logged training loss of each, and what is none."""
    directory = tmp_path / "some" / "checkpoints"
    losses = {3: 2.0, 6: 1.0, 9: float("nan"), 12: 1.5, 100: 3, 1_000_000: 1.0}
    for step, loss in losses.items():
        partial = directory / f".{step}.partial"
        partial.mkdir(parents=True)
        (partial / "state.json").write_text(json.dumps({"loss": loss}))
        write_manifest_and_rename(partial, directory / step_name(step), digests(partial))
    for name in ("step-x", "unused-step-000003", ".step-000015.partial"):
        (directory / name).mkdir()
    return directory


def steps_in(directory):
    return [int(path.name.removeprefix("step-")) for path in regular_checkpoints(directory)]


def test_checkpoints_are_found_oldest_first_and_nothing_else_is(some):
    assert steps_in(some) == [3, 6, 9, 12, 100, 1_000_000]
    newest = some / step_name(1_000_000)
    assert newest.name == "step-1000000"
    for name in (some, some.parent, newest):
        assert find_checkpoint(str(name)) == newest
    remove_leftovers(some)
    assert not (some / ".step-000015.partial").exists()
    assert (some / "unused-step-000003").is_dir()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some/checkpoints/step-x/state.json", "is a file; a checkpoint is a directory."),
        (
            "somme",
            "is neither a run directory nor a checkpoint. Looked in PLACE. Did you mean 'some'?",
        ),
        (
            "else/where",
            "is neither a run directory nor a checkpoint. Looked in PLACE/else, which does not "
            "exist.",
        ),
        (
            "some/checkpoints/step-x",
            "is neither a run directory nor a checkpoint: it has no checkpoints/ and no "
            "manifest.json.",
        ),
    ],
)
def test_what_is_no_checkpoint_is_said(some, tmp_path, name, message):
    (some / "step-x" / "state.json").write_text("")
    with pytest.raises(UserError) as error:
        find_checkpoint(str(tmp_path / name))
    (problem,) = error.value.problems
    place = repr(str(tmp_path / name))
    expected = f"{place} {message}".replace("'some'", repr(str(tmp_path / "some")))
    expected = re.sub("PLACE(/else)?", lambda match: repr(f"{tmp_path}{match[1] or ''}"), expected)
    assert str(problem) == f"checkpoint: {expected}"


@pytest.mark.parametrize(
    ("loss", "result"),
    [(2.0, 2.0), (3, math.inf), (math.nan, math.inf), ("1", math.inf), (None, math.inf)],
)
def test_a_training_loss_that_is_none_is_the_worst(tmp_path, loss, result):
    assert training_loss(tmp_path) == math.inf  # there is no file
    for content in ({"loss": loss}, {}, [loss]):
        (tmp_path / "state.json").write_text(json.dumps(content))
        expected = result if content == {"loss": loss} else math.inf
        assert training_loss(tmp_path) == expected or math.isnan(loss)
    (tmp_path / "state.json").write_text(json.dumps({"loss": loss}))
    assert training_loss(tmp_path) == result


@pytest.mark.parametrize(
    ("keep", "steps", "remaining"),
    [
        ({"keep_checkpoints": 2}, (), [100, 1_000_000]),
        ({"keep_checkpoints": 1}, (3, 7), [3, 1_000_000]),
        ({"keep_checkpoints": 1, "keep_every": 6}, (), [6, 12, 1_000_000]),
        ({"keep_checkpoints": 1, "keep_best": 1}, (), [6, 1_000_000]),
        ({"keep_checkpoints": 1, "keep_best": 4}, (), [3, 6, 12, 1_000_000]),
    ],
)
def test_what_a_rotation_keeps(some, keep, steps, remaining):
    rotate(some, TrainerConfig(**keep), frozenset(steps))
    assert steps_in(some) == remaining
    assert [path.name for path in some.glob(".*")] == [".step-000015.partial"]


def test_without_a_healthy_checkpoint_the_newest_with_finite_parameters_counts(some):
    """The updates before it were skipped, and have not touched the weights."""
    for step in steps_in(some):
        state = {"tally": {"skipped_in_a_row": 1.0}, "finite_parameters": step < 9}
        (some / step_name(step) / "state.json").write_text(json.dumps(state))
    assert healthy_checkpoints(some, 12) == [some / step_name(6)]


UNHEALTHY = ({"finite_parameters": False}, {"tally": {"skipped_in_a_row": 1.0}})


@pytest.mark.parametrize("unhealthy", UNHEALTHY)
@pytest.mark.parametrize(("keep", "remaining"), [(1, [6]), (2, [3, 6, 100])])
def test_a_rotation_spares_healthy_checkpoints_before_others(some, unhealthy, keep, remaining):
    for step in steps_in(some):
        state = {"tally": {"skipped_in_a_row": 0.0}} | (unhealthy if step > 6 else {})
        (some / step_name(step) / "state.json").write_text(json.dumps(state))
    assert healthy_checkpoints(some, 12) == [some / step_name(6), some / step_name(3)]
    assert healthy_checkpoints(some, 2) == []
    rotate(some, TrainerConfig(keep_checkpoints=keep))
    assert steps_in(some) == [*remaining, 1_000_000]
    # A newer healthy one takes the place of an older one.
    state = {"tally": {"skipped_in_a_row": 0.0}, "finite_parameters": True}
    (some / step_name(1_000_000) / "state.json").write_text(json.dumps(state))
    rotate(some, TrainerConfig(keep_checkpoints=1))
    assert steps_in(some) == [1_000_000]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tally": null}', '{"tally": {}}'])
def test_a_checkpoint_of_unknown_state_counts_as_healthy(tmp_path, content):
    assert is_healthy(tmp_path)
    (tmp_path / "state.json").write_text(content)
    assert is_healthy(tmp_path)


def test_what_a_run_does_not_go_on_from_is_set_aside(some):
    (some / "unused-step-000003" / "old").write_text("")
    set_aside([some / step_name(3), some / step_name(6)])
    assert steps_in(some) == [9, 12, 100, 1_000_000]
    for step in (3, 6):
        unused = some / f"unused-{step_name(step)}"
        assert sorted(path.name for path in unused.iterdir()) == [MANIFEST, "state.json"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "manifest.json is missing"),
        ({}, "manifest.json lists no files"),
        ({"state.json": 3}, "manifest.json is no list of files with sizes and checksums ("),
        ({"../a": [1, "x"]}, "manifest.json names a file elsewhere (../a)"),
        ({"..": [1, "x"]}, "manifest.json names a file elsewhere (..)"),
        ({"": [1, "x"]}, "manifest.json names a file elsewhere ()"),
        ({"a\nb": [1, "x"]}, r"'a\nb'... is missing"),
        ({"a" * 100: [1, "x"]}, f"'{'a' * 60}'... is missing"),
        ({"a" * 99: [1, "x"]}, f"{'a' * 99} is missing"),
        ({"state.json": [3, "x"]}, "state.json has 13 bytes instead of 3"),
        ({"state.json": [13, "x"]}, "state.json has changed (its checksum differs)"),
    ],
)
def test_damage_is_named(some, files, message):
    checkpoint = some / step_name(3)
    assert damage(checkpoint) is None
    (checkpoint / MANIFEST).unlink()
    if files is not None:
        (checkpoint / MANIFEST).write_text(json.dumps(files))
    assert damage(checkpoint).startswith(message)
    if "checksum" not in message or "sizes" in message:
        assert visible_damage(checkpoint) == damage(checkpoint)
    else:
        assert visible_damage(checkpoint) is None


def test_a_checkpoint_with_weights_of_another_model_is_refused(finished):
    path = checkpoint_of(finished[0])
    state = read_state(path)
    shape = state["model"]
    for changes, message in (
        ({"qkv_bias": True}, r"has no parameter .*; 5 others do not fit either\.$"),
        ({"intermediate_size": 64}, r"is \(48, 32\) in 'step-000012', but \(64, 32\) in the model"),
        (NEVER, r"holds 'model\..*norm.*', which the model has not\.$"),
    ):
        changed = state | {"model": shape | changes}
        if changes is NEVER:
            layers = [layer | {"qk_norm": False} for layer in state["layout"]["layers"]]
            changed["layout"] = state["layout"] | {"layers": layers}
        with pytest.raises(UserError, match=message):
            load_decoder(path, changed)


def test_a_model_that_is_read_in_another_dtype_is_the_converted_one(finished):
    path = checkpoint_of(finished[0])
    state, ids = read_state(path), torch.arange(24)[None]
    read, converted = load_decoder(path, state, "cpu", torch.bfloat16), load_decoder(path, state)
    assert_same_model(read, converted.to(torch.bfloat16), ids)


def assert_same_model(read, converted, ids):
    """Check dtypes and bits of all tensors, and that both compute alike."""
    for kind in ("named_parameters", "named_buffers"):
        tensors, expected = (dict(getattr(model, kind)()) for model in (read, converted))
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        assert torch.equal(read(ids), converted(ids))


NEVER = {"qk_norm": {"when": "never"}}


def test_a_description_holds_all_that_evaluation_needs(finished):
    config, _ = finished
    state = read_state(checkpoint_of(config))
    model = load_decoder(checkpoint_of(config), state)
    result = json.loads(json.dumps(description(config, model, state["tokenizer"], 0, {}, 12)))
    assert result == {key: state[key] for key in result}
    assert result.keys() == {
        "format", "step", "tokens", "model", "layout", "tokenizer", "end_of_text", "token_files",
        "config", "versions",
    }  # fmt: skip
    assert (result["format"], result["step"], result["tokens"]) == (2, 12, 12 * 4 * 32)
    assert (result["config"]["drop"]["at"], state["effects"]["recalibrate"]["step"]) == (6, 6)
    assert set(state["data"]) == {"corpus", "order", "texts"}
    assert state["versions"]["torch"] == torch.__version__
    assert result["versions"].keys() == {
        "unrope", "python", "torch", "lightning", "numpy", "datasets", "tokenizers",
    }  # fmt: skip
