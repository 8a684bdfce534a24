"""Every backend computes the same attention; each is called with what its kernel means."""

import math
import sys
import types
import warnings
from copy import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.bias import CausalBias

from tests.reference import attend
from trainer.common.errors import UserError
from trainer.model import backends
from trainer.model import decoder as decoder_module
from trainer.model.backends import BACKENDS, Mask, Use, backend, bias, choose_backend, prepared

B, HEADS, KV_HEADS, T, D = 2, 4, 2, 12, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 4 + [2] * 7])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
MASKS = {
    "plain": Mask(),
    "window": Mask(window=4),
    "window beyond the sequence": Mask(window=100),
    "documents": Mask(documents=DOCUMENTS),
    "alibi": Mask(slopes=SLOPES),
    "all": Mask(window=4, documents=DOCUMENTS, slopes=SLOPES),
}
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
new_tokens = pytest.mark.parametrize("new", [T, 5, 1], ids=["all", "last five", "last one"])


def inputs(new=T, kv_heads=KV_HEADS):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, HEADS, T, D, generator=generator)
    k, v = (torch.randn(B, kv_heads, T, D, generator=generator) for _ in range(2))
    return q[:, :, -new:], k, v


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_alibis_bias_is_not_rounded_to_16_bits_on_the_cpu(kind):
    """In bfloat16 keys at a distance of 2,001 and 2,008 would have one bias."""
    q = torch.zeros(1, 1, 1, 4, dtype=kind)
    values = bias(Mask(slopes=torch.tensor([2**-8])), range(3000, 3001), range(3001), q)
    expected = [(j - 3000) / 256 for j in range(3001)]
    assert values.flatten().tolist() == expected


def loop(q, k, v, mask):
    """The definition, one query and one key at a time in float64."""
    past, out = k.shape[2] - q.shape[2], torch.empty(q.shape, dtype=torch.float64)
    for b in range(B):
        for h in range(HEADS):
            shared = h // (HEADS // k.shape[1])

            def sees(i, j, b=b):
                near = mask.window is None or i - j < mask.window
                return near and (
                    mask.documents is None or mask.documents[b, i] == mask.documents[b, j]
                )

            def bias(i, j, h=h):
                return 0.0 if mask.slopes is None else -float(mask.slopes[h]) * (i - j)

            rows = [[0.0] * D] * past + q[b, h].double().tolist()
            keys, values = (x[b, shared].double().tolist() for x in (k, v))
            head = attend(rows, keys, values, bias=bias, sees=sees)
            out[b, h] = torch.tensor(head[past:], dtype=torch.float64)
    return out


def assert_is_attention(backend, mask, new=T, kv_heads=KV_HEADS):
    q, k, v = inputs(new, kv_heads)
    ready = prepared(backend, mask, (B, q.shape[2]), T, q.device)
    torch.testing.assert_close(
        backend(q, k, v, ready).double(), loop(q, k, v, mask), rtol=0, atol=1e-5
    )


@masks
@new_tokens
def test_attention_on_the_cpu(mask, new):
    assert_is_attention(BACKENDS["sdpa"].attend, mask, new)


@masks
@pytest.mark.parametrize("block", [1, 5])
def test_sdpa_in_blocks_of_queries(monkeypatch, mask, block):
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", block)
    assert_is_attention(BACKENDS["sdpa"].attend, mask)
    assert_is_attention(BACKENDS["sdpa"].attend, mask, new=7)


def test_sdpa_with_a_window_reads_its_window_of_the_keys_only(monkeypatch):
    """So that memory and time are linear in the length."""
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", 3)
    widths, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def recorded(q, k, v, **options):
        widths.append(k.shape[2])
        return kernel(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    assert_is_attention(BACKENDS["sdpa"].attend, Mask(window=4))
    assert max(widths) == 3 + 4 - 1


ENDS = torch.tensor([[9], [33]])


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [
        (Mask(slopes=SLOPES), 2),
        (Mask(slopes=SLOPES, documents=(torch.arange(64) >= ENDS).long()), 4),
        (Mask(slopes=SLOPES, begins=torch.tensor([0, 5])), 4),
    ],
    ids=["rows share biases", "documents", "padding"],
)
def test_biases_of_a_block_have_a_limit(monkeypatch, mask, blocks):
    limit, sizes, kernel = 2 * HEADS * 64 * 16, [], F.scaled_dot_product_attention
    monkeypatch.setattr(backends, "MOST_BIASES", limit)

    def recorded(*qkv, attn_mask, **options):
        sizes.append(attn_mask.numel())
        return kernel(*qkv, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    q, k = torch.randn(B, HEADS, 64, D), torch.randn(B, KV_HEADS, 64, D)
    BACKENDS["sdpa"].attend(q, k, k, mask)
    assert len(sizes) == blocks
    assert max(sizes) == limit
    sizes.clear()
    monkeypatch.setattr(backends, "MOST_BIASES", 1)
    BACKENDS["sdpa"].attend(q, k, k, mask)
    assert len(sizes) == 64 // 16  # smaller blocks would be slow


@pytest.fixture
def slow_flex(monkeypatch):
    """Without compiling, which takes long; torch then runs the same definition slowly."""
    monkeypatch.setattr(backends, "_compiled", lambda name: getattr(torch_flex, name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("slow_flex")
@masks
@new_tokens
def test_flex(mask, new):
    assert_is_attention(BACKENDS["flex"].attend, mask, new)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_flex")
@torch.no_grad()
def test_flex_of_the_last_positions_alone(tiny_decoder):
    """The last layer has fewer queries than the others, and thus another block mask."""
    model, ids = tiny_decoder(training_length=T, windows=[5]), torch.arange(2 * T).view(2, T)
    for block in model.layers:
        block.self_attn.attend = BACKENDS["flex"].attend
    torch.testing.assert_close(model(ids, last=3), model(ids)[:, -3:])


def test_heads_that_change_in_a_run_are_compiled_as_one_graph():
    """From the second number on the compiler takes it for a symbol."""

    def some(q, k, v, heads):
        return BACKENDS["sdpa"].attend(q[:, : 2 * heads], k[:, :heads], v[:, :heads], Mask())

    q, k = torch.randn(1, 8, T, 8), torch.randn(1, 4, T, 8)
    compiled = torch.compile(some, backend="eager", fullgraph=True)
    for heads in (4, 3, 2):
        torch.testing.assert_close(compiled(q, k, k, heads), some(q, k, k, heads))
    torch.compiler.reset()


def documented(q, k, v, causal, window_size, alibi_slopes=None):
    """Attention of one row by the documentation of the kernels, in plain torch."""
    tq, tk = q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    i, j = torch.arange(tq)[:, None] + tk - tq, torch.arange(tk)
    if alibi_slopes is not None:
        assert alibi_slopes.dtype == torch.float32
        scores = scores - alibi_slopes[:, None, None] * (i - j).abs()
    left, right = window_size
    hidden = (j > i) if causal else torch.zeros(tq, tk, dtype=torch.bool)
    hidden = hidden | ((i - j > left) if left >= 0 else False)
    hidden = hidden | ((j - i > right) if right >= 0 else False)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def packed_rows(q, k, v, starts, key_starts, longest, longest_keys, **options):
    """Attention within each document of a packed row."""
    assert starts.dtype == torch.int32
    assert torch.equal(starts, key_starts)
    assert (starts[0], starts[-1]) == (0, len(q))
    assert longest <= T  # the kernel allocates as much for every document
    assert longest == longest_keys >= starts.diff().max() >= starts.diff().min() >= 0
    parts = zip(starts.tolist(), starts.tolist()[1:], strict=False)
    return torch.cat([documented(q[a:b], k[a:b], v[a:b], **options) for a, b in parts])


@pytest.fixture
def fake_flash(monkeypatch):
    """A flash_attn package with the semantics of its documentation, in plain torch.

    Layout ``[B, T, H, D]`` or packed ``[sum T, H, D]``; causal and windowed masks aligned to the
    last key; ``window_size`` (left, right) counts neighbours beside the key itself, -1 for all.
    """
    calls = []

    def flash_attn_func(q, k, v, *, deterministic, **options):
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        calls.append("dense")
        return torch.stack([documented(*row, **options) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(q, k, v, *bounds, deterministic, **options):
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        calls.append("packed")
        return packed_rows(q, k, v, *bounds, **options)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@masks
def test_flash(fake_flash, mask):
    assert_is_attention(BACKENDS["flash"].attend, mask)
    assert fake_flash == ["dense" if mask.documents is None else "packed"]


@pytest.mark.parametrize("name", ["flash", "flex", "of_a_plugin"])
@pytest.mark.parametrize(("new", "begins"), [(5, torch.tensor([0, 3])), (1, None)])
def test_padded_rows_and_single_queries_go_to_sdpa(fake_flash, monkeypatch, name, new, begins):
    """No kernel knows where rows begin."""
    monkeypatch.setattr(backends, "_compiled", None)

    def of_a_plugin(q, k, v, mask):
        raise AssertionError

    monkeypatch.setitem(BACKENDS, name, BACKENDS.get(name))
    if name == "of_a_plugin":
        backend(supports=lambda use: not use.masked)(of_a_plugin)
    mask, (q, k, v) = Mask(begins=begins), inputs(new)
    expected = BACKENDS["sdpa"].attend(q, k, v, mask)
    assert torch.equal(BACKENDS[name].attend(q, k, v, mask), expected)
    assert fake_flash == []


@pytest.mark.usefixtures("fake_flash")
@pytest.mark.parametrize("longest", [7, 1000])
def test_flash_of_documents_whose_lengths_have_a_bound(longest):
    assert_is_attention(BACKENDS["flash"].attend, replace(MASKS["documents"], longest=longest))


@torch.no_grad()
def test_flash_of_documents_in_chunks(fake_flash, tiny_decoder):
    """The bounds that training gives are those of whole rows."""
    model, ids = tiny_decoder(), torch.arange(2 * T).view(2, T)
    mask = Mask(documents=DOCUMENTS)
    expected = model(ids, mask=mask)
    for attention in model.attentions:
        attention.attend = BACKENDS["flash"].attend
    mask = prepared(BACKENDS["flash"].attend, mask, (2, T), T, ids.device)
    model.prefill_chunk = 7
    torch.testing.assert_close(model(ids, mask=mask), expected)
    assert fake_flash == ["packed"] * 2


@pytest.mark.usefixtures("fake_flash")
@pytest.mark.parametrize("new", [5, 1])
@pytest.mark.parametrize("name", MASKS)
def test_flash_with_a_cache(name, new):
    assert_is_attention(BACKENDS["flash"].attend, MASKS[name], new)


def test_gradients_are_those_of_the_definition(monkeypatch):
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", 5)
    leaves = [x.requires_grad_() for x in inputs()]
    weights, mask = torch.randn(B, HEADS, T, D), MASKS["all"]
    ours = torch.autograd.grad((BACKENDS["sdpa"].attend(*leaves, mask) * weights).sum(), leaves)
    q, k, v = leaves = [x.detach().double().requires_grad_() for x in leaves]
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    same = DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]
    seen = same & (j <= i) & (i - j < 4)
    scores = q @ keys.mT / math.sqrt(D) - SLOPES[:, None, None] * (i - j)
    exp = scores.exp() * seen
    out = exp / exp.sum(-1, keepdim=True) @ values
    expected = torch.autograd.grad((out * weights).sum(), leaves)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)


@pytest.fixture
def sdpa_calls(monkeypatch):
    """What SDPA is called with: whether every head has keys of its own, the mask, the options."""
    calls, kernel = [], F.scaled_dot_product_attention

    def recorded(q, k, v, attn_mask=None, **options):
        calls.append((k.shape[1] == q.shape[1], attn_mask, options))
        return kernel(q, q, q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    return calls


@masks
@new_tokens
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_sdpa_asks_for_nothing_that_only_the_slow_kernel_does(
    sdpa_calls, mask, new, dtype
):
    """That is: keys shared by heads together with a mask, or in float32 (torch's memory-efficient
    kernel refuses ``enable_gqa``, its flash kernel float32 and masks). Torch's meta device stands
    for the GPU."""
    q, k, v = (x.to("meta", dtype) for x in inputs(new))
    of_gpu = {
        name: value.to("meta")
        for name in ("documents", "slopes")
        if (value := getattr(mask, name)) is not None
    }
    BACKENDS["sdpa"].attend(q, k, v, replace(mask, **of_gpu))
    assert sdpa_calls
    for has_own_keys, attn_mask, options in sdpa_calls:
        if not has_own_keys and new > 1:
            assert options["enable_gqa"]
            assert (attn_mask, dtype) == (None, torch.bfloat16)
        if mask.is_plain and 1 < new < T:
            assert isinstance(attn_mask, CausalBias)  # and not a [Tq, Tk] tensor


def chosen(monkeypatch, name="auto", capability=(8, 0), has_flash=False, cudnn=0, **changes):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(backends, "_has_flash_attn", lambda: has_flash)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    needs = {"masked": False, "half": True, "length": 2048, "head_size": 64, **changes}
    return choose_backend(name, Use("cuda", **needs))


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("sdpa", {}),
        ("flash", {"has_flash": True}),
        ("flash", {"has_flash": True, "head_size": 256}),
        ("flash", {"has_flash": True, "masked": True, "capability": (9, 0)}),
        ("sdpa", {"has_flash": True, "capability": (9, 0)}),
        ("flex", {"masked": True}),
        ("flex", {"masked": True, "has_flash": True, "half": False}),
        ("flex", {"masked": True, "has_flash": True, "head_size": 512}),
        ("flex", {"masked": True, "has_flash": True, "capability": (7, 5)}),
        ("sdpa", {"masked": True, "length": None}),
        ("sdpa", {"masked": True, "head_size": 8}),
    ],
    ids=str,
)
def test_auto_suits_masks_type_and_gpu(monkeypatch, name, needs):
    assert chosen(monkeypatch, **needs) == name


@pytest.mark.parametrize(
    ("cudnn", "needs"),
    [
        (True, {}),
        (False, {"masked": True}),
        (False, {"half": False}),
        (False, {"length": 2048 + 64}),
        (True, {"length": 128}),
        (False, {"length": None}),
        (False, {"head_size": 192}),
        (True, {"head_size": 128}),
        (False, {"head_size": 68}),
        (False, {"capability": (8, 0)}),
        (False, {"cudnn": 91400}),
    ],
    ids=str,
)
def test_cudnn_is_for_plain_training_at_lengths_it_is_right_at(monkeypatch, cudnn, needs):
    known = {"capability": (9, 0), "cudnn": 91501, **needs}
    assert chosen(monkeypatch, "sdpa", **known) == ("cudnn" if cudnn else "sdpa")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen(monkeypatch, "sdpa", **known) == "sdpa"


def test_a_backend_that_cannot_run_is_an_error(monkeypatch):
    for name in ("flash", "flex"):
        with pytest.raises(UserError, match="needs a GPU"):
            choose_backend(name, Use("cpu", False, True, None, 64))
    with pytest.raises(UserError, match="at least 16 channels"):
        chosen(monkeypatch, "flex", head_size=8)
    with pytest.raises(UserError, match="the package flash-attn"):
        chosen(monkeypatch, "flash")
    with pytest.raises(UserError, match="expected one of auto, sdpa, cudnn, flash, flex"):
        chosen(monkeypatch, "eager")
    assert chosen(monkeypatch, "flash", has_flash=True) == "flash"


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("queries", [1, 4])
def test_sdpa_forbids_cudnns_kernel_and_cudnn_leaves_it_to_the_caller(
    monkeypatch, allowed, queries
):
    seen = []

    def attention(q, *_, **__):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    q, k = (torch.zeros(1, 2, length, 8, device="meta") for length in (queries, 4))
    with backends.cudnn_attention(allowed):
        for name in ("sdpa", "cudnn", "sdpa"):
            BACKENDS[name].attend(q, k, k, Mask())
        assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    assert seen == [False, allowed and queries > 1, False]


def test_a_compiled_sdpa_forbids_cudnns_kernel_within_its_graph(monkeypatch):
    """An operator in the place of SDPA sees which kernels are allowed while the graph is made."""
    allowed = []

    @torch.library.custom_op("tests_of_unrope::attention", mutates_args=())
    def attention(q: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @attention.register_fake
    def _(q):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *_, **__: attention(q))
    q, k, v = inputs()
    with backends.cudnn_attention(True):
        for name in ("sdpa", "cudnn"):
            torch.compiler.reset()
            allowed.clear()
            torch.compile(BACKENDS[name].attend, backend="aot_eager", fullgraph=True)(
                q, k, v, Mask()
            )
            assert set(allowed) == {name == "cudnn"}
            assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.compiler.reset()


@torch.no_grad()
def test_a_function_registers_itself_as_a_backend(monkeypatch, tiny_decoder):
    monkeypatch.setattr(backends, "BACKENDS", copy(BACKENDS))
    monkeypatch.setattr(decoder_module, "BACKENDS", backends.BACKENDS)
    shapes = []

    def count_keys(mask, shape, keys, device):
        shapes.append((shape, keys))
        return replace(mask, blocks=keys)

    @backends.backend(
        needs="a short head",
        supports=lambda use: use.head_size <= 8,
        suits=lambda use: use.masked,
        prepare=count_keys,
    )
    def counted(q, k, v, mask):
        assert mask.blocks == k.shape[2]
        return backends.sdpa(q, k, v, mask)

    ids = torch.arange(2 * T).view(2, T)
    windowed, plain = tiny_decoder(windows=[5]), tiny_decoder()
    expected = windowed(ids)
    assert plain.use_backend("auto", "cpu") == "sdpa"
    assert windowed.use_backend("auto", "cpu") == plain.use_backend("counted", "cpu") == "counted"
    torch.testing.assert_close(windowed(ids), expected)
    assert shapes == [((2, T), T)]
    with pytest.raises(UserError, match="'counted' needs a short head"):
        choose_backend("counted", Use("cpu", False, True, None, 64))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("positional", "masked"),
    [({}, False), ({"windows": [None, 8]}, True), ({"layers": ["rope", "alibi"]}, True)],
)
def test_a_backend_is_chosen_for_what_the_layout_masks(
    tiny_decoder, monkeypatch, positional, masked, documents, device
):
    asked = []
    monkeypatch.setattr(
        decoder_module, "choose_backend", lambda *given: asked.append(given) or "sdpa"
    )
    model = tiny_decoder(**positional)
    assert model.use_backend("auto", device, documents=documents, length=64) == "sdpa"
    model.use_backend("flex", device, documents=documents, half=False)
    is_masked = masked or documents
    uses = Use("cuda", is_masked, True, 64, 8), Use("cuda", is_masked, False, None, 8)
    assert asked == [("auto", uses[0]), ("flex", uses[1])]
