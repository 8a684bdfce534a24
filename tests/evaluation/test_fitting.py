"""What a fit and a choice depend on: each input that changes makes them anew."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.store import Claims, Share, Store

TEXT = FitText({8: np.zeros((2, 8), int)}, 0, "text", {}, {8: np.zeros((1, 8), int)})
OTHERS = {
    "windows": {8: np.zeros((3, 8), int)},
    "end_of_text": 1,
    "fingerprint": "other",
    "needles": {8: None},
    "choice": {8: np.ones((1, 8), int)},
}


def test_a_fit_depends_on_its_text_and_a_choice_on_its_own_too():
    assert {one.name for one in fields(FitText)} == {*OTHERS}
    changed = {name: replace(TEXT, **{name: other}) for name, other in OTHERS.items()}
    of_fits = {name for name, text in changed.items() if text.key != TEXT.key}
    of_choices = {name for name, text in changed.items() if text.choice_key != TEXT.choice_key}
    assert of_fits == {"windows", "end_of_text", "fingerprint"}
    assert of_choices == of_fits | {"choice"}
    # Another longest length: the windows of 8 tokens end elsewhere.
    longer = replace(TEXT, windows={**TEXT.windows, 16: np.zeros((2, 16), int)})
    assert longer.key != TEXT.key


def test_what_is_kept_is_taken_for_the_same_weights_text_and_settings_alone(tmp_path):
    made = []

    def kept(model="weights", text=TEXT, settings=("a", 1), kind="temperature"):
        def make():
            made.append(1)
            return len(made)

        return Fitting(None, model, text, Store(tmp_path), 64).kept(kind, settings, make)

    assert [kept(), kept()] == [1, 1]
    others = [
        {"model": "other"}, {"settings": ("a", 2)}, {"kind": "longrope"},
        *({"text": replace(TEXT, **{k: OTHERS[k]})} for k in ("windows", "fingerprint")),
        {"text": replace(TEXT, end_of_text=1)},
    ]  # fmt: skip
    assert [kept(**other) for other in others] == [2, 3, 4, 5, 6, 7]
    assert kept() == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_a_number_is_the_worst_one(tmp_path, processes):
    """Also where processes share the values through the store, whose JSON has no NaN."""
    claims = Claims(tmp_path, Share(0, processes, "now"))
    fitting = Fitting(None, "weights", TEXT, Store(tmp_path), 64, claims=claims)
    losses = {0.0: math.nan, 0.5: 2.0, 1.0: math.inf}
    assert fitting.of_each("settings", [*losses], losses.get) == [math.inf, 2.0, math.inf]
