"""Rows of whole analyses, against their definitions in numpy, a head and a text at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import attention_of, captured, cells
from trainer.analysis.attention import NeedlePrompt
from trainer.analysis.clusters import analyze_clusters
from trainer.analysis.matrix_entropy import analyze_matrix_entropy
from trainer.analysis.offset_features import analyze_offset_features
from trainer.analysis.positional_bias import analyze_positional_bias
from trainer.analysis.target import Target

C = 32
IDS = torch.randint(0, 50, (2, 80), generator=torch.Generator().manual_seed(1))


def singular_values(vectors):
    return np.linalg.svd(vectors, compute_uv=False)


def stable_rank(vectors):
    values = singular_values(vectors)
    return (values**2).sum() / values[0] ** 2


def mean_of_texts(measure, *vectors):
    """The mean over texts of what a function says of their vectors."""
    return np.mean([measure(*of_text) for of_text in zip(*vectors, strict=True)])


def cosines(queries, keys):
    across = queries @ keys.T
    lengths = np.outer(np.linalg.norm(queries, axis=1), np.linalg.norm(keys, axis=1))
    return (across / lengths).mean()


def change_of_first(after, before):
    """Of the first singular value, but for a temperature, which changes all of them."""
    ratios = singular_values(after)[0] / singular_values(before)[0]
    return ratios * np.linalg.norm(before) / np.linalg.norm(after)


@pytest.mark.parametrize("n", [32, 64])
def test_clusters_within_the_training_length_are_those_of_a_text_of_it(tiny_decoder, n):
    """The temperature follows the length of the text."""
    model = tiny_decoder(training_length=C).eval()
    model.layout = model.layout.map(lambda s: s.with_temperature(coefficient=1.0, per="sequence"))
    rows = analyze_clusters(Target("tiny", model, IDS)).rows
    length = C if n == C else IDS.shape[1]
    heads = captured(model, IDS[:, :length])[1]
    states = {}
    for variant in ("plain", "rotated"):
        q, k = heads.states(rotated=variant == "rotated")
        q, k = q[:, 3, :n].double().numpy(), k[:, 1, :n].double().numpy()
        states[variant] = q, k
        expected = {
            ("cross_cosine", 3): mean_of_texts(cosines, q, k),
            ("cross_dot", 3): mean_of_texts(lambda a, b: (a @ b.T).mean(), q, k),
            ("query_stable_rank", 3): mean_of_texts(stable_rank, q),
            ("key_stable_rank", 1): mean_of_texts(stable_rank, k),
        }
        for (metric, head), value in expected.items():
            measured = cells(rows, metric, variant=variant, layer=1, head=head, length=n)
            assert measured.item() == pytest.approx(value, rel=1e-4)
    for index, (side, head) in enumerate([("query", 3), ("key", 1)]):
        ratio = mean_of_texts(change_of_first, states["rotated"][index], states["plain"][index])
        where = {"variant": "rotated / plain", "layer": 1, "head": head, "length": n}
        assert cells(rows, f"{side}_fsv_ratio", **where).item() == pytest.approx(ratio, rel=1e-5)


def test_the_share_of_the_first_component_is_that_of_the_whole_text(tiny_decoder):
    model = tiny_decoder(training_length=C)
    rows = analyze_clusters(Target("tiny", model, IDS)).rows
    heads = captured(model, IDS)[1]
    for side, x, head in (("query", heads.q, 3), ("key", heads.k, 1)):
        share = mean_of_texts(lambda v: 1 / stable_rank(v), x[:, head].double().numpy())
        where = {"layer": 1, "head": head, "length": 80}
        assert cells(rows, f"{side}_first_share", **where).item() == pytest.approx(share, rel=1e-5)


def entropy(eigenvalues):
    share = eigenvalues / eigenvalues.sum()
    return -(share * np.log(share)).sum()


def test_matrix_entropies_and_attention_on_the_needle(tiny_decoder):
    """DoPE, Eq. 25, 26 and 30."""
    model = tiny_decoder(training_length=C)
    prompt = NeedlePrompt(IDS.flip(1), slice(9, 13), 5)
    rows = analyze_matrix_entropy(Target("tiny", model, IDS, question=prompt)).rows
    names = "effective rank, r = 1", "effective rank, r = 4", "effective rank"  # of 8 channels
    of_keys = rows[rows["variant"] == "keys, as they attend"]
    assert {*of_keys["metric"]} == {"band entropy", "band entropy of a pair", *names}
    heads, of_prompt = captured(model, IDS)[1], captured(model, prompt.ids[:1])[1]
    attention, _ = attention_of(of_prompt, 0, 3)
    expected = {
        "attention_on_needle": attention[-5:, 9:13].sum(axis=1).mean(),
        "attention_on_first_token": attention[-5:, 0].mean(),
        "last_token_on_needle": attention[-1, 9:13].sum(),
    }
    for metric, value in expected.items():
        measured = cells(rows, metric, variant="needle prompt", layer=1, head=3)
        assert measured.item() == pytest.approx(value, rel=1e-4)
    for variant, x, head in (
        ("queries, before the rotation", heads.q, 3),
        ("keys, as they attend", heads.rotated_k, 1),
    ):
        where = {"variant": variant, "layer": 1, "head": head}
        vectors = x[:, head].double().numpy().reshape(-1, 8)
        bands = []
        for pair in range(4):
            points = vectors[:, [pair, pair + 4]]
            bands.append(entropy(np.linalg.eigvalsh(points.T @ points)))
        assert cells(rows, "band entropy of a pair", **where) == pytest.approx(bands, rel=1e-5)
        assert cells(rows, "band entropy", **where).item() == pytest.approx(
            np.mean(bands), rel=1e-5
        )
        eigenvalues = np.linalg.eigvalsh(vectors.T @ vectors)[::-1]
        for metric, r in (("effective rank, r = 4", 4), ("effective rank", 8)):
            rank = np.exp(entropy(eigenvalues[:r]))
            assert cells(rows, metric, **where).item() == pytest.approx(rank, rel=1e-5)


def test_prefix_spreads_are_those_of_the_first_text_within_the_training_length(tiny_decoder):
    """DroPE, Thm. 3.4, of the input of every attention and of the head."""
    model = tiny_decoder(training_length=C)
    rows = analyze_positional_bias(Target("tiny", model, IDS)).rows
    states = []
    hooks = [
        block.self_attn.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        for block in model.layers
    ]
    with torch.no_grad():
        states.append(model.hidden_states(IDS[:1, :C]))
    for hook in hooks:
        hook.remove()
    widest = []
    for (state,) in states:
        h = state.double().numpy()
        means = h.cumsum(axis=0) / np.arange(1, C + 1)[:, None]
        distances = np.linalg.norm(means[:, None] - h, axis=-1)
        widest.append(np.tril(distances).max())
    measured = cells(rows, "prefix_spread", variant="this model")
    np.testing.assert_allclose(measured, widest, rtol=1e-5)


def test_sinks_are_measured_without_the_strongest_slow_pair_and_the_strongest_fast_one(
    tiny_decoder,
):
    """Rotary Offset Features, Sec. 4.2, with the bound of Eq. 15."""
    model = tiny_decoder(training_length=C)
    rows = analyze_offset_features(Target("tiny", model, IDS)).rows
    rows = rows[rows["variant"] == "first token"]
    heads = captured(model, IDS)[1]
    slow = np.array(heads.encoding.spectra[0].inv_freq) < 2 * np.pi / C
    assert slow.tolist() == [False, True, True, True]

    def radii(x):
        mean = x.double().numpy().reshape(-1, 8).mean(axis=0)
        return np.hypot(mean[:4], mean[4:])

    for head in (1, 3):
        strength = radii(heads.q[:, head]) * radii(heads.k[:, head // 2])
        pair = int(np.where(slow, strength, 0).argmax())
        expected = {
            "attention": [],
            "attention_without": [pair],
            "attention_without_fast_pair": [0],
        }
        assert {*rows["pair"][(rows["layer"] == 1) & (rows["head"] == head)]} == {pair}
        for metric, missing in expected.items():
            left = [channel for channel in range(8) if channel % 4 not in missing]
            maps = [attention_of(heads, text, head, channels=left)[0] for text in range(2)]
            on_first = np.mean([attention[8:C, 0] for attention in maps])
            measured = cells(rows, metric, layer=1, head=head)
            assert measured.item() == pytest.approx(on_first, rel=1e-4)
