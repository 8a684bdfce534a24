"""The ``model`` configuration group; keys are named as in Hugging Face configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class QKNormConfig:
    """RMS normalisation of queries and keys between projection and rotation.

    ``when``: never, always, or from the drop on (``after_drop``).
    ``kind``: over each head (Qwen3) or over the full projection (OLMo 2, DroPE's released recipe).
    ``targets``: both, queries only, keys only.
    """

    when: Literal["never", "always", "after_drop"] = "never"
    kind: Literal["per_head", "full"] = "per_head"
    targets: Literal["both", "q", "k"] = "both"


@dataclass(frozen=True)
class SoftmaxConfig:
    """Extensions of attention's softmax, and a cap of the head's logits.

    ``learned_scale``: a learned factor on the scores for every query head, 1 at first
    (Scalable-Softmax, Nakanishi 2025, learns one). ``sinks``: for every query head a learned logit
    beside its scores, 0 at first, which takes its share of the weights and has no value (gpt-oss).
    ``softcap``: keeps scores within +-softcap by softcap tanh(score / softcap), before masks and
    ALiBi (Gemma 2: 50); null: no cap. ``final_softcap``: the same for the head's logits (Gemma 2:
    30).
    """

    learned_scale: bool = False
    sinks: bool = False
    softcap: float | None = None
    final_softcap: float | None = None

    @property
    def is_fused(self) -> bool:
        """Whether every kernel computes this softmax."""
        return not self.sinks and self.softcap is None


LARGEST = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 2048,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 24,
}
"""Limits that no model comes near; beyond them a run would fail late, for lack of memory."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a pre-norm decoder with grouped-query attention and SwiGLU.

    ``vocab_size``: null takes the tokenizer's. ``head_dim``: null takes hidden_size /
    num_attention_heads. ``qkv_bias``: bias on the query, key and value projections (Qwen2).
    ``initializer``: ``normal`` draws every matrix with std ``initializer_range``. ``fan_in`` draws
    with std 1 / sqrt(fan-in); untied embeddings with 1 and their head with a tenth of its fan-in
    value; tied embeddings like a head, with 1 / sqrt(hidden_size). ``initializer_by_depth``: divide
    the std of matrices that write to the residual stream by sqrt(2 * num_hidden_layers), with
    either initializer; false: draw them like the others, as in transformers and DroPE's Table 5
    (range 0.02). ``from_pretrained``: a directory, hub id or .gguf file whose weights the run
    begins with. It also determines shape, positions and tokenizer; of this group only
    ``attention_backend`` and a ``qk_norm`` enabled at the drop then have an effect. ``from_run``:
    the same with a run of this program, or one of its checkpoints.
    """

    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 30
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int | None = None
    vocab_size: int | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: QKNormConfig = field(default_factory=QKNormConfig)
    softmax: SoftmaxConfig = field(default_factory=SoftmaxConfig)
    initializer: Literal["normal", "fan_in"] = "normal"
    initializer_range: float = 0.02
    initializer_by_depth: bool = True
    attention_backend: Literal["auto", "sdpa", "flash", "varlen", "flex", "eager"] = "auto"
    from_pretrained: str | None = None
    from_run: str | None = None

    @property
    def is_trained(self) -> bool:
        """Whether the model begins with trained weights."""
        return self.from_pretrained is not None or self.from_run is not None

    @property
    def head_size(self) -> int:
        """Channels per head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def block_weights(self) -> int:
        """Number of weights in the matrices of all blocks."""
        heads = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_size
        block = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_hidden_layers * block

    def problems(self) -> list[str]:
        """Check the shape; return one sentence per problem."""
        found = [
            f"model.{key}: expected a positive number, got {value}."
            for key in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "vocab_size",
                "rms_norm_eps",
                "initializer_range",
            )
            if (value := getattr(self, key)) is not None and value <= 0
        ]
        found += [
            f"model.{key}: expected at most {most:,}, got {value}."
            for key, most in LARGEST.items()
            if (value := getattr(self, key)) is not None and value > most
        ]
        found += [
            f"model.softmax.{key}: expected a number from 0.001, or null for none, got {value}."
            for key in ("softcap", "final_softcap")
            if (value := getattr(self.softmax, key)) is not None and value < 0.001
        ]
        if found:
            return found
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            found.append(
                f"model.num_attention_heads: {self.num_attention_heads} heads do not divide "
                f"hidden_size {self.hidden_size}; choose a divisor or set model.head_dim."
            )
        elif self.head_size % 2:
            found.append(
                f"model.head_dim: {self.head_size} is odd, but channels rotate in pairs; "
                f"use {self.head_size + 1} or {self.head_size - 1}."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            found.append(
                f"model.num_key_value_heads: {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}."
            )
        return found
