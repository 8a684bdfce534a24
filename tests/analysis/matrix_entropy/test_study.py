"""Matrix entropies in a section: the numbers, the rankings, and the sentences made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from tests.analysis.attention_examples import attention_of, picture
from trainer.analysis.capture import NeedlePrompt, capture
from trainer.analysis.matrix_entropy.measure import copy_prompt
from trainer.analysis.matrix_entropy.study import MatrixEntropyStudy
from trainer.analysis.settings import NeedleSettings
from trainer.analysis.studies.study import Target, run

IDS = torch.randint(50, (1, 80), generator=torch.Generator().manual_seed(4))


def section_of(target):
    (section,) = run([MatrixEntropyStudy(target)], target)
    return section


def target_of(model, ids=IDS, **options):
    return Target("tiny", model, ids, **options)


def rank(rows, r=None):
    """exp of the entropy of the r largest squared singular values of ``[tokens, D]``."""
    power = np.linalg.svd(rows, compute_uv=False) ** 2
    if r == 1:
        return power.sum() / power[0]
    return math.exp(scipy.stats.entropy(power[:r]))


def band(rows, m, pairs=4):
    points = rows[:, [m, m + pairs]]
    return scipy.stats.entropy(np.linalg.eigvalsh(points.T @ points))


def of_heads(model, name, measure, ids=IDS):
    """``[layers][heads]`` of a measure of one side at one stage."""
    layers = []
    capture(model, ids, layers.append)
    return np.array(
        [[measure(head) for head in getattr(heads, name)[0].double().numpy()] for heads in layers]
    )


STAGES = {
    "query pre_ntk": "q",
    "query post_ntk": "rotated_q",
    "key pre_ntk": "k",
    "key post_ntk": "rotated_k",
}


def test_the_numbers_are_those_of_every_head(tiny_decoder):
    model = tiny_decoder()
    section = section_of(target_of(model))
    assert list(section.numbers["heads"]) == list(STAGES)
    for version, name in STAGES.items():
        scores_of_heads = section.numbers["heads"][version]
        assert list(scores_of_heads) == [
            "band entropy",
            "effective rank, r = 1",
            "effective rank, r = 4",
            "effective rank",
        ]
        for r, key in ((1, ", r = 1"), (4, ", r = 4"), (None, "")):
            expected = of_heads(model, name, lambda rows, r=r: rank(rows, r))
            np.testing.assert_allclose(scores_of_heads[f"effective rank{key}"], expected, rtol=1e-3)
        bands = of_heads(model, name, lambda rows: [band(rows, m) for m in range(4)])
        np.testing.assert_allclose(section.numbers["bands"][version], bands, atol=1e-4)
        np.testing.assert_allclose(scores_of_heads["band entropy"], bands.mean(axis=-1), atol=1e-4)
    maps, bands, *_ = section.pictures
    assert len(maps.rows) == 2 * (2 * 4 + 2 * 2)
    assert maps.header[4:] == (
        "band_entropy",
        "effective_rank_r_1",
        "effective_rank_r_4",
        "effective_rank",
    )
    assert len(bands.rows) == 4 * 2 * 4


def test_the_ranking_has_the_lowest_and_the_highest_heads_by_each_measure(tiny_decoder):
    model = tiny_decoder()
    (grid,) = section_of(target_of(model)).grids
    assert len(grid.rows) == 2 * 4
    scores = of_heads(model, "rotated_k", lambda rows: rank(rows, 4))
    order = [divmod(int(i), 2) for i in np.argsort(scores, axis=None)]
    (row,) = (row for row in grid.rows if row[:2] == ("keys", "effective rank, r = 4"))
    for cell, places in ((row[2], order[:3]), (row[3], order[:-4:-1])):
        assert cell == ", ".join(f"L{i}H{j} ({scores[i, j]:.2f})" for i, j in places)


def test_the_rotation_and_the_slow_bands_are_in_the_findings(tiny_decoder):
    model = tiny_decoder()
    before, after = (of_heads(model, name, rank).mean() for name in ("k", "rotated_k"))
    findings = section_of(target_of(model)).findings
    assert (
        f"Mean effective rank of keys: {before:.1f} before the rotation, {after:.1f} as they "
        "attend, of 8 channels."
    ) in findings
    bands = of_heads(model, "rotated_q", lambda rows: [band(rows, m) for m in range(4)])
    inv_freq = np.array(model.layout.layers[0].spectra[0].inv_freq)
    slow = inv_freq * 32 < 2 * math.pi
    assert slow.tolist() == [False, True, True, True] or slow.tolist() == [False, False, True, True]
    assert (
        "Bands of queries that turn less than once in the training length have a mean entropy of "
        f"{bands[..., slow].mean():.2f} nats as they attend, faster ones "
        f"{bands[..., ~slow].mean():.2f}."
    ) in findings


def test_the_extreme_heads_attend_to_the_needle_as_told(tiny_decoder):
    model = tiny_decoder()
    section = section_of(target_of(model))
    layers = []
    capture(model, copy_prompt(IDS).ids, layers.append)
    last = np.array(
        [
            [attention_of(heads, 0, head)[0][-10:].mean(axis=0) for head in range(4)]
            for heads in layers
        ]
    )
    needle, first = last[..., 8:19].sum(axis=-1), last[..., 0]
    np.testing.assert_allclose(section.numbers["attention_on_needle"], needle, atol=1e-5)
    np.testing.assert_allclose(section.numbers["attention_on_first_token"], first, atol=1e-5)
    assert (
        f"The 10 last queries put {needle.mean():.1%} of their attention on the needle (11 tokens) "
        f"and {first.mean():.1%} on the first token, mean over all heads; spread evenly, "
        f"{np.mean([11 / (t + 1) for t in range(70, 80)]):.1%} would be on the needle."
    ) in section.findings
    # A quarter of eight heads; of D = 8 channels no 16 are the largest.
    order = np.argsort(of_heads(model, "rotated_q", rank), axis=None)
    for name, places in (("lowest", order[:2]), ("highest", order[-2:])):
        assert (
            f"For {name} effective rank (2 of the heads) these are "
            f"{needle.ravel()[places].mean():.1%} and {first.ravel()[places].mean():.1%}."
        ) in section.findings
    bands = of_heads(model, "rotated_q", lambda x: np.mean([band(x, m) for m in range(4)]))
    shared = len(set(order[:2]) & set(np.argsort(bands, axis=None)[:2]))
    assert (
        f"Of the 2 query heads of lowest band entropy, {shared} are also among the 2 of lowest "
        "effective rank."
    ) in section.findings
    attention = picture(section, "needle_attention")
    assert {row[0] for row in attention.rows} == {
        "all heads",
        *(f"{k} {n}" for k in ("lowest", "highest") for n in ("band entropy", "effective rank")),
    }
    of_all = [row[2] for row in attention.rows if row[0] == "all heads"]
    np.testing.assert_allclose(of_all, last.mean(axis=(0, 1)), atol=1e-5)


def test_chosen_heads_are_those_of_the_maps(tiny_decoder):
    section = section_of(target_of(tiny_decoder(), chosen=((0, 1), (1, 3))))
    for name in ("attention_maps", "query_directions"):
        assert {row[:2] for row in picture(section, name).rows} == {(0, 1), (1, 3)}


def test_a_model_without_rotation_is_read_all_the_same(tiny_decoder):
    section = section_of(target_of(tiny_decoder(layers=["nope"])))
    heads = section.numbers["heads"]
    assert list(heads) == ["query post_ntk", "key post_ntk"]
    assert not any("turn less than once" in finding for finding in section.findings)


def test_layers_with_and_without_rotation(tiny_decoder):
    model = tiny_decoder(layers=["rope", "nope"])
    bands = of_heads(model, "rotated_k", lambda rows: [band(rows, m) for m in range(4)])[0]
    slow = np.array(model.layout.layers[0].spectra[0].inv_freq) * 32 < 2 * math.pi
    (sentence,) = (
        f for f in section_of(target_of(model)).findings if f.startswith("Bands of keys")
    )
    assert f"{bands[:, slow].mean():.2f} nats" in sentence
    assert sentence.endswith(f"{bands[:, ~slow].mean():.2f}.")


def test_a_text_needs_room_for_a_needle(tiny_decoder):
    model = tiny_decoder()
    assert MatrixEntropyStudy.problems(target_of(model)) == []
    (problem,) = MatrixEntropyStudy.problems(target_of(model, IDS[:, :15]))
    assert "16 tokens or more, got 15" in problem
    assert section_of(target_of(model, IDS[:, :16])).pictures


def test_several_texts_are_taken_together(tiny_decoder):
    model = tiny_decoder()
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(9))
    layers = []
    capture(model, ids, layers.append)
    rows = layers[1].rotated_k[:, 1].double().reshape(-1, 8).numpy()
    scores_of_heads = section_of(target_of(model, ids)).numbers["heads"]["key post_ntk"][
        "effective rank"
    ]
    assert scores_of_heads[1][1] == pytest.approx(rank(rows), rel=1e-4)


def test_heads_are_shown_with_a_question_by_the_entropy_of_their_keys(tiny_decoder):
    """DoPE, Fig. 2: the heads of highest and lowest entropy, each as the mean over all queries and
    as the last token, by the position of the key; the needle at depth 0."""
    model = tiny_decoder()
    prompt = NeedlePrompt(IDS, slice(1, 9), 6)
    section = section_of(target_of(model, needle=NeedleSettings(by="key"), question=prompt))
    ranks = of_heads(model, "rotated_k", rank).repeat(2, axis=1)
    order = [divmod(int(i), 4) for i in np.argsort(ranks, axis=None, kind="stable")]
    drawn = picture(section, "needle_heads")
    shown = {row[:2] for row in drawn.rows}
    assert {order[0], order[-1]} <= shown
    layers = []
    capture(model, IDS, layers.append)
    rows = {row[:4]: row[4] for row in drawn.rows}
    for layer, head in shown:
        weights, _ = attention_of(layers[layer], 0, head)
        for key in range(80):
            average = sum(row[key] for row in weights) / 80
            assert rows[layer, head, "average", key] == pytest.approx(average, abs=1e-5)
            assert rows[layer, head, "last token", key] == pytest.approx(weights[-1][key], abs=1e-5)
    last = np.array([[attention_of(h, 0, i)[0][-1] for i in range(4)] for h in layers])
    on_needle = last[..., 1:9].sum(axis=-1)
    np.testing.assert_allclose(section.numbers["last_token_on_needle"], on_needle, atol=1e-5)
    lowest = np.mean([on_needle[version] for version in order[:2]])
    (sentence,) = (f for f in section.findings if f.startswith("Of the last token alone"))
    assert f"{lowest:.1%} for lowest effective rank of keys" in sentence
    assert any(f.startswith("The 6 tokens of the question put") for f in section.findings)


def test_heads_are_ranked_in_the_text_that_has_the_needle_where_that_is_asked_for(tiny_decoder):
    model = tiny_decoder()
    text = torch.randint(50, (1, 80), generator=torch.Generator().manual_seed(8))
    prompt = NeedlePrompt(IDS, slice(1, 9), 6)
    for ranked_on, ids in (("text", text), ("prompt", IDS)):
        needle = NeedleSettings(ranked_on=ranked_on)
        section = section_of(target_of(model, text, needle=needle, question=prompt))
        ranks = of_heads(model, "rotated_q", rank, ids)
        lowest = [divmod(int(i), 4) for i in np.argsort(ranks, axis=None, kind="stable")[:2]]
        last = np.array(section.numbers["last_token_on_needle"])
        (sentence,) = (f for f in section.findings if f.startswith("Of the last token alone"))
        assert (
            f"{np.mean([last[place] for place in lowest]):.1%} for lowest effective rank"
            in sentence
        )
        assert ("ranked by their entropies in that text" in section.text) == (ranked_on == "prompt")


@pytest.mark.parametrize(("length", "keys"), [(128, "1 key"), (129, "2 keys")])
def test_the_caption_counts_the_keys_of_a_cell(tiny_decoder, length, keys):
    ids = torch.randint(50, (1, length), generator=torch.Generator().manual_seed(5))
    section = section_of(target_of(tiny_decoder(), ids))
    assert f"over {keys} (logarithmic)" in picture(section, "needle_attention").caption
