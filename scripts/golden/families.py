"""Make tiny models with transformers and write their weights and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import save_file

from golden.drope import draw, write_config, write_logits

VOCABULARY = 32
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8, "rope_parameters": YARN}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
}
"""``olmo2`` is a model that this program reads through transformers alone."""


def make(out: Path) -> None:
    """Write a directory for each family with its weights, and ``logits.npz`` inside it."""
    for number, (name, (kind, changes)) in enumerate(FAMILIES.items(), 100):
        config = getattr(transformers, f"{kind}Config")(**SHAPE | changes)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        draw(model, seed=number)
        directory = out / "models" / name
        directory.mkdir(parents=True, exist_ok=True)
        write_config(directory, config.to_diff_dict() | {"architectures": [type(model).__name__]})
        tied = config.tie_word_embeddings
        weights = {
            key: x.contiguous()
            for key, x in model.state_dict().items()
            if not (tied and key == "lm_head.weight")
        }
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        write_logits(directory, model, VOCABULARY)
