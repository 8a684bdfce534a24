"""Make tiny models with SakanaAI's DroPE classes and write their weights and logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "drope_llama_nope": ("Llama", "nope"),
    "drope_llama_softmax_scale": ("Llama", "nope"),
    "drope_llama_qk_norm": ("Llama", "qk_norm_nope"),
    "drope_llama_q_norm": ("Llama", "q_norm_nope"),
    "drope_llama_k_norm": ("Llama", "k_norm_nope"),
    "drope_qwen2_nope": ("Qwen2", "nope"),
    "drope_qwen2_qk_norm": ("Qwen2", "qk_norm_nope"),
}
IDS = (2, 24)


def make(out: Path, checkout: Path) -> None:
    """Write a directory for each model with its weights, and ``logits.npz`` inside it."""
    sys.path.insert(0, str(checkout))
    from custom_models import drope
    from safetensors.torch import save_file

    for number, (name, (base, attention)) in enumerate(MODELS.items()):
        more = {"softmax_scale": 0.65} if name.endswith("softmax_scale") else {}
        config = getattr(drope, f"DroPE{base}Config")(**SHAPE, **more, attention_type=attention)
        config._attn_implementation = "eager"
        model = getattr(drope, f"DroPE{base}ForCausalLM")(config).eval()
        draw(model, seed=number)
        directory = out / "models" / name
        directory.mkdir(parents=True, exist_ok=True)
        values = config.to_diff_dict() | {"architectures": [type(model).__name__]}
        write_config(directory, values)
        weights = {key: x.contiguous() for key, x in model.state_dict().items()}
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        write_logits(directory, model, SHAPE["vocab_size"])


def draw(model: torch.nn.Module, seed: int) -> None:
    """Fill the parameters, sorted by name, with random numbers of numpy."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            values = generator.standard_normal(parameter.shape)
            if parameter.dim() == 1:
                values = 1 + 0.3 * values
            else:
                values = values * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.from_numpy(values))


def write_config(directory: Path, values: dict[str, Any]) -> None:
    """Write ``config.json``, keys sorted."""
    text = json.dumps(values, indent=1, sort_keys=True, default=str)
    (directory / "config.json").write_text(text + "\n")


@torch.no_grad()
def write_logits(directory: Path, model: torch.nn.Module, vocabulary: int) -> None:
    """Write token ids and their float32 logits; print their error against float64."""
    ids = torch.from_numpy(np.random.default_rng(99).integers(0, vocabulary, IDS))
    single = model(ids, use_cache=False).logits
    double = model.double()(ids, use_cache=False).logits
    error = (single.double() - double).abs().max().item()
    print(f"{directory.name}: std {double.std():.2f}, fp32 against fp64 {error:.1e}")
    np.savez_compressed(directory / "logits.npz", ids=ids.numpy(), logits=single.numpy())
