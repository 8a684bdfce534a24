"""Shape and positional encodings of an Unrope model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class UnropeConfig(PreTrainedConfig):
    """Configuration of a Llama-style decoder with a positional encoding for every layer and head.

    ``layout``: ``training_length`` in tokens, ``spectra``, a list of encodings, and ``layers``: for
    each layer ``groups`` (the number of an encoding, and how many neighbouring key-value heads have
    it), ``window`` (keys that a query sees, itself included, or null) and ``qk_norm``. An encoding
    has ``inv_freq`` (radians per token of its rotated pairs), ``rotary_scale``, ``temperature``,
    ``alibi`` and ``long``; ``modeling_unrope.py`` says what they do.
    ``alibi_slopes``: one for every query head, where an encoding has ``alibi``.
    ``softmax``: ``learned_scale`` and ``sinks``, whether query heads have a factor on their scores
    and a logit beside them, and ``softcap`` and ``final_softcap``, within which scores and logits
    are kept, or null.
    ``qk_norm_kind``: ``per_head`` or ``full``; ``qk_norm_targets``: ``both``, ``q`` or ``k``.
    ``layer_types`` and ``sliding_window``: for caches and servers that keep no more keys than a
    window; windows of several sizes count as none there.
    ``code_version``: that of the code beside this file; None stands for the first.
    """

    model_type = "unrope"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - as the base class has it
    base_model_tp_plan = {  # noqa: RUF012 - as the base class has it
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 30
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49152
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    qkv_bias: bool = False
    qk_norm_kind: str = "per_head"
    qk_norm_targets: str = "both"
    layout: dict[str, Any] | None = None
    alibi_slopes: list[float] | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    code_version: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
