"""All analyses of a model: figures, rows, and means that change only on purpose."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.files import GOLDEN
from trainer.analysis.attention import NeedlePrompt, capture
from trainer.analysis.results import COLUMNS, TOPICS, Findings, Topic, summary, tidy
from trainer.analysis.target import Target, bucket_means, position_edges, read
from trainer.config import (
    AnalysisConfig,
    AttenuationSettings,
    NeedleSettings,
    ShortTime,
    WeightedRopeSettings,
)
from trainer.workflows.analyze import analyses_of

C, T = 32, 80
IDS = torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(1))
GOLDEN_MEANS = GOLDEN / "analysis.csv"
"""Means of every metric of :func:`rotating` and :func:`mixed`."""


def prompt(length):
    return NeedlePrompt(IDS[:, :length], slice(9, 12), 4)


def rotating(tiny_decoder):
    return Target("rotates", tiny_decoder(training_length=C).eval(), IDS, prompt=prompt(C))


def bare(tiny_decoder):
    model = tiny_decoder(training_length=C, layers=["nope"]).eval()
    return Target("bare", model, IDS, AnalysisConfig(chosen=[(1, 2), (0, 1)]), prompt(C))


def mixed(tiny_decoder):
    shape = {"num_hidden_layers": 3, "head_dim": 16, "num_key_value_heads": 4}
    layers = ["half_rope", "nope", "rope"]
    return Target(
        "mixed",
        tiny_decoder(training_length=C, model=shape, layers=layers).eval(),
        IDS,
        AnalysisConfig(
            chosen=[(2, 3)],
            pairs=[1, 3],
            prefixes=[20, 40],
            frequency_entropy=ShortTime("hamming", 16, 4),
            attenuation=AttenuationSettings(
                alphas=[0.0, 0.25, 1.0],
                gates=[
                    [WeightedRopeSettings("spectrum", "above", 0.4), WeightedRopeSettings(tau=0.9)],
                    [WeightedRopeSettings("sequence", "above", 0.1)],
                ],
                tokens=[30, 70],
            ),
            needle=NeedleSettings(kind="question", by="key", ranked_on="prompt"),
        ),
        prompt=prompt(C),
        question=prompt(T),
        choice=IDS.flip(0, 1),
    )


@pytest.mark.parametrize("build", [rotating, mixed], ids=lambda build: build.__name__)
@pytest.mark.slow
def test_means_of_every_metric_are_those_kept(tiny_decoder, build):
    """Tests of each topic compare its numbers with references; this one notices other changes."""
    rows = pd.concat([results.rows for results in analyses_of(build(tiny_decoder))])
    assert tuple(rows.columns) == COLUMNS
    groups = ["topic", "model", "variant", "metric"]
    means = rows.fillna({"variant": ""}).groupby(groups)["value"].mean().reset_index()
    kept = pd.read_csv(GOLDEN_MEANS, keep_default_na=False, dtype={"value": float})
    expected = kept[kept["model"] == means["model"][0]].reset_index(drop=True)
    pd.testing.assert_frame_equal(means[groups], expected[groups], check_dtype=False)
    np.testing.assert_allclose(means["value"], expected["value"], rtol=2e-3, atol=1e-5)


@pytest.mark.slow
def test_a_model_without_rotation_has_all_figures_that_need_none(tiny_decoder):
    results = {r.key: [plot.name for plot in r.plots] for r in analyses_of(bare(tiny_decoder))}
    of_one = sorted(name for name, topic in TOPICS.items() if topic.models == 1)
    assert list(results) == [name for name in of_one if name != "offset_features"]
    assert results["positional_bias"] == ["positional_bias_heads", "positional_bias_gradients"]
    assert "attenuation" not in results["frequency_entropy"]


def test_a_kind_of_two_models_has_the_comparison_too(tiny_decoder):
    model = tiny_decoder(training_length=C).eval()
    targets = [Target(name, model, IDS, AnalysisConfig("offset_features")) for name in "ab"]
    results = analyses_of(*targets)
    assert [result.key for result in results] == ["offset_features", "offset_changes"]


def test_rows_that_name_no_model_are_of_the_later_one():
    tables = [tidy({"m": 1.0}), tidy({"m": 2.0}, model="other")]
    topic = Topic("topic", "Title", lambda *_: Findings([], tables), models=2, kind="topic")
    with warnings.catch_warnings(action="error"):
        rows = topic(*(Target(name, None, IDS) for name in ("before", "after"))).rows
        assert len(summary(rows, C)) == 2
    assert rows["model"].tolist() == ["after", "other"]


def test_a_summary_has_the_training_length_and_the_longest():
    values = np.arange(12.0).reshape(2, 2, 3)
    rows = tidy({"m": values}, "layer", "head", "length", places={"length": [16, 32, 64]})
    rows = pd.concat([rows, tidy({"n": 5.0})]).reindex(columns=COLUMNS)
    table = summary(rows, 40)
    pd.testing.assert_frame_equal(summary(rows, 32), table)
    assert table["metric"].tolist() == ["m", "m", "n"]
    assert table["length"].tolist()[:2] == [32, 64]
    assert table["mean"].tolist() == [values[..., 1].mean(), values[..., 2].mean(), 5]
    assert table["n"].tolist() == [4, 4, 1]
    skewed = np.array([1.0, 2, 4, 20])
    table = summary(tidy({"m": skewed}, "head").reindex(columns=COLUMNS), 40)
    shown = table[["mean", "median", "low", "high"]].to_numpy()
    np.testing.assert_allclose(shown, [[6.75, 3, 1.3, 15.2]])


def test_first_positions_are_read_without_later_tokens(tiny_decoder):
    model = tiny_decoder(training_length=C).eval()
    model.layout = model.layout.map(lambda spectrum: spectrum.with_temperature(coefficient=2.0))

    def measure(heads):
        peaks = (heads.rotated_q * heads.rotated_k.repeat_interleave(2, dim=1)).sum(dim=-1)
        return {"within": peaks, "whole": peaks}

    means = read(Target("tiny", model, IDS), measure, of_whole=("whole",))
    short, long = (capture(model, ids, measure) for ids in (IDS[:, :C], IDS))
    for layer in range(2):
        within, whole = (x[layer]["whole"].double().mean(dim=0).numpy() for x in (short, long))
        np.testing.assert_allclose(means["whole"][layer], whole)
        np.testing.assert_allclose(means["within"][layer], np.hstack([within, whole[:, C:]]))
        assert not np.allclose(within, whole[:, :C])


@pytest.mark.parametrize(
    ("layers", "shown"),
    [(["rope"], [0, 2, 5]), (["rope", "rope", "rope", "nope", "nope", "rope"], [0, 2, 3, 5])],
)
def test_the_first_middle_last_and_first_still_layers_are_shown(tiny_decoder, layers, shown):
    model = tiny_decoder(layers=layers, model={"num_hidden_layers": 6})
    assert Target("a", model, IDS).shown_layers == shown


@given(st.integers(1, 200_000))
def test_buckets_cover_every_position_once_and_few_suffice(length):
    edges = position_edges(length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert edges == sorted(set(edges))
    assert edges[: min(length, 16) + 1] == list(range(min(length, 16) + 1))
    assert len(edges) <= 17 + 16 * np.log2(max(length / 16, 1)) + 1


@given(st.integers(1, 300))
def test_means_of_buckets(length):
    values = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    edges = position_edges(length)
    means = bucket_means(values, edges)
    for index, (a, b) in enumerate(pairwise(edges)):
        np.testing.assert_allclose(means[:, index], values[:, a:b].double().mean(dim=1), atol=1e-9)
