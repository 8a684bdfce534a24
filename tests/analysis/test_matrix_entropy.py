"""Matrix entropies against numpy and scipy, closed forms, and those of a model's heads by stage."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.attention_examples import attention_of, captured, cells, drawn, layer_of_heads
from tests.reference import turned
from trainer.analysis import matrix_entropy as module
from trainer.analysis.attention import NeedlePrompt, attention_blocks
from trainer.analysis.matrix_entropy import (
    analyze_matrix_entropy,
    average_attention,
    copy_prompt,
    extreme_heads,
    gram,
    matrix_entropy,
    matrix_entropy_of,
    query_directions,
    question_attention,
)
from trainer.analysis.target import NotApplicableError, Target
from trainer.config import AnalysisConfig, NeedleSettings
from trainer.positional.rescaling import position_interpolation

IDS = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(6))
seeds = st.integers(0, 2**32 - 1)


def states(seed=0, heads=3, tokens=20, size=8, batch=2):
    return torch.tensor(np.random.default_rng(seed).standard_normal((batch, heads, tokens, size)))


def entropies(x, pairs=None):
    return matrix_entropy(gram(x), (pairs or x.shape[-1] // 2,) * x.shape[1])


def with_eigenvalues(*values, seed=0):
    """One head whose Gram matrix has these eigenvalues."""
    basis = scipy.stats.ortho_group.rvs(len(values), random_state=seed)
    return torch.tensor(np.sqrt(values)[:, None] * basis)[None, None]


def von_neumann(matrix):
    """-tr(S log S) of a matrix over its trace."""
    share = matrix / np.trace(matrix)
    return -np.trace(share @ scipy.linalg.logm(share)).real


@settings(max_examples=5)
@given(seeds)
def test_a_band_has_the_entropy_of_its_own_gram_matrix(seed):
    x = states(seed)
    bands = entropies(x).bands
    for h in range(3):
        for m in range(4):
            points = x[:, h][..., [m, m + 4]].reshape(-1, 2).numpy()
            assert float(bands[h, m]) == pytest.approx(von_neumann(points.T @ points), rel=1e-9)


@settings(max_examples=5)
@given(seeds)
def test_a_head_has_the_entropy_of_its_own_gram_matrix(seed):
    x = states(seed)
    measured = entropies(x)
    for h in range(3):
        rows = x[:, h].reshape(-1, 8).numpy()
        expected = math.exp(von_neumann(rows.T @ rows))
        assert float(measured.effective_rank(None)[h]) == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(measured.band_mean, measured.bands.mean(dim=-1))


@given(seeds, st.sampled_from([2, 3, 4, 7, 8, 16, 32, None]))
def test_truncated_effective_rank_is_of_the_largest_eigenvalues(seed, r):
    x = states(seed)
    rank = entropies(x).effective_rank(r)
    for h in range(3):
        singular = np.linalg.svd(x[:, h].reshape(-1, 8).numpy(), compute_uv=False)
        expected = math.exp(scipy.stats.entropy((singular**2)[:r]))
        assert float(rank[h]) == pytest.approx(expected, rel=1e-9)


def test_with_one_eigenvalue_heads_are_ranked_by_it():
    heads = [(8, 1, 1, 1), (5, 3, 2, 1), (4, 4, 2, 1), (3, 3, 3, 3)]
    x = torch.cat([with_eigenvalues(*values, seed=i) for i, values in enumerate(heads)], dim=1)
    shares = [values[0] / sum(values) for values in heads]
    rank = entropies(x).effective_rank(1)
    assert rank.tolist() == pytest.approx([1 / share for share in shares])
    assert rank.argsort().tolist() == [0, 1, 2, 3]


def test_stages_differ_in_the_rotation_alone(tiny_decoder):
    """Of a rescaled model: none, the rescaled frequencies, those as trained."""
    model = tiny_decoder()
    trained = model.layout
    model.layout = trained.rescaled(position_interpolation, 4.0)
    inv_freq = trained.layers[0].spectra[0].inv_freq
    slower = tuple(f / 4 for f in inv_freq)
    for side in ("query", "key"):
        for heads in captured(model, IDS):
            plain = heads.q if side == "query" else heads.k
            for stage, frequencies in (
                ("pre_ntk", (0.0,) * 4),
                ("post_ntk", slower),
                ("post_rope", inv_freq),
            ):
                rotated = torch.tensor(
                    [
                        [[turned(v, i, frequencies) for i, v in enumerate(head)] for head in text]
                        for text in plain.double().tolist()
                    ]
                )
                ours, expected = matrix_entropy_of(heads, side, stage, trained), entropies(rotated)
                for name in ("bands", "eigenvalues"):
                    torch.testing.assert_close(
                        getattr(ours, name), getattr(expected, name), rtol=1e-4, atol=1e-5
                    )


def test_heads_of_one_layer_with_other_numbers_of_pairs():
    x = states(heads=2)
    measured = matrix_entropy(gram(x), (2, 4))
    of_half, whole = entropies(x, pairs=2).bands[0], entropies(x).bands[1]
    assert measured.bands[0, :2].tolist() == of_half.tolist()
    assert measured.bands[0, 2:].isnan().all()
    torch.testing.assert_close(measured.band_mean, torch.stack([of_half.mean(), whole.mean()]))


def test_the_frequencies_as_trained_are_those_of_a_layer_s_own_heads_with_its_temperature(
    tiny_decoder,
):
    """Without a rescaling they are those of the pass, here of other heads in the second layer."""
    model = tiny_decoder(layers=["rope", "half_rope"], heads={"rope": 0.5})
    model.layout = model.layout.map(lambda s: s.with_temperature(coefficient=2.0))
    ids = torch.randint(50, (1, 80), generator=torch.Generator().manual_seed(2))
    for heads in captured(model, ids):
        for side in ("query", "key"):
            passed, trained = (
                matrix_entropy_of(heads, side, stage, model.layout)
                for stage in ("post_ntk", "post_rope")
            )
            for name in ("bands", "trace"):
                ours, expected = getattr(trained, name), getattr(passed, name)
                torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


NEEDLE_TEXT = torch.randint(50, (2, 80), generator=torch.Generator().manual_seed(4))


def test_the_end_of_the_text_is_copied_to_a_tenth_of_it():
    prompt = copy_prompt(NEEDLE_TEXT)
    changed = prompt.ids
    assert (prompt.needle, prompt.question) == (slice(8, 19), 10)
    assert changed[0, 8:18].tolist() == NEEDLE_TEXT[0, 70:].tolist()
    assert changed[0, :8].tolist() == NEEDLE_TEXT[0, :8].tolist()
    assert changed[0, 18:].tolist() == NEEDLE_TEXT[0, 18:].tolist()


def test_a_needle_has_at_most_32_copied_tokens():
    ids = torch.arange(400)[None]
    prompt = copy_prompt(ids)
    assert (prompt.needle, prompt.question) == (slice(40, 73), 32)
    assert prompt.ids[0, 40:72].tolist() == [*range(368, 400)]


def test_average_attention_is_that_of_all_blocks(monkeypatch):
    monkeypatch.setattr(module, "attention_blocks", partial(attention_blocks, size=16))
    heads = layer_of_heads()
    expected = attention_of(heads, 0, 3)[0].mean(axis=0)
    np.testing.assert_allclose(average_attention(heads, 3), expected, rtol=1e-4, atol=1e-7)


def test_figures_have_attention_by_position_and_directions_of_the_heads_that_are_shown(
    tiny_decoder, monkeypatch
):
    """Of a text of more positions than points: means of two, and of the last one alone."""
    monkeypatch.setattr(module, "POINTS", 20)
    model, ids = tiny_decoder(), NEEDLE_TEXT[:1, :39]
    prompt = NeedlePrompt(ids, slice(4, 9), 3)
    config = AnalysisConfig(chosen=[(1, 2), (0, 3)])
    results = analyze_matrix_entropy(Target("tiny", model, ids, config, question=prompt))
    layers = captured(model, ids)
    panels = iter(drawn(results, "needle_heads"))
    for layer, head in config.chosen:
        weights, _ = attention_of(layers[layer], 0, head)
        for kind, curve in (("average", weights.mean(axis=0)), ("last token", weights[-1])):
            panel = next(panels)
            assert panel.title == f"L{layer}H{head}\n{kind}"
            assert panel.vertical == (6.5, "needle")
            (line,) = panel.lines
            assert line.x == [*range(0, 39, 2)]
            np.testing.assert_allclose(
                line.y, [curve[a : a + 2].mean() for a in line.x], rtol=1e-4, atol=1e-6
            )
    maps = drawn(results, "query_directions")
    assert [*maps] == ["L1H2", "L0H3"]
    assert maps["L1H2"].shape == (3, 8)


def test_attention_and_directions_of_the_last_queries(tiny_decoder):
    """DoPE, Fig. 2 to 6: attention of the question, of the last token and of all queries."""
    model = tiny_decoder()
    prompt = NeedlePrompt(NEEDLE_TEXT, slice(1, 9), 6)
    mean, last = question_attention(model, prompt)
    layers = captured(model, NEEDLE_TEXT[:1])
    for heads in layers:
        for head in range(4):
            weights, _ = attention_of(heads, 0, head)
            np.testing.assert_allclose(
                mean[heads.layer, head], weights[-6:].mean(axis=0), atol=1e-5
            )
            np.testing.assert_allclose(last[heads.layer, head], weights[-1], atol=1e-5)
            average = [sum(row[j] for row in weights) / 80 for j in range(80)]
            np.testing.assert_allclose(average_attention(heads, head), average, atol=1e-6)
    similarity = query_directions(layers[1], 2, 6)
    queries = layers[1].rotated_q[0, 2].double().numpy()
    values, vectors = np.linalg.eigh(queries.T @ queries)
    vectors = vectors[:, np.argsort(-values)]
    cosines = queries[-6:] @ vectors / np.linalg.norm(queries[-6:], axis=1, keepdims=True)
    cosines *= np.sign((queries @ vectors).mean(axis=0))
    np.testing.assert_allclose(similarity, cosines, atol=1e-5)
    np.testing.assert_allclose((similarity**2).sum(axis=1), 1)


def test_a_question_that_does_not_fit_is_refused(tiny_decoder):
    config = AnalysisConfig("matrix_entropy", needle=NeedleSettings("question"))
    target = Target("tiny", tiny_decoder().eval(), IDS, config)
    with pytest.raises(NotApplicableError, match=r"^analysis\.needle\.kind: 40 tokens"):
        analyze_matrix_entropy(target)
    copied = copy_prompt(IDS)
    assert analyze_matrix_entropy(replace(target, question=copied)).plots


def test_the_heads_that_are_shown_have_extreme_entropies_as_they_attend(tiny_decoder, monkeypatch):
    shown = {}
    monkeypatch.setattr(module, "needle_plots", lambda _, __, places, ___: shown.update(places))
    rows = analyze_matrix_entropy(Target("tiny", tiny_decoder(), IDS)).rows
    highest = {}
    for stage in ("as they attend", "before the rotation"):
        values = cells(rows, "band entropy", 2, 4, variant=f"queries, {stage}")
        highest[stage] = divmod(int(values.argmax()), 4)
    assert highest["as they attend"] != highest["before the rotation"]
    assert shown[highest["as they attend"]].endswith("highest band entropy")


def test_an_extreme_key_head_is_shown_by_the_first_query_head_that_reads_it():
    """Query heads 0 and 1 of four read key head 0 of two, 2 and 3 read the other one."""
    entropy = np.array([[0.3, 0.1], [0.5, 0.2]])
    ranks = np.array([[3.0, 2.0], [2.5, 4.0]])
    assert extreme_heads({"band entropy": entropy, "effective rank": ranks}, 4, "key") == {
        (0, 2): "L0H2: lowest band entropy of keys",
        (1, 0): "L1H0: highest band entropy of keys",
        (1, 2): "L1H2: highest effective rank of keys",
    }


def test_heads_of_many_channels_are_shown_by_their_16_largest_directions():
    scores = {f"effective rank, r = {r}": np.array([[2.0, 1.0, 3.0]]) + r for r in (1, 8)}
    scores["effective rank, r = 16"] = np.array([[7.0, 6.0, 5.0]])
    scores["effective rank"] = scores["effective rank, r = 8"]
    scores["band entropy"] = np.array([[0.3, 0.1, 0.1]])
    assert extreme_heads(scores, 3, "query") == {
        (0, 1): "L0H1: lowest band entropy",
        (0, 0): "L0H0: highest band entropy",
        (0, 2): "L0H2: lowest effective rank, r = 16",
    }
