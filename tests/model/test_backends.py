"""Every backend computes the same attention; each is called with what its kernel means."""

import math
import subprocess
import sys
import types
import warnings
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as torch_attention
from torch.nn.attention import _fa4, current_flash_attention_impl
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.bias import CausalBias

from tests.reference import attend
from trainer.common.errors import UserError
from trainer.model import backend_choice, backends
from trainer.model.backend_choice import Needs, choose_backend
from trainer.model.backends import BACKENDS, eager, prepared
from trainer.model.config import SoftmaxConfig
from trainer.model.masks import Mask, bias, bounds_of
from trainer.model.softmax import PLAIN, Softmax, recomputed

B, HEADS, KV_HEADS, T, D = 2, 4, 2, 12, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 4 + [2] * 7])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
MASKS = {
    "plain": Mask(),
    "window": Mask(window=4),
    "window of one": Mask(window=1),
    "window beyond the sequence": Mask(window=100),
    "documents": Mask(documents=DOCUMENTS),
    "alibi": Mask(slopes=SLOPES),
    "window and alibi": Mask(window=4, slopes=SLOPES),
    "all": Mask(window=4, documents=DOCUMENTS, slopes=SLOPES),
}
SINKS = torch.tensor([0.7, -1.5, 2.0, 0.0])
SOFTMAXES = {
    "sinks": Softmax(sinks=SINKS),
    "soft-cap": Softmax(softcap=0.8),
    "both": Softmax(SINKS, 0.8),
}
softmaxes = pytest.mark.parametrize("softmax", SOFTMAXES.values(), ids=SOFTMAXES)
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


def loop(q, k, v, mask, softmax=PLAIN):
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
            sink = None if softmax.sinks is None else float(softmax.sinks[h])
            more = {"softcap": softmax.softcap, "sink": sink}
            head = attend(rows, keys, values, bias=bias, sees=sees, **more)
            out[b, h] = torch.tensor(head[past:], dtype=torch.float64)
    return out


def assert_is_attention(backend, mask, new=T, kv_heads=KV_HEADS, softmax=PLAIN):
    q, k, v = inputs(new, kv_heads)
    ready = prepared(backend, mask, (B, q.shape[2]), T, q.device)
    torch.testing.assert_close(
        backend(q, k, v, ready, softmax).double(), loop(q, k, v, mask, softmax), rtol=0, atol=1e-5
    )


@masks
@new_tokens
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_attention_on_the_cpu(name, mask, new):
    assert_is_attention(BACKENDS[name], mask, new)


@masks
@new_tokens
@softmaxes
def test_sinks_and_soft_caps(monkeypatch, mask, new, softmax):
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", 5)
    for name in ("sdpa", "eager"):
        assert_is_attention(BACKENDS[name], mask, new, softmax=softmax)


@masks
@pytest.mark.parametrize("block", [1, 5, 12])
def test_sdpa_in_blocks_of_queries(monkeypatch, mask, block):
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", block)
    assert_is_attention(BACKENDS["sdpa"], mask)
    assert_is_attention(BACKENDS["sdpa"], mask, new=7)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_other_groupings_of_heads(kv_heads):
    for name in ("sdpa", "eager"):
        assert_is_attention(BACKENDS[name], MASKS["all"], kv_heads=kv_heads)


def test_sdpa_with_a_window_reads_its_window_of_the_keys_only(monkeypatch):
    """So that memory and time are linear in the length."""
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", 3)
    widths, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def recorded(q, k, v, **options):
        widths.append(k.shape[2])
        return kernel(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    assert_is_attention(BACKENDS["sdpa"], Mask(window=4))
    assert max(widths) == 3 + 4 - 1


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
@pytest.mark.parametrize("softmax", [PLAIN, *SOFTMAXES.values()], ids=["plain", *SOFTMAXES])
def test_flex(mask, new, softmax):
    assert_is_attention(BACKENDS["flex"], mask, new, softmax=softmax)


@pytest.mark.usefixtures("slow_flex")
@torch.no_grad()
def test_flex_of_the_last_positions_alone(tiny_decoder):
    """The last layer has fewer queries than the others, and thus another block mask."""
    model, ids = tiny_decoder(training_length=T, windows=[5]), torch.arange(2 * T).view(2, T)
    for block in model.layers:
        block.self_attn.attend = BACKENDS["flex"]
    torch.testing.assert_close(model(ids, last=3), model(ids)[:, -3:])


@pytest.fixture
def compiled_anew(monkeypatch):
    """Compile without generated code, and clear the cache for other tests."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    backends._compiled_once.cache_clear()
    torch.compiler.reset()
    yield
    backends._compiled_once.cache_clear()
    torch.compiler.reset()


@pytest.mark.usefixtures("compiled_anew")
def test_flex_is_compiled_for_more_masks_types_and_heads_than_eight():
    """torch gives up after eight, where nothing else is said."""
    q, k, v = inputs()
    with torch.no_grad():
        for dtype, softmax in ((torch.float32, PLAIN), (torch.bfloat16, Softmax(softcap=2.0))):
            for mask in MASKS.values():
                rounded = [x.to(dtype) for x in (q, k, v)]
                ready = prepared(BACKENDS["flex"], mask, (B, T), T, q.device)
                output = BACKENDS["flex"](*rounded, ready, softmax)
                wanted = eager(*rounded, prepared(eager, mask, (B, T), T, q.device), softmax)
                torch.testing.assert_close(output, wanted, atol=3e-2, rtol=3e-2)


def test_written_out_scores_are_so_many_at_once(monkeypatch):
    length, softmax = 40, Softmax(softcap=2.0)
    q, k, v = (torch.randn(1, heads, length, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    whole = BACKENDS["sdpa"](q, k, v, Mask(), softmax)
    monkeypatch.setattr(backends, "SCORES", 0)  # 16 queries, the fewest
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", 1000)
    sizes = []

    def seen(q, *others):
        sizes.append(q.shape[2])
        return recomputed(q, *others)

    monkeypatch.setattr(backends, "recomputed", seen)
    torch.testing.assert_close(BACKENDS["sdpa"](q, k, v, Mask(), softmax), whole)
    assert sizes == [16, 16, 8]


@pytest.mark.parametrize("own_masks", [False, True])
def test_biases_of_alibi_are_so_many_at_once(monkeypatch, own_masks):
    """For every row of the batch, where each has its own mask."""
    length, rows = 40, 3
    q, k, v = (torch.randn(rows, heads, length, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    documents = torch.arange(length).expand(rows, -1) // 13 if own_masks else None
    mask = Mask(slopes=torch.linspace(0.1, 1, HEADS), documents=documents)
    whole = eager(q, k, v, mask)
    limit = 20 * HEADS * length * (rows if own_masks else 1)
    monkeypatch.setattr(backends, "SCORES", limit)
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", 1000)
    sizes = []

    def counted(*arguments):
        biases = bias(*arguments)
        sizes.append(biases.numel())
        return biases

    monkeypatch.setattr(backends, "bias", counted)
    torch.testing.assert_close(BACKENDS["sdpa"](q, k, v, mask), whole)
    assert len(sizes) == 2
    assert max(sizes) <= limit


def test_heads_that_change_in_a_run_are_compiled_as_one_graph():
    """From the second number on the compiler takes it for a symbol."""

    def some(q, k, v, heads):
        return BACKENDS["sdpa"](q[:, : 2 * heads], k[:, :heads], v[:, :heads], Mask())

    q, k = torch.randn(1, 8, T, 8), torch.randn(1, 4, T, 8)
    compiled = torch.compile(some, backend="eager", fullgraph=True)
    for heads in (4, 3, 2):
        torch.testing.assert_close(compiled(q, k, k, heads), some(q, k, k, heads))
    torch.compiler.reset()


def documented(q, k, v, causal, window_size, alibi_slopes=None, softcap=None):
    """Attention of one row by the documentation of the kernels, in plain torch."""
    tq, tk = q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    i, j = torch.arange(tq)[:, None] + tk - tq, torch.arange(tk)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
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


@pytest.fixture
def fake_varlen(monkeypatch):
    """torch's varlen_attn with the semantics of its documentation, which runs on no CPU."""

    def varlen_attn(q, k, v, *bounds, window_size, enable_gqa):
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return packed_rows(q, k, v, *bounds, causal=False, window_size=window_size)

    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)


@pytest.mark.usefixtures("fake_varlen")
@new_tokens
@pytest.mark.parametrize("name", ["plain", "window", "documents"])
def test_varlen(name, new):
    if name == "documents" and new == 5:
        with pytest.raises(UserError, match="document masks do not work with a KV cache"):
            assert_is_attention(BACKENDS["varlen"], MASKS[name], new)
    else:
        assert_is_attention(BACKENDS["varlen"], MASKS[name], new)
        both = replace(MASKS[name], window=4)
        assert_is_attention(BACKENDS["varlen"], both, new)


@masks
@pytest.mark.parametrize("softmax", [PLAIN, Softmax(softcap=0.8)], ids=["plain", "soft-cap"])
def test_flash(fake_flash, mask, softmax):
    assert_is_attention(BACKENDS["flash"], mask, softmax=softmax)
    assert fake_flash == ["dense" if mask.documents is None else "packed"]


@pytest.mark.usefixtures("fake_flash")
@pytest.mark.parametrize("new", [5, 1])
@pytest.mark.parametrize("name", ["plain", "window", "alibi", "window and alibi"])
def test_flash_with_a_cache(name, new):
    assert_is_attention(BACKENDS["flash"], MASKS[name], new)


@pytest.mark.usefixtures("fake_flash")
def test_flash_keeps_documents_of_different_rows_apart_whatever_their_numbers():
    """Numbers may repeat in the next row, or differ by any offset."""
    for last, first in [(7, 7), (7 + T, 7), (7 + T + 1, 7), (7, 7 + T + 1)]:
        documents = torch.tensor([[0] * 4 + [last] * 8, [first] * 6 + [99] * 6])
        assert_is_attention(BACKENDS["flash"], Mask(documents=documents))


@pytest.mark.parametrize("softmax", [PLAIN, *SOFTMAXES.values()], ids=["plain", *SOFTMAXES])
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_gradients_are_those_of_the_definition(monkeypatch, name, softmax):
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", 5)
    sinks = [] if softmax.sinks is None else [softmax.sinks.clone()]
    leaves = [x.requires_grad_() for x in (*inputs(), *sinks)]
    weights, mask = torch.randn(B, HEADS, T, D), MASKS["all"]
    q, k, v, *sinks = leaves
    own_softmax = softmax._replace(sinks=sinks[0] if sinks else None)
    out = BACKENDS[name](q, k, v, mask, own_softmax)
    ours = torch.autograd.grad((out * weights).sum(), leaves)
    q, k, v, *sinks = leaves = [x.detach().double().requires_grad_() for x in leaves]
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    i, j = torch.arange(T)[:, None], torch.arange(T)
    same = DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]
    seen = same & (j <= i) & (i - j < 4)
    scores = q @ keys.mT / math.sqrt(D)
    if softmax.softcap:
        scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
    exp = (scores - SLOPES[:, None, None] * (i - j)).exp() * seen
    total = exp.sum(-1, keepdim=True) + (sinks[0].exp()[:, None, None] if sinks else 0)
    out = exp / total @ values
    expected = torch.autograd.grad((out * weights).sum(), leaves)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)


def test_eager_keeps_the_type_of_its_queries():
    assert eager(*(x.bfloat16() for x in inputs()), Mask()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["flash", "varlen"])
def test_bounds_from_the_loader_may_end_in_empty_documents(fake_flash, fake_varlen, name):
    bounds = torch.cat([bounds_of(DOCUMENTS), torch.full((3,), B * T, dtype=torch.int32)])
    assert_is_attention(BACKENDS[name], Mask(documents=DOCUMENTS, bounds=bounds, longest=8))


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
    BACKENDS["sdpa"](q, k, v, replace(mask, **of_gpu))
    assert sdpa_calls
    for has_own_keys, attn_mask, options in sdpa_calls:
        if not has_own_keys and new > 1:
            assert options["enable_gqa"]
            assert (attn_mask, dtype) == (None, torch.bfloat16)
        if mask.is_plain and 1 < new < T:
            assert isinstance(attn_mask, CausalBias)  # and not a [Tq, Tk] tensor


TRAINING = Needs(length=2048)
SWITCHES = hasattr(torch_attention, "restore_flash_attention_impl")
switches = pytest.mark.skipif(not SWITCHES, reason="torch 2.11 or later exchanges its kernels")


@pytest.fixture(autouse=True)
def torchs_own_flash():
    """Forget which packages load, and give torch its own kernels back."""
    yield
    if SWITCHES:
        torch_attention.restore_flash_attention_impl(_raise_warn=False)
    backend_choice._import_error.cache_clear()
    _fa4._fa4_import_module.cache_clear()
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


def installed(monkeypatch, capability=(8, 0), cudnn=91300, **versions):
    """A GPU, on which kernels are tried on the CPU, and packages that load."""
    monkeypatch.setattr(backend_choice, "TRIAL_DEVICE", "cpu")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    if "flash_attn" in versions:
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))

    def version(name):
        if name.replace("-", "_") in versions:
            return versions[name.replace("-", "_")]
        raise PackageNotFoundError(name)

    monkeypatch.setattr(backend_choice, "version", version)
    monkeypatch.setattr(backend_choice, "_capability", lambda: capability)


@pytest.mark.parametrize("name", ["flash", "varlen", "flex"])
def test_a_gpu_backend_on_the_cpu_is_an_error(monkeypatch, name):
    installed(monkeypatch, flash_attn="2.8.3")
    with pytest.raises(UserError, match=f"model.attention_backend: '{name}' needs a GPU"):
        choose_backend(name, "cpu", Needs())


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({}, "which is not installed"),
        (
            {"flash_attn_3": "3.0.0b1"},
            r"is not installed \(flash-attn-3 is, with another interface\)",
        ),
        ({"flash_attn": "1.0.9"}, "is of version 1.0.9 instead of 2"),
    ],
)
def test_a_missing_package_is_an_error_that_says_what_to_install(monkeypatch, packages, message):
    installed(monkeypatch, **packages)
    with pytest.raises(UserError, match=rf"{message}.*pip install 'unrope\[flash\]'"):
        choose_backend("flash", "cuda", Needs())


CANNOT = [
    ("varlen", (8, 0), Needs(biased=True), "knows no ALiBi"),
    ("varlen", (8, 0), Needs(head_size=36), "multiple of 8, which 36 is not"),
    ("varlen", (8, 0), Needs(half=False), "16 bits only"),
    ("flash", (8, 0), Needs(half=False), "16 bits only"),
    ("flash", (8, 0), Needs(head_size=512), "256 channels at most"),
    ("flash", (7, 5), Needs(), "Ampere"),
    ("flash", (8, 0), Needs(softmax=SoftmaxConfig(sinks=True)), "no gradient of attention sinks"),
    ("varlen", (8, 0), Needs(softmax=SoftmaxConfig(sinks=True)), "no gradient of attention sinks"),
    ("varlen", (8, 0), Needs(softmax=SoftmaxConfig(softcap=50.0)), "knows no soft-caps"),
]


def test_soft_caps_came_to_flash_attn_with_a_version(monkeypatch):
    installed(monkeypatch, flash_attn="2.5.9.post1")
    assert choose_backend("flash", "cuda", Needs()).name == "flash"
    with pytest.raises(UserError, match=r"'flash' knows no soft-caps before version 2\.6"):
        choose_backend("flash", "cuda", Needs(softmax=SoftmaxConfig(softcap=50.0)))


@pytest.mark.parametrize(("name", "capability", "needs", "message"), CANNOT)
def test_kernels_refuse_unsupported_attention(monkeypatch, name, capability, needs, message):
    """``auto`` does not choose them either."""
    installed(monkeypatch, capability, flash_attn="2.8.3")
    with pytest.raises(UserError, match=f"attention_backend: '{name}' .*{message}"):
        choose_backend(name, "cuda", needs)
    assert choose_backend("auto", "cuda", needs._replace(documents=True)).name != name


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_configured_backend_is_chosen(name):
    choice = choose_backend(name, "cpu", Needs(documents=True))
    assert choice == (name, "as configured", False)


@pytest.mark.parametrize(
    ("device", "needs", "with_flash", "without"),
    [
        ("cpu", Needs(documents=True), "sdpa", "sdpa"),
        ("cuda", TRAINING, "flash", "sdpa"),
        ("cuda", Needs(documents=True), "flash", "varlen"),
        ("cuda", Needs(documents=True, windows=True), "flash", "varlen"),
        ("cuda", TRAINING._replace(documents=True, biased=True), "flash", "flex"),
        ("cuda", TRAINING._replace(windows=True), "flash", "flex"),
        ("cuda", TRAINING._replace(half=False), "sdpa", "sdpa"),
        ("cuda", TRAINING._replace(documents=True, half=False), "flex", "flex"),
        ("cuda", Needs(windows=True), "flash", "sdpa"),
        ("cuda", TRAINING._replace(softmax=SoftmaxConfig(softcap=50.0)), "flash", "flex"),
        ("cuda", TRAINING._replace(softmax=SoftmaxConfig(sinks=True)), "flex", "flex"),
        ("cuda", Needs(softmax=SoftmaxConfig(sinks=True)), "sdpa", "sdpa"),
        (
            "cuda",
            TRAINING._replace(softmax=SoftmaxConfig(True, final_softcap=30.0)),
            "flash",
            "sdpa",
        ),
    ],
)
def test_auto_suits_device_masks_and_type(monkeypatch, device, needs, with_flash, without):
    installed(monkeypatch, flash_attn="2.8.3")
    assert choose_backend("auto", device, needs).name == with_flash
    installed(monkeypatch, flash_attn_4="4.0.0")
    assert choose_backend("auto", device, needs).name == without


def package(monkeypatch, tmp_path, module, text):
    """A package on sys.path."""
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


UNDEFINED = "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEab')"


def test_a_flash_attn_that_does_not_load_is_not_chosen(monkeypatch, tmp_path):
    """A wheel that was built for another torch has package metadata all the same."""
    installed(monkeypatch, flash_attn="2.8.3")
    package(monkeypatch, tmp_path, "flash_attn", UNDEFINED)
    name, why, _ = choose_backend("auto", "cuda", TRAINING)
    assert name == "sdpa"
    assert "cannot be loaded (ImportError: flash_attn_2_cuda.so: undefined symbol" in why
    with pytest.raises(UserError, match=r"flash-attn, which cannot be loaded \(ImportError"):
        choose_backend("flash", "cuda", TRAINING)


@pytest.mark.parametrize(
    ("capability", "needs", "cudnn"),
    [
        ((9, 0), TRAINING, True),
        ((10, 0), TRAINING, True),
        ((8, 0), TRAINING, False),
        ((9, 0), Needs(), False),  # an evaluation
        ((9, 0), Needs(length=576), False),
        ((9, 0), TRAINING._replace(windows=True), False),
        ((9, 0), TRAINING._replace(biased=True), False),
        ((9, 0), TRAINING._replace(documents=True), False),
        ((9, 0), TRAINING._replace(half=False), False),
        ((9, 0), TRAINING._replace(head_size=256), False),
        ((9, 0), TRAINING._replace(softmax=SoftmaxConfig(sinks=True)), False),
    ],
)
@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_cudnn_is_for_plain_training_at_lengths_it_is_right_at(
    monkeypatch, name, capability, needs, cudnn
):
    installed(monkeypatch, capability, cudnn=91900)
    choice = choose_backend(name, "cuda", needs)
    assert (choice.cudnn, "cuDNN" in choice.why) == (cudnn, cudnn)
    installed(monkeypatch, capability, cudnn=91300)  # which torch does not prefer
    assert not choose_backend(name, "cuda", needs).cudnn
    assert not choose_backend("sdpa", "cpu", needs).cudnn
    installed(monkeypatch, capability, cudnn=91900)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not choose_backend(name, "cuda", needs).cudnn


def test_on_hopper_plain_attention_is_sdpas_and_not_flash_attn_2s(monkeypatch):
    installed(monkeypatch, (9, 0), flash_attn="2.8.3")
    for needs in (TRAINING, Needs()):
        assert choose_backend("auto", "cuda", needs).name == "sdpa"
    assert choose_backend("auto", "cuda", TRAINING._replace(windows=True)).name == "flash"


def test_cudnns_attention_is_off_but_where_it_is_asked_for():
    code = "import torch, trainer.model.backends; print(torch.backends.cuda.cudnn_sdp_enabled())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
    with backends.cudnn_attention(True):
        assert torch.backends.cuda.cudnn_sdp_enabled()
        with backends.cudnn_attention(False):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


FA3 = """
import torch
library = torch.library.Library("flash_attn_3", "FRAGMENT")
for name in ("fwd", "bwd"):
    if not hasattr(torch.ops.flash_attn_3, name):
        library.define(f"{name}(Tensor q) -> Tensor")
"""
FA4 = "_flash_attn_fwd = _flash_attn_bwd = None"


@switches
@pytest.mark.usefixtures("fake_varlen")
@pytest.mark.parametrize("needs", [Needs(), Needs(length=576), Needs(documents=True)], ids=str)
@pytest.mark.parametrize(
    ("capability", "module", "text", "kind"),
    [
        ((9, 0), "flash_attn_interface", FA3, "FA3"),
        ((9, 0), "flash_attn.cute.interface", FA4, "FA4"),
        ((10, 0), "flash_attn.cute.interface", FA4, "FA4"),
        ((10, 0), "flash_attn_interface", FA3, None),
        ((9, 0), "flash_attn_interface", UNDEFINED, None),
        ((9, 0), "flash_attn.cute.interface", "import no_such_cutlass", None),
    ],
)
def test_later_flash_attention_where_it_loads(
    monkeypatch, tmp_path, caplog, needs, capability, module, text, kind
):
    """torch's SDPA and varlen_attn then call it; CUDA's kernels are registered without a GPU."""
    installed(monkeypatch, capability)
    package(monkeypatch, tmp_path, module, text)
    choice = choose_backend("auto", "cuda", needs)
    assert choice.name == ("varlen" if needs.documents else "sdpa")
    assert current_flash_attention_impl() == kind
    assert (f"with {kind}" in choice.why) == (kind is not None)
    fails = text not in (FA3, FA4)
    assert ("is not used: " in caplog.text) == fails


@switches
@pytest.mark.parametrize("wrong", ["raises", "is off", "has a gradient of NaN"])
def test_later_flash_attention_that_fails_its_trial_is_not_used(
    monkeypatch, tmp_path, caplog, wrong
):
    installed(monkeypatch, (9, 0))
    package(monkeypatch, tmp_path, "flash_attn_interface", FA3)

    def kernel(q, k, v, mask, softmax):
        if wrong == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        if wrong == "has a gradient of NaN":  # of the values alone, and right values
            return backends.sdpa(q, k, v, mask, softmax) + (v * 0).sqrt().sum()
        return backends.sdpa(q * 1.5, k, v, mask, softmax)

    monkeypatch.setitem(BACKENDS, "sdpa", kernel)
    assert "FA3" not in choose_backend("auto", "cuda", Needs(length=576)).why
    assert current_flash_attention_impl() is None
    assert ("no kernel image" if wrong == "raises" else "% in a trial") in caplog.text


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("softmax", [SoftmaxConfig(), SoftmaxConfig(sinks=True)], ids=str)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_flex_attention_by_flash_attention_4(
    monkeypatch, tmp_path, caplog, loads, softmax, capability
):
    installed(monkeypatch, capability)
    package(monkeypatch, tmp_path, "flash_attn.cute.interface", FA4 if loads else UNDEFINED)
    asked = []

    def attention(q, k, v, score_mod, block_mask, enable_gqa, kernel_options):
        asked.append(kernel_options)
        q, k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, block_mask)

    def block_mask(seen, rows, heads, queries, keys, device):
        return seen(0, 0, torch.arange(queries)[:, None], torch.arange(keys))

    functions = {"flex_attention": attention, "create_block_mask": block_mask}
    monkeypatch.setattr(backends, "_compiled", functions.get)
    needs = TRAINING._replace(windows=True, softmax=softmax)
    used = loads and capability == (9, 0) and not softmax.sinks
    assert choose_backend("auto", "cuda", needs).name == ("flex_flash" if used else "flex")
    assert asked == ([{"BACKEND": "FLASH"}] if used else [])
    tried = capability == (9, 0) and not softmax.sinks
    assert ("are not used: ImportError" in caplog.text) == (tried and not loads)


def test_a_decoder_runs_on_the_chosen_backend(tiny_decoder):
    model, ids = tiny_decoder(windows=[8]), torch.arange(20)[None]
    assert model.use_backend("auto", "cpu") == ("sdpa", "on the CPU", False)
    expected = model(ids)
    assert model.use_backend("eager", "cpu").name == "eager"
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-5)
    with pytest.raises(UserError):
        model.use_backend("flex", "cpu")


def test_torch_without_the_exchange_of_kernels_keeps_its_own(monkeypatch, tmp_path):
    """Version 2.10 could activate FlashAttention-4 and not give its own kernels back."""
    installed(monkeypatch, (9, 0))
    package(monkeypatch, tmp_path, "flash_attn.cute.interface", FA4)
    with monkeypatch.context() as older:
        older.delattr(torch_attention, "restore_flash_attention_impl", raising=False)
        choice = choose_backend("auto", "cuda", Needs())
    assert choice.why == "no masks; torch's own flash attention"
