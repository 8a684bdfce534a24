"""Text of fits and choices."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from tests.data.conftest import held_out
from tests.evaluation.conftest import fit_text
from trainer.config import (
    ChoiceSettings,
    EvaluationConfig,
)
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.fitting import FitText
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.many_shot import SEED, many_shot_tasks
from trainer.evaluation.needles import NEEDLE_TASKS, Haystack

BOS = 0
CONFIG = EvaluationConfig()


def test_windows_of_all_lengths_end_at_the_same_places():
    text = fit_text(range(100), count=3)
    for length in (5, 40, 100):
        assert text.windows(length)[:, -5:].tolist() == text.windows(40)[:, -5:].tolist()


@pytest.mark.parametrize("shares", [(26, 6), (22, 10), (13, 10, 9)])
def test_windows_of_a_mixture_are_chosen_from_each_of_its_texts(shares):
    """As many as their shares of four; a heavy text is not taken alone."""
    texts = [range(100 * i, 100 * i + 100) for i in range(len(shares))]
    text = fit_text(*texts, weights=shares, count=32)
    chosen = text.windows(1, 4)[:, 0]
    assert len(np.unique(chosen)) == 4
    assert (abs(np.bincount(chosen // 100) - 4 * np.array(shares) / 32) < 1).all()


def test_texts_of_a_choice_spread_over_the_whole_text():
    text = fit_text(range(24), count=9)
    for texts, ends in ((1, [23]), (2, [11, 23]), (4, [5, 11, 17, 23])):
        ids = text.choice(replace(CONFIG, choice=ChoiceSettings(texts=texts)), 5)
        assert ids[:, -1].tolist() == ends
    assert len(text.choice(replace(CONFIG, choice=ChoiceSettings(texts=12)), 5)) == 9


@pytest.fixture(scope="module")
def haystack():
    text = " ".join(f"Sentence {i} of a text that says {i * i}." for i in range(400))
    tokenizer = train_tokenizer([], 257, [])
    # Every text begins with the token once, though the tokenizer would add another.
    name = tokenizer.id_to_token(BOS)
    tokenizer.post_processor = TemplateProcessing(f"{name} $A", special_tokens=[(name, BOS)])
    return Haystack(Encoder(tokenizer, (BOS,), BOS), [text])


def texts(haystack, length, *, config=CONFIG, **choice):
    config = replace(config, choice=ChoiceSettings(**choice))
    encoder = haystack.encoder
    held_out = SimpleNamespace(haystack=haystack, encoder=encoder, bos=encoder.bos)
    text = FitText(held_out, count=1)
    return text.choice(config, length)


def test_prompts_with_needles_end_with_their_question(haystack):
    rows = texts(haystack, 600, text="standard", texts=3)
    assert rows.shape[0] == 3
    assert rows[:, 0].tolist() == [BOS] * 3
    places = []
    for row in rows.tolist():
        said = haystack.encoder.tokenizer.decode(row[1:])
        key = re.search(r"One of the special magic numbers for (.+?) is: \d{7}\.", said)
        assert said.endswith(
            f"The special magic number for {key[1]} mentioned in the provided text is:"
        )
        places.append(key.start() / len(said))
    # The trials spread over the depths, from the beginning to the end.
    assert places == pytest.approx([0, 0.4, 0.8], abs=0.2)
    assert places == sorted(places)


def test_they_are_others_than_those_that_are_evaluated(haystack):
    asked = NEEDLE_TASKS["standard"](haystack, replace(CONFIG.needles, trials=4)).prompts(600)
    mine = texts(haystack, 600, text="standard").tolist()
    assert not any(list(prompt.tokens) in mine for prompt in asked)


@pytest.fixture
def math_file(tmp_path):
    file = tmp_path / "math.jsonl"
    rows = [
        {"problem": f"What is {i} and {i * i}?", "solution": f"It is \\boxed{{{i + i * i}}}."}
        for i in range(200)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.slow
def test_many_shots_are_others_than_those_that_are_evaluated(haystack, math_file):
    name = "many_shot_skip"
    shots = replace(CONFIG.many_shot, file=math_file, trials=3, new_tokens=16)
    _, task, _ = many_shot_tasks(shots, haystack.encoder)
    mine = texts(haystack, 700, config=replace(CONFIG, many_shot=shots), text=name, texts=3)
    said = [haystack.encoder.tokenizer.decode(row[-200:]) for row in mine.tolist()]
    asked = [
        haystack.encoder.tokenizer.decode(prompt.tokens[-200:]) for prompt in task.prompts(700)
    ]
    assert len(said) == len(asked) == 3
    assert not {*said} & {*asked}


def test_many_shots_are_drawn_by_another_seed(haystack, tmp_path):
    """Those of one seed are the same problems, in the same order."""
    file = tmp_path / "math.jsonl"
    rows = [{"problem": f"{i} + 1?", "solution": f"\\boxed{{{i + 1}}}"} for i in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shots = replace(CONFIG.many_shot, file=str(file), trials=3, new_tokens=16)
    config = replace(CONFIG, many_shot=shots)
    mine = texts(haystack, 200, config=config, text="many_shot_skip", texts=3)
    length = mine.shape[1] - 1
    of_seed = {}
    for seed in (SEED, SEED + 1):
        _, task, _ = many_shot_tasks(shots, haystack.encoder, seed)
        of_seed[seed] = [[*prompt.tokens[-length:]] for prompt in task.prompts(200)]
    assert mine[:, 1:].tolist() == of_seed[SEED + 1]
    assert not any(row in of_seed[SEED] for row in mine[:, 1:].tolist())


@pytest.mark.parametrize("name", ["many_shot_needle", "many_shot_skip"])
def test_prompts_of_many_shots_have_one_length(haystack, name, math_file):
    shots = replace(CONFIG.many_shot, file=math_file, new_tokens=16)
    found = texts(haystack, 700, config=replace(CONFIG, many_shot=shots), text=name)
    assert 700 - 16 - 60 < found.shape[1] <= 700 - 16
    for row in found.tolist():
        said = haystack.encoder.tokenizer.decode(row[1:])
        assert said.endswith("Solution:")
        assert said.count("boxed") > 5


def test_a_loss_counts_every_token_behind_the_first_one_of_the_text(tiny_decoder):
    model, first = tiny_decoder(), 7
    corpus = SimpleNamespace(first_token=first)
    text = FitText(HeldOut(corpus, held_out(np.arange(30) % 11), (), None), count=3)
    windows = text.windows(10)
    ids = torch.from_numpy(np.pad(windows, ((0, 0), (1, 0)), constant_values=first))
    with torch.no_grad():
        logits = model(ids[:, :-1]).double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert text.loss(model, windows, 20) == pytest.approx(expected.item(), rel=1e-5)
