"""Exported models, as transformers loads them, compute what ours compute."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.common.errors import UserError
from trainer.generation.generate import generate
from trainer.interchange.export.custom.configuration_unrope import UnropeConfig
from trainer.interchange.export.custom.modeling_unrope import UnropeForCausalLM, UnropeModel
from trainer.interchange.export.directory import write_files
from trainer.interchange.export.engines import OLDEST_TRANSFORMERS, verdicts
from trainer.interchange.export.plan import make_plan, round_weights, write_weights
from trainer.interchange.pretrained import read_pretrained, waits
from trainer.interchange.tensor_files import read_headers
from trainer.model.config import QKNormConfig, SoftmaxConfig
from trainer.positional.config import TemperatureConfig
from trainer.positional.rescaling import dynamic, llama3, longrope, ntk_aware, yarn
from trainer.recalibration.drop import drop

dynamic_ntk = pytest.mark.skipif(
    Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS["dynamic"]),
    reason="this version of transformers computes other frequencies than its formula",
)
IDS = torch.randint(50, (2, 50), generator=torch.Generator().manual_seed(1))
TOKENIZER = Tokenizer(models.WordLevel({str(i): i for i in range(50)}, unk_token="0"))
SCALED = SoftmaxConfig(learned_scale=True)
PER_HEAD, FULL = QKNormConfig("always"), QKNormConfig("always", "full")


def layout_changed(change):
    def apply(model):
        model.layout = model.layout.map(change)

    return apply


def by_method(rescaling, factor):
    def apply(model):
        model.layout = model.layout.rescaled(rescaling, factor)

    return apply


def dropped(**options):
    def apply(model):
        model.layout = drop(model.layout, **options)

    return apply


def tempered(**changes):
    return layout_changed(lambda s: s.with_temperature(**changes))


def long_factors(spectrum):
    if not spectrum.rotates:
        return spectrum
    return longrope(spectrum, (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 3.0, 4.0), 32)


AFTER = {"qk_norm": QKNormConfig("after_drop")}
NATIVE = {
    "RoPE": ("Llama", "default", {}, None),
    "RoPE, untied": ("Llama", "default", {"model": {"tie_word_embeddings": False}}, None),
    "wide heads": ("Llama", "default", {"model": {"head_dim": 16}}, None),
    "undivided width": (
        "Mistral",
        "default",
        {"model": {"hidden_size": 30, "head_dim": 8}},
        None,
    ),
    "before its drop": ("Llama", "default", {"model": AFTER}, None),
    "after its drop": ("Qwen3", "llama3", {"model": AFTER}, dropped(qk_norm=True)),
    "after a drop without QK-norm": ("Llama", "llama3", {}, dropped()),
    "iRoPE": ("SmolLM3", "default", {"layers": ["rope", "nope"]}, None),
    "QK-norm": ("Qwen3", "default", {"model": {"qk_norm": PER_HEAD}}, None),
    "learned scale": ("Llama", "default", {"model": {"softmax": SCALED}}, None),
    "learned scale, half RoPE, biases": (
        "Qwen2",
        "proportional",
        {"model": {"softmax": SCALED, "qkv_bias": True}, "layers": ["half_rope"]},
        tempered(scale=1.3),
    ),
    "biases": ("Qwen2", "default", {"model": {"qkv_bias": True}}, None),
    "biases, half RoPE, tempered": (
        "Qwen2",
        "proportional",
        {"model": {"qkv_bias": True}, "layers": ["half_rope"]},
        tempered(scale=1.3),
    ),
    "half RoPE": ("Llama", "proportional", {"layers": ["half_rope"]}, None),
    "half RoPE, QK-norm, tempered": (
        "Qwen3",
        "proportional",
        {"model": {"qk_norm": PER_HEAD}, "layers": ["half_rope"]},
        tempered(scale=1.3),
    ),
    "a quarter RoPE, larger and tempered": (
        "Llama",
        "proportional",
        {"model": {"head_dim": 16}, "encodings": {"rope": {"rotary_fraction": 0.25}}},
        layout_changed(lambda s: replace(s, rotary_scale=1.2).with_temperature(scale=1.3)),
    ),
    "angles of iRoPE": (
        "Llama",
        "linear",
        {"encodings": {"rope": {"angle_scale": 0.25}}},
        None,
    ),
    "p-RoPE": ("Llama", "proportional", {"layers": ["p_rope"]}, None),
    "HoPE": ("Llama", "proportional", {"layers": ["hope"]}, None),
    "high frequency": ("Llama", "default", {"layers": ["high_frequency"]}, None),
    "RoPE-ID untempered": (
        "Llama",
        "proportional",
        {
            "layers": ["rope_id"],
            "training_length": 80,
            "encodings": {"rope_id": {"temperature": 0}},
        },
        None,
    ),
    "constant temperature": ("Llama", "default", {}, tempered(scale=1.7)),
    "tempered NoPE among RoPE": (
        "SmolLM3",
        "default",
        {"layers": ["rope", "nope"]},
        tempered(scale=0.7),
    ),
    "YaRN": ("Llama", "yarn", {"model": {"head_dim": 16}}, by_method(yarn, 4.0)),
    "Llama 3": (
        "Llama",
        "llama3",
        {"model": {"head_dim": 32}},
        by_method(llama3, 8.0),
    ),
    "dynamic NTK": (
        "Llama",
        "dynamic",
        {},
        layout_changed(lambda s: dynamic(s, ntk_aware, 32, 2.0)),
    ),
    "LongRoPE": ("Llama", "longrope", {}, layout_changed(long_factors)),
    "windows": ("Mistral", "default", {"windows": [7]}, None),
    "windows in some layers": ("SmolLM3", "default", {"windows": [7, None]}, None),
    "RNoPE-SWA": ("SmolLM3", "default", {"layers": ["rope", "nope"], "windows": [7, None]}, None),
}
CUSTOM = {
    "QK-norm over the full projection": ({"model": {"qk_norm": FULL}}, "QK-norm over the full"),
    "QK-norm of keys": ({"model": {"qk_norm": QKNormConfig("always", targets="k")}}, "one side"),
    "ALiBi": ({"layers": ["alibi", "rope"]}, "ALiBi"),
    "RoPE-ID": ({"layers": ["rope_id"], "training_length": 70}, "temperature that changes"),
    "Llama 4's temperature": (
        {
            "layers": ["rope", "nope"],
            "temperature": TemperatureConfig(
                coefficient=0.3, reference=8, steps=True, heads="free"
            ),
        },
        "temperature that changes",
    ),
    "the logarithm of the length": (
        {"temperature": TemperatureConfig(coefficient=2.0, scale=0.4, reference=1)},
        "temperature that changes",
    ),
    "the logarithm of the keys in a window": (
        {
            "temperature": TemperatureConfig(coefficient=2.0, scale=0.4, reference=1),
            "windows": [7, None],
        },
        "temperature that changes",
    ),
    "sinks": ({"model": {"softmax": SoftmaxConfig(sinks=True)}}, "attention sinks"),
    "soft-caps": (
        {"model": {"softmax": SoftmaxConfig(softcap=0.5, final_softcap=3.0)}, "windows": [7]},
        "soft-caps",
    ),
    "final soft-cap": ({"model": {"softmax": SoftmaxConfig(final_softcap=3.0)}}, "soft-caps"),
    "all of them under ALiBi": (
        {"model": {"softmax": SoftmaxConfig(True, True, 0.5, 3.0)}, "layers": ["alibi", "rope"]},
        "ALiBi",
    ),
    "learned scale beside QK-norm": (
        {"model": {"softmax": SCALED, "qk_norm": PER_HEAD}},
        "learned scale",
    ),
    "half of the heads": ({"heads": {"nope": 0.5}}, "heads of one layer"),
    "windows of two sizes": ({"windows": [7, 20]}, "several sizes"),
    "two bases": ({"layers": ["rope", "high_frequency"]}, "rotate differently"),
    "biases and NoPE in one layer": (
        {"model": {"qkv_bias": True}, "layers": ["rope", "nope"]},
        "layers without rotation",
    ),
}


def native(tiny_decoder, kind):
    """A decoder of a kind of :data:`NATIVE`."""
    _, _, options, change = NATIVE[kind]
    model = tiny_decoder(**options)
    if change is not None:
        change(model)
    return model


def saved(model, directory):
    """The plan, after everything but the card was written."""
    plan = make_plan(model.config, model.layout)
    write_files(model, plan, TOKENIZER, 0, directory, "float32")
    return plan


def loaded(directory, plan):
    """What transformers makes of it, with no weight missing or left over."""
    kind = getattr(transformers, plan.architecture) if plan.is_native else UnropeForCausalLM
    hf, info = kind.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return hf.eval()


@torch.no_grad()
def assert_same_model(model, hf):
    """Logits of two rows, longer than the training, and what is generated with a cache.

    Where frequencies change with the length, generation is compared up to there: from then on
    transformers goes on with keys as they were rotated when they were read, ours are rotated anew.
    """
    C = model.layout.training_length
    # Up to where another length begins, and beyond; some encodings remember the longest.
    for length in sorted({C - 1, C, C + 1, 50} & set(range(51))):
        theirs = hf(IDS[:, :length]).logits
        torch.testing.assert_close(model(IDS[:, :length]), theirs, rtol=0, atol=1e-4)
    assert 0.1 < theirs.std() < 10
    changes = [s.long.length for s in model.layout.spectra if s.long is not None]
    count = min([25, *(length - 20 for length in changes)])
    out = hf.generate(
        IDS[:, :20],
        attention_mask=torch.ones_like(IDS[:, :20]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert out[:, 20:].tolist() == generate(model, IDS[:, :20].tolist(), count)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=dynamic_ntk) if k == "dynamic NTK" else k for k in NATIVE]
)
def test_a_native_architecture_computes_the_same(tiny_decoder, tmp_path, kind):
    architecture, rope_type, *_ = NATIVE[kind]
    model = native(tiny_decoder, kind)
    plan = saved(model, tmp_path)
    assert plan.architecture == f"{architecture}ForCausalLM"
    assert plan.values["rope_parameters"]["rope_type"] == rope_type
    assert_same_model(model, loaded(tmp_path, plan))
    assert_read_back(model, plan, tmp_path)
    # Version 4 knows these keys alone, which version 5 reads too.
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert_same_model(model, loaded(tmp_path, plan))


@torch.no_grad()
def assert_read_back(model, plan, directory):
    """To the bit where no weight carries a part of the encoding; else as near as float32 is."""
    again = read_pretrained(str(directory)).decoder().eval()
    for length in (20, 32, 33, 50):
        ours, read = model(IDS[:, :length]), again(IDS[:, :length])
        if plan.changes or (plan.is_native and model.config.softmax.learned_scale):
            torch.testing.assert_close(read, ours, rtol=0, atol=1e-5)
        else:
            assert torch.equal(read, ours)


@pytest.mark.parametrize("kind", CUSTOM)
def test_the_code_that_goes_with_a_model_computes_the_same(tiny_decoder, tmp_path, kind):
    options, reason = CUSTOM[kind]
    model = tiny_decoder(**options)
    plan = saved(model, tmp_path)
    assert not plan.is_native
    assert any(reason in refusal for refusal in plan.refusals.values())
    read = loaded(tmp_path, plan)
    assert read.config._attn_implementation == "sdpa"  # which transformers chooses where it may
    assert_same_model(model, read)


@pytest.mark.parametrize(
    ("encodings", "layers", "native"),
    [(["rope"], None, False), (["rope"], "all", True), (["nope", "rope"], None, True)],
)
def test_layers_that_a_rescaling_left_out_are_exported_as_they_are(
    tiny_decoder, tmp_path, encodings, layers, native
):
    """No native architecture has two rotations; the code that goes with a model has."""
    model = tiny_decoder(layers=encodings, windows=[7, None], model={"head_dim": 16})
    trained = model.layout
    model.layout = trained.rescaled(yarn, 4.0, layers)
    assert (model.layout.layers[0] == trained.layers[0]) == (layers != "all")
    assert model.layout.layers[1] != trained.layers[1]
    plan = saved(model, tmp_path)
    assert plan.is_native == native
    assert ("layers that rotate differently" in plan.refusals.values()) != native
    assert_same_model(model, loaded(tmp_path, plan))
    again = read_pretrained(str(tmp_path)).decoder().eval()
    torch.testing.assert_close(again(IDS), model(IDS), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        tempered(coefficient=0.4, per="query"),
        layout_changed(long_factors),
        tempered(scale=1.4),
        layout_changed(lambda s: dynamic(s, yarn, 32)),
    ],
)
def test_the_code_follows_the_length(tiny_decoder, tmp_path, change):
    model = tiny_decoder(heads={"nope": 0.5})
    change(model)
    assert_same_model(model, loaded(tmp_path, saved(model, tmp_path)))


@pytest.mark.parametrize("sinks", [False, True])
def test_the_code_leaves_padding_out(tiny_decoder, tmp_path, sinks):
    """A row behind padding is what it is alone, also where encodings follow the length."""
    softmax = SoftmaxConfig(sinks=sinks, softcap=2.0 if sinks else None)
    model = tiny_decoder(layers=["alibi", "rope"], windows=[None, 30], model={"softmax": softmax})
    model.layout = model.layout.map(lambda s: s.with_temperature(coefficient=0.3))
    hf = loaded(tmp_path, saved(model, tmp_path))
    prompt = IDS[:1, :11]
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), prompt], dim=1)
    ids = torch.cat([padded, IDS[1:, :20]])
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    out = hf.generate(
        ids, attention_mask=mask, max_new_tokens=25, do_sample=False, eos_token_id=None
    )
    ours = generate(model, [prompt[0].tolist(), IDS[1, :20].tolist()], 25)
    assert out[:, 20:].tolist() == ours


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "change",
    [
        tempered(coefficient=0.8),
        tempered(coefficient=0.8, per="query"),
        layout_changed(long_factors),
    ],
    ids=["temperature", "by query", "frequencies"],
)
def test_padding_on_either_side_is_no_part_of_the_length(tiny_decoder, tmp_path, change, side):
    """Six tokens beside 90 of padding are within the training length of 32; fifty are not."""
    model = tiny_decoder(heads={"nope": 0.5})
    change(model)
    hf = loaded(tmp_path, saved(model, tmp_path))
    rows = [IDS[0, :6], IDS[1]]
    ids, mask = torch.zeros(2, 2, 96, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(96 - len(row), None) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = row, 1
    theirs = hf(ids, attention_mask=mask).logits
    for i, row in enumerate(rows):
        torch.testing.assert_close(
            theirs[i, mask[i].bool()], model(row[None])[0], rtol=0, atol=1e-4
        )


@torch.no_grad()
def test_the_code_takes_the_cache_by_either_name(tiny_decoder, tmp_path):
    model = tiny_decoder(layers=["alibi"])
    hf = loaded(tmp_path, saved(model, tmp_path))
    whole = hf(IDS).logits
    for name in ("past_key_values", "cache"):
        cache = DynamicCache()
        hf(IDS[:, :30], **{name: cache})
        continued = hf(IDS[:, 30:], **{name: cache}).logits
        torch.testing.assert_close(continued, whole[:, 30:], rtol=0, atol=1e-5)
    with pytest.raises(TypeError, match="either past_key_values or cache"):
        hf(IDS, cache=DynamicCache(), past_key_values=DynamicCache())


@pytest.mark.parametrize("part", ["model", "whole"])
def test_the_code_refuses_arguments_that_it_does_not_know(tiny_decoder, tmp_path, part):
    """Ignored, a renamed argument would make generation wrong without an error."""
    hf = loaded(tmp_path, saved(tiny_decoder(layers=["alibi"]), tmp_path))
    module = hf.model if part == "model" else hf
    for name in ("past_keys", "output_attentions", "token_type_ids", "attention_instances"):
        with pytest.raises(TypeError, match=f"does not know the argument {name}"):
            module(IDS, **{name: True})
    module(IDS, output_attentions=False, token_type_ids=None)  # which ask for nothing
    with pytest.raises(
        ValueError, match=r"attention_mask: expected \[B, Tk\], got \[1, 1, 50, 50\]"
    ):
        module(IDS, attention_mask=torch.ones(1, 1, 50, 50))


@torch.no_grad()
def test_the_code_shows_hidden_states_and_returns_tuples(tiny_decoder, tmp_path):
    hf = loaded(tmp_path, saved(tiny_decoder(layers=["alibi"]), tmp_path))
    out = hf(IDS, output_hidden_states=True)
    assert len(out.hidden_states) == hf.config.num_hidden_layers + 1
    assert torch.equal(out.hidden_states[0], hf.model.embed_tokens(IDS))
    assert torch.equal(hf.lm_head(out.hidden_states[-1]), out.logits)
    assert torch.equal(hf(IDS, use_cache=False, return_dict=False)[0], out.logits)
    hf.config.output_hidden_states, hf.config.return_dict = True, False
    assert torch.equal(hf(IDS, use_cache=False)[-1][-1], out.hidden_states[-1])


@torch.no_grad()
def test_windows_keep_no_more_keys_than_they_see(tiny_decoder, tmp_path):
    """The mask of a cache that has forgotten the first tokens, in one step and in several."""
    model = tiny_decoder(layers=["alibi", "rope"], windows=[7, None])
    hf = loaded(tmp_path, saved(model, tmp_path))
    cache = DynamicCache(config=hf.config)
    parts = [
        hf(IDS[:, a:b], past_key_values=cache).logits for a, b in ((0, 20), (20, 29), (29, 30))
    ]
    assert [layer.keys.shape[2] for layer in cache.layers] == [6, 30]
    torch.testing.assert_close(torch.cat(parts, 1), model(IDS[:, :30]), rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("windows", [None, [7, None], [7, 20]])
def test_static_caches_and_beams_choose_the_same_tokens(tiny_decoder, tmp_path, windows):
    """Also behind padding, for which ``generate`` makes masks of its own for such caches."""
    options = {"windows": windows} if windows else {}
    hf = loaded(tmp_path, saved(tiny_decoder(layers=["alibi", "rope"], **options), tmp_path))
    ids, mask = IDS[:, :20].clone(), torch.ones(2, 20, dtype=torch.long)
    ids[0, :9], mask[0, :9] = 0, 0
    words = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    plain = hf.generate(ids, do_sample=False, **words)
    static = hf.generate(ids, do_sample=False, cache_implementation="static", **words)
    assert torch.equal(static, plain)
    beams = [hf.generate(ids, num_beams=3, use_cache=use, **words) for use in (True, False)]
    assert torch.equal(*beams)


@torch.no_grad()
def test_sequences_that_share_a_row_do_not_see_each_other(tiny_decoder, tmp_path):
    """As transformers' own models do, where positions begin anew and there is no mask."""
    hf = loaded(
        tmp_path, saved(tiny_decoder(layers=["alibi", "rope"], windows=[7, None]), tmp_path)
    )
    lengths = [11, 19, 20]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = hf(IDS[:1], position_ids=positions).logits
    alone = torch.cat([hf(part).logits for part in IDS[:1].split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    other = tmp_path / "by_length"
    other.mkdir()
    by_length = loaded(other, saved(tiny_decoder(layers=["rope_id"], training_length=70), other))
    with pytest.raises(ValueError, match="give every sequence a row of its own"):
        by_length(IDS[:1], position_ids=positions)


def test_the_code_has_our_loss_and_trains_with_recomputed_blocks(tiny_decoder, tmp_path):
    model = tiny_decoder(layers=["alibi"], heads={"nope": 0.5})
    hf = loaded(tmp_path, saved(model, tmp_path))
    expected, gradients = model.loss(IDS[:, :-1], IDS[:, 1:]), []
    for recomputed in (False, True):
        if recomputed:
            hf.gradient_checkpointing_enable()
        out = hf.train()(IDS, labels=IDS)
        torch.testing.assert_close(out.loss, expected, rtol=0, atol=1e-5)
        assert out.get("cache", out.get("past_key_values")) is None
        hf.zero_grad()
        out.loss.backward()
        gradients.append([p.grad.clone() for p in hf.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=0, atol=1e-6)


@torch.no_grad()
def test_the_implementation_can_be_set_later(tiny_decoder, tmp_path):
    """Also to a function that a user registers, which is given masks and biases."""
    model = tiny_decoder(layers=["alibi", "rope"], windows=[7, None])
    hf = loaded(tmp_path, saved(model, tmp_path))
    calls = []

    def mine(module, q, k, v, mask, **options):
        calls.append(mask)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)

    AttentionInterface.register("mine", mine)
    for name in ("eager", "mine"):
        hf.set_attn_implementation(name)
        assert hf.config._attn_implementation == name
        torch.testing.assert_close(hf(IDS).logits, model(IDS), rtol=0, atol=1e-4)
    assert len(calls) == 2


SERVED = {
    "QK-norm over the full projection": {"model": {"qk_norm": FULL}},
    "two bases": {"layers": ["rope", "high_frequency"]},
    "half of the heads": {"heads": {"nope": 0.5}},
    "windows": {"layers": ["rope", "nope"], "heads": {"nope": 0.5}, "windows": [7, None]},
    "learned scale beside QK-norm": {"model": {"softmax": SCALED, "qk_norm": PER_HEAD}},
    "a temperature by query": {"temperature": TemperatureConfig(coefficient=0.3, reference=8)},
}
"""Models with code of their own that a server's attention can compute."""


@torch.no_grad()
@pytest.mark.parametrize("kind", SERVED)
def test_a_server_computes_it_with_an_attention_of_its_own(
    tiny_decoder, tmp_path, monkeypatch, kind
):
    """As vLLM's and SGLang's backends do: they take the base model, join sequences in one row
    whose positions begin anew, pass their objects through, and mask by themselves."""
    model = tiny_decoder(**SERVED[kind])
    saved(model, tmp_path)
    lengths = [11, 19, 20]

    def attend(module, q, k, v, mask, scaling=None, attention_instances=None, **options):
        assert mask is None
        assert not options
        window = attention_instances[module.layer_idx]
        parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        out = [attention_by_hand(*part, scaling, window) for part in parts]
        return torch.cat(out, dim=1).flatten(0, 1).flatten(1), None  # [tokens, heads * size]

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", attend)
    config = UnropeConfig.from_pretrained(tmp_path)
    instances = {
        index: config.sliding_window
        if hasattr(config, "layer_types") and config.layer_types[index] == "sliding_attention"
        else None
        for index in range(config.num_hidden_layers)
    }
    served = UnropeModel.from_pretrained(tmp_path, attn_implementation="vllm").eval()
    states = served(
        input_ids=IDS[:1],
        inputs_embeds=None,
        use_cache=False,
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        attention_instances=instances,
        return_dict=False,
    )[0]
    ours = torch.cat([model.hidden_states(part) for part in IDS[:1].split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(states, ours, rtol=0, atol=1e-4)


def attention_by_hand(q, k, v, scaling, window):
    """``[1, T, H, D]`` in float64, a query at a time."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, dim=1).double() for x in (k, v))
    rows = []
    for i in range(q.shape[2]):
        seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
        weights = (k[:, :, seen] @ q[:, :, i, :, None].double() * scaling).softmax(dim=2)
        rows.append((weights * v[:, :, seen]).sum(dim=2))
    return torch.stack(rows, dim=1).to(q.dtype)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layers": ["alibi"]}, "it has no ALiBi"),
        (
            {"layers": ["rope_id"], "training_length": 70},
            "it does not tell the model how long each sequence is",
        ),
        ({"model": {"softmax": SoftmaxConfig(sinks=True)}}, "it has no learned attention sinks"),
        ({"model": {"softmax": SoftmaxConfig(final_softcap=3.0)}}, "it has no soft-caps"),
        ({"windows": [7, 20]}, "it has one size of sliding windows"),
    ],
)
def test_a_server_refuses_a_model_that_it_cannot_compute(
    tiny_decoder, tmp_path, monkeypatch, options, reason
):
    model = tiny_decoder(**options)
    plan = saved(model, tmp_path)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", None)
    with pytest.raises(ValueError, match=f"'vllm' cannot compute this model: {reason}"):
        UnropeModel.from_pretrained(tmp_path, attn_implementation="vllm")
    by_engine = {v.engine: v for v in verdicts(plan.values, plan.architecture)}
    for engine in ("vLLM", "SGLang"):
        assert (by_engine[engine].loads, by_engine[engine].note) == (False, reason)


@pytest.mark.parametrize(
    "kind", ["RoPE, untied", "QK-norm", "biases", "iRoPE", "windows", "Llama 3", "LongRoPE"]
)
def test_import_and_export_again_change_no_bit(tiny_decoder, tmp_path, kind):
    model = native(tiny_decoder, kind)
    saved(model, tmp_path)
    again = tmp_path / "again"
    again.mkdir()
    imported = read_pretrained(str(tmp_path)).decoder()
    saved(imported, again)
    reread = read_pretrained(str(again)).decoder()
    for name, value in model.named_parameters():
        assert torch.equal(reread.get_parameter(name), value)
    assert torch.equal(reread(IDS), imported(IDS))
    assert (again / "config.json").read_text() == (tmp_path / "config.json").read_text()


def norms_in_the_first(model):
    first, *others = model.layout.layers
    model.layout = replace(model.layout, layers=(replace(first, qk_norm=True), *others))


HALF = {"heads": {"nope": 0.5}}
READ_BACK = {kind: (options, lambda model: None) for kind, (options, _) in CUSTOM.items()} | {
    "norms in one layer": (
        {"model": {"qk_norm": QKNormConfig("after_drop", "full")}},
        norms_in_the_first,
    ),
    "a temperature by query": (HALF, tempered(coefficient=0.4, per="query")),
    "frequencies that follow the length": (HALF, layout_changed(lambda s: dynamic(s, yarn, 32))),
    "factors for long sequences": (HALF, layout_changed(long_factors)),
}


@pytest.mark.parametrize("kind", READ_BACK)
def test_an_export_with_code_is_read_back_without_running_it(tiny_decoder, tmp_path, kind):
    """The same layout, weights and logits, to the bit; the code beside them may be anything."""
    options, change = READ_BACK[kind]
    model = tiny_decoder(**options)
    change(model)
    plan = saved(model, tmp_path)
    assert not plan.is_native
    for code in tmp_path.glob("*.py"):
        code.write_text("raise SystemExit('it was run')")
    assert_read_back(model, plan, tmp_path)
    read = read_pretrained(str(tmp_path))
    assert read.layout == model.layout
    assert make_plan(read.config, read.layout) == plan
    for name, parameter in read.decoder().named_parameters():
        if not waits(name, model.layout):
            assert torch.equal(parameter, model.get_parameter(name))


def test_an_export_of_the_first_version_is_named_with_the_way_out(tiny_decoder, tmp_path, caplog):
    saved(tiny_decoder(layers=["alibi"]), tmp_path)
    read_pretrained(str(tmp_path))
    assert not caplog.messages
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["code_version"]
    path.write_text(json.dumps(values))
    read_pretrained(str(tmp_path))
    (message,) = caplog.messages
    assert "transformers 5.24 or newer" in message
    assert message.endswith(f"python -m trainer export {tmp_path} to=DIRECTORY")
    for version in (3, "two"):
        caplog.clear()
        path.write_text(json.dumps(values | {"code_version": version}))
        read_pretrained(str(tmp_path))
        (message,) = caplog.messages
        assert f"code_version is {version!r}, and this program writes 2" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(layout=None), "layout: expected the encodings of all layers"),
        (
            lambda d: d.update(qk_norm_kind="each"),
            "qk_norm_kind: expected 'per_head' or 'full', got",
        ),
        (
            lambda d: d.update(num_hidden_layers=3, layer_types=None),
            "layout: 2 layers for 3 of the model",
        ),
        (lambda d: d.update(alibi_slopes=[0.5]), "alibi_slopes: expected ALiBi's for 4 heads"),
        (lambda d: d.update(vocab_size="many"), "vocab_size: expected a positive whole number"),
        (lambda d: d.update(head_dim=7), "head_dim: 7 is odd"),
        (lambda d: d.update(softmax={"sink": True}), "softmax.sink: unknown key. Did you"),
        (lambda d: d.update(softmax={"softcap": -1.0}), "softmax.softcap: expected 0.001 or more"),
        (lambda d: d["layout"].pop("spectra"), "layout.spectra"),
        (
            lambda d: d["layout"]["spectra"][0].update(inv_freq=[0.1] * 9),
            "18 of 8 channels rotate",
        ),
        (lambda d: d["layout"]["layers"][0].update(groups=[[0, 1]]), "other key-value heads"),
        (lambda d: d["layout"]["layers"][0].update(groups=[[5, 2]]), "a spectrum that is not"),
        (lambda d: d["layout"]["layers"][0].update(window=-1), "layout.layers.0.window"),
    ],
)
def test_a_damaged_description_of_ours_is_named(tiny_decoder, tmp_path, change, message):
    saved(tiny_decoder(layers=["alibi"]), tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(UserError) as error:
        read_pretrained(str(tmp_path))
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}: config.json: ")


@torch.no_grad()
def test_a_learned_scale_is_rounded_with_the_queries_that_carry_it(tiny_decoder, tmp_path):
    model = tiny_decoder(model={"softmax": SCALED, "qkv_bias": True})
    plan = make_plan(model.config, model.layout)
    write_files(model, plan, TOKENIZER, 0, tmp_path, "bfloat16")
    round_weights(model, plan, torch.bfloat16)
    hf = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(hf(IDS).logits, model(IDS), rtol=0, atol=1e-5)


def test_large_models_are_written_in_shards(tiny_decoder, tmp_path):
    model = tiny_decoder()
    plan = make_plan(model.config, model.layout)
    write_weights(model, plan, tmp_path, "float32", shard_bytes=20_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert all(path.stat().st_size < 21_500 for path in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    weights = {name: value for path in shards for name, value in load_file(path).items()}
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    assert set(index["weight_map"]) == set(weights) == set(read_headers(tmp_path))
    for name, value in model.named_parameters():
        assert torch.equal(weights[f"model.{name}"], value)


def test_files_have_the_usual_permissions(tiny_decoder, tmp_path):
    (tmp_path / "made_here").touch()
    saved(tiny_decoder(), tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
