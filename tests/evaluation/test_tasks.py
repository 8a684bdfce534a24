"""Prompts and windows on which methods are fitted."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from tests.data.conftest import held_out
from trainer.config import (
    ChoiceSettings,
    DataConfig,
    EvaluationConfig,
    LongRopeSettings,
    TemperatureSettings,
    TokenizerConfig,
)
from trainer.data.corpus import prepare_corpus
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.many_shot import many_shot_tasks
from trainer.evaluation.methods import method_for
from trainer.evaluation.needles import NEEDLE_TASKS, Haystack
from trainer.evaluation.tasks import choice_prompts, fit_text

BOS = 0
CONFIG = EvaluationConfig()


@pytest.fixture(scope="module")
def haystack():
    text = " ".join(f"Sentence {i} of a text that says {i * i}." for i in range(400))
    tokenizer = train_tokenizer([], 257, [])
    # Every text begins with the token once, though the tokenizer would add another.
    name = tokenizer.id_to_token(BOS)
    tokenizer.post_processor = TemplateProcessing(f"{name} $A", special_tokens=[(name, BOS)])
    return Haystack(tokenizer, [text], (BOS,))


def texts(haystack, length, *, config=CONFIG, **choice):
    config = replace(config, choice=ChoiceSettings(**choice))
    return choice_prompts(config, haystack, length)


def test_prompts_with_needles_end_with_their_question(haystack):
    rows = texts(haystack, 600, text="standard", texts=3)
    assert rows.shape[0] == 3
    assert rows[:, 0].tolist() == [BOS] * 3
    places = []
    for row in rows.tolist():
        said = haystack.tokenizer.decode(row[1:])
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
    _, task, _ = many_shot_tasks(shots, haystack.tokenizer, BOS)
    mine = texts(haystack, 700, config=replace(CONFIG, many_shot=shots), text=name, texts=3)
    said = [haystack.tokenizer.decode(row[-200:]) for row in mine.tolist()]
    asked = [haystack.tokenizer.decode(prompt.tokens[-200:]) for prompt in task.prompts(700)]
    assert len(said) == len(asked) == 3
    assert not {*said} & {*asked}


@pytest.mark.parametrize("name", ["many_shot_needle", "many_shot_skip"])
def test_prompts_of_many_shots_have_one_length(haystack, name, math_file):
    shots = replace(CONFIG.many_shot, file=math_file, new_tokens=16)
    found = texts(haystack, 700, config=replace(CONFIG, many_shot=shots), text=name)
    assert 700 - 16 - 60 < found.shape[1] <= 700 - 16
    for row in found.tolist():
        said = haystack.tokenizer.decode(row[1:])
        assert said.endswith("Solution:")
        assert said.count("boxed") > 5


@pytest.fixture
def corpus(tmp_path):
    lines = [f"Line {i} says {i * i}." for i in range(2000)]
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    data = DataConfig(
        source="files",
        files=[str(tmp_path / "a.txt")],
        sequence_length=32,
        validation=0.5,
        cache_dir=str(tmp_path / "cache"),
    )
    return prepare_corpus(data, TokenizerConfig(vocab_size=300))


@pytest.mark.parametrize(("method", "length"), [("dope", None), ("dope", 20), ("pi", None)])
def test_texts_are_made_for_what_is_chosen_on_them_alone(tiny_decoder, corpus, method, length):
    """At the lengths that are evaluated, or at the one that is given."""
    choice = ChoiceSettings(text="standard", texts=2, length=length)
    config = EvaluationConfig(choice=choice, fit_windows=2)
    methods = [method_for(method, tiny_decoder().layout, config)]
    found = fit_text(corpus, corpus.end_of_text, config, methods, [320, 640], 32)
    at = [640] if length else [320, 640]
    shapes = None if found.choice is None else {n: x.shape[0] for n, x in found.choice.items()}
    assert shapes == (dict.fromkeys(at, 2) if method == "dope" else None)


@pytest.mark.parametrize("name", ["dope+temperature", "longrope+temperature"])
def test_what_comes_before_a_temperature_has_text_at_its_lengths(
    tiny_decoder, corpus, tmp_path, name
):
    """The temperature is fitted at a length of its own, where the parts before it choose, too."""
    model = tiny_decoder(model={"vocab_size": corpus.tokenizer.get_vocab_size()})
    config = EvaluationConfig(
        lengths=[10],
        fit_windows=2,
        choice=ChoiceSettings(text="standard", texts=2),
        longrope=LongRopeSettings(search="needles", evaluations=2, windows=1),
        temperature=TemperatureSettings(grid=[0.0, 0.5], models="all", lengths=[12.0]),
    )
    made = method_for(name, model.layout, config)
    made_text = fit_text(corpus, corpus.end_of_text, config, [made], [320], 32)
    fitting = Fitting(lambda: model, made_text, 4096)
    assert made.layouts(fitting)(10.0) != model.layout
    assert any("logits times" in note for note in fitting.notes)


def test_texts_for_a_search_by_needles_are_of_validation_text_beyond_the_training_length(
    tiny_decoder, corpus
):
    validation = " ".join(corpus.documents(corpus.validation, 1 << 20))
    layout = tiny_decoder().layout

    def made(method, settings):
        config = EvaluationConfig(longrope=settings, fit_windows=2)
        methods, lengths = [method_for(method, layout, config)], [32, 400, 600]
        return fit_text(corpus, corpus.end_of_text, config, methods, lengths, 32).needles

    by_needles = LongRopeSettings(search="needles", windows=3)
    found = made("pi+longrope", by_needles)
    assert {length: len(requests) for length, requests in found.items()} == {400: 3, 600: 3}
    for request in found[400]:
        assert request.context[0] == corpus.end_of_text
        words = corpus.tokenizer.decode(list(request.context[1:]))
        assert re.search(r"Line \d+ says \d+", words)[0] in validation
    assert made("pi", by_needles) == made("longrope", LongRopeSettings()) == {}


@pytest.mark.parametrize("weights", [[0.8, 0.2], [0.5, 0.3, 0.2]])
def test_windows_of_a_mixture_name_their_texts(tiny_decoder, weights):
    text = held_out(
        *(range(1000 * n, 1000 * n + 500) for n in range(len(weights))), weights=weights
    )
    corpus = SimpleNamespace(validation=text, first_token=0, fingerprint="")
    config = replace(CONFIG, fit_windows=16)
    methods = [method_for("dope", tiny_decoder().layout, config)]
    read = fit_text(corpus, None, config, methods, [128], 32)
    for windows in read.windows.values():
        assert read.parts == tuple(windows[:, 0] // 1000)
    chosen = read.spread(5, 128)[:, 0] // 1000
    assert np.bincount(chosen).tolist() == [4, 1] if len(weights) == 2 else [3, 1, 1]
