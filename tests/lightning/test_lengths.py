"""Measuring lengths in training: the right numbers at the right steps, and no trace in the run."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.lightning.test_distributed import launch, variant
from tests.lightning.test_run import (
    assert_resumes,
    assert_same_tensors,
    checkpoint_of,
    rows_of,
)
from trainer.checkpoint import load_decoder, read_state
from trainer.common.fields import adapter
from trainer.common.ranks import Ranks
from trainer.config import BenchmarksConfig
from trainer.data.corpus import prepare_corpus
from trainer.evaluation.results import Reach
from trainer.lightning.module import evaluating
from trainer.lightning.monitors import Benchmarks, Lengths
from trainer.model.backends import BACKENDS, cudnn_attention
from trainer.runs.parsing import merged

pytestmark = pytest.mark.slow

LENGTHS = {"lengths_every": 4, "lengths": [1, 2, 4]}
MONITORED = {"monitor": LENGTHS}


def without_monitors(rows):
    return [{k: v for k, v in row.items() if not k.startswith("length/")} for row in rows]


def history_of(config, step=None):
    return read_state(checkpoint_of(config, step))["lengths"]


def reaches(config):
    return [*adapter(tuple[Reach, ...]).validate_python(history_of(config))]


def captured_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer": {"precision": "bf16", "micro_batch_size": 2}, "optimizer": {"name": "muon"}},
        {"trainer": {"compile": True}},
    ],
    ids=["fp32", "bf16 accumulation muon", "compiled"],
)
@pytest.mark.usefixtures("graphs_as_they_are")
def test_a_monitored_run_is_bitwise_the_run_without(run, changes):
    graphs = [captured_graphs()]
    plain, _ = run("plain", **changes)
    graphs.append(captured_graphs())
    monitored, _ = run("monitored", **merged(changes, MONITORED))
    graphs.append(captured_graphs())
    assert_same_tensors(checkpoint_of(plain), checkpoint_of(monitored))
    assert without_monitors(rows_of(monitored)) == rows_of(plain)
    assert len(history_of(monitored)) == 5
    # Every run captures its own; what measures is not compiled.
    of_plain, of_monitored = np.diff(graphs)
    assert of_monitored == of_plain
    assert (of_plain > 0) == ("compile" in changes.get("trainer", {}))


def test_a_monitored_sharded_run_is_bitwise_the_run_without(base, tmp_path):
    changes = variant("fsdp2", "bf16", trainer={"micro_batch_size": 1})
    jobs = {"plain": (changes, None, None), "monitored": (merged(changes, MONITORED), None, None)}
    runs = launch(base, tmp_path, 2, jobs)
    assert_same_tensors(checkpoint_of(runs["plain"]), checkpoint_of(runs["monitored"]))
    assert without_monitors(rows_of(runs["monitored"])) == rows_of(runs["plain"])
    assert len(history_of(runs["monitored"])) == 5


def test_a_resumed_run_has_the_same_history_and_rows(run, tmp_path):
    whole, _ = run("whole", **MONITORED)
    assert_resumes(run, whole, (3, 6, 9), tmp_path, **MONITORED)  # before, at and after the drop


def test_both_sides_of_the_drop_and_the_end_are_measured(run):
    config, _ = run(monitor={**LENGTHS, "lengths_every": 5})
    history = reaches(config)
    assert [(reach.step, reach.dropped) for reach in history] == [
        (5, False),
        (6, False),
        (6, True),
        (10, True),
        (12, True),
    ]
    before, after = history[1:3]
    assert before.loss != after.loss
    rows = {row["step"]: row for row in rows_of(config)}
    assert [step for step, row in rows.items() if "length/loss_4x" in row] == [6, 8, 10, 12]
    # What is measured when a step begins goes into the next row; the last measurement wins.
    for step, reach in ((6, before), (8, after), (12, history[-1])):
        for i, factor in enumerate((1, 2, 4)):
            assert rows[step][f"length/loss_{factor}x"] == reach.loss[i]
            assert rows[step][f"length/retrieval_{factor}x"] == reach.retrieval[i]


def test_all_phases_measure_at_multiples_of_the_training_length_of_the_report(run):
    config, _ = run(
        drop={"at": None},
        monitor=LENGTHS,
        phases={"short": {"steps": 4}, "long": {"steps": 4, "sequence_length": 64, "drop": {}}},
    )
    assert config.training_length == 64
    measured = [(reach.step, reach.training_length, reach.lengths) for reach in reaches(config)]
    assert measured == [(step, 64, (64, 128, 256)) for step in (4, 4, 8)]
    benchmarks = BenchmarksConfig(tasks=["perplexity"], lengths=[1, 2], every=4)
    monitor = replace(config.monitor, benchmarks=benchmarks)
    config = replace(config, monitor=monitor)
    corpus = prepare_corpus(config.data, config.tokenizer)
    assert Benchmarks(config, corpus, Ranks(0, 1, 0, 1), None, []).lengths == [64, 128]


def test_numbers_are_those_of_the_saved_model_on_validation_text(run):
    config, _ = run(monitor=LENGTHS)
    last = reaches(config)[-1]
    corpus = prepare_corpus(config.data, config.tokenizer)
    model = load_decoder(checkpoint_of(config), read_state(checkpoint_of(config)))
    lengths = Lengths(config, corpus, Ranks(0, 1, 0, 1), [])
    perplexity, statements = lengths.perplexity, lengths.statements
    assert last.lengths == (32, 64, 128)
    for i, length in enumerate(last.lengths):
        losses = []
        for window in perplexity.windows[length]:
            stream = corpus.validation.parts[0].stream
            assert any(
                np.array_equal(window, stream.windows(np.array([start]), length)[0])
                for start in range(len(stream) - length + 1)
            )
            ids = torch.tensor([corpus.end_of_text, *window])
            logits = model(ids[None, :-1])[0]
            losses.append(F.cross_entropy(logits, ids[1:], reduction="none").detach())
        mean = torch.stack(losses).mean(dim=0)
        assert last.loss[i] == pytest.approx(mean[-32:].mean().item(), rel=1e-5)
        trials = statements.trials[length]
        hits = [
            int(model(torch.tensor(prompt)[None])[0, -1].argmax()) == answer
            for prompt, answer in zip(trials.prompts, trials.answers, strict=True)
        ]
        assert last.retrieval[i] == pytest.approx(sum(hits) / 6)


@pytest.fixture
def module(tiny_decoder):
    """Stand-in for a module, as :func:`evaluating` needs it."""
    return SimpleNamespace(model=tiny_decoder(), device=torch.device("cpu"))


def test_everything_is_put_back(module):
    model = module.model.train()
    model.layers[0].mlp.eval()
    model.layers[1].self_attn.attend = BACKENDS["flex"]
    modes = [part.training for part in model.modules()]

    def draws():
        return torch.rand(3).tolist(), np.random.rand(), random.random()  # noqa: NPY002

    def look():
        with evaluating(module) as inside:
            assert not torch.is_grad_enabled()
            assert not any(part.training for part in inside.modules())
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert {block.self_attn.attend for block in inside.layers} == {BACKENDS["sdpa"]}
            return draws()

    with cudnn_attention(True):  # as in training at a fixed length
        assert look() == draws()  # drawn inside, as if never drawn
        assert torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(RuntimeError), evaluating(module):
        raise RuntimeError
    assert torch.is_grad_enabled()
    assert [part.training for part in model.modules()] == modes
    assert model.layers[1].self_attn.attend is BACKENDS["flex"]
