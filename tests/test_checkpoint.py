"""Checkpoints: any tool reads the weights, any number of ranks resumes, damage is refused."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.program import run_ranks
from trainer import checkpoint
from trainer.checkpoint import (
    BEFORE_DROP,
    MANIFEST,
    STATE,
    Writer,
    check_sound,
    files_of,
    find_checkpoint,
    join_tensors,
    newest_checkpoint,
    optimizer_tensors,
    read_state,
    readers,
    regular_checkpoints,
    restore,
    settle,
    split_tensors,
)
from trainer.common.errors import UserError
from trainer.interchange.hf_rope import rope_forms
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.layout import Layout
from trainer.training.setup import quiet_lightning

CONFIG = ModelConfig(
    vocab_size=34,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=False,
)


def decoder(seed=0, **changes):
    layout = build_layout(
        PositionalConfig(),
        num_layers=2,
        num_key_value_heads=1,
        head_dim=8,
        training_length=16,
        qk_norm=False,
    )
    return Decoder(replace(CONFIG, **changes), layout, seed)


def train(model, optimizer, steps=3):
    """Take steps on fixed batches."""
    for step in range(steps):
        ids = torch.arange(32).reshape(2, 16) + step
        model.loss(ids, ids.roll(-1, 1), torch.ones(2, 16)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_state_that_is_no_tensor_is_named():
    model = decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.norm.weight]["count"] = 3
    with pytest.raises(UserError, match=r"^optimizer: .* got count=3$"):
        optimizer_tensors(model, optimizer)


def tensors_of(model, optimizer):
    """What a checkpoint holds."""
    weights = {f"model.{name}": x.detach() for name, x in model.named_parameters()}
    return weights | optimizer_tensors(model, optimizer)


def describe(model, step):
    return {"step": step, "model": asdict(model.config), "layout": model.layout.to_dict()}


@pytest.fixture
def saved(tmp_path):
    """A model and optimizer after three steps, and the directory with their checkpoint."""
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    write(tmp_path, model, optimizer, "step-000003", 3)
    return model, optimizer, tmp_path


def write(directory, model, optimizer, *names_and_steps, keep=99, **kept):
    writer = Writer(directory, keep, **kept)
    pairs = zip(names_and_steps[::2], names_and_steps[1::2], strict=True)
    for name, step in pairs:
        writer.save(directory / name, tensors_of(model, optimizer), describe(model, step))
    writer.wait()


def test_weights_are_read_with_safetensors_alone(saved):
    model, optimizer, directory = saved
    (file,) = (directory / "step-000003").glob("*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        for name, parameter in model.named_parameters():
            assert torch.equal(tensors.get_tensor(f"model.{name}"), parameter)
            moment = optimizer.state[parameter]["exp_avg"]
            assert torch.equal(tensors.get_tensor(f"optim.{name}.exp_avg"), moment)
    assert not list(directory.rglob("*.metadata"))


def test_a_run_resumes_bitwise(saved):
    model, optimizer, directory = saved
    resumed = decoder(seed=1)
    other = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    restore(resumed, other, directory / "step-000003")
    assert_equal(model, optimizer, resumed, other)
    train(model, optimizer)
    train(resumed, other)
    assert_equal(model, optimizer, resumed, other)


def test_a_rank_fills_files_one_after_the_other(saved, monkeypatch):
    """A tensor that is larger than a file has one of its own."""
    model, optimizer, directory = saved
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)
    sizes = {"a": 15, "b": 10, "c": 20, "d": 50, "e": 1, "f": 1}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    assert files_of(tensors) == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4, "f": 4}
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 10_000)
    write(directory, model, optimizer, "step-000004", 4)
    assert len([*(directory / "step-000004").glob("*.safetensors")]) > 3
    resumed = decoder(seed=1)
    other = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    restore(resumed, other, directory / "step-000004")
    assert_equal(model, optimizer, resumed, other)


def assert_equal(model, optimizer, other, its_optimizer):
    tensors, others = tensors_of(model, optimizer), tensors_of(other, its_optimizer)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[k], others[k]) for k in tensors)


@pytest.mark.slow
def test_two_ranks_write_what_one_and_two_read(tmp_path):
    script = Path(__file__).with_name("checkpoint_ranks.py")
    written, again, alone = (tmp_path / f"{name}.pt" for name in ("written", "again", "alone"))
    for ranks, what, file in ((2, "train", written), (2, "restore", again), (1, "restore", alone)):
        for rank in run_ranks(ranks, script, what, tmp_path, file, cwd=tmp_path):
            assert rank.returncode == 0, rank.stderr
    assert len(list((tmp_path / "step-000003").glob("*.safetensors"))) == 2
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000003"
    expected = torch.load(written)
    for file in (again, alone):
        tensors = torch.load(file)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    model = decoder(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    restore(model, optimizer, tmp_path / "step-000003")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"model.{name}"])


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("pattern", ["*.safetensors", STATE])
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(saved, harm, pattern):
    model, optimizer, directory = saved
    write(directory, model, optimizer, "step-000006", 6)
    (file,) = (directory / "step-000006").glob(pattern)
    harm(file)
    assert newest_checkpoint(directory) == directory / "step-000003"
    assert regular_checkpoints(directory) == [directory / "step-000003"]
    harm(next((directory / "step-000003").glob(pattern)))
    for _ in range(2):  # the next start does not begin anew either
        with pytest.raises(UserError, match="are damaged"):
            newest_checkpoint(directory)


def test_a_step_may_be_damaged_again(saved):
    model, optimizer, directory = saved
    for _ in range(2):
        write(directory, model, optimizer, "step-000006", 6)
        truncate(directory / "step-000006" / STATE)
        assert newest_checkpoint(directory) == directory / "step-000003"


def test_the_state_of_an_optimizer_keeps_its_dtypes_and_replaces_another(saved):
    model, optimizer, directory = saved
    optimizer.state[model.norm.weight]["exp_avg"] = torch.ones(16, dtype=torch.bfloat16)
    del optimizer.state[model.embed_tokens.weight]
    write(directory, model, optimizer, "step-000006", 6)
    resumed = decoder(seed=1)
    other = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    train(resumed, other)
    restore(resumed, other, directory / "step-000006")
    assert_equal(model, optimizer, resumed, other)
    assert other.state[resumed.norm.weight]["exp_avg"].dtype == torch.bfloat16


def test_a_checkpoint_that_may_not_be_read_is_not_put_aside(saved, monkeypatch):
    directory = saved[2]

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(PermissionError):
        newest_checkpoint(directory)
    monkeypatch.undo()
    assert newest_checkpoint(directory) == directory / "step-000003"


@pytest.mark.parametrize("denied", [".", "step-000003"])
def test_a_directory_that_may_not_be_listed_is_neither_empty_nor_damaged(
    saved, monkeypatch, denied
):
    """Path.glob would find nothing in it: a run would start again, or put a checkpoint aside."""
    directory = saved[2]

    def deny(listing):
        def listed(path="."):
            if Path(path) == directory / denied:
                raise PermissionError(13, "Permission denied", str(path))
            return listing(path)

        return listed

    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, deny(getattr(os, name)))
        with pytest.raises(PermissionError):
            newest_checkpoint(directory)
    assert newest_checkpoint(directory) == directory / "step-000003"


def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_new_one(saved, monkeypatch):
    model, optimizer, directory = saved
    path = directory / BEFORE_DROP
    write(directory, model, optimizer, BEFORE_DROP, 3)
    shutil.rmtree(directory / "step-000003")

    class Killed(BaseException):
        pass

    def killed(path, target):
        raise Killed

    train(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *paths: killed(*paths) if paths[0].is_dir() else None)
        with pytest.raises(Killed):
            write(directory, model, optimizer, BEFORE_DROP, 6)
    assert not path.exists()
    (directory / ".step-000007.partial").mkdir()  # of a kill before the manifest
    settle(directory)
    assert [each.name for each in directory.iterdir()] == [BEFORE_DROP]
    assert newest_checkpoint(directory) == path
    assert read_state(path)["step"] == 6
    resumed = decoder(seed=1)
    other = torch.optim.AdamW(resumed.parameters())
    restore(resumed, other, path)
    assert_equal(model, optimizer, resumed, other)


def test_a_run_is_found_by_a_path_from_home(saved, monkeypatch):
    directory = saved[2]
    monkeypatch.setenv("HOME", str(directory.parent))
    assert find_checkpoint(f"~/{directory.name}/step-000003") == directory / "step-000003"


def test_a_checkpoint_that_is_not_there_is_not_called_damaged(tmp_path):
    with pytest.raises(UserError, match="step-000005' is missing"):
        check_sound(tmp_path / "step-000005")


@pytest.mark.parametrize("removed", [[], ["*.safetensors"], [STATE]])
@pytest.mark.parametrize("listed", [STATE, "*.safetensors"])
def test_a_manifest_lists_all_files_of_a_checkpoint(saved, removed, listed):
    directory = saved[2]
    path = directory / "step-000003"
    (name,) = [file.name for file in path.glob(listed)]
    manifest = json.loads((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_text(json.dumps({name: manifest[name]}))
    for pattern in removed:
        next(path.glob(pattern)).unlink()
    with pytest.raises(UserError, match="are damaged"):
        newest_checkpoint(directory)


def test_a_checkpoint_of_version_0_2_is_refused_in_one_sentence(tmp_path):
    (tmp_path / STATE).write_text(json.dumps({"format": 2, "step": 3}))
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(UserError, match="has format 2, expected 5"):
        read_state(tmp_path)


def test_a_checkpoint_of_the_format_before_is_read_without_an_origin(tmp_path):
    layout = decoder().layout
    values = layout.to_dict()
    for spectrum in values["spectra"]:
        del spectrum["origin"]
    state = {"format": 4, "step": 3, "layout": values, "user_callbacks": {"a": {"n": 1}}}
    (tmp_path / STATE).write_text(json.dumps(state))
    read = read_state(tmp_path)
    assert read["lightning"] == {"callbacks": {"a": {"n": 1}}}
    stored = Layout.from_dict(read["layout"])
    assert stored == layout
    assert layout.spectra[0].origin
    assert not stored.spectra[0].origin
    form, _ = rope_forms(stored.spectra[0], 8, 16)
    assert form == {"rope_type": "default", "rope_theta": 10_000.0}


def test_the_newest_and_permanent_checkpoints_stay(tmp_path):
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    steps = [x for step in range(1, 10) for x in (f"step-{step:06d}", step)]
    directory = tmp_path / "checkpoints"
    write(directory, model, optimizer, BEFORE_DROP, 5, *steps, keep=2, permanent={3}, every=4)
    assert [path.name[-1] for path in regular_checkpoints(directory)] == ["3", "4", "8", "9"]
    assert (directory / BEFORE_DROP).is_dir()
    for name in (tmp_path, directory):
        assert find_checkpoint(str(name)) == directory / "step-000009"


def test_beyond_a_million_steps_the_newest_checkpoint_stays(tmp_path):
    """Its name has a digit more, and comes before the others in an alphabet."""
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = [x for step in (999_998, 999_999, 1_000_000) for x in (f"step-{step}", step)]
    directory = tmp_path / "checkpoints"
    write(directory, model, optimizer, *steps, keep=2)
    names = [path.name for path in regular_checkpoints(directory)]
    assert names == ["step-999999", "step-1000000"]
    for found in (find_checkpoint(str(tmp_path)), newest_checkpoint(directory)):
        assert found == directory / "step-1000000"


def test_a_checkpoint_holds_what_was_when_it_was_asked_for(tmp_path, monkeypatch):
    """Training goes on while the files are written."""
    model, go_on = decoder(), Event()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    before = {name: value.clone() for name, value in tensors_of(model, optimizer).items()}
    save = checkpoint.dcp.save
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *a, **k: go_on.wait() and save(*a, **k))
    writer = Writer(tmp_path, 2)
    writer.save(tmp_path / "step-000003", tensors_of(model, optimizer), describe(model, 3))
    train(model, optimizer)
    assert newest_checkpoint(tmp_path) is None
    go_on.set()
    writer.wait()
    restore(model, optimizer, tmp_path / "step-000003")
    for name, value in tensors_of(model, optimizer).items():
        assert torch.equal(value, before[name])


def test_the_thread_that_writes_leaves_the_gpu_alone(tmp_path, monkeypatch):
    """Where there is a GPU, DCP's own thread waits for its work; here it would fail."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with closing(Writer(tmp_path, 1)) as writer:
        writer.save(tmp_path / "step-000001", {"model.a": torch.ones(3)}, {"step": 1})
        writer.wait()


def test_a_failed_write_leaves_the_checkpoint_before_it(saved, monkeypatch):
    model, optimizer, directory = saved

    def full(path, data):
        raise OSError("No space left")

    monkeypatch.setattr(checkpoint, "write_atomically", full)
    with pytest.raises(UserError, match=r"step-000006.*No space left"):
        write(directory, model, optimizer, "step-000006", 6)
    assert newest_checkpoint(directory) == directory / "step-000003"
    assert failed_write(directory, model, optimizer)
    monkeypatch.undo()
    assert not failed_write(directory, model, optimizer)
    assert newest_checkpoint(directory) == directory / "step-000006"


def failed_write(directory, model, optimizer):
    """Whether a checkpoint could not be written, as the writer knows before one waits for it."""
    writer = Writer(directory, 99)
    writer.save(directory / "step-000006", tensors_of(model, optimizer), describe(model, 6))
    assert not Writer(directory, 99).has_failed
    writer.close()
    return writer.has_failed


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(saved, monkeypatch, caplog):
    model, optimizer, directory = saved

    def denied(path, *_, **options):
        if not options.get("ignore_errors"):
            raise PermissionError("denied")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", denied)
    write(directory, model, optimizer, "step-000006", 6, keep=1)
    assert [path.name for path in regular_checkpoints(directory)] == ["step-000003", "step-000006"]
    assert newest_checkpoint(directory) == directory / "step-000006"
    assert "step-000003" in caplog.text


def test_one_process_is_not_warned_that_it_has_no_group(tmp_path, recwarn):
    """The thread that writes sets no filters, which are those of all threads."""
    with quiet_lightning():
        write(tmp_path, decoder(), torch.optim.SGD([torch.ones(1)]), "step-000001", 1)
    assert not [str(warning.message) for warning in recwarn]


@pytest.mark.parametrize(
    "value",
    [
        {0: torch.zeros(1), "0": torch.ones(1)},
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {(1, 2): 3},
        {torch.float32: 3},
    ],
)
def test_what_could_not_be_read_again_is_refused(value):
    with pytest.raises(UserError, match="state"):
        split_tensors(value, "state", {})


def test_shards_are_joined_by_their_offsets_and_not_by_names_of_files(tmp_path):
    whole = torch.arange(12.0).reshape(6, 2)
    for file, rows in (("a", slice(4, 6)), ("b", slice(0, 3)), ("c", slice(3, 4))):
        place = {"model.x": {"saved_offsets": [rows.start, 0]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(place)}
        save_file({"model.x": whole[rows].clone()}, tmp_path / f"{file}.safetensors", metadata)
    assert torch.equal(readers(tmp_path)["model.x"](), whole)


def test_another_shape_is_named(saved):
    directory = saved[2]
    wider = decoder(intermediate_size=32)
    with pytest.raises(ValueError, match=r"Size mismatch .*mlp"):
        restore(wider, torch.optim.AdamW(wider.parameters()), directory / "step-000003")


def test_a_name_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected a run .* model\.safetensors"):
        find_checkpoint(str(tmp_path / "none"))


@pytest.mark.parametrize("mark", ["__tensor__", "__items__", "__tuple__"])
def test_a_state_may_have_the_names_that_mark_tensors_and_tuples(mark):
    tensors = {}
    state = {"a": {mark: "state.b"}, "b": torch.ones(1), "c": {mark: [1, (2, 3)], "d": {mark: {}}}}
    written = json.loads(json.dumps(split_tensors(state, "state", tensors)))
    read = {name: partial(tensors.get, name) for name in tensors}
    assert join_tensors(written, read) == state
