"""Which engines compute an exported model, against the rotation each one builds."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.interchange.test_export import CUSTOM, native
from trainer.interchange.export.engines import (
    ENGINES,
    RefusedError,
    rotations,
    verdicts,
)
from trainer.interchange.export.plan import make_plan
from trainer.positional.rescaling import yarn

YES, NO = True, False
OTHER = "would rotate by other frequencies, without an error"
EXPECTED = {
    "RoPE": (YES, YES, YES, ""),
    "after its drop": (YES, YES, NO, "rotates unless run with --rope-freq-scale 1e-30"),
    "after a drop without QK-norm": (YES, YES, YES, ""),
    "iRoPE": (YES, YES, NO, OTHER),
    "QK-norm": (YES, YES, YES, ""),
    "biases": (YES, YES, YES, ""),
    "half RoPE": (YES, NO, NO, OTHER),
    "angles of iRoPE": (YES, YES, YES, ""),
    "RoPE-ID untempered": (NO, NO, NO, OTHER),
    "YaRN": (YES, YES, YES, ""),
    "Llama 3": (YES, YES, YES, ""),
    "dynamic NTK": (NO, NO, NO, "keeps the frequencies of short sequences in long ones"),
    "windows": (YES, NO, NO, "has no sliding windows in this architecture"),
    "RNoPE-SWA": (YES, YES, NO, "has no sliding windows in this architecture"),
}
"""vLLM, SGLang, llama.cpp, and what is said of llama.cpp."""


def planned(tiny_decoder, kind):
    model = native(tiny_decoder, kind)
    return make_plan(model.config, model.layout)


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_engines_of_a_native_model(tiny_decoder, kind):
    plan = planned(tiny_decoder, kind)
    first, *others = verdicts(plan.values, plan.architecture)
    assert (first.engine, first.loads) == ("transformers", True)
    assert [verdict.engine for verdict in others] == ["vLLM", "SGLang", "llama.cpp"]
    assert (*(verdict.loads for verdict in others), others[-1].note) == EXPECTED[kind]


def test_a_model_with_code_of_its_own_has_no_gguf(tiny_decoder):
    for options, _ in CUSTOM.values():
        model = tiny_decoder(**options)
        plan = make_plan(model.config, model.layout)
        last = verdicts(plan.values, plan.architecture)[-1]
        assert str(last) == "llama.cpp: no (its converter has no such class)"


def test_a_smollm3_without_any_rotation_is_not_offered_to_llama_cpp(tiny_decoder):
    """It rotates three layers of four, whatever the file says."""
    plan = planned(tiny_decoder, "iRoPE")
    depth = plan.values["num_hidden_layers"]
    for rotates, loads in (([0] * depth, False), ([1] * depth, True)):
        values = plan.values | {"no_rope_layers": rotates}
        assert verdicts(values, "SmolLM3ForCausalLM")[-1].loads is loads
    fourth = plan.values | {"num_hidden_layers": 8, "no_rope_layers": [1, 1, 1, 0] * 2}
    assert verdicts(fourth, "SmolLM3ForCausalLM")[-1].loads


@pytest.mark.parametrize("kind", ["half RoPE", "angles of iRoPE", "YaRN", "Llama 3", "LongRoPE"])
def test_rotations_are_compared_with_those_of_transformers(tiny_decoder, kind):
    plan = planned(tiny_decoder, kind)
    rope = plan.values["rope_parameters"]
    config = AutoConfig.for_model(
        plan.architecture.removesuffix("ForCausalLM").lower(), **plan.values
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    for rotation in rotations(plan.values, plan.architecture):
        np.testing.assert_allclose(rotation.inv_freq, inv_freq, rtol=1e-6)
        assert rotation.rotary_scale == pytest.approx(scale)


def test_the_standstill_holds_for_either_original_length(tiny_decoder):
    """vLLM reads the one in the parameters, llama.cpp's converter the one beside them, or 8192."""
    plan = planned(tiny_decoder, "after a drop without QK-norm")
    for beside in (plan.values["original_max_position_embeddings"], 8192):
        values = plan.values | {"original_max_position_embeddings": beside}
        for engine in ENGINES:
            for rotation in rotations(values, plan.architecture, engine):
                assert max(rotation.inv_freq) < 1e-25
    for frequency in rotations(plan.values, plan.architecture)[0].inv_freq:
        assert frequency == 0


def test_an_attention_factor_of_another_size_is_left_to_transformers(tiny_decoder):
    model = tiny_decoder(model={"head_dim": 16})
    model.layout = model.layout.rescaled(yarn, 4.0)
    plan = make_plan(model.config, model.layout)
    assert "attention_factor" not in plan.values["rope_parameters"]
    rope = plan.values["rope_parameters"] | {"attention_factor": 1.5}
    for verdict in verdicts(plan.values | {"rope_parameters": rope}, plan.architecture)[1:]:
        assert not verdict.loads
        assert verdict.note == "has only YaRN's own attention factor"


def test_llama_cpp_ramps_between_whole_pairs(tiny_decoder):
    """It rounds the ends of YaRN's ramp outwards, whatever ``truncate`` says."""
    model = tiny_decoder(model={"head_dim": 16})
    model.layout = model.layout.rescaled(yarn, 4.0)
    plan = make_plan(model.config, model.layout)
    rope = plan.values["rope_parameters"] | {"truncate": False}
    by_engine = {
        v.engine: v for v in verdicts(plan.values | {"rope_parameters": rope}, "LlamaForCausalLM")
    }
    assert by_engine["vLLM"].loads
    assert not by_engine["llama.cpp"].loads


def test_a_share_of_no_channels_is_refused_by_vllm():
    values = {
        "rope_parameters": {
            "rope_type": "proportional",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.0,
        },
        "head_dim": 8,
        "num_hidden_layers": 2,
    }
    with pytest.raises(RefusedError, match="a share of 0"):
        ENGINES["vLLM"](values, "Qwen3ForCausalLM")
