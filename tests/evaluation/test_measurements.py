"""What is measured at a length: shared among ranks, scored, and cropped."""

from __future__ import annotations

from trainer.data.needles import NeedleVocabulary
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.measurements import Perplexity, Prompted, Statements
from trainer.evaluation.prompts import Prompt

LENGTHS = [32, 64]


def test_ranks_share_trials_and_windows(corpus):
    vocabulary = NeedleVocabulary.of(corpus.tokenizer)
    windows = windows_with_common_ends(corpus.test, 3, LENGTHS)
    perplexity = Perplexity(windows, corpus.end_of_text, 32)
    whole = Statements.of(corpus.test, LENGTHS, vocabulary, corpus.end_of_text, 6, 2, 1)
    parts = [whole.part(rank, 2).trials[64] for rank in range(2)]
    assert (parts[1].prompts == whole.trials[64].prompts[1::2]).all()
    assert sum(len(part.answers) for part in parts) == len(parts[0].depths) * 2 == 6
    assert (perplexity.part(1, 2).windows[32] == perplexity.windows[32][1::2]).all()


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
    found = task.measure(model, 64, 32, 4096, read.append)
    assert found == {"scores": (0.25,) * 3, "depths": (0.5,) * 3, "labels": ("a",) * 3}
    assert sum(read) == 3
    assert asked == [("0",), ("1",), ("2",)]


def test_cropping_keeps_the_first_token_and_room_for_the_answer(model, corpus, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "trainer.evaluation.measurements.answers",
        lambda model, tokenizer, prompts, *_: asked.extend(prompts) or [""] * len(prompts),
    )

    class One:
        name, stop = "one", None

        def score(self, text, answers):
            return 0.0

        def prompts(self, length):
            return [Prompt((7, *range(100, 100 + length - 3)), ("x",), 2)]

    Prompted(One(), corpus.tokenizer).measure(model, 64, 32, 4096, lambda _: None)
    (prompt,) = asked
    assert len(prompt.tokens) == 30
    assert prompt.tokens[0] == 7
    assert prompt.tokens[-1] == 160
