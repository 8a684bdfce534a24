"""The chunked cross-entropy is the plain one, and never holds all logits."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model import loss
from trainer.model.loss import linear_cross_entropy

WIDTH, VOCAB = 6, 11


def problem(tokens, seed=0, vocab=VOCAB, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    weights = torch.rand(tokens, generator=generator) + 0.1
    return hidden, weight, targets, weights


def plain(hidden, weight, targets, weights):
    """sum(w CE) / sum(w) in float64 by autograd; value and both gradients."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.T
    each = F.cross_entropy(logits, targets, reduction="none")
    value = (weights.double() * each).sum() / weights.double().sum()
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


def ours(hidden, weight, *others, **options):
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    value = linear_cross_entropy(hidden, weight, *others, **options)
    return value.detach(), *torch.autograd.grad(value, (hidden, weight))


def assert_same(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@given(
    st.integers(1, 40),
    st.integers(1, 17),
    st.integers(0, 99),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_value_and_gradients_are_the_plain_ones_for_any_chunk(monkeypatch, tokens, chunk, seed):
    monkeypatch.setattr(loss, "TILE", 3)
    monkeypatch.setitem(loss.CHUNKS, "cpu", (0, chunk))
    case = problem(tokens, seed)
    assert_same(ours(*case), plain(*case))


def test_without_weights_it_is_the_mean_cross_entropy():
    hidden, weight, targets, _ = problem(20)
    value = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(value, F.cross_entropy(hidden @ weight.T, targets))
    assert value.dtype == torch.float32


def test_a_token_of_weight_0_is_left_out():
    hidden, weight, targets, weights = problem(20)
    weights[5:] = 0
    value, by_hidden, by_weight = ours(hidden, weight, targets, weights)
    first = plain(hidden[:5], weight, targets[:5], weights[:5])
    assert_same((value, by_hidden[:5], by_weight), first)
    assert not by_hidden[5:].any()


def test_leading_dimensions_are_tokens():
    hidden, weight, targets, weights = problem(24)
    shaped = (hidden.view(2, 3, 4, -1), weight, targets.view(2, 3, 4), weights.view(2, 3, 4))
    value, by_hidden, by_weight = ours(*shaped)
    assert by_hidden.shape == (2, 3, 4, WIDTH)
    assert_same(
        (value, by_hidden.flatten(0, -2), by_weight), plain(hidden, weight, targets, weights)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_scale_with_what_comes_from_above(dtype):
    hidden, weight, targets, _ = problem(20)
    weight = weight.to(dtype).requires_grad_()
    hidden.requires_grad_()
    (3 * linear_cross_entropy(hidden, weight, targets)).backward()
    _, *expected = plain(hidden, weight, targets, torch.ones(20))
    assert weight.grad.dtype == dtype
    for found, gradient in zip((hidden.grad, weight.grad), expected, strict=True):
        rtol = 2**-8 if found.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), 3 * gradient, rtol=rtol, atol=1e-6)


def test_without_any_weight_loss_and_gradients_are_0():
    hidden, weight, targets, _ = problem(20)
    assert not any(x.any() for x in ours(hidden, weight, targets, torch.zeros(20)))


def test_bfloat16_states_have_bfloat16_products_and_float32_sums():
    hidden, weight, targets, weights = problem(20)
    actual = ours(hidden.bfloat16(), weight, targets, weights)
    assert [x.dtype for x in actual] == [torch.float32, torch.bfloat16, torch.float32]
    assert_same(actual, plain(hidden, weight, targets, weights), 3e-2)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("chunk", [1, 7, 24, 100])
def test_losses_of_a_model_are_those_of_its_logits(tiny_decoder, monkeypatch, chunk):
    monkeypatch.setitem(loss.CHUNKS, "cpu", (0, chunk))
    model, targets = tiny_decoder(), (torch.arange(96) % 50).view(2, 48)
    states = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        losses = model.losses(states, targets)
    assert largest.elements <= max(chunk * 50, states.numel())
    logits = states @ model.head.T
    expected = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(losses, expected)


def by_hand(logits, targets, weights):
    """Gradient, log-partition and logit of the target, token by token in Python's floats."""
    gradient, log_zs, picked = [], [], []
    for row, target, weight in zip(
        logits.tolist(), targets.tolist(), weights.tolist(), strict=True
    ):
        x = row
        log_z = math.log(math.fsum(math.exp(v) for v in x))
        gradient.append([weight * (math.exp(v - log_z) - (i == target)) for i, v in enumerate(x)])
        log_zs.append(log_z)
        picked.append(x[target])
    return torch.tensor(gradient).double(), torch.tensor(log_zs), torch.tensor(picked)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_gradient_over_the_logits_is_the_one_by_hand(compiled):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(300, 70, generator=generator)).bfloat16()
    targets = torch.randint(70, (300,), generator=generator)
    weights = torch.rand(300, generator=generator)
    gradient, log_z, picked = by_hand(logits, targets, weights)
    function = loss._compiled() if compiled else loss.replace_by_gradient
    returned = function(logits, targets, weights)
    torch.testing.assert_close(returned, (log_z, picked), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), gradient, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_are_added_in_float32(dtype):
    """Ones to a large number: sums in bfloat16 would stay as they are."""
    total = torch.zeros(3, 2)
    a, b = torch.ones(3, 5, dtype=dtype), torch.ones(5, 2, dtype=dtype)
    loss.add_product(total, 1000 * a, b)
    for _ in range(4):
        loss.add_product(total, a, b)
    assert (total == 5020).all()


def test_the_logits_of_all_tokens_never_exist(monkeypatch):
    monkeypatch.setattr(loss, "TILE", 16)
    monkeypatch.setitem(loss.CHUNKS, "cpu", (0, 16))
    hidden, weight, targets, weights = problem(1000, vocab=500, width=8)
    allowed = max(16 * 500, 1000 * 8)
    with LargestTensor() as chunked:
        ours(hidden, weight, targets, weights)
    assert chunked.elements <= allowed
    with LargestTensor() as whole:
        plain(hidden, weight, targets, weights)
    assert whole.elements >= 1000 * 500


@pytest.mark.parametrize(
    ("keep", "message"), [(False, "backward through the graph a second time"), (True, "inplace")]
)
def test_a_second_backward_is_refused(keep, message):
    """Gradients are scaled in place, so a second pass would return wrong ones."""
    hidden, weight, targets, _ = problem(20)
    value = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    value.backward(retain_graph=keep)
    with pytest.raises(RuntimeError, match=message):
        value.backward()


def test_a_second_derivative_is_refused():
    """The gradients that forward has computed do not depend on the states any more."""
    hidden, weight, targets, _ = problem(20)
    hidden.requires_grad_()
    value = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(value, hidden, create_graph=True)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.long, torch.bool], ids=str
)
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_weights_have_any_dtype(dtype, states):
    hidden, weight, targets, weights = problem(20)
    hidden, weights = hidden.to(states), (4 * weights).round()
    expected = ours(hidden, weight, targets, weights)
    for a, b in zip(ours(hidden, weight, targets, weights.to(dtype)), expected, strict=True):
        if dtype != torch.bool:
            assert torch.equal(a, b)
    with_bools = ours(hidden, weight, targets, weights > 2)
    assert_same(with_bools, plain(hidden, weight, targets, weights > 2), 3e-2)


def test_under_autocast_products_have_its_dtype(tiny_decoder):
    """As those of the logits, whose cross-entropy torch computes in float32."""
    model = tiny_decoder()
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        value = model.loss(ids, ids.roll(-1))
        expected = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1).flatten())
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert value.item() != pytest.approx(model.loss(ids, ids.roll(-1)).item(), rel=1e-6)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(value, parameters)
    for a, b in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * b.abs().max().item())
