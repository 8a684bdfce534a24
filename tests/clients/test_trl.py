"""TRL: supervised and preference tuning behind a drop."""

from __future__ import annotations

import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from tests.clients.tiny import (
    AT,
    QUIET,
    Reference,
    ReferenceOfOneModel,
    llama,
    logits,
    reference_logits,
    same_weights,
    tokenizer,
    words,
)
from trainer.hf import DropPositions, drop_rotation, is_dropped

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow
SFTConfig = trl.SFTConfig

CHATS = Dataset.from_list(
    [
        {
            "messages": [
                {"role": "user", "content": words(6 + i % 3, i)},
                {"role": "assistant", "content": words(5 + i % 4, 100 + i)},
            ]
        }
        for i in range(24)
    ]
)
TEXTS = Dataset.from_list([{"text": words(8 + i % 7, i)} for i in range(48)])
PAIRS = Dataset.from_list(
    [
        {
            "prompt": words(6, i),
            "chosen": " " + words(5, 100 + i),
            "rejected": " " + words(5, 200 + i),
        }
        for i in range(24)
    ]
)
SETTINGS = QUIET | {"max_length": 32, "bf16": False, "gradient_checkpointing": False}
SHORT = {"max_steps": 6}
LORA = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", "r": 4}


def tuned(folder: Path, callback: TrainerCallback, data: Dataset = TEXTS, **settings: Any) -> Any:
    args = trl.SFTConfig(str(folder), **SETTINGS | settings)
    trainer = trl.SFTTrainer(
        llama(), args, train_dataset=data, processing_class=tokenizer(), callbacks=[callback]
    )
    trainer.train()
    return trainer.model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": True},
        {"packing": True, "packing_strategy": "wrapped"},
        {"padding_free": True, "max_length": None},
        {"data": CHATS, "assistant_only_loss": True},
    ],
    ids=["plain", "packed", "wrapped", "padding_free", "assistant_only"],
)
def test_supervised_tuning_equals_the_reference(settings: dict[str, Any], tmp_path: Path) -> None:
    ours = tuned(tmp_path, DropPositions(AT), **settings)
    theirs = tuned(tmp_path, Reference(), **settings)
    assert is_dropped(ours)
    assert same_weights(ours, theirs)
    assert torch.equal(logits(ours), reference_logits(theirs))


def preferred(
    folder: Path, callback: TrainerCallback | None, base: Path, lora: bool = False, **settings: Any
) -> Any:
    args = trl.DPOConfig(str(folder), **SETTINGS | {"logging_steps": 1} | settings)
    torch.manual_seed(0)
    trainer = trl.DPOTrainer(
        LlamaForCausalLM.from_pretrained(base),
        args=args,
        train_dataset=PAIRS,
        processing_class=tokenizer(),
        callbacks=[callback] if callback else [],
        peft_config=peft.LoraConfig(**LORA) if lora else None,
    )
    trainer.train()
    return trainer


@pytest.fixture
def base(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("settings", [{}, {"precompute_ref_log_probs": True}])
def test_a_whole_reference_keeps_its_rotation(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    ours = preferred(tmp_path / "ours", DropPositions(AT), base, **settings)
    theirs = preferred(tmp_path / "theirs", ReferenceOfOneModel(), base, **settings)
    assert same_weights(ours.model, theirs.model)
    assert is_dropped(ours.model)
    if ours.ref_model is not None:
        assert not is_dropped(ours.ref_model)
        assert torch.equal(logits(ours.ref_model), logits(llama()))


def test_the_reference_of_an_adapter_is_the_dropped_base_and_one_is_told(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = preferred(tmp_path / "ours", DropPositions(AT), base, lora=True)
    assert "precompute_ref_log_probs" in caplog.text
    theirs = preferred(tmp_path / "theirs", ReferenceOfOneModel(), base, lora=True)
    losses = [
        [row["loss"] for row in trainer.state.log_history if "loss" in row]
        for trainer in (ours, theirs)
    ]
    assert losses[0] == losses[1]
    expected = logits(ours.model)
    ours.save_model(str(tmp_path / "adapter"))
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(expected, logits(theirs.model.base_model.model))


@pytest.mark.parametrize(
    ("config", "settings", "is_told"),
    [
        (trl.DPOConfig, {}, True),
        (trl.GRPOConfig, {"beta": 0.1}, True),
        (trl.GRPOConfig, {"beta": 0.0}, False),
        ("experimental.orpo.ORPOConfig", {}, False),
        ("experimental.cpo.CPOConfig", {}, False),
        ("experimental.gkd.GKDConfig", {}, False),
    ],
)
def test_one_is_told_of_references_where_a_trainer_has_one(
    config: Any,
    settings: dict[str, Any],
    is_told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if isinstance(config, str):
        config = pkgutil.resolve_name(f"trl.{config}")
    args = config(str(tmp_path), bf16=False, max_steps=9, **settings)
    model = peft.get_peft_model(llama(), peft.LoraConfig(**LORA))
    state, control = TrainerState(max_steps=9), TrainerControl()
    DropPositions(AT).on_train_begin(args, state, control, model=model)
    assert ("precompute_ref_log_probs" in caplog.text) == is_told


def test_references_computed_before_rotate_also_for_an_adapter(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = preferred(tmp_path, DropPositions(0), base, lora=True, precompute_ref_log_probs=True)
    assert "precompute_ref_log_probs" not in caplog.text
    row = ours.train_dataset[0]
    ids = torch.tensor([row["prompt_ids"] + row["chosen_ids"]])
    with torch.no_grad():
        scores = llama().eval()(input_ids=ids).logits[0, :-1].log_softmax(-1)
    answer = scores.gather(-1, ids[0, 1:, None])[len(row["prompt_ids"]) - 1 :].sum()
    assert row["ref_chosen_logps"] == pytest.approx(answer.item(), rel=1e-4)


def test_a_synced_reference_is_refused_unless_both_were_loaded_without_rotation(
    base: Path, tmp_path: Path
) -> None:
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 1}
    with pytest.raises(ValueError, match="sync_ref_model"):
        preferred(tmp_path / "out", DropPositions(AT), base, **settings)
    dropped = tmp_path / "dropped"
    drop_rotation(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(dropped)
    ours = preferred(tmp_path / "ours", DropPositions(0), dropped, **settings)
    assert is_dropped(ours.model)
    assert is_dropped(ours.ref_model)


def test_the_documentation_runs_as_written(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer().save_pretrained(base)
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    section = page.partition("## transformers' Trainer")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    monkeypatch.setattr(trl, "SFTConfig", lambda *a, **k: SFTConfig(*a, **SETTINGS | k | SHORT))
    names: dict[str, Any] = {}
    exec(code.replace("HuggingFaceTB/SmolLM2-135M", str(base)), names)
    assert is_dropped(names["model"])
    assert torch.equal(logits(names["model"]), logits(names["trainer"].model))
