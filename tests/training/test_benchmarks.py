"""Benchmarks in training: the right scores at the right steps, and no trace in the run."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.comparing import (
    assert_same_tensors,
    checkpoint_of,
    rows_of,
)
from tests.evaluation.conftest import task_inputs, values_of
from tests.training.test_distributed import launch, variant
from trainer.checkpoint import read_state
from trainer.config import MultipleChoiceSettings
from trainer.data.corpus import prepare_corpus
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.multiple_choice import multiple_choice_tasks
from trainer.runs.models import read_run
from trainer.runs.parsing import merged

pytestmark = pytest.mark.slow

TASK, QUESTIONS = "sentences", 7


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Configuration of benchmarks: a file of questions in the cache, and tasks with lengths."""
    directory = tmp_path_factory.mktemp("cache") / "benchmarks"
    directory.mkdir()
    rows = [
        {
            "doc_id": number,
            "idx": index,
            "label": number % 2,
            "request": {"context": f"Sentence {number} of a text that is", "continuation": text},
        }
        for number in range(QUESTIONS)
        for index, text in enumerate((f" {number * number} long.", " not."))
    ]
    with gzip.open(directory / f"{TASK}.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    configuration = {
        "benchmarks": {
            "every": 4,
            "tasks": ["perplexity", "statements", "multiple_choice"],
            "lengths": [4, 8],
            "limit": 5,
        },
        "evaluation": {"enabled": False, "multiple_choice": {"tasks": [TASK]}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNROPE_CACHE", str(directory.parent))
        yield configuration


def milestones(config, step=None):
    return read_state(checkpoint_of(config, step))["benchmarks"]


def without_benchmarks(rows):
    return [{k: v for k, v in row.items() if not k.startswith("benchmark/")} for row in rows]


@pytest.mark.parametrize(
    "changes",
    [{}, {"trainer": {"precision": "bf16", "micro_batch_size": 2, "compile": True}}],
    ids=["fp32", "bf16 accumulation compiled"],
)
@pytest.mark.usefixtures("graphs_as_they_are")
def test_a_run_with_benchmarks_is_bitwise_the_run_without(run, asked, changes):
    plain, _ = run("plain", **changes)
    watched, _ = run("watched", **merged(changes, asked))
    assert_same_tensors(checkpoint_of(plain), checkpoint_of(watched))
    assert without_benchmarks(rows_of(watched)) == rows_of(plain)
    history = milestones(watched)
    assert [(m["step"], m["tokens"], m["dropped"]) for m in history] == [
        (4, 4 * 128, False),
        (6, 6 * 128, False),
        (6, 6 * 128, True),
        (8, 8 * 128, True),
        (12, 12 * 128, True),
    ]
    assert set(history[0]["scores"]) == {
        f"{task}/{n}x"
        for task in ("perplexity", "statements", f"{TASK}_acc", f"{TASK}_acc_norm")
        for n in (4, 8)
    }


def test_scores_are_those_of_the_saved_model(run, asked, tmp_path):
    config, _ = run(**asked)
    last = milestones(config)[-1]["scores"]
    corpus = prepare_corpus(config.data, config.tokenizer)
    model = read_run(checkpoint_of(config)).decoder().eval()
    encoder = Encoder(corpus.tokenizer, (corpus.first_token,), corpus.first_token)
    for task in multiple_choice_tasks(
        task_inputs(MultipleChoiceSettings(tasks=[TASK]), encoder, lengths=[128], limit=5)
    ):
        values = values_of(task, model, 4096)
        for key in task.titles:
            scores = [value for _, name, value in values if name == key]
            assert last[f"{key}/4x"] == pytest.approx(sum(scores) / 5)
    assert last["perplexity/4x"] == pytest.approx(expected_perplexity(model, corpus), rel=1e-4)
    rows = {row["step"]: row for row in rows_of(config)}
    with_them = {step for step, row in rows.items() if f"benchmark/{TASK}_acc/4x" in row}
    assert with_them == {4, 6, 8, 12}
    for key, value in last.items():
        assert rows[12][f"benchmark/{key}"] == value


def expected_perplexity(model, corpus):
    """exp of the mean loss on the last 32 of 128 tokens, in 5 windows that end at fifths of the
    validation text and go on at its end."""
    losses, text = [], corpus.validation.parts[0][1]
    for end in (len(text) * i // 5 for i in range(1, 6)):
        window = [text[i % len(text)] for i in range(end - 128, end)]
        ids = torch.tensor(np.array(window, dtype=np.int64))
        ids = torch.cat([torch.tensor([corpus.end_of_text]), ids])
        logits = model(ids[None, :-1])[0]
        losses.append(F.cross_entropy(logits[-32:], ids[-32:]).item())
    return math.exp(sum(losses) / 5)


def test_ranks_share_the_questions_and_have_the_scores_of_one(base, tmp_path, asked, run):
    """Even if weights are sharded and ranks need different numbers of passes."""
    alone = milestones(run("one", **asked)[0])
    jobs = {
        name: (merged(variant(name, "fp32", trainer={"micro_batch_size": 1}), asked), None, None)
        for name in ("ddp", "fsdp2")
    }
    jobs["plain"] = (variant("fsdp2", "fp32", trainer={"micro_batch_size": 1}), None, None)
    runs = launch(base, tmp_path, 2, jobs)
    assert_same_tensors(checkpoint_of(runs["plain"]), checkpoint_of(runs["fsdp2"]))
    for name in ("ddp", "fsdp2"):
        shared = milestones(runs[name])
        assert [m["step"] for m in shared] == [m["step"] for m in alone]
        for key, value in alone[0]["scores"].items():
            assert shared[0]["scores"][key] == pytest.approx(value, rel=1e-3), key
