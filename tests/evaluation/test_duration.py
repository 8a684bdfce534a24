"""How long an evaluation says that it will take."""

from __future__ import annotations

import logging
import time

import pytest

from trainer.evaluation import engine
from trainer.evaluation.engine import say_duration
from trainer.model.flops import forward_flops


@pytest.mark.parametrize(("passes", "said"), [(59, "118 s"), (60, "2 min"), (91, "3 min")])
def test_it_follows_from_a_pass_that_takes_two_seconds(
    tiny_decoder, monkeypatch, caplog, passes, said
):
    model, clock = tiny_decoder().eval(), iter(range(0, 1000, 2))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    caplog.set_level(logging.INFO, logger=engine.__name__)
    # Three sequences of 16 tokens at once; 512 tokens would then take longer than an estimate may.
    work = 3 * forward_flops(model.config, model.layout, 16)
    say_duration(model, [512, 16], passes * work, batch_tokens=48)
    assert [record.getMessage() for record in caplog.records] == [f"About {said} in all"]
    assert next(clock) == 4  # one pass was timed, from 0 to 2
