"""The probe's numbers against a plain loop over queries and keys in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.analysis import probe as probe_file
from trainer.analysis.capture import capture
from trainer.analysis.probe import MEASURES, probe, stable_rank
from trainer.model.config import SoftmaxConfig
from trainer.positional.encodings import alibi_slopes

IDS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))


def by_hand(heads, alibi):
    """The measures of one layer, query by query."""
    q, k = heads.rotated_q.double().numpy(), heads.rotated_k.double().numpy()
    B, Hq, T, D = q.shape
    group = Hq // k.shape[1]
    sink, entropy, distance, largest = [], [], [], -np.inf
    for b in range(B):
        for h in range(Hq):
            for i in range(1, T):
                first = max(0, i - (heads.encoding.window or T) + 1)
                keys = np.arange(first, i + 1)
                logits = k[b, h // group, keys] @ q[b, h, i] / np.sqrt(D)
                if heads.softcap is not None:
                    logits = heads.softcap * np.tanh(logits / heads.softcap)
                largest = max(largest, logits.max())
                if alibi:
                    logits = logits - alibi_slopes(Hq)[h] * (i - keys)
                p = np.exp(logits - logits.max())
                learned = 0.0
                if heads.sinks is not None:
                    learned = np.exp(float(heads.sinks[h]) - logits.max())
                sink.append(p[0] / (p.sum() + learned) if first == 0 else 0.0)
                p /= p.sum()
                entropy.append(-(p * np.log(p)).sum() / np.log(len(p)))
                distance.append((p * (i - keys)).sum())
    ranks = []
    for matrix in k.reshape(-1, T, D):
        values = np.linalg.svd(matrix, compute_uv=False)
        ranks.append((values**2).sum() / values[0] ** 2)
    return [np.mean(sink), np.mean(entropy), np.mean(distance), largest, np.mean(ranks)]


LAYOUTS = {
    "rope": {},
    "nope": {"layers": ["nope"]},
    "windows": {"windows": [5, None]},
    "alibi": {"layers": ["alibi"]},
    "alibi in a window": {"layers": ["alibi"], "windows": [7]},
    "sinks and soft-cap": {
        "windows": [5, None],
        "model": {"softmax": SoftmaxConfig(learned_scale=True, sinks=True, softcap=1.0)},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scores", [probe_file.SCORES, 8 * 24 * 5], ids=["whole", "in blocks"])
def test_measures_are_the_plain_loop(tiny_decoder, monkeypatch, layout, scores):
    monkeypatch.setattr(probe_file, "SCORES", scores)
    model = tiny_decoder(**LAYOUTS[layout])
    expected = []
    capture(model, IDS, lambda heads: expected.append(by_hand(heads, "alibi" in layout)))
    found = probe(model, IDS)
    assert tuple(found) == MEASURES
    for name, values in zip(MEASURES, np.array(expected).T, strict=True):
        assert found[name] == pytest.approx(list(values), rel=1e-4), name


def test_uniform_attention_has_closed_forms(tiny_decoder):
    """Without keys every query attends to all it sees alike."""
    model = tiny_decoder(layers=["nope"])
    with torch.no_grad():
        for block in model.layers:
            block.self_attn.q_proj.weight.zero_()
    found, T = probe(model, IDS), 24
    queries = np.arange(1, T)
    assert found["entropy"] == pytest.approx([1, 1])
    assert found["sink_mass"] == pytest.approx([(1 / (queries + 1)).mean()] * 2)
    assert found["distance"] == pytest.approx([(queries / 2).mean()] * 2)
    assert found["largest_logit"] == [0, 0]


def test_scores_are_float32_whatever_the_model_computes_in(tiny_decoder):
    model = tiny_decoder()
    model.choose_products("cpu", torch.bfloat16)
    heads = []
    capture(model, IDS, lambda one: heads.append(by_hand(one, alibi=False)))
    found = probe(model, IDS)
    for name, values in zip(MEASURES, np.array(heads).T, strict=True):
        assert found[name] == pytest.approx(list(values), rel=1e-4), name


def test_a_model_that_has_broken_is_looked_at_all_the_same(tiny_decoder):
    model = tiny_decoder()
    with torch.no_grad():
        model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    found = probe(model, IDS)
    assert np.isfinite(found["stable_rank"][0])
    assert np.isnan(found["stable_rank"][1])


def test_stable_rank_counts_directions():
    keys = torch.diag(torch.tensor([2.0, 2.0, 1.0, 0.0]))
    assert stable_rank(keys.mT @ keys).item() == pytest.approx((4 + 4 + 1) / 4)
