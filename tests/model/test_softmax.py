"""A decoder with a learned scale, sinks and soft-caps: against ten plain lines, and against
transformers' models that have them."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from trainer.model import backends
from trainer.model.config import QKNormConfig, SoftmaxConfig
from trainer.model.decoder import Decoder
from trainer.model.masks import Mask
from trainer.model.softmax import Softmax
from trainer.positional.config import TemperatureConfig

IDS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))
ALL = SoftmaxConfig(learned_scale=True, sinks=True, softcap=0.8, final_softcap=2.0)
MODELS = {
    "rope": {},
    "windows and a temperature": {
        "layers": ["rope", "nope"],
        "windows": [6, None],
        "temperature": TemperatureConfig(coefficient=0.5, reference=8),
    },
    "alibi": {"layers": ["alibi"]},
    "half of the heads": {"heads": {"nope": 0.5}},
    "qk_norm": {"model": {"qk_norm": QKNormConfig("always")}},
}


def ten_lines(q, k, v, mask, _, *, scale, sinks, softcap):
    """Compute a layer's attention in float64; the scale multiplies the scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    scores = softcap * torch.tanh(scale[:, None, None] * (q @ k.mT) / 8**0.5 / softcap)
    if mask.slopes is not None:
        scores = scores - mask.slopes[:, None, None] * (i - j)
    seen = (j <= i) & (i - j < (mask.window or 99))
    if mask.documents is not None:
        seen = seen & (mask.documents[:, None, :, None] == mask.documents[:, None, None])
    weights = scores.exp() * seen
    return weights / (weights.sum(-1, keepdim=True) + sinks.exp()[:, None, None]) @ v


def in_plain_lines(model, options):
    """The loss of the same model in float64, and its gradients by the names of parameters."""
    plain = Decoder(model.config.__class__(**vars(model.config) | {"softmax": SoftmaxConfig()}),
                    model.layout).double()  # fmt: skip
    values = {name: p.detach().double() for name, p in model.named_parameters()}
    plain.load_state_dict({name: values[name] for name in plain.state_dict()})
    leaves = dict(plain.named_parameters())
    for index, block in enumerate(plain.layers):
        name = f"layers.{index}.self_attn"
        more = {n: values[f"{name}.{n}"].requires_grad_() for n in ("softmax_scale", "sinks")}
        leaves |= {f"{name}.{n}": value for n, value in more.items()}
        scale, sinks = more.values()
        block.self_attn.attend = partial(ten_lines, scale=scale, sinks=sinks, softcap=0.8)
    logits = plain.hidden_states(IDS[:, :-1], **options) @ plain.head.T
    loss = F.cross_entropy((2 * torch.tanh(logits / 2)).flatten(0, 1), IDS[:, 1:].flatten())
    return loss.item(), dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_of_all_parameters(tiny_decoder, monkeypatch, name, packed):
    monkeypatch.setitem(backends.QUERY_BLOCK, "cpu", 5)
    shape = MODELS[name].get("model", {}) | {"softmax": ALL}
    model = tiny_decoder(**MODELS[name] | {"model": shape})
    documents = (torch.arange(23) // 9).expand(2, -1)
    options = {"documents": documents} if packed else {}
    loss = model.loss(IDS[:, :-1], IDS[:, 1:], **options)
    loss.backward()
    expected, gradients = in_plain_lines(model, options)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    for parameter, value in model.named_parameters():
        wanted = gradients[parameter]
        torch.testing.assert_close(value.grad.double(), wanted, rtol=1e-4, atol=1e-6, msg=parameter)
    losses = model.token_losses(IDS[:, :-1], IDS[:, 1:]) if not packed else None
    assert packed or losses.mean().item() == pytest.approx(expected, abs=1e-6)


def test_they_begin_as_no_scale_and_a_key_that_weighs_as_a_score_of_0(tiny_decoder):
    attention = Decoder(tiny_decoder(model={"softmax": ALL}).config, tiny_decoder().layout).layers
    assert attention[0].self_attn.softmax_scale.tolist() == [1.0] * 4
    assert attention[0].self_attn.sinks.tolist() == [0.0] * 4


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_are_those_of_gpt_oss_and_soft_caps_those_of_gemma_2(window):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 12, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, 12, 8, generator=generator)
    sinks, i = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.arange(12)
    hidden = (i > i[:, None]) | (i[:, None] - i >= (window or 99))
    later = torch.zeros(12, 12).masked_fill(hidden, -math.inf)[None, None]
    layer = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    scaling = 8**-0.5
    gpt_oss, _ = modeling_gpt_oss.eager_attention_forward(layer, q, k, v, later, scaling)
    gemma, _ = modeling_gemma2.eager_attention_forward(
        layer, q, k, v, later, scaling=scaling, softcap=0.7
    )
    for expected, softmax in ((gpt_oss, Softmax(sinks)), (gemma, Softmax(softcap=0.7))):
        output = backends.sdpa(q, k, v, Mask(window), softmax)
        torch.testing.assert_close(output.transpose(1, 2), expected, rtol=0, atol=1e-6)


def test_backward_keeps_no_probabilities(tiny_decoder):
    """Those of 512 tokens would take 4 MiB a layer; saved tensors grow linearly with the length."""
    model = tiny_decoder(model={"softmax": ALL, "num_hidden_layers": 1})
    sizes = []
    for length in (256, 512):
        saved = {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.loss(*torch.zeros(2, 1, length, dtype=torch.long))
        sizes.append(sum(saved.values()))
    assert sizes[1] < 2.1 * sizes[0]
    assert sizes[1] < 4 * 512 * 512 * 4


@torch.no_grad()
def test_in_16_bits_scores_and_their_softmax_are_float32():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 30, 8, generator=generator).bfloat16() for _ in range(3))
    softmax = Softmax(torch.tensor([0.5, 1.0]).bfloat16(), 2.0)
    output = backends.sdpa(q, k, v, Mask(), softmax)
    assert output.dtype == torch.bfloat16
    exact = backends.sdpa(*(x.float() for x in (q, k, v)), Mask(), softmax)
    assert torch.equal(output, exact.bfloat16())
