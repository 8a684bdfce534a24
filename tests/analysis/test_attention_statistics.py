"""Statistics of heads and divergences of models, against loops and torch's own KL."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.analysis.attention_examples import attention_of, layer_of_heads
from trainer.analysis import attention_statistics as module
from trainer.analysis.attention_rows import attention_rows
from trainer.analysis.attention_statistics import StatisticsOfHeads, divergence_by_position
from trainer.common.errors import UserError

IDS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0))


def statistics_of(heads):
    statistics = StatisticsOfHeads()
    statistics.update(heads.layer, attention_rows(heads))
    return statistics.result()


@pytest.mark.parametrize("window", [None, 6])
def test_statistics_are_means_over_queries_that_have_a_choice(window):
    heads = layer_of_heads(window=window, texts=1)
    found = statistics_of(heads)
    for head in range(4):
        attention, _ = attention_of(heads, 0, head)
        distance, entropy = [], []
        for i in range(1, 40):
            seen = [(i - j, a) for j, a in enumerate(attention[i]) if a > 0]
            distance.append(sum(back * a for back, a in seen))
            most = np.log(min(i + 1, window or 40))
            entropy.append(-sum(a * np.log(a) for _, a in seen) / most)
        assert found.distance[0, head] == pytest.approx(np.mean(distance), rel=1e-4)
        assert found.entropy[0, head] == pytest.approx(np.mean(entropy), rel=1e-4)
        assert found.sink_mass[0, head] == pytest.approx(attention[1:, 0].mean(), rel=1e-4)


def test_uniform_attention_has_entropy_one():
    heads = layer_of_heads("nope")
    heads.rotated_k[:] = 0
    np.testing.assert_allclose(statistics_of(heads).entropy, 1, rtol=1e-5)


def test_divergence_is_torch_s_at_every_position(tiny_decoder, monkeypatch):
    monkeypatch.setattr(module, "chunk_size", lambda *_: 7)
    model, other = tiny_decoder(layers=["rope"]), tiny_decoder(layers=["nope"])
    found = divergence_by_position(model, other, IDS)
    with torch.no_grad():
        p, q = (one(IDS).double().log_softmax(-1) for one in (model, other))
    expected = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(0)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-7)
    assert found[-1] > 1e-3
    np.testing.assert_allclose(divergence_by_position(model, model, IDS), 0, atol=1e-12)


def test_vocabularies_must_match(tiny_decoder):
    with pytest.raises(UserError, match="share a vocabulary, got 50 and 60"):
        divergence_by_position(tiny_decoder(), tiny_decoder(model={"vocab_size": 60}), IDS)
