"""peft: what an adapter's directory loads is what was trained."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import peft as integration

from tests.clients.tiny import (
    AT,
    QUIET,
    Reference,
    checkpoint,
    llama,
    logits,
    reference_logits,
    rows,
)
from trainer.hf import (
    DropPositions,
    drop_rotation,
    is_dropped,
    restore_rotation,
    save_dropped_base,
)

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Save a base with rotation, and return its directory."""
    llama().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture(autouse=True)
def any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers take this peft: it wants one newer than the newest."""
    monkeypatch.setattr(integration, "check_peft_version", lambda **_: None)


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, **changes)


def adapted(base: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), lora(**changes))


def with_nonzero_adapter(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.3)
    return model


def trained(
    model: Any, folder: Path, callback: TrainerCallback, resume: str | None = None
) -> Trainer:
    args = TrainingArguments(
        str(folder), **QUIET | {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-1}
    )
    trainer = Trainer(model, args, train_dataset=rows(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def auto(directory: str | Path) -> Any:
    return peft.AutoPeftModelForCausalLM.from_pretrained(directory)


def test_an_adapter_and_its_checkpoints_are_loaded_as_they_were_trained(
    base: str, tmp_path: Path
) -> None:
    ours = trained(adapted(base), tmp_path / "ours", DropPositions(AT))
    theirs = trained(adapted(base), tmp_path / "theirs", Reference())
    expected = reference_logits(theirs.model)
    assert torch.equal(logits(ours.model), expected)
    ours.save_model(str(tmp_path / "adapter"))
    for directory in (tmp_path / "adapter", checkpoint(tmp_path / "ours", 6)):
        assert torch.equal(logits(auto(directory)), expected)
    for step in range(1, 7):
        loaded = auto(checkpoint(tmp_path / "ours", step))
        assert is_dropped(loaded) == (step > AT)
        reference = auto(checkpoint(tmp_path / "theirs", step))
        compute = reference_logits if step > AT else logits
        assert torch.equal(logits(loaded), compute(reference))
    auto(tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(base)), logits(llama()))


@pytest.mark.parametrize("step", [1, AT, 5])
def test_an_adapter_resumes_on_both_sides_of_the_drop(base: str, tmp_path: Path, step: int) -> None:
    whole = trained(adapted(base), tmp_path / "out", DropPositions(AT))
    expected = logits(whole.model)
    directory = checkpoint(tmp_path / "out", step)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(directory, is_trainable=True)
    for model in (adapted(base), loaded, whole.model):
        resumed = trained(model, tmp_path / "out", DropPositions(AT), resume=directory)
        assert torch.equal(logits(resumed.model), expected)
        assert torch.equal(logits(auto(checkpoint(tmp_path / "out", 6))), expected)


def one_adapter(base: str) -> Any:
    return with_nonzero_adapter(adapted(base))


def two_adapters(base: str) -> Any:
    model = adapted(base)
    model.add_adapter("other", lora())
    return with_nonzero_adapter(model)


def of_transformers(base: str) -> Any:
    model = LlamaForCausalLM.from_pretrained(base)
    model.add_adapter(lora())
    return with_nonzero_adapter(model)


def with_trained_modules(base: str) -> Any:
    return with_nonzero_adapter(adapted(base, modules_to_save=["lm_head"]))


def in_no_directory(base: str) -> Any:
    torch.manual_seed(0)
    return with_nonzero_adapter(peft.get_peft_model(llama(), lora()))


def by_a_relative_path(base: str) -> Any:
    return with_nonzero_adapter(adapted(os.path.relpath(base)))


@pytest.mark.parametrize(
    "build",
    [
        one_adapter,
        two_adapters,
        of_transformers,
        with_trained_modules,
        in_no_directory,
        by_a_relative_path,
    ],
)
def test_a_dropped_base_is_written_in_loops_of_ones_own(
    build: Callable[[str], Any], base: str, tmp_path: Path
) -> None:
    model = build(base)
    expected = reference_logits(model)
    with pytest.raises(ValueError, match="rotates: call drop_rotation first"):
        save_dropped_base(model, tmp_path / "dropped")
    drop_rotation(model)
    if build is not in_no_directory:
        with pytest.raises(ValueError, match="another directory than that of the base"):
            save_dropped_base(model, base)
    save_dropped_base(model, tmp_path / "dropped")
    model.save_pretrained(tmp_path / "adapter")
    loaded = auto(tmp_path / "adapter")
    assert is_dropped(AutoModelForCausalLM.from_pretrained(tmp_path / "dropped"))
    assert torch.allclose(logits(loaded), expected, atol=1e-6)

    rotating = logits(restore_rotation(model))
    if build is not in_no_directory:
        model.save_pretrained(tmp_path / "rotating")
        assert torch.equal(logits(auto(tmp_path / "rotating")), rotating)
    assert not torch.allclose(rotating, expected, atol=1e-3)


def test_an_adapter_put_on_a_dropped_model_loads_no_base_that_rotates(
    base: str, tmp_path: Path
) -> None:
    dropped = drop_rotation(LlamaForCausalLM.from_pretrained(base))
    model = with_nonzero_adapter(peft.get_peft_model(dropped, lora()))
    expected = reference_logits(model)
    model.save_pretrained(tmp_path / "unwritten")
    with pytest.raises(OSError, match="without rotation"):
        auto(tmp_path / "unwritten")
    save_dropped_base(model, tmp_path / "dropped")
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(auto(tmp_path / "adapter")), expected)


def test_an_adapter_added_behind_the_drop_names_the_dropped_base(base: str, tmp_path: Path) -> None:
    model = drop_rotation(one_adapter(base))
    save_dropped_base(model, tmp_path / "dropped")
    model.add_adapter("late", lora())
    model.set_adapter("late")
    with_nonzero_adapter(model)
    model.save_pretrained(tmp_path / "adapters")
    assert torch.equal(logits(auto(tmp_path / "adapters" / "late")), reference_logits(model))


@pytest.mark.parametrize("newest", ["0123abcd", "4567cdef"])
def test_a_base_of_the_hub_is_linked_from_its_cache(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: str
) -> None:
    """From the commit that was loaded, whichever is the newest."""
    repository = tmp_path / "hub" / "models--me--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (repository / "refs" / "main").write_text(newest)
    for file in Path(base).iterdir():
        blob = file.rename(repository / "blobs" / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(blob)
    if newest != snapshot.name:
        llama().save_pretrained(repository / "snapshots" / newest)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = one_adapter(str(snapshot))
    model.base_model.model.config._commit_hash = snapshot.name  # as if loaded by its name
    model.base_model.model.name_or_path = "me/tiny"
    drop_rotation(model)
    written = save_dropped_base(model, tmp_path / "dropped")
    weights = written / "model.safetensors"
    assert not weights.is_symlink()
    assert weights.samefile(repository / "blobs" / "hash-of-model.safetensors")
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(auto(tmp_path / "adapter")), reference_logits(model))


def test_another_base_of_equal_size_and_time_takes_the_place_of_the_first(
    base: str, tmp_path: Path
) -> None:
    """As in an image whose files all have one time."""
    other = llama()
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    other.save_pretrained(tmp_path / "other")
    for directory in (base, tmp_path / "other"):
        os.utime(Path(directory, "model.safetensors"), (1, 1))
        model = drop_rotation(one_adapter(str(directory)))
        save_dropped_base(model, tmp_path / "dropped")
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(auto(tmp_path / "adapter")), reference_logits(model))


def test_a_base_that_was_loaded_without_rotation_is_named_as_it_is(
    base: str, tmp_path: Path
) -> None:
    drop_rotation(LlamaForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "dropped")
    model = with_nonzero_adapter(adapted(str(tmp_path / "dropped")))
    assert save_dropped_base(model, tmp_path / "unused") == tmp_path / "dropped"
    assert not (tmp_path / "unused").exists()


def test_a_base_is_written_again_over_that_of_another_run(base: str, tmp_path: Path) -> None:
    other = llama(layers=2)
    other.save_pretrained(tmp_path / "other", max_shard_size="10KB")
    finetuned = llama()
    finetuned.lm_head.weight.data.mul_(2)
    finetuned.save_pretrained(tmp_path / "finetuned")  # files of the same names and sizes
    sharded, same_files = str(tmp_path / "other"), str(tmp_path / "finetuned")
    for directory in (sharded, base, sharded, base, base, same_files, base):
        model = drop_rotation(with_nonzero_adapter(adapted(directory)))
        written = save_dropped_base(model, tmp_path / "dropped")
        loaded = AutoModelForCausalLM.from_pretrained(written)
        expected = reference_logits(LlamaForCausalLM.from_pretrained(directory))
        assert torch.equal(logits(loaded), expected)
        index = "model.safetensors.index.json"
        assert (written / index).exists() == Path(directory, index).exists()


def test_the_tokenizer_beside_a_written_base_is_a_file_of_its_own(
    base: str, tmp_path: Path
) -> None:
    source = Path(base, "tokenizer.json")
    source.write_text("the base's")
    model = drop_rotation(adapted(base))
    for _ in range(2):
        written = save_dropped_base(model, tmp_path / "dropped") / "tokenizer.json"
        assert written.read_text() == "the base's"
        written.write_text("another")
    assert source.read_text() == "the base's"


def test_a_model_without_an_adapter_is_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no adapter"):
        save_dropped_base(LlamaForCausalLM.from_pretrained(base), tmp_path / "dropped")
