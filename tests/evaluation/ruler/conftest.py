"""A small tokenizer, text for haystacks, and files of questions in the forms of both data sets."""

from __future__ import annotations

import json
from pydoc_data.topics import topics

import pytest

from trainer.config import RulerSettings
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.ruler import NOISE, ruler_tasks

BOS = 0
DOCUMENTS = [" ".join(text.split()) for _, text in sorted(topics.items())][:60]


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([*DOCUMENTS, *[NOISE] * 50], 2000, ())


def squad():
    """Five articles of four paragraphs, each with a question and one that has no answer."""
    return {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": f"Town {a}.{p} has {a + 1}{p}0 people. " + "It is old. " * 9,
                        "qas": [
                            {"question": "Nothing?", "answers": [], "is_impossible": True},
                            {
                                "question": f"How many people has town {a}.{p}?",
                                "answers": [{"text": f"{a + 1}{p}0"}, {"text": f"{a + 1}{p}0 p"}],
                                "is_impossible": False,
                            },
                        ],
                    }
                    for p in range(4)
                ]
            }
            for a in range(5)
        ]
    }


def hotpotqa():
    """Six questions with ten paragraphs each."""
    return [
        {
            "question": f"Who owns lake {q}?",
            "answer": f"owner {q}",
            "context": [
                [
                    f"Lake {q}-{p}",
                    [f"Its owner is owner {q}.", " It is deep."] if p == 3 else ["Dry."],
                ]
                for p in range(10)
            ],
        }
        for q in range(6)
    ]


@pytest.fixture(scope="session")
def question_files(tmp_path_factory):
    """The paths of both, as keyword arguments of the settings."""
    directory = tmp_path_factory.mktemp("questions")
    paths = {"squad_file": directory / "squad.json", "hotpotqa_file": directory / "hotpot.json"}
    for path, data in zip(paths.values(), (squad(), hotpotqa()), strict=True):
        path.write_text(json.dumps(data))
    return {key: str(path) for key, path in paths.items()}


@pytest.fixture(scope="session")
def task(tokenizer, question_files):
    """A function that makes one task by its name."""

    def make(name, trials=5, bos=BOS):
        settings = RulerSettings([name], trials, **question_files)
        ((made,), _) = ruler_tasks(settings, tokenizer, DOCUMENTS, bos)
        return made

    return make


@pytest.fixture(scope="session")
def texts(task, tokenizer):
    """A function from a task's name and a length to text and answers of its trials."""

    def read(name, length):
        return [
            (tokenizer.decode(list(prompt.tokens[1:])), prompt.answers)
            for prompt in task(name).prompts(length)
        ]

    return read
