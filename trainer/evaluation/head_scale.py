"""A softmax temperature for every attention head, fitted by gradient (HeadScale, Wang et al. 2024,
arXiv 2404.12224)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from trainer.data.order import Integers
from trainer.evaluation.fitting import Fitting
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout

STEPS, RATE, LARGEST = 30, 0.05, 100.0
"""Steps and learning rate of Adam, and the largest coefficient. The paper's code has 200 steps of
batches, and a rate of 0.05 to 0.1 on the scale itself."""


def fit_heads(
    fitting: Fitting,
    layout_at: Callable[[float], Layout],
    windows: Mapping[int, Integers],
    layers: Sequence[int],
    start: float,
) -> list[list[float]]:
    """Return c of 1 + c ln s for every query head of ``layers``, ``[layers][Hq]``.

    Adam lowers the mean loss of held-out text, summed over the lengths, with all weights frozen. It
    begins with ``start`` for all heads, and no c falls below 0 (the paper's focus constraint). The
    best of all steps is returned, which is no worse than ``start``. Each window is a forward and a
    backward pass of its own.

    Args:
        fitting: the model, a decoder, and its text.
        layout_at: maps an extension factor to a layout without temperature.
        windows: ``[N, length]`` held-out tokens for every length.
        layers: indices of the layers.
        start: coefficient of all heads at the first step.
    """
    model = cast(Decoder, fitting.model)
    C = model.layout.training_length
    shape = len(layers), model.config.num_attention_heads
    c = torch.full(shape, start, device=model.device)
    optimizer = torch.optim.Adam([c], lr=RATE)
    best, lowest = c.clone(), math.inf
    with _scales(model, layers) as (scales, trained):
        for step in range(STEPS + 1):
            loss, c.grad = 0.0, torch.zeros_like(c)
            for length, tokens in windows.items():
                log_s = math.log(length / C)
                with torch.no_grad():
                    for scale, row, learned in zip(scales, c, trained, strict=True):
                        scale.copy_(learned * (1 + row * log_s))
                with model.using(layout_at(length / C)):
                    loss += _backward(model, tokens, fitting.text.end_of_text)
                for index, (scale, learned) in enumerate(zip(scales, trained, strict=True)):
                    assert scale.grad is not None
                    c.grad[index] += scale.grad * learned * log_s
                    scale.grad = None
                fitting.read(*tokens.shape)
            if not math.isfinite(loss):
                break
            if loss < lowest:
                best, lowest = c.clone(), loss
            if step < STEPS:
                optimizer.step()
                c.clamp_(0, LARGEST)
    return cast(list[list[float]], best.tolist())


@contextmanager
def _scales(
    model: Decoder, layers: Sequence[int]
) -> Iterator[tuple[list[nn.Parameter], list[Tensor]]]:
    """Give these layers a trainable softmax scale per head, and freeze all weights; restore both
    afterwards. Yields the scales, and the values that the model has, ``[Hq]`` each."""
    modules = [model.layers[index].self_attn for index in layers]
    before = [module.softmax_scale for module in modules]
    ones = torch.ones(model.config.num_attention_heads, device=model.device)
    trained = [ones if scale is None else scale.detach().clone() for scale in before]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    scales = [nn.Parameter(value.clone()) for value in trained]
    try:
        for weight in weights:
            weight.requires_grad_(False)
        for module, scale in zip(modules, scales, strict=True):
            module.softmax_scale = scale
        with torch.enable_grad():
            yield scales, trained
    finally:
        for module, scale_before in zip(modules, before, strict=True):
            module.softmax_scale = scale_before
        for weight in weights:
            weight.requires_grad_(True)


def _backward(model: Decoder, windows: Integers, end_of_text: int) -> float:
    """Accumulate the gradient of the mean loss of ``windows`` ``[N, T]``, and return the loss."""
    total = torch.zeros((), device=model.device)
    for window in torch.from_numpy(windows).to(model.device, torch.int64):
        ids = torch.cat([window.new_tensor([end_of_text]), window[:-1]])
        loss = model.loss(ids[None], window[None]) / len(windows)
        loss.backward()
        total += loss.detach()
    return float(total)
