"""Measurements at a length: shared among ranks, scored, and cropped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from trainer.config import EvaluationConfig
from trainer.data.needles import NeedleVocabulary
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.measurements import Perplexity, Prompted, Reading, Statements
from trainer.evaluation.scoring import Prompt
from trainer.evaluation.tasks import HeldOut, make_tasks

LENGTHS = [32, 64]


def test_ranks_share_trials_and_windows(corpus):
    vocabulary = NeedleVocabulary.from_tokenizer(corpus.tokenizer)
    windows = windows_with_common_ends(corpus.test, 3, LENGTHS)
    perplexity = Perplexity(windows, corpus.end_of_text, 32)
    whole = Statements.make(corpus.test, LENGTHS, vocabulary, corpus.end_of_text, 6, 2, 1)
    parts = [whole.part(rank, 2).trials[64] for rank in range(2)]
    assert (parts[1].prompts == whole.trials[64].prompts[1::2]).all()
    assert sum(len(part.answers) for part in parts) == len(parts[0].depths) * 2 == 6
    assert (perplexity.part(1, 2).windows[32] == perplexity.windows[32][1::2]).all()


def test_windows_beside_shorter_ones_are_another_measurement(corpus):
    """Fewer of their last tokens are averaged."""

    def key(*lengths, **settings):
        windows = windows_with_common_ends(corpus.test, 3, [*lengths, 64])
        return Perplexity(windows, corpus.end_of_text, 64, **settings).fingerprint(64)

    assert key(24) != key()
    assert key(24, last=24) == key(last=24) == key(24)


@torch.no_grad()
@pytest.mark.parametrize("last", [None, 5])
def test_the_headline_is_the_loss_on_the_last_tokens_alone(model, corpus, last):
    """Of as many as the shortest length or the training length, unless a number is given."""
    windows = windows_with_common_ends(corpus.test, 3, [24, 64])
    task = Perplexity(windows, corpus.end_of_text, 32, last)
    for length in (24, 64):
        losses = []
        for window in windows[length]:
            ids = torch.tensor([corpus.end_of_text, *window])
            losses.append(F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none"))
        count = last or 24
        result = task.measure(Reading(model, length, None, 4096))
        by_window = [window[-count:].mean().item() for window in losses]
        assert result["losses"] == pytest.approx(by_window, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("reads", [None, 40, 64, 65])
def test_cropped_statements_are_asked_with_as_many_tokens_as_are_read(model, corpus, reads):
    """An end-of-text token and the last of the prompt, in a plain loop."""
    vocabulary, end = NeedleVocabulary.from_tokenizer(corpus.tokenizer), corpus.end_of_text
    task = Statements.make(corpus.test, [64], vocabulary, end, 8, 2, 1)
    seen = []
    handle = model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    result = task.measure(Reading(model, 64, reads, 130))  # two trials, a batch
    handle.remove()
    trials = task.trials[64]
    cropped = [[end, *prompt[64 - min(reads or 64, 64) + 1 :]] for prompt in trials.prompts]
    assert torch.cat(seen).tolist() == cropped
    hits = [
        float(model(torch.tensor([prompt]))[0, -1].argmax() == answer)
        for prompt, answer in zip(cropped, trials.answers, strict=True)
    ]
    assert result["scores"] == tuple(hits)
    assert result["depths"] == tuple(round(1 - depth / 64, 4) for depth in trials.depths.tolist())


def test_a_task_of_prompts_is_scored_and_cropped(model, corpus):
    asked = []

    class Quarter:
        name, stop = "quarter", None

        def score(self, text, answers):
            asked.append(tuple(answers))
            return 0.25

        def prompts(self, length):
            tokens = (0, *range(1, length - 2))
            return [Prompt(tokens, (str(i),), 2, depth=0.5, label="a") for i in range(3)]

    task = Prompted(Quarter(), corpus.tokenizer)
    assert task.sequences(64) == 3
    assert task.fingerprint(64) == Prompted(Quarter(), corpus.tokenizer).fingerprint(64)
    assert task.fingerprint(64) != task.fingerprint(32)
    read = []
    result = task.measure(Reading(model, 64, 32, 4096, read.append))
    assert result == {"scores": (0.25,) * 3, "depths": (0.5,) * 3, "labels": ("a",) * 3}
    assert sum(read) == 3
    assert asked == [("0",), ("1",), ("2",)]


@pytest.mark.parametrize(
    ("named", "numbers"),
    [
        ([7, 7, 3, None, 3, None], (0, 0, 1, 2, 1, 3)),
        ([7, 3, None, None], ()),
        ([], ()),
    ],
)
def test_groups_are_counted_in_the_order_of_prompts(corpus, named, numbers):
    class Grouped:
        name, stop = "grouped", None

        def prompts(self, length):
            return [Prompt((0, i), (), 2, group=group) for i, group in enumerate(named)]

    assert Prompted(Grouped(), corpus.tokenizer).groups(64) == numbers


def test_cropping_keeps_the_first_token_and_room_for_the_answer(model, corpus, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "trainer.evaluation.measurements.answers",
        lambda model, tokenizer, prompts, *_: asked.extend(prompts) or {0: ""},
    )

    class One:
        name, stop = "one", None

        def score(self, text, answers):
            return 0.0

        def prompts(self, length):
            return [Prompt((7, *range(100, 100 + length - 3)), ("x",), 2)]

    Prompted(One(), corpus.tokenizer).measure(Reading(model, 64, 32, 4096))
    (prompt,) = asked
    assert len(prompt.tokens) == 30
    assert prompt.tokens[0] == 7
    assert prompt.tokens[-1] == 160


def test_what_is_read_begins_with_the_token_that_the_tokenizer_puts_before_texts(corpus):
    tokenizer = Tokenizer.from_str(corpus.tokenizer.to_str())
    tokenizer.add_special_tokens(["<s>"])
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", first)]
    )
    text = HeldOut(replace(corpus, tokenizer=tokenizer), corpus.test, first, 0.5)
    config = EvaluationConfig(tasks=["perplexity", "statements"], windows=2)
    (perplexity, statements), _ = make_tasks(text, config, [32], 32)
    assert perplexity.first_token == first
    assert (statements.trials[32].prompts[:, 0] == first).all()
