"""Quantized models: torchao and bitsandbytes change weights and their modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from tests.clients.tiny import llama, logits, reference_logits
from trainer.hf import drop_rotation, is_dropped, restore_rotation

pytestmark = pytest.mark.slow


@pytest.fixture
def base(tmp_path: Path) -> Path:
    llama(width=64).save_pretrained(tmp_path / "base")  # a block of bitsandbytes' 4 bits
    return tmp_path / "base"


@pytest.mark.parametrize("order", ["dropped first", "quantized first"])
def test_torchao_before_and_after_the_drop(order: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    int8 = quantization.Int8WeightOnlyConfig()
    reference = llama()
    quantization.quantize_(reference, int8)
    model = llama()
    if order == "dropped first":
        drop_rotation(model)
    quantization.quantize_(model, int8)
    drop_rotation(model)
    assert torch.equal(logits(model), reference_logits(reference))
    assert torch.equal(logits(restore_rotation(model)), logits(reference))


@pytest.mark.parametrize("is_saved_dropped", [True, False])
def test_a_model_that_torchao_quantizes_as_it_is_loaded(base: Path, is_saved_dropped: bool) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    reference = AutoModelForCausalLM.from_pretrained(base, quantization_config=config)
    directory = base
    if is_saved_dropped:
        directory = base.with_name("dropped")
        drop_rotation(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)
    assert is_dropped(drop_rotation(model))
    assert torch.equal(logits(model), reference_logits(reference))


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(base: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model, reference = (
        AutoModelForCausalLM.from_pretrained(base, quantization_config=config, device_map="cpu")
        for _ in range(2)
    )
    drop_rotation(model)
    assert torch.equal(logits(model), reference_logits(reference))
    assert torch.equal(logits(restore_rotation(model)), logits(reference))
