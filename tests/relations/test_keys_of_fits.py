"""Keys of fits, and of the methods that are fitted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.relations.keys import (
    FIT_TEXT,
    LAYOUT,
    WINDOWS,
    Key,
    Paths,
    all_leaves,
    changed,
    ignored_leaves,
)
from tests.relations.leaves import with_value
from trainer.evaluation import fitting, methods
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.loss import AnsweredTexts
from trainer.evaluation.method_config import BY_LAYER, PARTS, LongRopeSettings
from trainer.evaluation.methods import Recipe, recipe
from trainer.evaluation.methods import _plain as plain_settings
from trainer.evaluation.store import Claims, Share
from trainer.positional.config import PositionalConfig, build_layout
from trainer.workflows import remarks

REASONS = {
    "windows": "their sizes stand for them: the text decides where they end",
    "needles": "read by the search for factors alone, whose key has them",
    "choice": "read by choices alone",
    "parts": "follow from the texts and weights, which the fingerprint has",
}
"""Why keys omit fields of a text for fits."""
NO_NEEDLES = {"needles": {}}
FEWER = {4: WINDOWS[4][:1]}


@dataclass(frozen=True)
class Fit:
    """What a stored fit depends on."""

    model: str
    text: FitText
    kind: str
    settings: dict[str, Any]


def fit_key(fit):
    """Return the key under which a fit is stored."""
    model = SimpleNamespace(layout=None)
    fitting = Fitting(model, fit.model, fit.text, Paths(Path("/")), 1)
    return fitting.stored(fit.kind, fit.settings, print)


def tried_key(fit):
    """Return the keys under which processes share losses."""
    paths = []

    class Tried(Paths):
        def get(self, kind, key, make):
            paths.append(self.path(kind, key))
            return 0.0

        def has(self, kind, key):
            return True

    claims = Claims(Path("/tmp"), Share())
    claims.share = Share(0, 2)
    claims.take = lambda *job: True
    model = SimpleNamespace(layout=None)
    fitting = Fitting(model, fit.model, fit.text, Tried(Path("/")), 1, claims=claims)
    fitting.losses(fit.settings, [1.0, 2.0], float)
    assert len({*paths}) == 2
    return paths


KEYS = {
    "a text for fits": Key(FIT_TEXT, lambda text: text.key, REASONS, NO_NEEDLES),
    "the size of a text for fits": Key(
        FIT_TEXT, lambda text: text.key, {k: v for k, v in REASONS.items() if k != "windows"},
        {"windows": FEWER, **NO_NEEDLES},
    ),
    "a text for choices": Key(
        FIT_TEXT,
        lambda text: text.choice_key,
        {k: v for k, v in REASONS.items() if k != "choice"},
        NO_NEEDLES,
    ),
    "a fit": Key(
        Fit("model", FIT_TEXT, "kind", {"a": 1}),
        fit_key,
        {f"text.{name}": why for name, why in REASONS.items()},
        {"settings": {"a": 2}, "text.needles": {}},
    ),
    "a shared loss": Key(
        Fit("model", FIT_TEXT, "kind", {"a": 1}),
        tried_key,
        {**{f"text.{name}": why for name, why in REASONS.items()}, "kind": "of a fit"},
        {"settings": {"a": 2}, "text.needles": {}},
    ),
    "longrope's search": Key(
        LongRopeSettings(), plain_settings, files=("factors",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_changes_with_every_leaf_but_those_listed(name):
    assert ignored_leaves(KEYS[name]) == sorted(KEYS[name].without)


READS = {
    **dict.fromkeys(("crop", "none", "window", "drop", "drop_channels"), ()),
    **dict.fromkeys(PARTS, ()),
    "dynamic_ntk_alpha": ("dynamic_ntk",),
    "longrope": ("longrope",),
    "temperature": ("temperature",),
    "temperature_rope_id": ("temperature",),
    "temperature_per_head": ("temperature",),
    "dope": ("dope", "choice"),
    "weighted_rope": ("weighted_rope", "choice"),
}
"""Groups of settings that each part of a method reads."""
NO_SETTING = {
    "temperature.models": "chooses the models that have the method, and changes none of them",
    "longrope.factors": "a file that would be read",
}


@pytest.mark.parametrize("name", PARTS)
def test_a_method_is_stored_with_every_setting_that_it_reads(name):
    free = {"layers": ["nope"]} if name.startswith("temperature") else {}
    layout = build_layout(
        PositionalConfig(**free),
        num_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        training_length=32,
    )
    config = EvaluationConfig(temperature=replace(EvaluationConfig().temperature, models="all"))
    stored = set()

    def settings(config):
        made = recipe(name, layout, config)
        assert isinstance(made, Recipe), made
        return json.dumps([made.key, made.settings], default=str)

    groups = {group for read in READS.values() for group in read}
    for path in all_leaves(config):
        if path.split(".")[0] in groups and path != "longrope.factors":
            other = with_value(config, path, next(changed(config, path)))
            stored |= {path} if settings(other) != settings(config) else set()
    read = {path for path in all_leaves(config) if path.split(".")[0] in READS[name]}
    assert stored == read - NO_SETTING.keys()
    by_layer = settings(replace(config, layers=[0])) != settings(config)
    assert by_layer == (name in BY_LAYER)


def test_remarks_know_the_same_readers_of_settings():
    for group in {group for read in READS.values() for group in read}:
        assert {*remarks.OF_METHODS[group]} == {
            name for name, read in READS.items() if group in read
        }


FITTED = {
    "temperature": {
        "stored": {"temperature.grid", "temperature.per", "temperature.lengths", "temperature.fit"},
        "tried": {"temperature.per", "temperature.lengths"},
    },
    "temperature_per_head": {
        "stored": {"temperature.grid", "temperature.lengths"},
        "tried": {"temperature.lengths"},
    },
    "longrope": {
        "stored": {
            *("longrope.search", "longrope.evaluations", "longrope.windows", "longrope.seed"),
        },
        "tried": set(),
    },
}
"""Settings with which a stored fit, or a loss that processes share, must change. The grid is no
part of a loss, which belongs to a single value."""


class Recording(Fitting):
    """A fit that records what it would be stored under, and finds nothing."""

    def stored(self, kind, settings, make):
        """Record a fit, and make it."""
        self.keys["stored"].append(json.dumps([kind, settings], default=str))
        return make()

    def losses(self, settings, values, loss):
        """Record shared losses."""
        self.keys["tried"].append(json.dumps(settings, default=str))
        return [0.0] * len(values)


def keys_of_fits(name, config, layout, first=0):
    """Return the keys of a method's fits at twice and four times the length; ``first``: the token
    that begins texts with an answer."""
    windows = {length: np.zeros((1, length), np.int64) for length in (32, 48, 64, 96, 128)}
    needles = {n: AnsweredTexts(np.full((1, n), first), np.ones(1, np.int64)) for n in windows}
    text = FitText(windows, 0, "t", needles)
    fitting = Recording(SimpleNamespace(layout=layout), "model", text, None, 1)
    fitting.keys = {"stored": [], "tried": []}
    method = recipe(name, layout, config).make(fitting)
    for factor in (2.0, 4.0):
        method.layout_at(factor)
    return fitting.keys


def unit_factors(fitting, settings, factor, layout, layers):
    """Stand in for a search: factors of 1 for every layer."""
    return [[1.0] * 4 for _ in layout.of_layers(layers).spectra]


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_is_stored_under_all_settings_that_decide_on_it(name, monkeypatch):
    monkeypatch.setattr(methods, "fit_heads", lambda *arguments: [[0.1] * 2 for _ in arguments[3]])
    monkeypatch.setattr(methods, "fitted_factors", unit_factors)
    plain = EvaluationConfig(lengths=[2.0, 4.0])
    config = replace(plain, temperature=replace(plain.temperature, models="all"))
    before = keys_of_fits(name, config, LAYOUT)
    ours = {"temperature.lengths": [3.0], "temperature.grid": [0.1, 0.2]}
    for kind, paths in FITTED[name].items():
        assert bool(before[kind]) == bool(paths)
        for path in paths:
            value = ours.get(path) or next(changed(config, path))
            after = keys_of_fits(name, with_value(config, path, value), LAYOUT)
            assert {*after[kind]}.isdisjoint(before[kind]), path
        of_some = keys_of_fits(name, replace(config, layers=[0]), LAYOUT)
        assert {*of_some[kind]}.isdisjoint(before[kind])
        if name != "longrope":
            behind = [
                keys_of_fits(f"{first}+{name}", config, LAYOUT)[kind] for first in ("pi", "yarn")
            ]
            assert {*behind[0]}.isdisjoint(behind[1])
        longer = replace(LAYOUT, training_length=16)
        assert {*keys_of_fits(name, config, longer)[kind]}.isdisjoint(before[kind]), "layout"


@pytest.mark.parametrize("name", ["temperature", "temperature_per_head"])
@pytest.mark.parametrize("grid", [[0.1, 0.2], [0.1], [0.1, 9.0]])
def test_only_a_fit_that_may_go_beyond_its_grid_is_stored_under_the_end(monkeypatch, name, grid):
    """A loss belongs to a value, wherever the search ends."""
    monkeypatch.setattr(methods, "fit_heads", lambda *arguments: [[0.1] * 2 for _ in arguments[3]])
    plain = EvaluationConfig(lengths=[2.0, 4.0])
    settings = replace(plain.temperature, models="all", grid=grid)
    config = replace(plain, temperature=settings)

    def keys():
        made = recipe(name, LAYOUT, config)
        return {**keys_of_fits(name, config, LAYOUT), "cells": [str(made.settings)]}

    before = keys()
    for module in (fitting, methods):
        monkeypatch.setattr(module, "LARGEST_TRIED", 3.0)
    after = keys()
    goes_beyond = grid == [0.1, 0.2]
    assert {*after["stored"]}.isdisjoint(before["stored"]) == goes_beyond
    assert {*after["cells"]}.isdisjoint(before["cells"]) == goes_beyond
    assert {*after["tried"]} == {*before["tried"]}


def test_a_search_by_needles_is_stored_under_their_texts(monkeypatch):
    monkeypatch.setattr(methods, "fitted_factors", unit_factors)
    config = EvaluationConfig(lengths=[2.0, 4.0], longrope=LongRopeSettings(search="needles"))
    keys = [keys_of_fits("longrope", config, LAYOUT, first)["stored"] for first in (0, 1)]
    assert {*keys[0]}.isdisjoint(keys[1])


NOPE = build_layout(
    PositionalConfig(layers=["nope"]),
    num_layers=2,
    num_key_value_heads=2,
    head_dim=8,
    training_length=32,
)
"""A layout that is the same at every length, so that no key has the length by it."""


def fitted_at(monkeypatch, name, *lengths, fit="sum"):
    """Return the keys of the fits of a NoPE model at these lengths."""
    monkeypatch.setattr(methods, "fit_heads", lambda *arguments: [[0.1] * 2 for _ in arguments[3]])
    plain = EvaluationConfig(lengths=[2.0, 4.0])
    settings = replace(plain.temperature, models="all", lengths=[*lengths], fit=fit)
    return keys_of_fits(name, replace(plain, temperature=settings), NOPE)


def test_losses_at_one_length_are_not_taken_for_those_at_another(monkeypatch):
    tried = fitted_at(monkeypatch, "temperature", 2.0, 4.0, fit="line")["tried"]
    assert len({*tried}) == 2


@pytest.mark.parametrize("name", ["temperature", "temperature_per_head"])
@pytest.mark.parametrize("kind", ["stored", "tried"])
def test_a_fit_at_one_length_is_not_taken_for_one_at_another(monkeypatch, name, kind):
    shorter, longer = (fitted_at(monkeypatch, name, length)[kind] for length in (2.0, 4.0))
    assert shorter
    assert {*shorter}.isdisjoint(longer)
