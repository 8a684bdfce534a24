"""Every kernel against its definition in float64, and which one ``auto`` takes."""

from __future__ import annotations

import math

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.conftest import ON_A_GPU
from trainer.lightning.optimizers import newton_schulz
from trainer.model.backends import (
    BACKENDS,
    Mask,
    Use,
    _has_flash_attn,
    choose_backend,
    prepared,
    sdpa,
)
from trainer.model.loss import CHUNKS, linear_cross_entropy

pytestmark = pytest.mark.usefixtures("exact_products")

ROWS, HEADS, KV_HEADS, CHANNELS = 2, 6, 2, 64
MASKS = {
    "plain": {},
    "window": {"window": 50},
    "documents": {"documents": True},
    "alibi": {"slopes": True},
    "all": {"window": 50, "documents": True, "slopes": True},
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of outputs and gradients, relative to their largest value; sums of losses are float32."""


def mask_of(kind: str, length: int, device: str) -> Mask:
    values = dict(MASKS[kind])
    if values.pop("documents", False):
        ends = torch.tensor([[length // 3], [length // 2 + 1]])
        values["documents"] = (torch.arange(length) >= ends).long().to(device)
    if values.pop("slopes", False):
        values["slopes"] = 2.0 ** -torch.arange(1, HEADS + 1, device=device)
    return Mask(**values)


def defined(q, k, v, mask):
    """Attention by its definition, with all scores in memory."""
    length = q.shape[2]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = q @ k.mT / math.sqrt(CHANNELS)
    if mask.slopes is not None:
        scores = scores - mask.slopes.cpu().double()[:, None, None] * distance
    hidden = distance < 0
    if mask.window is not None:
        hidden = hidden | (distance >= mask.window)
    if mask.documents is not None:
        documents = mask.documents.cpu()
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    return scores.masked_fill(hidden, -math.inf).softmax(dim=-1) @ v


def assert_close(found, expected, kind):
    error = (found.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE.get(kind, 1e-5)


def inputs(length):
    torch.manual_seed(length)
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    return [torch.randn(ROWS, count, length, CHANNELS, dtype=torch.float64) for count in heads]


SHORT = [("sdpa", mask, kind, 200) for mask in MASKS for kind in TOLERANCE]
CASES = [
    *SHORT,
    *(("sdpa", mask, torch.bfloat16, 1001) for mask in MASKS),
    *(("flex", mask, torch.bfloat16, 200) for mask in MASKS),
    *(("flex", "all", kind, 1001) for kind in TOLERANCE),
    *(("flash", mask, torch.bfloat16, length) for mask in MASKS for length in (200, 1001)),
    *(("cudnn", "plain", torch.bfloat16, length) for length in (128, 1024)),
]


@pytest.mark.parametrize(
    ("device", "name", "kind", "dtype", "length"),
    [
        *(("cpu", *case) for case in SHORT),
        *(pytest.param("cuda", *case, marks=ON_A_GPU) for case in CASES),
    ],
    ids=lambda value: str(value).split(".")[-1],
)
def test_outputs_and_gradients(device, name, kind, dtype, length):
    backend = BACKENDS[name]
    if not backend.supports(Use(device, kind != "plain", dtype.itemsize == 2, length, CHANNELS)):
        pytest.skip(f"needs {backend.needs}")
    exact = inputs(length)
    # Both read the rounded values.
    q, k, v, cotangent = (x.to(dtype) for x in exact)
    reference = [x.double().requires_grad_() for x in (q, k, v)]
    mask = mask_of(kind, length, device)
    expected = defined(*reference, mask)
    expected_gradients = torch.autograd.grad(expected, reference, cotangent.double())
    found_inputs = [x.detach().to(device).requires_grad_() for x in (q, k, v)]
    ready = prepared(backend.attend, mask, (ROWS, length), length, torch.device(device))
    found = backend.attend(*found_inputs, ready)
    gradients = torch.autograd.grad(found, found_inputs, cotangent.to(device))
    assert_close(found, expected, dtype)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient, wanted, dtype)


CONTINUED = [("sdpa", mask, kind) for mask in MASKS for kind in TOLERANCE]
ON_GPUS = [
    *CONTINUED,
    *(("flex", mask, torch.bfloat16) for mask in ("plain", "all")),
    *(("flash", mask, torch.bfloat16) for mask in MASKS),
]


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 150])
@pytest.mark.parametrize(
    ("device", "name", "kind", "dtype"),
    [
        *(("cpu", *case) for case in CONTINUED),
        *(pytest.param("cuda", *case, marks=ON_A_GPU) for case in ON_GPUS),
    ],
    ids=lambda value: str(value).split(".")[-1],
)
def test_queries_after_cached_keys(device, name, kind, dtype, new):
    """As chunks of a long text, and tokens of an answer, in an evaluation."""
    backend, length = BACKENDS[name], 350
    if not backend.supports(Use(device, kind != "plain", dtype.itemsize == 2, None, CHANNELS)):
        pytest.skip(f"needs {backend.needs}")
    q, k, v, _ = (x.to(dtype) for x in inputs(length))
    mask = mask_of(kind, length, device)
    expected = defined(q.double(), k.double(), v.double(), mask)[:, :, -new:]
    ready = prepared(backend.attend, mask, (ROWS, new), length, torch.device(device))
    found = backend.attend(*(x.to(device) for x in (q[:, :, -new:], k, v)), ready)
    assert_close(found, expected, dtype)


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("masked", "half", "length"),
    [
        (False, True, 2048), (False, True, 2000), (False, False, 2048),
        (True, True, 2048), (True, False, 2048), (True, True, None), (False, True, None),
    ],
)  # fmt: skip
def test_the_kernel_that_auto_takes(gpu, masked, half, length):
    """The table of docs/cluster.md, row by row."""
    capability = torch.cuda.get_device_capability()
    has_cudnn = torch.backends.cudnn.version() > 91500 and capability in (HOPPER, (10, 0))
    can_flash = half and _has_flash_attn() and capability >= AMPERE
    if has_cudnn and half and not masked and length == 2048:
        expected = "cudnn"
    elif not masked and capability >= HOPPER:
        expected = "sdpa"
    elif can_flash:
        expected = "flash"
    elif not masked or length is None:
        expected = "sdpa"
    else:
        expected = "flex"
    assert choose_backend("auto", Use(gpu, masked, half, length, CHANNELS)) == expected


class Operators(TorchDispatchMode):
    """Names of the operators that a block calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["sdpa", "cudnn"])
def test_cudnns_kernel_runs_where_it_is_asked_for_alone(device, name):
    half = Use(device, False, True, 1024, CHANNELS)
    if name == "cudnn" and choose_backend("auto", half) != "cudnn":
        pytest.skip("torch prefers another kernel here")
    q, k, v, _ = (x.to(device, torch.bfloat16) for x in inputs(1024))
    with Operators() as operators:
        BACKENDS[name].attend(q, k, v, Mask())
    (kernel,) = (operator for operator in operators.names if "attention" in operator)
    assert ("cudnn" in kernel) == (name == "cudnn"), kernel


@pytest.mark.parametrize("kind", ["plain", "documents"])
def test_a_graph_of_sdpa_has_no_kernel_of_cudnn(device, kind):
    """Whatever it is compiled in: torch allows that kernel by default."""
    names = []

    def noted(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    q, k, v, _ = (x.to(device, torch.bfloat16).requires_grad_() for x in inputs(256))
    mask = mask_of(kind, 256, device)
    compiled = torch.compile(sdpa, backend=aot_autograd(fw_compiler=noted), fullgraph=True)
    found = compiled(q, k, v, mask)
    torch.testing.assert_close(found, sdpa(q, k, v, mask), rtol=0, atol=2e-2)
    kernels = [name for name in names if "attention" in name]
    assert kernels
    assert not any("cudnn" in kernel for kernel in kernels), kernels


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float64], ids=str)
def test_loss_and_its_gradients(device, dtype, monkeypatch):
    """In three chunks, the last one smaller."""
    monkeypatch.setitem(CHUNKS, device, (0, 1024))
    torch.manual_seed(0)
    hidden = torch.randn(3000, 96).to(dtype)
    head = torch.randn(5003, 96) / 10
    targets = torch.randint(5003, (3000,))
    weights = torch.rand(3000)
    reference = [hidden.double().requires_grad_(), head.to(dtype).double().requires_grad_()]
    losses = torch.nn.functional.cross_entropy(
        reference[0] @ reference[1].T, targets, reduction="none"
    )
    expected = (losses * weights.double()).sum() / weights.double().sum()
    expected_gradients = torch.autograd.grad(expected, reference)
    found_inputs = [hidden.to(device).requires_grad_(), head.to(device).requires_grad_()]
    found = linear_cross_entropy(*found_inputs, targets.to(device), weights.to(device))
    assert_close(found, expected, dtype)
    for gradient, wanted in zip(
        torch.autograd.grad(found, found_inputs), expected_gradients, strict=True
    ):
        assert_close(gradient, wanted, dtype)


def test_the_loss_under_autocast_is_that_of_the_logits(device, tiny_decoder):
    model = tiny_decoder(model={"hidden_size": 128, "vocab_size": 5003}).to(device)
    ids = torch.arange(3, 1003, device=device).view(2, 500)
    with torch.autocast(device, torch.bfloat16):
        found = model.loss(ids, ids)
        expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    gradients, expected_gradients = (
        torch.autograd.grad(value, list(model.parameters())) for value in (found, expected)
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient, wanted.cpu().double(), torch.bfloat16)


@pytest.mark.parametrize("shape", [(3, 64, 96), (3, 96, 64)], ids=str)
def test_muons_iteration_keeps_singular_vectors(device, shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    found = left.mT @ newton_schulz(matrices.to(device)).float().cpu() @ right.mT
    values = found.diagonal(dim1=-2, dim2=-1)
    assert 0.6 < values.min() < values.max() < 1.3
    assert (found - values.diag_embed()).abs().max() < 0.05
