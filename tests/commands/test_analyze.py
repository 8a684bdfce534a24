"""The analyze command: a page about a run's model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from tests.analysis.attention_examples import cells
from tests.small_runs import trained_in
from trainer.__main__ import main
from trainer.analysis.capture import capture
from trainer.analysis.settings import kinds
from trainer.analysis.topics import TOPICS
from trainer.positional.rescaling import ntk_aware
from trainer.runs.models import find_candidate
from trainer.workflows.analyze import page_texts, use_method
from trainer.workflows.requests import AnalysisConfig, AnalysisRequest
from trainer.workflows.subjects import held_out_corpus

SHORT = ["analysis.length=48", "analysis.texts=2", "threads=1"]


@pytest.fixture(scope="module")
def rope(base, tmp_path_factory):
    changes = {"model": {"qk_norm": {"when": "never"}}, "drop": {"at": None}}
    directory = tmp_path_factory.mktemp("rope") / "run"
    trained_in(directory, base, **changes, trainer={"max_steps": 4})
    return directory


@pytest.fixture(scope="module")
def drope(finished):
    return Path(finished[0].run_dir)


def test_one_analysis_lies_in_the_run_under_its_name(rope, capsys):
    main(["analyze", f"checkpoint={rope}", "+analysis=sinks", *SHORT])
    page = rope / "analysis" / "sinks" / "report.html"
    assert f"Report: {page}" in capsys.readouterr().out
    assert "2 held-out texts of 48" in page.read_text()
    rows = pd.read_csv(page.parent / "results.csv")
    assert rows["length"].max() == 48
    assert set(rows["layer"].dropna()) == {0, 1}
    assert (page.parent / "sinks" / "sinks_keys.svg").is_file()


def effective_rank(rows):
    """exp of the entropy of the squared singular values."""
    power = np.linalg.svd(rows, compute_uv=False) ** 2
    shares = power / power.sum()
    return np.exp(-(shares * np.log(shares)).sum())


@pytest.mark.slow
def test_a_model_is_analysed_under_a_method_set_for_the_length_of_the_text(rope, tmp_path):
    """DoPE, Fig. 2: Dynamic NTK with alpha = 48 / 32. That a checkpoint itself is left as it was,
    the second page shows."""
    words = ["analyze", f"checkpoint={rope}", "+analysis=matrix_entropy", *SHORT]
    main([*words, f"output={tmp_path / 'ntk'}", "analysis.method=dynamic_ntk_alpha"])
    main([*words, f"output={tmp_path / 'plain'}"])
    candidate = find_candidate(str(rope))
    model = candidate.load("cpu").eval()
    layouts = {"plain": model.layout}
    # s = alpha n / C - (alpha - 1)
    layouts["ntk"] = model.layout.rescaled(ntk_aware, 1.5 * 1.5 - 0.5)
    request = AnalysisRequest(str(rope), analysis=AnalysisConfig("matrix_entropy", 48, 2))
    ids = page_texts(held_out_corpus(request.text, candidate), request.analysis, candidate)
    for name, layout in layouts.items():
        keys = []
        with model.using(layout):
            capture(model, ids, lambda heads, keys=keys: keys.append(heads.rotated_k))
        rows = pd.read_csv(tmp_path / name / "results.csv")
        ranks = cells(rows, "effective rank", variant="keys, as they attend")
        expected = [effective_rank(k[:, 0].flatten(0, 1).double().numpy()) for k in keys]
        np.testing.assert_allclose(ranks, expected, rtol=1e-4)


@pytest.mark.slow
def test_a_file_is_read_whole_in_place_of_held_out_text(rope, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("Sentence 7 of a text that is 49 long.\nAnd another one.")
    words = [f"checkpoint={rope}", "+analysis=matrix_entropy", f"analysis.file={file}"]
    main(["analyze", *words, f"output={tmp_path / 'page'}", "threads=1"])
    candidate = find_candidate(str(rope))
    ids = candidate.tokenizer.encode(file.read_text(), add_special_tokens=False).ids
    keys = []
    bos = held_out_corpus(None, candidate).end_of_text
    text = torch.tensor([[bos, *ids]])
    capture(candidate.load("cpu").eval(), text, lambda heads: keys.append(heads.rotated_k))
    rows = pd.read_csv(tmp_path / "page" / "results.csv")
    ranks = cells(rows, "effective rank", variant="keys, as they attend")
    expected = [effective_rank(k[0, 0].double().numpy()) for k in keys]
    np.testing.assert_allclose(ranks, expected, rtol=1e-4)


def test_a_method_changes_the_layers_that_an_analysis_names(tiny_decoder):
    model = tiny_decoder(windows=[16, None])
    trained = model.layout
    candidate = SimpleNamespace(name="swa", layout=trained, computed_by=None)
    for layers, slowed in ((None, [1]), ([0], [0]), ("all", [0, 1])):
        use_method(model, candidate, "pi", 64, layers)
        for index, (new, old) in enumerate(zip(model.layout.layers, trained.layers, strict=True)):
            by = 2 if index in slowed else 1
            expected = [f / by for f in old.spectra[0].inv_freq]
            assert new.spectra[0].inv_freq == pytest.approx(expected)


@pytest.mark.slow
def test_two_models_are_on_one_page(rope, drope, tmp_path):
    """A drop beside its own checkpoint from before it, and offset features of two models."""
    main(["analyze", f"checkpoint={drope}", "+analysis=drop", f"output={tmp_path / 'a'}", *SHORT])
    rows = pd.read_csv(tmp_path / "a" / "results.csv")
    assert {"DroPE", "RoPE (before-drop)"} < set(rows["model"])
    words = [f"compare={drope / 'checkpoints' / 'before-drop'}", f"output={tmp_path / 'b'}"]
    main(["analyze", f"checkpoint={rope}", "+analysis=offset_features", *words, *SHORT])
    rows = pd.read_csv(tmp_path / "b" / "results.csv")
    assert set(rows["topic"]) == {"offset_features", "offset_changes"}
    assert set(rows["length"][rows["topic"] == "offset_changes"]) == {32}


def test_every_topic_can_be_asked_for():
    assert kinds() == ("all", *TOPICS, "drop")
