"""``prepare`` and ``inspect`` from their words to what they print."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainer.__main__ import main
from trainer.common.errors import UserError
from trainer.common.processes import cores
from trainer.data.corpus import prepare_corpus
from trainer.data.dataset import TrainingSamples
from trainer.data.order import as_text
from trainer.data.preparing import prepare_command
from trainer.runs.checkpoints import digests
from trainer.runs.models import find_candidate
from trainer.runs.phases import phase_at, phases_of
from trainer.training.run import train
from trainer.workflows import prepare as verifying
from trainer.workflows.inspect_step import inspect_step
from trainer.workflows.requests import InspectionRequest
from trainer.workflows.subjects import held_out_corpus
from trainer.workflows.training_text import open_corpus


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


def test_the_text_is_verified_by_as_many_threads_as_asked_for(capsys, monkeypatch):
    threads = []
    verify = verifying.verify
    record = lambda text, count: threads.append(count) or verify(text, count)  # noqa: E731
    monkeypatch.setattr(verifying, "verify", record)
    for words in ([], ["verify=true", "prepare.workers=3"], ["verify=true"]):
        said(capsys, "prepare", *WORDS, *words)
    assert threads == [3, cores()]


def test_parts_are_prepared_apart(capsys, monkeypatch):
    monkeypatch.setattr("trainer.data.plan.UNIT", 1)
    assert "the last part that is finishes" in said(capsys, "prepare", *WORDS, "prepare.part=2/2")
    assert said(capsys, "prepare", *WORDS, "prepare.part=1/2").startswith("Prepared")


def test_parts_of_two_states_of_a_source_are_not_mixed(capsys, monkeypatch):
    monkeypatch.setattr("trainer.data.plan.UNIT", 1)
    said(capsys, "prepare", *WORDS, "prepare.part=2/2")
    with Path("0.jsonl").open("a") as file:
        file.write(json.dumps({"text": "One more."}) + "\n")
    error = " ".join(error_of(capsys, "prepare", *WORDS, "prepare.part=1/2").split())
    assert "begun when it had other files or sizes; bring those back, or remove" in error


def test_parts_of_a_mixture_have_the_tokenizer_of_its_first_text(capsys, monkeypatch, place):
    """Known from the plan on: no part waits for others."""
    monkeypatch.setattr("trainer.data.plan.UNIT", 1)
    mixture = [f"+data.mixture.{name}.files=['{name}.jsonl','2.jsonl']" for name in ("0", "1")]
    words = ["data=files", *WORDS[2:], *mixture]
    for part in ("1/2", "2/2"):
        said(capsys, "prepare", *words, f"prepare.part={part}")
    assert said(capsys, "prepare", *words).count("Nothing to do") == 2
    first, second = place.glob("cache/corpora/*/tokenizer.json")
    assert first.read_text() == second.read_text()


def test_a_mixture_names_the_text_that_is_wrong(capsys):
    words = ["data=files", "+data.mixture.a.files=['0.jsonl']", *WORDS[2:]]
    error = error_of(capsys, "prepare", *words, "+data.mixture.b.files=[gone.jsonl]")
    assert "data.mixture.b.files: there is no file 'gone.jsonl'" in error
    error = error_of(capsys, "prepare", *words, "+data.mixture.b.weight=0.00001")
    assert "data.mixture.b.weight: 1e-05 is less than one of 10,000 samples" in error


@pytest.mark.parametrize(
    ("given", "advised"),
    [
        (["prepare", "data=c4", "verify=true"], "prepare data=c4"),
        (["slurm", "prepare", "data=c4", "slurm.prepare=3", "--submit"], "prepare data=c4"),
        (["train", "+experiment=x", "seed=1"], "prepare +experiment=x seed=1"),
        (["inspect", "checkpoint=runs/x"], "prepare +experiment=NAME"),
    ],
)
def test_the_command_that_prepares_is_one_that_works(monkeypatch, given, advised):
    monkeypatch.setattr("sys.argv", ["trainer/__main__.py", *given])
    assert prepare_command() == f"python -m trainer {advised}"


def test_a_neighbour_that_is_damaged_is_no_matter(capsys, monkeypatch, place):
    monkeypatch.setenv("UNROPE_CACHE", "cache")
    for name, manifest in {"a": "broken", "b": '{"format": 99}', "c": '{"format": 2}'}.items():
        (place / "cache/corpora" / name).mkdir(parents=True)
        (place / "cache/corpora" / name / "manifest.json").write_text(manifest)
    monkeypatch.setattr("sys.argv", ["trainer/__main__.py", "data=c4"])
    error = " ".join(error_of(capsys, "data=c4").split())
    assert "data: allenai/c4 (en), about 156 billion tokens" in error
    assert "has not been prepared" in error
    assert "python -m trainer prepare data=c4" in error


def test_what_is_stopped_leaves_nothing_temporary(capsys, monkeypatch, place):
    from trainer.data import shards

    original = shards.ShardWriter.add

    def add(self, encoded):
        original(self, encoded)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(shards.ShardWriter, "add", add)
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", *WORDS])
    assert stopped.value.code == 85
    assert "The same command goes on" in capsys.readouterr().err
    assert not list(place.glob("cache/corpora/*/.*.tmp"))
    monkeypatch.setattr(shards.ShardWriter, "add", original)
    assert said(capsys, "prepare", *WORDS).startswith("Prepared")


def test_a_part_beyond_the_last_is_refused(capsys):
    error = error_of(capsys, "prepare", *WORDS, "prepare.part=3/2")
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
    words = "inspect", f"checkpoint={checkpoint}", "step=4", "characters=999"
    header, *rest = said(capsys, *words, "samples=4").split("\nSample ")
    assert "samples 12 to 15 of 32 tokens" in header
    assert said(capsys, *words, "samples=9").split("\nSample ") == [header, *rest]  # the whole step
    for shown, (row,) in zip(rest, samples.targets(np.arange(12, 16))[0][:, None], strict=True):
        documents = [[]]
        for token in row.tolist():
            documents[-1].append(token)
            documents += [[]] * (token == samples.corpus.end_of_text)
        text = " ¶ ".join(map(samples.corpus.tokenizer.decode, documents))
        assert shown.partition("\n")[2].strip() == text.strip()
    assert "step: the run has 4 steps" in error_of(
        capsys, "inspect", f"checkpoint={checkpoint}", "step=5"
    )
    assert "checkpoint: give a run directory" in error_of(capsys, "inspect")
    (trained.checkpoint / "state.json").write_text(json.dumps({**state, "data": None}))
    (trained.checkpoint / "manifest.json").write_text(json.dumps(digests(trained.checkpoint)))
    refused = error_of(capsys, "inspect", f"checkpoint={checkpoint}")
    assert "checkpoint: it was trained on other text" in refused
    del state["data"]
    (trained.checkpoint / "state.json").write_text(json.dumps(state))
    (trained.checkpoint / "manifest.json").write_text(json.dumps(digests(trained.checkpoint)))
    assert error_of(capsys, "inspect", f"checkpoint={checkpoint}") == refused


@pytest.mark.parametrize("mixed", [False, True])
def test_a_run_goes_on_with_the_text_it_has_read(run, place, mixed):
    """Also where files have come since, or the source is gone."""
    data = {"source": "files", "files": [str(place / "*.jsonl")], "cache_dir": str(place / "cache")}
    if mixed:
        texts = {name: {"files": [str(place / f"{name}.jsonl")]} for name in ("0", "1")}
        data |= {"mixture": texts, "packing": "best_fit", "document_mask": True}
    config, trained = run(f"texts {mixed}", trainer={"max_steps": 4}, drop={"at": 2}, data=data)
    read = open_corpus(config)
    with Path("0.jsonl").open("a") as file:
        file.write(json.dumps({"text": "One more."}) + "\n")
    candidate = find_candidate(str(trained.checkpoint.parent.parent))
    for corpus in (open_corpus(config), held_out_corpus(None, candidate)):
        assert corpus.fingerprint == read.fingerprint
    elsewhere = replace(config, run_dir=str(place / "another"))
    with pytest.raises(UserError, match=r"has other files or sizes .* data\.prepared= takes that"):
        open_corpus(elsewhere, alone=False)
    assert open_corpus(elsewhere).fingerprint != read.fingerprint
    for unheard in (["../../evil"], ["f" * 16], [7], "text", None):
        found = prepare_corpus(config.data, config.tokenizer, wanted=unheard)
        assert found.fingerprint != read.fingerprint


def test_a_run_does_not_go_on_with_text_that_changed_unnoticed(run):
    """Same names and sizes, other tokens: the last step of the checkpoint is read again."""
    config, _ = run(trainer={"max_steps": 4}, drop={"at": 2}, data={"revision": "mine"})
    corpus = prepare_corpus(config.data, config.tokenizer)
    for shard in corpus.parts[0].text.directory.glob("train-*.bin"):
        shard.write_bytes(np.fromfile(shard, "<u2")[::-1].tobytes())
    longer = replace(config, trainer=replace(config.trainer, max_steps=6))
    with pytest.raises(UserError, match=r"the last step .* read samples 12 to 15 .* verify=true"):
        train(longer, prepare_corpus(config.data, config.tokenizer))


def test_every_step_of_a_run_with_phases_is_shown_as_its_phase_read_it(run):
    b = {"steps": 2, "sequence_length": 64, "batch_size": 2, "drop": {}}
    config, trained = run(phases={"a": {"steps": 2}, "b": b}, drop={"at": None, "at_tokens": None})
    for step in range(4):
        phase = phase_at(phases_of(config), step)
        first, size = phase.first_sample(step), phase.config.trainer.batch_size
        request = InspectionRequest(str(trained.checkpoint.parent.parent), step=step + 1, samples=1)
        header = next(inspect_step(request))
        length = phase.config.data.sequence_length
        assert f"samples {first} to {first + size - 1} of {length} tokens" in header
