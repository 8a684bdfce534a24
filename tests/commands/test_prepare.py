"""``prepare`` and ``inspect`` from their words to what they print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from trainer.__main__ import main
from trainer.data.certificate import as_text
from trainer.data.corpus import prepare_corpus
from trainer.data.dataset import TrainingSamples


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"Document {i} says something. " * 4}) + "\n" for i in range(300)]
    for part in range(3):
        Path(f"{part}.jsonl").write_text("".join(lines[part::3]))
    return tmp_path


WORDS = ["data=files", "data.files=['*.jsonl']", "tokenizer.vocab_size=300", "data.cache_dir=cache"]


def said(capsys, *words):
    main(list(words))
    return capsys.readouterr().out


def error_of(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_text_is_prepared_once_and_verified(capsys, place):
    first = said(capsys, "prepare", *WORDS)
    assert re.match(r"Prepared \*\.jsonl: tokens train [\d,]+, .*; 300 documents; in cache/", first)
    assert said(capsys, "prepare", *WORDS).startswith("Nothing to do:")
    assert said(capsys, "prepare", *WORDS, "verify=true").startswith("Every byte is as it was")
    (shard,) = place.glob("cache/corpora/*/train-00000-0000.bin")
    content = bytearray(shard.read_bytes())
    content[7] ^= 4
    shard.write_bytes(content)
    error = error_of(capsys, "prepare", *WORDS, "verify=true")
    assert "train-00000-0000.bin is not what was written" in error


def test_parts_are_prepared_apart(capsys, monkeypatch):
    monkeypatch.setattr("trainer.data.plan.UNIT", 1)
    assert "the last part that is finishes" in said(capsys, "prepare", *WORDS, "prepare.part=2/2")
    assert said(capsys, "prepare", *WORDS, "prepare.part=1/2").startswith("Prepared")


@pytest.mark.parametrize("part", ["0/2", "3/2", "2", "a/b"])
def test_a_part_that_is_none_is_named(capsys, part):
    error = error_of(capsys, "prepare", *WORDS, f"prepare.part={part}")
    assert "prepare.part: expected a part and how many there are, such as 3/16" in error


def test_text_by_a_source_of_the_users_own(capsys, place):
    Path("mine.py").write_text(
        "from trainer.data.sources import text_source\n\n\n"
        "@text_source\n"
        "def poems(count=200):\n"
        '    return (f"Poem {i} is about the number {i * i}. " * 3 for i in range(count))\n'
    )
    words = ["plugins=[mine.py]", "data.source=poems", "data.cache_dir=cache"]
    words.append("tokenizer.vocab_size=300")
    assert "Prepared poems: " in said(capsys, "prepare", *words)
    assert "100 documents" in said(capsys, "prepare", *words, "+data.arguments.count=100")
    assert "does not take them" in error_of(capsys, "prepare", *words, "+data.arguments.many=1")


def test_every_experiment_on_the_hub_says_what_it_needs_without_a_network(capsys, monkeypatch):
    monkeypatch.setenv("UNROPE_CACHE", "cache")
    monkeypatch.setattr("sys.argv", ["trainer/__main__.py", "data=c4"])
    error = error_of(capsys, "data=c4")
    assert "data: allenai/c4 (en), about 156 billion tokens" in " ".join(error.split())
    assert "python -m trainer prepare data=c4" in " ".join(error.split())


def test_inspect_shows_the_samples_of_a_step(capsys, run):
    config, trained = run(trainer={"max_steps": 4}, drop={"at": 2})
    checkpoint = trained.checkpoint.parent.parent
    shown = said(capsys, "inspect", f"checkpoint={checkpoint}", "step=3", "samples=2")
    samples = TrainingSamples(prepare_corpus(config.data, config.tokenizer), config.data, 0)
    hashes = samples.hashes(range(8, 12))
    header, _, first, text, *_ = shown.splitlines()
    assert header.endswith(f"certificate {as_text(int(hashes.sum()))}")
    assert "samples 8 to 11 of 32 tokens" in header
    assert first.startswith("Sample 8: block ")
    assert f"hash {as_text(int(hashes[0]))}" in first
    expected = samples.corpus.tokenizer.decode(samples.targets(np.array([8]))[0][0][:5].tolist())
    assert text.replace(" ¶ ", "").startswith(expected.replace("<|endoftext|>", ""))
    state = json.loads((trained.checkpoint / "state.json").read_text())
    whole = samples.hashes(range(16))
    assert state["certificate"]["samples"] == as_text(int(whole.sum()))
    assert "step: the run has 4 steps" in error_of(
        capsys, "inspect", f"checkpoint={checkpoint}", "step=5"
    )
    assert "checkpoint: give a run directory" in error_of(capsys, "inspect")


def test_a_run_does_not_go_on_with_text_that_changed_unnoticed(run):
    """Same names and sizes, other tokens: the last step of the checkpoint is read again."""
    from trainer.errors import UserError
    from trainer.training.run import train

    config, _ = run(trainer={"max_steps": 4}, drop={"at": 2}, data={"revision": "mine"})
    corpus = prepare_corpus(config.data, config.tokenizer)
    for shard in corpus.parts[0].text.directory.glob("train-*.bin"):
        shard.write_bytes(bytes(reversed(shard.read_bytes())))
    longer = type(config)(**{**vars(config), "trainer": _longer(config.trainer)})
    with pytest.raises(UserError, match=r"the last step .* read samples 12 to 15 .* verify=true"):
        train(longer, prepare_corpus(config.data, config.tokenizer))


def _longer(trainer):
    from dataclasses import replace

    return replace(trainer, max_steps=6)
