"""What is impossible in the groups ``data`` and ``tokenizer``, and what texts they stand for."""

from __future__ import annotations

import pytest

from trainer.config import DataConfig, NeedlesConfig, TokenizerConfig
from trainer.data.order import PERIOD

FILES = {"source": "files", "files": ["a.txt"]}


@pytest.mark.parametrize(
    "config",
    [
        DataConfig(),
        DataConfig(sequence_length=2, validation=0.5, test=0.49),
        DataConfig(restart_positions=True, document_mask=True),
        DataConfig(prepared="x", source="files", validation=0.0),  # whose source is not read
        DataConfig(source="hub", hub_name="x"),
        DataConfig(mixture={"a": FILES, "b": FILES | {"weight": 1 / (PERIOD - 1)}}),
        DataConfig(mixture={"a": {"prepared": "x", "source": "files"}}),
        DataConfig(sequence_length=61, needles=NeedlesConfig(share=1.0, mentions=(1, 20))),
        DataConfig(sequence_length=60, needles=NeedlesConfig(share=0.0, mentions=(20, 20))),
        DataConfig(needles=NeedlesConfig(names=(1, 1), mentions=(1, 1), weight=1e-9)),
        TokenizerConfig(vocab_size=257, sample_megabytes=1),
        TokenizerConfig(vocab_size=1_000_000),
        TokenizerConfig(path="x", vocab_size=1),
    ],
)  # fmt: skip
def test_what_lies_just_within_the_bounds_is_possible(config):
    assert config.problems() == []


VOCABULARY = "tokenizer.vocab_size: expected 257 entries, which hold every byte, to 1,000,000; got"
TOO_LITTLE = (
    f"data.mixture.b.weight: 1e-06 is less than one of {PERIOD:,} samples, in which shares are "
    f"exact; give {1 / PERIOD:.2g} or more."
)
WRONG = [
    (
        {"restart_positions": True},
        "data.restart_positions: needs document_mask=true in the same group.",
    ),
    (
        {"prepared": "x", "mixture": {"a": FILES}},
        "data.prepared: one text, but data.mixture names several; name it there.",
    ),
    ({"source": "files"}, "data.files: expected files, got none"),
    ({"source": "hub"}, "data.hub_name: expected a dataset, got none"),
    (
        {"validation": 0.5, "test": 0.5},
        "data.validation: expected validation + test below 1",
    ),
    (
        {"mixture": {"a": FILES | {"weigth": 1.0}}},
        "data.mixture.a.weigth: unknown key. Did you mean 'weight'?",
    ),
    (
        {"mixture": {"a": FILES | {"weight": 0}}},
        "data.mixture.a.weight: expected a positive number, got 0.",
    ),
    (
        {"mixture": {"a": FILES | {"files": "a"}}},
        "data.mixture.a.files: expected a list in brackets, got 'a'. To give this one alone: "
        "'files=[a]'.",
    ),
    (
        {"mixture": {"a": {"source": "files"}}},
        "data.mixture.a.files: expected files, got none",
    ),
    ({"mixture": {"a": FILES, "b": FILES | {"weight": 1e-6}}}, TOO_LITTLE),
    *(
        (
            {"needles": NeedlesConfig(**{key: (3, 2)})},
            f"data.needles.{key}: expected smallest and largest, got [3, 2].",
        )
        for key in ("names", "mentions")
    ),
    (
        {"needles": NeedlesConfig(names=(2, 17))},
        "data.needles.names: expected at most 16, got 17.",
    ),
    (
        {"sequence_length": 60, "needles": NeedlesConfig(share=0.1)},
        "data.needles.mentions: 20 statements of 3 tokens do not fit data.sequence_length 60; at "
        "most 19.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_what_is_impossible_is_said_in_one_sentence(values, message):
    assert [*map(str, DataConfig(**values).problems())] == [message]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": ""}, "tokenizer.path: expected a file, or null to train one, got ''."),
        ({"vocab_size": 256}, f"{VOCABULARY} 256."),
        ({"vocab_size": 1_000_001}, f"{VOCABULARY} 1000001."),
    ],
)
def test_what_is_impossible_of_a_tokenizer(values, message):
    assert [*map(str, TokenizerConfig(**values).problems())] == [message]


def test_a_mixture_is_texts_by_name_with_weights_and_sources_of_their_own():
    weighted = FILES | {"files": ["b.txt"], "weight": 3}
    mixed = DataConfig(sequence_length=128, text_field="body", mixture={"a": FILES, "b": weighted})
    first, second = mixed.texts.values()
    assert mixed.texts.keys() == {"a", "b"}
    assert (first[1], second[1]) == (1.0, 3.0)
    assert second[0] == DataConfig(
        sequence_length=128, text_field="body", source="files", files=["b.txt"]
    )
    alone = DataConfig()
    assert alone.texts == {"text": (alone, 1.0)}
