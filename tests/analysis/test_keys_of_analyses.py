"""Each key of an analysis that its topics read changes what they show."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from tests.relations.leaves import leaves, other_value, with_value
from trainer.analysis.attention import NeedlePrompt
from trainer.analysis.results import TOPICS
from trainer.analysis.target import Target
from trainer.config import (
    AnalysisConfig,
    AttenuationSettings,
    NeedleSettings,
    ShortTime,
    WeightedRopeSettings,
)
from trainer.workflows import analyze  # noqa: F401 - registers the topics

TOPICS_OF = {
    "chosen": "clusters frequency_entropy matrix_entropy offset_features sinks",
    "pairs": "offset_features",
    "context_length": "offset_features",
    "frequency_entropy.window": "frequency_entropy",
    "frequency_entropy.frame": "frequency_entropy",
    "frequency_entropy.hop": "frequency_entropy",
    "prefixes": "frequency_entropy",
    "attenuation.alphas": "frequency_entropy",
    "attenuation.gates": "frequency_entropy",
    "attenuation.tokens": "frequency_entropy",
    "needle.by": "matrix_entropy",
    "needle.ranked_on": "matrix_entropy",
}
OF_THE_WORKFLOW = {
    *("kind", "arguments", "length", "texts", "dtype", "method", "file"),
    *("attenuation.choice", "needle.kind", "needle.depth"),
}
"""Keys that are read before the topics are: tests/workflows."""
CONFIG = AnalysisConfig(
    chosen=[(0, 1)],
    pairs=[1],
    prefixes=[24],
    frequency_entropy=ShortTime(frame=16, hop=8),
    attenuation=AttenuationSettings(
        alphas=[0.5], gates=[[WeightedRopeSettings("sequence", "below", 0.99)]], tokens=[40]
    ),
    needle=NeedleSettings(),
)
OTHER = {
    "chosen": [(1, 2)],
    "pairs": [2],
    "prefixes": [30],
    "frequency_entropy.frame": 20,
    "attenuation.alphas": [0.25],
    "attenuation.gates": [[WeightedRopeSettings("sequence", "below", 0.9)]],
    "attenuation.tokens": [48],
}
IDS = torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(1))


def test_every_key_is_read_here_or_there():
    assert {*leaves(AnalysisConfig())} == {*TOPICS_OF} | OF_THE_WORKFLOW


@pytest.fixture(scope="module")
def known():
    return {}


def plain(value):
    """What a figure is made of, without its functions."""
    if is_dataclass(value):
        return [plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, dict):
        return [plain([*pair]) for pair in value.items()]
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if callable(value) else str(np.asarray(value).tolist())


@pytest.fixture
def shown(tiny_decoder):
    """A function that returns rows, captions and contents of figures."""
    model = tiny_decoder(training_length=32).eval()
    prompts = [NeedlePrompt(IDS[:, :n].flip(1), slice(9, 12), 4) for n in (32, 64)]

    def show(topic, config):
        results = TOPICS[topic](Target("a", model, IDS, config, *prompts))
        return results.rows.to_csv(), plain(results.plots), results.notes

    return show


@pytest.mark.parametrize(
    ("key", "topic"), [(key, topic) for key in TOPICS_OF for topic in TOPICS_OF[key].split()]
)
def test_a_key_changes_what_its_topics_show(shown, known, key, topic):
    config = CONFIG
    if key.startswith("needle."):
        config = replace(CONFIG, chosen=[])  # those that rank first
    context = topic, len(config.chosen)
    if context not in known:
        known[context] = shown(topic, config)
    other = OTHER.get(key) or other_value(config, key)
    assert shown(topic, with_value(config, key, other)) != known[context]
