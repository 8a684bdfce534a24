"""Models that transformers computes: what is read of them is what they do."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.interchange.families import FAMILIES, MLA, SHAPE, YARN, made
from tests.reference import turned
from trainer.analysis.attention import attention_statistics, capture, head_attention
from trainer.common.errors import UserError
from trainer.hf import NO_ROTATION
from trainer.interchange.adapted import AdaptedModel, read_adapted
from trainer.interchange.hf_config import from_hf_config
from trainer.interchange.pretrained import read_pretrained
from trainer.model.generate import generate
from trainer.positional.layout import Intervention, LayerEncoding
from trainer.positional.rescaling import yarn
from trainer.positional.spectrum import Spectrum

IDS = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(3))
T = IDS.shape[1]
every_family = pytest.mark.parametrize("family", FAMILIES)


def observed(model, ids=IDS):
    return capture(model, ids, lambda heads: heads)


@torch.no_grad()
def theirs(hf, ids=IDS):
    """By the plain implementation of transformers: attention of every layer, and logits."""
    hf.set_attn_implementation("eager")
    outputs = hf(ids, output_attentions=True)
    return outputs.attentions, outputs.logits


def attention_of(heads):
    """Written plainly in float64 from what an analysis is given: ``[B, Hq, T, T]``."""
    q, k = heads.rotated_q.double(), heads.rotated_k.double()
    k = k.repeat_interleave(heads.queries_per_key, dim=1)
    scores = heads.scale * q @ k.mT
    if heads.softcap is not None:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    window = heads.encoding.window or T
    scores = scores.masked_fill((j > i) | (j <= i - window), -math.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.double()[:, None, None].expand(len(q), -1, T, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.softmax(dim=-1)[..., :T]


@every_family
def test_queries_and_keys_give_the_models_own_attention(family):
    hf = made(family)
    model = AdaptedModel(hf)
    layers = observed(model)
    attentions, _ = theirs(hf)
    assert len(layers) == len(attentions) == 3
    for heads, expected in zip(layers, attentions, strict=True):
        assert heads.q.shape[:3] == heads.rotated_q.shape[:3] == (2, 4, T)
        torch.testing.assert_close(attention_of(heads).float(), expected, rtol=0, atol=2e-5)
        for head in range(4):
            by_head = head_attention(heads, head, slice(0, T))
            torch.testing.assert_close(by_head, expected[:, head], rtol=0, atol=2e-5)
        rows, i = attention_statistics(heads), torch.arange(T)
        torch.testing.assert_close(rows.sink, expected[..., 0], rtol=0, atol=2e-5)
        torch.testing.assert_close(rows.diagonal, expected[..., i, i], rtol=0, atol=2e-5)
        distance = (expected * (i[:, None] - i)).sum(dim=-1) / expected.sum(dim=-1)
        torch.testing.assert_close(rows.distance, distance, rtol=0, atol=2e-3)


@every_family
def test_the_encoding_leads_from_plain_to_rotated(family):
    """Against complex numbers in float64."""
    layers = observed(AdaptedModel(made(family)), IDS[:1])
    for heads in layers:
        spectrum = heads.encoding.spectra[0]
        for plain, rotated in ((heads.q, heads.rotated_q), (heads.k, heads.rotated_k)):
            expected = torch.tensor(
                [
                    [turned(x, i, spectrum.inv_freq) for i, x in enumerate(head)]
                    for head in plain[0].tolist()
                ]
            )
            expected[..., : spectrum.rotary_dim] *= spectrum.rotary_scale
            torch.testing.assert_close(rotated[0], expected, rtol=0, atol=2e-5)


ROTATED = {"SmolLM3": [4, 0, 4], "Llama4": [4, 4, 0]}
ROTATED |= {name: [2, 2, 2] for name in ("Phi", "DeepseekV2", "DeepseekV3", "GPTNeoX", "Glm")}


@every_family
def test_which_channels_rotate_in_which_layers(family):
    model = AdaptedModel(made(family))
    head_dim = model.config.head_size
    pairs = [layer.spectra[0].rotary_dim // 2 for layer in model.layout.layers]
    assert pairs == ROTATED.get(family, [head_dim // 2] * 3)
    windows = {name: [8, 8, 8] for name in ("Mistral", "Gemma3", "Olmo3")}
    windows |= {name: [8, None, 8] for name in ("Gemma2", "GptOss")}
    assert [layer.window for layer in model.layout.layers] == windows.get(family, [None] * 3)
    lengths = {"Llama, YaRN": (16, 64), "GptOss": (4096, 32 * 4096)}.get(family, (64, 64))
    assert (model.layout.training_length, model.layout.longest) == lengths
    assert model.layout.spectra[0].rotary_scale == pytest.approx(
        0.1 * math.log({"Llama, YaRN": 4, "GptOss": 32}.get(family, 1)) + 1
    )


@every_family
@torch.no_grad()
def test_logits_at_once_and_from_a_cache_are_the_models_own(family):
    hf = made(family)
    model = AdaptedModel(hf)
    cache = model.empty_cache(2, T)
    cached = torch.cat([model(IDS[:, :15], cache=cache), model(IDS[:, 15:], cache=cache)], dim=1)
    whole, last = model(IDS), model(IDS, last=3)
    losses = model.token_losses(IDS[:, :-1], IDS[:, 1:])
    _, expected = theirs(hf)
    for logits in (whole, cached):
        torch.testing.assert_close(logits, expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(last, expected[:, -3:], rtol=0, atol=5e-5)
    entropy = F.cross_entropy(expected[:, :-1].transpose(1, 2), IDS[:, 1:], reduction="none")
    torch.testing.assert_close(losses, entropy, rtol=0, atol=1e-4)


@every_family
def test_prompts_of_several_lengths_go_on_as_if_alone(family):
    hf = made(family, **({"attn_temperature_tuning": False} if family == "Llama4" else {}))
    prompts = [IDS[0, :9].tolist(), IDS[1, :14].tolist()]
    continued = generate(AdaptedModel(hf), prompts, 4)
    for prompt, tokens in zip(prompts, continued, strict=True):
        alone = list(prompt)
        for _ in range(4):
            alone.append(theirs(hf, torch.tensor([alone]))[1][0, -1].argmax().item())
        assert tokens == alone[-4:]


def test_states_are_those_that_the_head_reads():
    """OPT's head reads its decoder's states, past the model between them."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32)
    hf = transformers.OPTForCausalLM(config).eval()
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.testing.assert_close(AdaptedModel(hf)(IDS), hf(IDS).logits, rtol=0, atol=5e-5)


def test_a_model_that_sees_later_tokens_is_refused():
    hf = made("Gemma")
    hf.config.use_bidirectional_attention = True
    for layer in hf.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UserError, match="depend on later tokens"):
        AdaptedModel(hf)


def test_layers_that_cache_more_than_keys_and_values_are_refused():
    """DeepSeek-V3.2 chooses keys by others, unless its attention has another name."""
    indexer = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
    config = transformers.DeepseekV32Config(**SHAPE | MLA | indexer)
    with pytest.raises(UserError, match="nothing but keys and values"):
        AdaptedModel(transformers.DeepseekV32ForCausalLM(config))


def test_a_layer_that_is_used_twice_is_refused():
    hf = made("Llama")
    hf.model.layers[2] = hf.model.layers[1]
    with pytest.raises(UserError, match="expected all, each once"):
        AdaptedModel(hf)


def test_attention_may_get_its_mask_by_name():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.AfmoeConfig(**SHAPE, head_dim=8, **experts)
    hf = transformers.AfmoeForCausalLM(config).eval()
    expected = hf(IDS).logits
    model = AdaptedModel(hf)
    with model.observed(lambda *_, **__: None):
        torch.testing.assert_close(model(IDS), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["GPT2", "OPT"])
def test_positions_that_are_learned_begin_with_each_row(kind):
    """Whatever the lengths of the others, and if rows leave the batch."""
    sizes = {"OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32}}
    config = getattr(transformers, f"{kind}Config")
    torch.manual_seed(0)
    head = {"GPT2": "LMHeadModel"}.get(kind, "ForCausalLM")
    hf = getattr(transformers, f"{kind}{head}")(config(**SHAPE | sizes.get(kind, {}))).eval()
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = AdaptedModel(hf)
    assert not model.layout.rotates
    prompts = [IDS[0, :9].tolist(), IDS[1, :14].tolist(), IDS[0, 3:5].tolist()]
    with torch.no_grad():
        alone = [hf(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    ends = {int(alone[0].argmax())}  # the first one ends at once
    together = generate(model, prompts, 5, end_tokens=ends)
    assert len(together[0]) == 1
    for prompt, tokens in zip(prompts, together, strict=True):
        assert tokens == generate(model, [prompt], 5, end_tokens=ends)[0]
        ids, expected = list(prompt), []
        for _ in tokens:
            with torch.no_grad():
                expected.append(int(hf(torch.tensor([ids])).logits[0, -1].argmax()))
            ids.append(expected[-1])
        assert tokens == expected


def test_cudnn_computes_no_attention_of_a_model_of_transformers(monkeypatch):
    allowed = []
    attend = F.scaled_dot_product_attention

    def note(*args, **options):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    AdaptedModel(made("Llama"))(IDS)
    assert allowed
    assert not any(allowed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a Llama, which our decoder and transformers can both read."""
    directory = tmp_path_factory.mktemp("llama")
    made("Llama").save_pretrained(directory)
    words = {"<eos>": 0} | {f"w{i}": i for i in range(1, 97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<eos>"))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def both(saved):
    return read_pretrained(str(saved)).decoder(), read_adapted(saved)


def test_models_that_are_read_in_another_dtype_are_the_converted_ones(saved):
    load, half = read_pretrained(str(saved)).decoder, torch.bfloat16
    read, converted, ids = load("cpu", half), load().to(half), torch.arange(24)[None]
    for kind in ("named_parameters", "named_buffers"):
        tensors, expected = (dict(getattr(model, kind)()) for model in (read, converted))
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        assert torch.equal(read(ids), converted(ids))


GAIN = Intervention(query=tuple((0.2 + h,) * 8 for h in range(4)), key=((0.5,) * 8,) * 2)
CHANGES = {
    "YaRN": lambda layout: layout.rescaled(yarn, 4.0),
    "no encoding": lambda layout: layout.map(lambda _: Spectrum()),
    "no rotary channels": lambda layout: layout.map(lambda s: replace(s, rotary_scale=0.0)),
    "a temperature per query": lambda layout: replace(
        layout.map(lambda s: s.with_temperature(coefficient=0.5, per="query")), training_length=8
    ),
    "half of the heads": lambda layout: replace(
        layout,
        layers=tuple(LayerEncoding((Spectrum(), *layer.spectra[1:])) for layer in layout.layers),
    ),
    "a gain on heads": lambda layout: replace(
        layout, layers=tuple(replace(layer, intervention=GAIN) for layer in layout.layers)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_changed_layout_is_that_of_our_decoder(both, change):
    ours, other = both
    before = other(IDS)
    with ours.using(change(ours.layout)), other.using(change(other.layout)):
        expected, logits = ours(IDS), other(IDS)
        cache = other.empty_cache(2, T)
        stepwise = torch.cat([other(x, cache=cache) for x in IDS.split(10, dim=1)], dim=1)
    assert (expected - before).abs().max() > 0.01
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(stepwise, expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(other(IDS), before, rtol=0, atol=0)


@torch.no_grad()
def test_yarn_rescales_olmo_3_as_transformers_does():
    """Layers with windows keep their frequencies, in OLMo 3's published models and by default
    here."""
    shape = {"num_hidden_layers": 4, "sliding_window": 8, "max_position_embeddings": 16}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    types = ("sliding_attention", "full_attention")
    trained = AdaptedModel(made("Olmo3", **shape, rope_parameters=dict.fromkeys(types, plain)))
    assert [layer.window for layer in trained.layout.layers] == [8, 8, 8, None]
    theirs = made("Olmo3", **shape, rope_parameters={types[0]: plain, types[1]: YARN})
    expected = theirs(IDS).logits
    assert AdaptedModel(theirs).layout.longest == YARN["factor"] * 16  # which some layers reach
    assert (trained(IDS) - expected).abs().max() > 0.01
    with trained.using(trained.layout.rescaled(yarn, YARN["factor"])):
        torch.testing.assert_close(trained(IDS), expected, rtol=0, atol=5e-5)
    with trained.using(trained.layout.rescaled(yarn, YARN["factor"], "all")):
        assert (trained(IDS) - expected).abs().max() > 0.01


@pytest.mark.parametrize("family", ["Phi", "Llama4", "DeepseekV2", "Cohere"])
@torch.no_grad()
def test_dropped_positions_are_gone_from_every_arrangement(family):
    """A token is then predicted alike wherever the tokens before it stand."""
    model = AdaptedModel(made(family, **({"floor_scale": 64} if family == "Llama4" else {})))
    shuffled = IDS.clone()
    shuffled[:, :-1] = IDS[:, torch.randperm(T - 1)]
    one_layer = []
    with model.using(model.layout.map(lambda _: Spectrum())):
        for ids in (IDS, shuffled):
            layers = observed(model, ids)
            assert torch.equal(layers[0].q, layers[0].rotated_q)
            one_layer.append(attention_statistics(layers[0]).entropy[:, :, -1])
    torch.testing.assert_close(*one_layer, rtol=0, atol=1e-4)


def test_the_shape_is_that_of_the_configuration():
    hf = made("Llama", tie_word_embeddings=True, intermediate_size=40)
    read, _ = from_hf_config(hf.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    assert replace(AdaptedModel(hf).config, rms_norm_eps=read.rms_norm_eps) == read


def test_a_dropped_model_has_its_own_length():
    layout = AdaptedModel(made("Llama", rope_parameters=NO_ROTATION | {"rope_theta": 1e4})).layout
    assert (layout.rotates, layout.training_length, layout.longest) == (False, 64, 64)


def test_frequencies_are_not_rounded_with_the_weights(saved, both):
    hf, inv_freq = read_adapted(saved, torch.bfloat16).hf, both[1].hf.model.rotary_emb.inv_freq
    assert hf.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(hf.model.rotary_emb.inv_freq, inv_freq)


def test_texts_that_fill_a_chunk_of_attention_are_not_observed():
    chunks, ids = AdaptedModel(made("Llama4")), IDS[:1].repeat(1, 4)
    observed(chunks, ids[:, :48])
    with pytest.raises(UserError, match="hides other keys"):
        observed(chunks, ids[:, :60])


def test_frequencies_that_follow_the_length_are_refused_beyond_the_first():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = AdaptedModel(made("Llama", rope_parameters=rope))
    plain = model.hidden_states(IDS[:, :16])
    model.layout = model.layout.map(lambda s: s.with_temperature(coefficient=1e-9))
    torch.testing.assert_close(model.hidden_states(IDS[:, :16]), plain, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="follows lengths beyond 16 tokens"):
        model.hidden_states(IDS)
    model.layout = model.own_layout
    model.hidden_states(IDS)
    for begins in ((), (4, 0)):  # keys of the first frequencies, of the shorter row
        cache = model.empty_cache(2, T)
        model.hidden_states(IDS[:, : 17 if begins else 16], cache=cache)
        cache.fill(begins, cache.length)
        with pytest.raises(UserError, match="follows lengths beyond 16 tokens"):
            model.hidden_states(IDS[:, 17:], cache=cache)
    with pytest.raises(UserError, match="'dynamic' depends on the texts read before"):
        AdaptedModel(
            made(
                "Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
            )
        )


def test_a_model_whose_attention_cannot_be_watched_is_refused():
    """One that calls attention itself, past transformers' AttentionInterface."""
    hf = made("Llama")
    for layer in hf.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UserError, match="0 of its 3 layers call attention through"):
        AdaptedModel(hf)


def test_a_refusal_names_the_model(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    made("Llama", rope_parameters=rope).save_pretrained(tmp_path / "second")
    with pytest.raises(UserError, match=r"second: .*'dynamic'"):
        read_adapted(tmp_path / "second")


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UserError, match="got LlamaModel"):
        AdaptedModel(made("Llama").model)


def wrapped(layer, change):
    """Let a layer's attention get tables that ``change`` makes of its own."""
    forward = layer.self_attn.forward

    def attend(*args, position_embeddings, **options):
        return forward(*args, position_embeddings=change(position_embeddings), **options)

    layer.self_attn.forward = attend


def test_a_layer_that_rotates_otherwise_than_its_tables_say_is_refused():
    hf = made("Llama")
    wrapped(hf.model.layers[1], lambda tables: (tables[0], 2 * tables[1]))
    with pytest.raises(UserError, match="unknown way"):
        AdaptedModel(hf)


def test_layers_that_rotate_without_being_given_tables_are_refused():
    hf = made("Llama")
    tables = hf.model.rotary_emb(torch.zeros(1), torch.arange(T)[None])
    hf.model.rotary_emb.forward = lambda *_, **__: None
    for layer in hf.model.layers:
        wrapped(layer, lambda _: [table[:, :16] for table in tables])
    with pytest.raises(UserError, match="unknown way"):
        AdaptedModel(hf)


@pytest.mark.parametrize("layers", [[1], [0, 1, 2]])
def test_all_layers_have_heads_of_one_kind(layers):
    hf = made("Llama")
    config = replace(hf.config, num_attention_heads=2, num_key_value_heads=2)
    for index in layers:
        attention = LlamaAttention(config, index).eval()
        attention.config = hf.config  # of its implementation
        hf.model.layers[index].self_attn = attention
    if len(layers) == 3:
        assert AdaptedModel(hf).config.num_attention_heads == 2
        return
    with pytest.raises(UserError, match="heads of one kind"):
        AdaptedModel(hf)


def test_weights_that_are_not_in_the_file_are_named(saved):
    weights = load_file(saved / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"missing: model\.norm\.weight"):
        read_adapted(saved)


def test_the_text_model_of_a_model_that_reads_images_too():
    text = {**SHAPE, "head_dim": 8}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    hf = transformers.Gemma3ForConditionalGeneration(config).eval()
    model = AdaptedModel(hf)
    torch.testing.assert_close(model(IDS), hf(IDS).logits, rtol=0, atol=1e-4)


def test_models_that_need_code_or_elsewhere_are_refused(saved):
    values = json.loads((saved / "config.json").read_text())

    def refused(message, **changes):
        (saved / "config.json").write_text(json.dumps(values | changes))
        with pytest.raises(UserError, match=message):
            read_adapted(saved)

    refused("code of a model is never run", model_type="mine")
    refused("attn_implementation", attn_implementation="someone/kernel")
    refused("attn_implementation", attn_implementation={"": "someone/kernel"})
    refused("attn_implementation", text_config={"_attn_implementation": "someone/kernel"})
    refused("transformers_weights", transformers_weights="../x")
    (saved / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    refused("adapter of peft")
