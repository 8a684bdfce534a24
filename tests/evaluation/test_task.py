"""Tasks at a length: scored, and cropped."""

from __future__ import annotations

import runpy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.evaluation.conftest import values_of
from trainer.common.errors import UserError
from trainer.config import EvaluationConfig, ManyShotSettings, NeedleTaskSettings
from trainer.data.corpus import held_out_windows
from trainer.evaluation.answering import answers
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.perplexity import perplexity
from trainer.evaluation.scoring import Prompt
from trainer.evaluation.statements import statements
from trainer.evaluation.task import TASKS, PromptTask, Task, TaskInputs, TaskKind, evenly_spaced
from trainer.evaluation.tasks import make_tasks


def inputs(corpus, lengths, settings):
    return TaskInputs(HeldOut(corpus, corpus.test, (), 1.0), lengths, 32, 99, settings)


@torch.no_grad()
@pytest.mark.parametrize("last", [24, 5])
def test_the_headline_is_the_loss_on_the_last_tokens_alone(model, corpus, last):
    windows, text = (
        held_out_windows(corpus.test, 3, 64),
        HeldOut(corpus, corpus.test, (), None),
    )
    tasks = perplexity(TaskInputs(text, [24, 64], last, 99, 3))
    for task, length in zip(tasks, (24, 64), strict=True):
        losses = []
        for window in windows[:, -length:]:
            ids = torch.tensor([corpus.end_of_text, *window])
            losses.append(F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none"))
        result = values_of(task, model, 4096)
        by_window = [window[-last:].mean().item() for window in losses]
        assert [value for _, _, value in result] == pytest.approx(by_window, rel=1e-5)
        assert [(trial, key) for trial, key, _ in result] == [(i, "perplexity") for i in range(3)]


@pytest.mark.parametrize(("last", "length"), [(16, 64), (32, 64), (64, 64), (64, 32)])
@pytest.mark.parametrize("wanted", [3, 10**6])
def test_windows_share_no_scored_token_however_many_are_asked_for(corpus, last, length, wanted):
    """An interval over windows takes them as independent; a note says how many are missing."""
    ((_, ids),) = corpus.test.parts
    count = min(wanted, len(ids) // last)
    asked = TaskInputs(HeldOut(corpus, corpus.test, (), None), [length], last, wanted, 10**6)
    (task,) = perplexity(asked)
    assert len(task.trials) == count
    assert len(asked.notes) == (count < wanted)
    ends = [n * len(ids) // count for n in range(1, count + 1)]
    assert min(b - a for a, b in pairwise([0, *ends])) >= last
    expected = [np.take(ids, range(end - length, end), mode="wrap") for end in ends]
    assert np.array_equal(task.batches.args[0], np.stack(expected))


def test_statements_of_a_length_are_the_same_beside_other_lengths(corpus):
    settings = NeedleTaskSettings(trials=8, needles=2, seed=1)
    (alone,) = statements(inputs(corpus, [64], settings))
    *_, beside = statements(inputs(corpus, [16, 32, 64], settings))
    assert alone.fingerprint == beside.fingerprint
    for other in (replace(settings, seed=2), replace(settings, needles=3)):
        assert statements(inputs(corpus, [64], other))[0].fingerprint != alone.fingerprint


@torch.no_grad()
@pytest.mark.parametrize("reads", [40, 64])
def test_cropped_statements_are_asked_with_as_many_tokens_as_are_read(model, corpus, reads):
    """An end-of-text token and the last of the prompt, in a plain loop."""
    end, settings = corpus.end_of_text, NeedleTaskSettings(trials=8, needles=2, seed=1)
    (task,) = statements(inputs(corpus, [64], settings))
    seen = []
    handle = model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.context = reads
    result = values_of(task, model, 130)  # two trials, a batch
    handle.remove()
    trials, _ = task.batches.args
    cropped = [[end, *prompt[64 - reads + 1 :]] for prompt in trials.prompts]
    assert torch.cat(seen).tolist() == cropped
    hits = [
        float(model(torch.tensor([prompt]))[0, -1].argmax() == answer)
        for prompt, answer in zip(cropped, trials.answers, strict=True)
    ]
    assert result == [(i, "statements", hit) for i, hit in enumerate(hits)]
    depths = [round(1 - depth / 64, 4) for depth in trials.depths.tolist()]
    assert task.trials.depth.tolist() == depths


def test_a_task_of_prompts_is_scored_and_cropped(model, corpus, monkeypatch):
    """The first token and room for the answer of two tokens stay."""
    asked, read = [], []
    monkeypatch.setattr(
        "trainer.evaluation.task.answers",
        lambda *given: read.extend(given[2]) or answers(*given),
    )

    def score(text, answers):
        asked.append(tuple(answers))
        return 0.25

    def prompts(length):
        tokens = (0, *range(1, length - 2))
        return [Prompt(tokens, (str(i),), 2, depth=0.5, label="a") for i in range(3)]

    asks = PromptTask("quarter", corpus.tokenizer, prompts, score)
    task = asks.at(64)
    assert asks.at(64).fingerprint == task.fingerprint != asks.at(32).fingerprint
    model.context = 32
    values = values_of(task, model, 4096)
    assert sorted(values) == [(i, "quarter", 0.25) for i in range(3)]
    assert task.trials.to_dict("list") == {
        "text": [0, 1, 2], "depth": [0.5] * 3, "label": ["a"] * 3,
    }  # fmt: skip
    assert asked == [("0",), ("1",), ("2",)]
    assert [[*prompt.tokens] for prompt in read] == [[0, *range(33, 62)]] * 3


@pytest.mark.parametrize(
    ("context", "tokens"),
    [(12, range(10)), (11, [0, *range(2, 10)]), (5, [0, 8, 9]), (4, [0, 9]), (3, [0]), (2, [0])],
)
def test_a_prompt_keeps_its_first_token_where_the_answer_takes_the_room(
    monkeypatch, context, tokens
):
    read = []

    def answered(model, tokenizer, prompts, *_):
        read.extend([*prompt.tokens] for prompt in prompts)
        return [""] * len(prompts)

    monkeypatch.setattr("trainer.evaluation.task.answers", answered)
    task = PromptTask("mine", None, lambda _: [Prompt(range(10), (), 2)], lambda *_: 0.0)
    values_of(task.at(12), SimpleNamespace(context=context), 100)
    assert read == [[*tokens]]


def test_a_score_that_is_mended_is_another_task(corpus, tmp_path):
    def asked(value):
        (tmp_path / "mine.py").write_text(f"score = lambda text, answers: {value}")
        score = runpy.run_path(str(tmp_path / "mine.py"))["score"]
        tokenizer = corpus.tokenizer
        task = PromptTask("mine", tokenizer, lambda length: [Prompt([1], ("a",), 1)], score)
        return task.at(8).fingerprint

    assert asked(0.0) == asked(0.0) != asked(1.0)


def test_what_ends_or_begins_an_answer_is_passed_on_and_part_of_the_task(monkeypatch):
    given = []

    def answered(model, tokenizer, prompts, batch_tokens, *rest):
        given.append((batch_tokens, *rest))
        return [""] * len(prompts)

    def stop(text, answers):
        return True

    monkeypatch.setattr("trainer.evaluation.task.answers", answered)
    asks = PromptTask("mine", None, lambda _: [Prompt([1], ("a",), 1)], lambda *_: 0.0)
    others = [replace(asks, **key) for key in ({}, {"stop": stop}, {"never_first": (3,)})]
    tasks = [each.at(8) for each in others]
    assert len({task.fingerprint for task in tasks}) == 3
    for task in tasks:
        values_of(task, SimpleNamespace(context=None), 100)
    assert given == [(100, None, ()), (100, stop, ()), (100, None, (3,))]


@pytest.mark.parametrize(
    ("named", "numbers"),
    [
        ([7, 7, 3, None, 3, None], (0, 0, 1, 2, 1, 3)),
        ([7, 3, None, None], (0, 1, 2, 3)),
        ([], ()),
    ],
)
def test_groups_are_counted_in_the_order_of_prompts(corpus, named, numbers):
    def prompts(length):
        return [Prompt((0, i), (), 2, group=group) for i, group in enumerate(named)]

    task = PromptTask("grouped", corpus.tokenizer, prompts, None)
    assert tuple(task.at(64).trials.text) == numbers


def test_what_is_read_begins_with_the_token_that_the_tokenizer_puts_before_texts(corpus):
    tokenizer = Tokenizer.from_str(corpus.tokenizer.to_str())
    tokenizer.add_special_tokens(["<s>"])
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", first)]
    )
    (part,) = corpus.parts
    special = replace(part.special, tokenizer=tokenizer, first=first)
    other = replace(corpus, parts=(replace(part, special=special),))
    text = HeldOut(other, corpus.test, (first,), 0.5)
    config = EvaluationConfig(tasks=["perplexity", "statements"], windows=2)
    (losses, retrieval), _ = make_tasks(text, config, [32], 32)
    assert losses.batches.args[1] == first
    assert (retrieval.batches.args[0].prompts[:, 0] == first).all()


@pytest.mark.parametrize("share", [0.0, None])
def test_statements_are_left_out_with_a_note_where_training_text_had_none(corpus, share):
    asked = TaskInputs(HeldOut(corpus, corpus.test, (), share), [64], 32, 99, NeedleTaskSettings())
    assert statements(asked) == []
    assert "'statements' was left out" in asked.notes[0]


def test_a_loss_is_kept_under_all_that_is_read_and_nan_if_it_is_not_finite(corpus, monkeypatch):
    text = HeldOut(corpus, corpus.test, (), None)
    asked = [TaskInputs(text, [24], last, 99, 3) for last in (24, 5)]
    (all_tokens,), (few,) = map(perplexity, asked)
    assert all_tokens.fingerprint != few.fingerprint
    (part,) = corpus.parts
    other = replace(corpus, parts=(replace(part, special=replace(part.special, first=7)),))
    (begun,) = perplexity(replace(asked[0], text=replace(text, corpus=other)))
    assert begun.fingerprint != all_tokens.fingerprint
    assert all_tokens.metric == "loss"
    losses = torch.tensor([[1.0] * 24, [1.0] * 23 + [torch.inf]])
    monkeypatch.setattr("trainer.evaluation.perplexity.token_losses", lambda *_, **__: losses)
    read, *_ = few.batches(SimpleNamespace(context=None), 100)
    assert str(read()) == "[(0, 'perplexity', 1.0), (1, 'perplexity', nan)]"


@pytest.mark.parametrize(("context", "tokens"), [(20, 20), (99, 64), (None, 64)])
def test_losses_are_of_as_many_tokens_as_the_model_reads(
    model, corpus, monkeypatch, context, tokens
):
    (task,) = perplexity(TaskInputs(HeldOut(corpus, corpus.test, (), None), [64], 32, 99, 3))
    sizes, losses = set(), model.token_losses

    def token_losses(ids, labels):
        sizes.add(ids.shape[1])
        return losses(ids, labels)

    monkeypatch.setattr(model, "token_losses", token_losses)
    model.context = context
    values_of(task, model, 4096)
    assert sizes == {tokens}


@pytest.mark.parametrize(
    ("make", "settings"), [(statements, NeedleTaskSettings(needles=2)), (perplexity, 3)]
)
def test_the_split_that_is_named_is_read(corpus, make, settings):
    keys = set()
    for split in (corpus.validation, corpus.test):
        (task,) = make(TaskInputs(HeldOut(corpus, split, (), 1.0), [64], 32, 99, settings))
        keys.add(task.fingerprint)
    assert len(keys) == 2


def test_one_limit_holds_for_every_task(corpus):
    text = HeldOut(corpus, corpus.test, (corpus.end_of_text,), 0.5)
    asked = {"tasks": ["perplexity", "statements", "standard"], "limit": 3}
    config = EvaluationConfig(needles=NeedleTaskSettings(needles=2), **asked)
    tasks, _ = make_tasks(text, config, [200], 32)
    assert [len(task.trials) for task in tasks] == [3, 3, 3]
    assert tasks[2].trials.depth.tolist() == [0.0, 0.5, 1.0]


def test_tasks_without_any_trial_are_refused(corpus, tmp_path):
    text = HeldOut(corpus, corpus.test, (corpus.end_of_text,), None)
    problems = tmp_path / "math.jsonl"
    problems.touch()
    config = EvaluationConfig(tasks=["many_shot"], many_shot=ManyShotSettings(str(problems)))
    with pytest.raises(UserError, match=r"^evaluation\.tasks: none has a trial$"):
        make_tasks(text, config, [64], 32)


@pytest.mark.parametrize(
    ("total", "count", "numbers"),
    [(6, 4, [0, 2, 3, 5]), (3, 9, [0, 1, 2]), (5, 1, [0]), (0, 3, [])],
)
def test_a_limit_takes_trials_from_the_first_to_the_last(total, count, numbers):
    assert evenly_spaced(total, count) == numbers


def test_results_of_one_name_are_not_put_together(corpus, monkeypatch):
    """Such as those of a benchmark's questions here and in lm-eval."""
    text = HeldOut(corpus, corpus.test, (corpus.end_of_text,), None)

    def losses(inputs):
        trials = pd.DataFrame(index=range(2))
        return [Task({"perplexity": "Mine"}, length, "", trials, None) for length in inputs.lengths]

    monkeypatch.setitem(TASKS, "mine", TaskKind(losses, None))
    config = EvaluationConfig(tasks=["perplexity", "mine"], windows=2)
    with pytest.raises(UserError, match="two tasks have results of the name 'perplexity'"):
        make_tasks(text, config, [32, 64], 32)
    for name in config.tasks:
        assert len(make_tasks(text, replace(config, tasks=[name]), [32, 64], 32)[0]) == 2


def test_a_prompt_fits_its_length_together_with_its_answer():
    task = PromptTask("mine", None, lambda length: [Prompt([1, 2, 3], ("7",), 2)], lambda *_: 1.0)
    assert len(task.at(5).trials) == 1
    with pytest.raises(UserError, match="at least 5 tokens for mine"):
        task.at(4)
