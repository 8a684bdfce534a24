"""Which architecture holds a model: why those before it do not, and what is written of it."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from trainer.interchange.export.plan import make_plan
from trainer.model.config import ModelConfig, QKNormConfig, SoftmaxConfig
from trainer.positional.encodings import alibi_slopes, make_spectrum
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature

ROPE = make_spectrum("rope", 8, 32, {})
NOPE = Spectrum()
FAST = make_spectrum("rope", 8, 32, {"base": 500.0})
HALF = Spectrum(ROPE.inv_freq[:2])
PER_HEAD, NEVER = QKNormConfig("always"), QKNormConfig()
LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OWN = (
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Unrope")
)
NATIVE = LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3
NORM, NO_NORM, BIAS, NO_BIAS = (
    "QK-norm", "no QK-norm", "biases on queries, keys and values", "no biases",
)  # fmt: skip
SOME_STILL = "layers without rotation"
ODD_WINDOWS, SIZES = "layers without a sliding window", "several sizes of sliding windows"


def shape(**changes):
    values = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
    }  # fmt: skip
    return ModelConfig(**values | changes)


def planned(spectra=(ROPE, ROPE), windows=(None, None), norms=(False, False), **changes):
    layers = [
        LayerEncoding(((s, 2),), window, norm)
        if isinstance(s, Spectrum)
        else LayerEncoding.of_heads(s, window, norm)
        for s, window, norm in zip(spectra, windows, norms, strict=True)
    ]
    return make_plan(shape(**changes), Layout(32, tuple(layers)))


NORMED = {"norms": (True, True), "qk_norm": PER_HEAD}
WARM = replace(ROPE, temperature=Temperature(0.3))
CASES = {
    "plain": ({}, LLAMA, []),
    "no rotation": ({"spectra": (NOPE, NOPE)}, LLAMA, []),
    "some do not rotate": (
        {"spectra": (ROPE, NOPE)}, SMOLLM3, [SOME_STILL, SOME_STILL, NO_BIAS, NO_NORM],
    ),
    "biases": ({"qkv_bias": True}, QWEN2, [BIAS, BIAS]),
    "biases without rotation": (
        {"qkv_bias": True, "spectra": (NOPE, NOPE)}, QWEN2, [BIAS, BIAS],
    ),
    "norms": (NORMED, QWEN3, [NORM, NORM, NORM]),
    "norms without rotation": (NORMED | {"spectra": (NOPE, NOPE)}, QWEN3, [NORM, NORM, NORM]),
    "norms and biases": (NORMED | {"qkv_bias": True}, OWN, [NORM, NORM, NORM, BIAS, NORM]),
    "norms, and some do not rotate": (
        NORMED | {"spectra": (ROPE, NOPE)}, OWN, [NORM, NORM, NORM, SOME_STILL, NORM],
    ),
    "full norms": (
        {"norms": (True, True), "qk_norm": QKNormConfig("always", "full")}, OWN,
        ["QK-norm over the full projection or on one side"] * 5,
    ),
    "full norms that are off": ({"qk_norm": QKNormConfig("after_drop", "full")}, LLAMA, []),
    "norms in one layer": (
        {"norms": (True, False), "qk_norm": PER_HEAD}, OWN, ["QK-norm in some layers only"] * 5,
    ),
    "windows": ({"windows": (7, 7)}, MISTRAL, ["sliding windows"]),
    "a window in one layer": (
        {"windows": (None, 7)}, SMOLLM3, ["sliding windows", ODD_WINDOWS, NO_BIAS, NO_NORM],
    ),
    "windows of two sizes": ({"windows": (7, 8)}, OWN, [SIZES, SIZES, NO_BIAS, NO_NORM, SIZES]),
    "a width of its own": (
        {"hidden_size": 30, "head_dim": 8}, MISTRAL,
        ["a width that the heads do not divide"],
    ),
    "ALiBi": ({"spectra": (Spectrum(alibi=True), ROPE)}, OWN, ["ALiBi"] * 5),
    "a temperature": (
        {"spectra": (ROPE, WARM)}, OWN,
        ["a softmax temperature that changes with the length"] * 5,
    ),
    "two kinds of heads": (
        {"spectra": (ROPE, (ROPE, NOPE))}, OWN,
        ["heads of one layer with different encodings"] * 5,
    ),
    "two rotations": ({"spectra": (ROPE, FAST)}, OWN, ["layers that rotate differently"] * 5),
    "two sizes of one rotation": (
        {"spectra": (ROPE, replace(ROPE, rotary_scale=2.0))}, LLAMA, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_the_first_that_holds_a_model_is_taken_and_the_others_say_why_not(kind):
    options, architecture, reasons = CASES[kind]
    plan = planned(**options)
    assert plan.architecture == architecture
    assert plan.refusals == dict(zip(NATIVE, reasons, strict=False))
    assert plan.is_native == (architecture != OWN)


SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
STANDING = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 1e30, "low_freq_factor": 8192.0,
    "high_freq_factor": 16384.0, "original_max_position_embeddings": 2,
}  # fmt: skip
FULL = "full_attention"


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {"rope_parameters": PLAIN}),
        ({"windows": (7, 7)}, {"rope_parameters": PLAIN, "sliding_window": 7}),
        (
            {"spectra": (NOPE, ROPE), "windows": (None, 7)},
            {
                "rope_parameters": PLAIN, "no_rope_layers": [0, 1], "use_sliding_window": True,
                "sliding_window": 7, "layer_types": [FULL, "sliding_attention"],
            },
        ),
        (
            {"qkv_bias": True, "spectra": (NOPE, NOPE)},
            {
                "rope_parameters": STANDING, "use_sliding_window": False, "sliding_window": None,
                "layer_types": [FULL, FULL], "original_max_position_embeddings": 2,
            },
        ),
        (
            {"hidden_size": 30, "head_dim": 8},
            {"rope_parameters": PLAIN, "hidden_size": 30, "sliding_window": None},
        ),
    ],
)  # fmt: skip
def test_configuration_written_for_a_native_architecture(options, more):
    plan = planned(**options)
    of_version_4 = {"rope_theta": 10_000.0}
    if (rope := more["rope_parameters"]) is STANDING:
        of_version_4["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    assert plan.values == SHAPE | {"hidden_act": "silu"} | more | of_version_4
    assert plan.changes == ()


@pytest.mark.parametrize(
    ("spectra", "slopes"),
    [((ROPE, FAST), None), ((Spectrum(alibi=True), ROPE), list(alibi_slopes(4)))],
)
def test_configuration_written_for_custom_code(spectra, slopes):
    plan = planned(spectra=spectra, qk_norm=QKNormConfig("never", "full", "k"))
    layout = Layout(32, tuple(LayerEncoding(((s, 2),)) for s in spectra))
    assert plan.values.pop("softmax") == asdict(SoftmaxConfig())
    assert plan.values == SHAPE | {
        "qkv_bias": False, "qk_norm_kind": "full", "qk_norm_targets": "k",
        "layout": layout.to_dict(), "alibi_slopes": slopes, "code_version": 2,
        "layer_types": [FULL, FULL], "sliding_window": None,
        "auto_map": {
            "AutoConfig": "configuration_unrope.UnropeConfig",
            "AutoModel": "modeling_unrope.UnropeModel",
            "AutoModelForCausalLM": "modeling_unrope.UnropeForCausalLM",
        },
    }  # fmt: skip
    assert plan.changes == ()


def test_sizes_and_constant_temperatures_go_into_the_queries():
    """Of a product of queries and keys that transformers rotates at their own size."""
    warm = replace(HALF, rotary_scale=3.0, temperature=Temperature(scale=0.5))
    still = Spectrum(temperature=Temperature(scale=0.25))
    plan = planned(spectra=(warm, still))
    first, second = plan.changes
    # Four rotated channels of eight: pairs (0, 2), (1, 3) become (0, 4), (1, 5).
    assert first.order == (0, 1, 4, 5, 2, 3, 6, 7)
    assert first.factors == pytest.approx((4.5, 4.5, 0.5, 0.5) * 2)
    assert second.order == tuple(range(8))
    assert second.factors == (0.25,) * 8


def test_an_odd_number_of_pairs_keeps_every_channel_once():
    order = planned(spectra=(Spectrum(ROPE.inv_freq[:3]),) * 2).changes[0].order
    assert order == (0, 1, 2, 6, 3, 4, 5, 7)
