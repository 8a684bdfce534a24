"""Small random models of transformers, one of every kind of attention."""

import torch
import transformers

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
MLA |= MOE | {"v_head_dim": 6, "first_k_dense_replace": 1, "n_shared_experts": 1}
MLA |= {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 16}
FAMILIES = {
    "Llama": {},
    "Llama, YaRN": {"rope_parameters": YARN},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 8},
    "Gemma": {"head_dim": 16},
    "Gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
    },
    "Olmo": {"clip_qkv": 0.3},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 8},
    "Phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "Phi3": {},
    "Cohere": {},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "Llama4": {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "no_rope_layers": [1, 1, 0],
        "attention_chunk_size": 48,
        "floor_scale": 8,
    },
    "DeepseekV2": MLA,
    "DeepseekV3": MLA,
    "GptOss": {
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 8,
    },
    "Gemma3": {"head_dim": 16, "sliding_window": 8},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Glm": {"head_dim": 8},
}
"""What each has beside :data:`SHAPE`; the name is that of its classes up to a comma."""


def made(family, **changes):
    """Its weights are large enough for heads to attend unevenly."""
    name = family.split(",")[0]
    text = "Text" if name in ("Llama4", "Gemma3") else ""
    config = getattr(transformers, f"{name}{text}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(
        config(**SHAPE | FAMILIES[family] | changes)
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
        else:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()
