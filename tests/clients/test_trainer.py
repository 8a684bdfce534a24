"""transformers' Trainer: the drop in its settings, resumes and processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.clients.tiny import (
    AT,
    QUIET,
    Reference,
    checkpoint,
    llama,
    logits,
    reference_logits,
    rows,
    same_weights,
)
from trainer.hf import DropPositions, is_dropped

pytestmark = pytest.mark.slow


def trained(
    folder: Path, callback: TrainerCallback, resume: str | None = None, **settings: Any
) -> Trainer:
    args = TrainingArguments(str(folder), **QUIET | settings)
    trainer = Trainer(
        llama(2), args, train_dataset=rows(), eval_dataset=rows(4), callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 2},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.1},
    ],
    ids=["plain", "checkpointing", "bf16", "compile", "remainder", "schedule"],
)
def test_a_run_equals_one_whose_rotation_function_returns_its_inputs(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    ours = trained(tmp_path, DropPositions(AT), **settings)
    theirs = trained(tmp_path, Reference(), **settings)
    assert same_weights(ours.model, theirs.model)
    ours.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    reference = llama(2)
    reference.load_state_dict(theirs.model.state_dict())
    assert torch.equal(logits(loaded), reference_logits(reference))


def test_resumes_on_both_sides_equal_the_uninterrupted_run(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    whole = trained(tmp_path, DropPositions(AT, rewarm=2), **settings)
    for step in (1, AT, AT + 1, 5):
        resumed = trained(
            tmp_path, DropPositions(AT, rewarm=2), resume=checkpoint(tmp_path, step), **settings
        )
        assert same_weights(resumed.model, whole.model)
        assert is_dropped(resumed.model)


def test_the_best_model_at_the_end_is_one_without_rotation(tmp_path: Path) -> None:
    ours = trained(
        tmp_path,
        DropPositions(AT),
        save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="loss", learning_rate=1.0,
    )  # fmt: skip
    losses = {row["step"]: row["eval_loss"] for row in ours.state.log_history if "eval_loss" in row}
    best = min((step for step in losses if step > AT), key=losses.__getitem__)
    assert ours.state.best_model_checkpoint == checkpoint(tmp_path, best)
    assert is_dropped(ours.model)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint(tmp_path, best))
    assert torch.equal(logits(ours.model), logits(loaded))
    assert torch.equal(logits(ours.model), reference_logits(ours.model))


def test_two_processes_equal_the_reference(tmp_path: Path) -> None:
    command = (
        "-m torch.distributed.run --standalone --nproc-per-node=2 -m tests.clients.test_trainer"
    )
    subprocess.run(
        [sys.executable, *command.split(), str(tmp_path)], check=True, capture_output=True
    )
    ours, theirs = (torch.load(tmp_path / f"{name}.pt") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def two_processes(folder: Path) -> None:
    """Train in this process group, ours and the reference, and save the weights."""
    for name, callback in {"ours": DropPositions(AT), "theirs": Reference()}.items():
        trainer = trained(folder / "out", callback, ddp_backend="gloo")
        if trainer.args.process_index == 0:
            torch.save(trainer.model.state_dict(), folder / f"{name}.pt")


if __name__ == "__main__":
    two_processes(Path(sys.argv[1]))
