"""Gains of norms that come on in a trained model."""

import torch

from trainer.model.config import QKNormConfig
from trainer.recalibration.drop import drop
from trainer.recalibration.gain import input_sizes, set_gains

IDS = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(1))


def projections(model, side):
    """Outputs of the query or key projections of every layer on ``IDS``."""
    seen = []
    hooks = [
        getattr(block.self_attn, f"{side}_proj").register_forward_hook(
            lambda _, __, output: seen.append(output.detach())
        )
        for block in model.layers
    ]
    model(IDS)
    for hook in hooks:
        hook.remove()
    return seen


def test_every_gain_is_the_rms_of_what_the_norm_will_see(tiny_decoder):
    model = tiny_decoder(model={"qk_norm": QKNormConfig("after_drop")})
    before = {side: projections(model, side) for side in "qk"}
    set_gains(input_sizes(model, IDS.split(1)))
    for side, outputs in before.items():
        for block, output in zip(model.layers, outputs, strict=True):
            weight = getattr(block.self_attn, f"{side}_norm").weight
            rms = output.double().square().mean().sqrt().float()
            torch.testing.assert_close(weight, rms.expand_as(weight))


def test_the_norms_then_keep_the_size_of_queries(tiny_decoder):
    model = tiny_decoder(model={"qk_norm": QKNormConfig("after_drop", "full")})
    before = projections(model, "q")[0]
    set_gains(input_sizes(model, IDS.split(1)))
    model.layout = drop(model.layout, qk_norm=True)
    after = model.layers[0].self_attn.q_norm(before)
    torch.testing.assert_close(after.norm(), before.norm(), rtol=1e-3, atol=0)


def test_nothing_else_changes_and_no_hook_stays(tiny_decoder):
    model = tiny_decoder(model={"qk_norm": QKNormConfig("after_drop", targets="q")})
    before = {n: p.clone() for n, p in model.named_parameters() if "q_norm" not in n}
    set_gains(input_sizes(model, IDS.split(1)))
    assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())
    assert not any(module._forward_hooks for module in model.modules())
