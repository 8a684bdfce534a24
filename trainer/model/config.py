"""The ``model`` configuration group; keys are named as in Hugging Face configurations."""

from dataclasses import field
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from trainer.common.errors import UserError
from trainer.common.fields import configuration


@configuration
class QKNormConfig:
    """RMS normalisation of queries and keys between projection and rotation."""

    when: Literal["never", "always", "after_drop"] = "never"
    """Whether it is on: never, always, or after_drop (from the drop on)."""
    kind: Literal["per_head", "full"] = "per_head"
    """What is normalised: per_head (each head, as in Qwen3), or full (the whole projection, as
    in OLMo 2 and DroPE's released recipe)."""
    targets: Literal["both", "q", "k"] = "both"
    """Which are normalised: both, q, k."""


@configuration
class ModelConfig:
    """Shape of a pre-norm decoder with grouped-query attention and SwiGLU."""

    hidden_size: PositiveInt = 576
    """Channels of the residual stream."""
    intermediate_size: PositiveInt = 1536
    """Channels of the MLPs."""
    num_hidden_layers: PositiveInt = 30
    """Number of decoder layers."""
    num_attention_heads: PositiveInt = 9
    """Query heads of each layer."""
    num_key_value_heads: PositiveInt = 3
    """Key-value heads of each layer; divides the query heads, and fewer is grouped-query
    attention."""
    head_dim: PositiveInt | None = None
    """Channels of each head; null: hidden_size / num_attention_heads."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; null: as many as the tokenizer has tokens."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in every RMS norm."""
    tie_word_embeddings: bool = True
    """Use the embedding as the head."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values, as in Qwen2."""
    qk_norm: QKNormConfig = field(default_factory=QKNormConfig)
    """RMS norm of queries and keys before the rotation."""
    initializer: Literal["normal", "fan_in"] = "normal"
    """Standard deviation of initial weights: normal (0.02 everywhere), or fan_in (1 / sqrt(fan-in);
    untied embeddings 1 and their head a tenth of its fan-in value)."""
    initializer_by_depth: bool = True
    """Divide o_proj and down_proj by sqrt(2 num_hidden_layers) at the start; false: as
    transformers does, and DroPE's Table 5."""
    attention_backend: str = "auto"
    """Kernel of attention: auto, sdpa, cudnn, flash, flex, or one that a plugin registers."""
    from_pretrained: str | None = None
    """Directory or hub id with weights to start from, with their shape, positions
    and tokenizer; null: random weights."""
    from_run: str | None = None
    """A run of this program, or one of its checkpoints, to start from, with its shape, positions
    and tokenizer; null: none."""

    @property
    def is_trained(self) -> bool:
        """Whether the model begins with trained weights."""
        return self.from_pretrained is not None or self.from_run is not None

    @property
    def head_size(self) -> int:
        """Channels per head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def check_shape(config: ModelConfig) -> None:
    """Raise a UserError unless heads divide the width, if they have no size of their own, this size
    is even, and key-value heads divide the heads."""
    heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    if config.head_dim is None and width % heads:
        raise UserError(f"model.num_attention_heads: {heads} do not divide hidden_size {width}")
    if config.head_size % 2:
        raise UserError(f"model.head_dim: expected an even number, got {config.head_size}")
    if heads % kv:
        raise UserError(f"model.num_key_value_heads: {kv} do not divide {heads} attention heads")


def check_vocabulary(config: ModelConfig, tokens: int) -> None:
    """Raise a UserError unless a model has an embedding for each of ``tokens`` of a text."""
    if config.vocab_size is not None and config.vocab_size < tokens:
        raise UserError(f"model.vocab_size: expected at least {tokens}, got {config.vocab_size}")
