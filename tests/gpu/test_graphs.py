"""One graph a kind of layer with the backends that a GPU takes, before a drop and after."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.gpu.conftest import ON_A_GPU
from trainer.lightning.strategy import checkpoint_activations
from trainer.model.backends import Mask
from trainer.model.config import QKNormConfig
from trainer.positional.layout import drop

CASES = [
    ("rope", "none"), ("rope", "selective"), ("rope", "full"),
    ("windows", "none"), ("windows", "selective"),
    ("documents", "none"), ("documents", "selective"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "kind", "recomputed"),
    [
        pytest.param("cpu", "documents", "selective", marks=pytest.mark.slow),
        *(pytest.param("cuda", *case, marks=ON_A_GPU) for case in CASES),
    ],
)
def test_a_step_before_and_after_a_drop(device, tiny_decoder, kind, recomputed):
    torch._dynamo.reset()
    positional = {"windows": [48]} if kind == "windows" else {}
    shape = {"num_hidden_layers": 3, "hidden_size": 128, "qk_norm": QKNormConfig("after_drop")}
    model = tiny_decoder(**positional, training_length=256, model=shape).to(device)
    model.compute_dtype = torch.bfloat16
    model.use_backend("auto", device, documents=kind == "documents", length=256)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        checkpoint_activations(block, recomputed)
        block.compile(backend=counter, fullgraph=True)

    def step(end: int) -> float:
        ids = torch.randint(50, (2, 256), device=device)
        options = {}
        if kind == "documents":
            documents = (torch.arange(256, device=device) >= end).long().expand(2, 256)
            options = {"mask": Mask(documents=documents)}
        loss = model.loss(ids, ids, **options)
        loss.backward()
        return loss.item()

    losses = [step(100), step(120)]
    assert counter.frame_count == 1
    model.layout = drop(model.layout, qk_norm=True)
    losses += [step(100), step(120)]
    assert counter.frame_count == 2
    assert torch.tensor(losses).isfinite().all()
