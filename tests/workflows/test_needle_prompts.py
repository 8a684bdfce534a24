"""Needle prompts for analyses: what they hold, and where."""

from __future__ import annotations

import re

import pytest
import torch

from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.methods import recipe
from trainer.evaluation.settings import LongRopeSettings
from trainer.workflows.needle_prompts import needle_prompt, searched_needles


@pytest.fixture(scope="module")
def byte_tokenizer():
    return train_tokenizer([], 257, [])


def test_a_statement_stands_at_a_tenth_and_its_question_at_the_end(byte_tokenizer):
    words = byte_tokenizer.encode("So it goes. " * 200).ids
    ids = torch.tensor([words[:2000], words[12:2012]])
    made = needle_prompt(byte_tokenizer, ids, 1500)
    assert made.ids.shape == (2, 1500)
    for row in made.ids.tolist():
        statement = byte_tokenizer.decode(row[made.needle])
        found = re.fullmatch(r" One of the special magic numbers for (.+) is: \d{7}\.", statement)
        asked = f"\n\nThe special magic number for {found[1]} mentioned in the provided text is:"
        assert byte_tokenizer.decode(row).endswith(asked)
        text = 1500 - len(row[made.needle]) - len(byte_tokenizer.encode(asked).ids)
        assert abs(made.needle.start - 0.1 * text) <= 2


def test_where_there_is_no_room_there_is_none(byte_tokenizer):
    ids = torch.zeros(1, 1000, dtype=torch.long)
    assert needle_prompt(byte_tokenizer, ids, 300) is None
    assert needle_prompt(byte_tokenizer, ids, 1001) is None


def test_texts_for_a_search_by_needles_are_of_validation_text_beyond_the_training_length(
    tiny_decoder, tmp_path
):
    lines = [f"Line {i} says {i * i}." for i in range(2000)]
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    data = DataConfig(
        source="files",
        files=[str(tmp_path / "a.txt")],
        sequence_length=32,
        validation=0.5,
        cache_dir=str(tmp_path / "cache"),
    )
    corpus = prepare_corpus(data, TokenizerConfig(vocab_size=300))
    validation = " ".join(corpus.documents(corpus.validation, 1 << 20))
    layout = tiny_decoder().layout

    def made(method, settings):
        recipes = [recipe(method, layout, EvaluationConfig(longrope=settings))]
        lengths = [32, 400, 600]
        return searched_needles(settings, recipes, corpus, corpus.end_of_text, lengths, 32)

    by_needles = LongRopeSettings(search="needles", windows=3)
    found = made("pi+longrope", by_needles)
    assert {length: texts.tokens.shape for length, texts in found.items()} == {
        400: (3, 400),
        600: (3, 600),
    }
    for row in found[400].tokens.tolist():
        assert row[0] == corpus.end_of_text
        words = corpus.tokenizer.decode(row[1:])
        assert re.search(r"Line \d+ says \d+", words)[0] in validation
    assert made("pi", by_needles) == made("longrope", LongRopeSettings()) == {}
