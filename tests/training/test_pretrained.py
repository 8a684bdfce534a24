"""Runs that begin with weights trained elsewhere, and drop their encoding before the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tests.comparing import assert_same_state, checkpoint_of, rows_of
from trainer.checkpoint import BEFORE_DROP, read_state
from trainer.common.errors import PreemptedError
from trainer.data.needles import WORDS
from trainer.data.tokenizer import train_tokenizer
from trainer.runs.directory import plain
from trainer.runs.models import read_run
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import phases_of
from trainer.training.fit import train
from trainer.workflows.text import open_corpus


@pytest.fixture(scope="module")
def published(base, tmp_path_factory):
    """A directory as transformers writes it, with a tokenizer, and the model itself."""
    directory = tmp_path_factory.mktemp("published")
    lines = Path(base["data"]["files"][0]).read_text().splitlines()
    tokenizer = train_tokenizer([json.loads(line)["text"] for line in lines], 300, WORDS)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=True,
            initializer_range=0.3,
        )
    )
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory, model


@pytest.fixture
def begin(base, published, tmp_path):
    """Train from the published weights, with changes; the configuration and the finished run."""

    def go(name="run", **changes):
        values = {
            **base,
            "run_dir": str(tmp_path / name),
            "model": {"from_pretrained": str(published[0]), "qk_norm": {"when": "after_drop"}},
            "drop": {"at": 0, "effect_sequences": 4, "schedule": {"warmup_steps": 2}},
        }
        run = parse(merged(values, changes))
        (tmp_path / name).mkdir(exist_ok=True)
        return run.config, train(run, open_corpus(run))

    return go


@torch.no_grad()
def test_the_loss_before_the_drop_is_that_of_the_published_model(begin, published):
    config, run = begin()
    corpus = open_corpus(parse(plain(config)))
    assert (
        corpus.tokenizer.to_str() == Tokenizer.from_file(f"{published[0]}/tokenizer.json").to_str()
    )
    phase = phases_of(config)[1]
    probe = torch.from_numpy(corpus.mixed(phase.data).probe(4, phase.length))
    ids, targets = probe[:, :-1], probe[:, 1:]
    logits = published[1](ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    effect = read_state(run)["effects"]["recalibrate"]
    assert effect["loss_before"] == pytest.approx(expected.item(), rel=1e-5)
    assert effect["step"] == 0


def test_shape_and_positions_are_the_published_ones(begin):
    config, run = begin()
    assert config.model.num_attention_heads == 4
    before = read_state(Path(config.run_dir) / "checkpoints" / BEFORE_DROP)
    assert before["layout"]["training_length"] == 64
    (spectrum,) = before["layout"]["spectra"]
    assert spectrum["inv_freq"] == pytest.approx([500.0 ** (-m / 4) for m in range(4)])
    layout = read_run(run).decoder().layout
    assert layout.training_length == 64
    assert not any(s.rotates for s in layout.spectra)
    assert all(layer.qk_norm for layer in layout.layers)


def test_checkpoints_have_the_files_about_the_published_tokens(begin, published):
    """Exports of the run write them again."""
    _, run = begin(trainer={"max_steps": 1}, drop={"schedule": {"warmup_steps": 0}})
    ids = json.loads(read_state(run)["token_files"]["config.json"])
    config = published[1].config
    assert ids == {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}


def test_without_a_drop_it_goes_on_as_it_was(begin, published):
    config, _ = begin(drop={"at": None}, model={"qk_norm": {"when": "never"}})
    model = read_run(checkpoint_of(config, 3)).decoder()
    weights = {f"model.{n}": p for n, p in model.named_parameters()}
    published = dict(published[1].named_parameters())
    assert weights.keys() == published.keys()
    # Three steps of a warm-up move weights a little, and none stays.
    for name, value in weights.items():
        assert 0 < (value - published[name]).abs().max() < 5e-3, name


def test_it_resumes_bitwise(begin):
    whole, _ = begin("whole")
    with pytest.raises(PreemptedError):
        begin("stopped", trainer={"max_time": "00:00:00"})
    resumed, _ = begin("stopped")
    assert_same_state(checkpoint_of(resumed), checkpoint_of(whole))
    assert rows_of(resumed) == rows_of(whole)


def test_benchmarks_measure_published_weights_before_the_drop(begin):
    asked = {"every": 5, "tasks": ["perplexity"], "lengths": [1], "limit": 4}
    config, _ = begin(benchmarks=asked)
    history = read_state(checkpoint_of(config))["benchmarks"]
    assert [(milestone["step"], milestone["dropped"]) for milestone in history] == [
        (0, False),
        (0, True),
        (5, True),
        (10, True),
        (12, True),
    ]
    before, after, *_ = (milestone["scores"]["perplexity/1x"] for milestone in history)
    assert after != before
    rows = rows_of(config)
    assert all(row.get("tokens_per_second", 1) > 0 for row in rows)
