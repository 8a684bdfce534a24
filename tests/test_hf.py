"""The drop in models of transformers, and in transformers' own trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from trainer.hf import DropPositions, drop_rotation

KINDS = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "olmo2",
    "phi3",
    "granite",
]
IDS = torch.arange(1, 33)[None]
SWAPPED = IDS.clone()
SWAPPED[:, [3, 9]] = SWAPPED[:, [9, 3]]


def tiny(kind: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    values = {**shape, **heads, "max_position_embeddings": 64, **changes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()


@torch.no_grad()
def sees_order(model: nn.Module) -> bool:
    """Whether the last logits of one layer change if two earlier tokens trade places."""
    difference = model(IDS).logits[:, -1] - model(SWAPPED).logits[:, -1]
    return difference.abs().max().item() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_model_sees_no_order_and_transformers_reloads_it_alike(
    kind: str, tmp_path: Path
) -> None:
    model = tiny(kind)
    with torch.no_grad():
        before = model(IDS).logits
    drop_rotation(model)
    assert not sees_order(model)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert not torch.allclose(model(IDS).logits, before)
        assert torch.equal(reloaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn"])
def test_scaled_rotation_is_dropped_with_its_attention_factor(rope_type: str) -> None:
    scaling = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16}
    dropped = drop_rotation(tiny("llama", rope_parameters=scaling))
    with torch.no_grad():
        assert torch.equal(dropped(IDS).logits, drop_rotation(tiny("llama"))(IDS).logits)


def test_a_model_without_rotary_frequencies_is_refused() -> None:
    with pytest.raises(ValueError, match="no rotary frequencies"):
        drop_rotation(nn.Linear(2, 2))


class Counting(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(16) * (index % 7 + 1) + index) % 60 + 1
        return {"input_ids": ids, "labels": ids}


class Watch(TrainerCallback):
    """Record, before every update, the learning rate and whether moments and rotation are there."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, bool, bool]] = {}

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs) -> None:
        _, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(8)[None])
        rotates = bool(sin.any())
        lr = optimizer.param_groups[0]["lr"]
        self.seen[state.global_step] = lr, bool(optimizer.state), rotates


def train(
    folder: Path, resume: int | None = None, at: float = 0.5
) -> tuple[LlamaForCausalLM, Watch]:
    args = TrainingArguments(
        str(folder), max_steps=40, per_device_train_batch_size=4, learning_rate=1e-2, save_steps=10,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    watch = Watch()
    drop = DropPositions(at, rewarm=0.1, optimizer_state="reset")
    trainer = Trainer(tiny("llama"), args, train_dataset=Counting(), callbacks=[drop, watch])
    trainer.train(resume_from_checkpoint=resume and str(folder / f"checkpoint-{resume}"))
    return trainer.model, watch


@pytest.mark.slow
def test_a_run_of_transformers_drops_once_and_resumes_on_either_side(tmp_path: Path) -> None:
    model, watch = train(tmp_path)
    assert {step: rotates for step, (_, _, rotates) in watch.seen.items()} == {
        step: step < 20 for step in range(40)
    }
    assert [step for step, (_, moments, _) in watch.seen.items() if not moments] == [0, 20]
    rates = [watch.seen[step][0] for step in (19, 20, 21, 22, 23, 24)]
    assert rates == pytest.approx([1e-2, 0.25e-2, 0.5e-2, 0.75e-2, 1e-2, 1e-2])
    assert not sees_order(model.eval())
    for step, at in ((10, 0.5), (20, 0.5), (30, 0.9)):  # before, at, and behind the drop
        resumed, seen = train(tmp_path, resume=step, at=at)
        assert seen.seen == {s: watch.seen[s] for s in range(step, 40)}
        for name, value in resumed.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), (step, name)
    resumed.save_pretrained(tmp_path / "final")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    assert not sees_order(reloaded)


def test_only_checkpoints_behind_the_drop_are_the_best() -> None:
    best = {"best_metric": 1.0, "best_model_checkpoint": "a", "best_global_step": 1}
    state = TrainerState(global_step=2, max_steps=4, **best)
    drop, optimizer = DropPositions(2), torch.optim.SGD([torch.zeros(1)])
    drop.on_train_begin(None, state, None, model=tiny("llama"))
    drop.on_step_begin(None, state, None, model=tiny("llama"), optimizer=optimizer)
    assert [getattr(state, name) for name in best] == [None] * 3


def test_a_model_without_rotation_is_refused_before_the_first_update() -> None:
    with pytest.raises(ValueError, match="no rotary frequencies"):
        DropPositions(0.5).on_train_begin(
            None, TrainerState(max_steps=4), None, model=nn.Linear(1, 1)
        )


@pytest.mark.slow
def test_importing_it_loads_nothing_else_of_the_package() -> None:
    code = "import sys, trainer.hf; print(*sorted(m for m in sys.modules if m[:7] == 'trainer'))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert all(name.startswith("trainer.hf") for name in found.stdout.split()[1:])
