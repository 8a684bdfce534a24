"""The analyze command: a page about a run's model, and one clear line for what cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.small_runs import trained_in
from trainer.__main__ import main
from trainer.analysis.capture import capture
from trainer.analysis.settings import kinds
from trainer.analysis.studies import section
from trainer.analysis.studies.catalogue import STUDIES
from trainer.analysis.studies.section import Indicator
from trainer.commands.analyze import summary
from trainer.common.errors import UserError
from trainer.positional.rescaling import ntk_aware
from trainer.runs.models import find_candidate
from trainer.workflows import analyze as analysis
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


def refused(words, capsys):
    """What the program says of a mistake."""
    with pytest.raises(SystemExit) as stop:
        main(["analyze", *words])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return [line for line in said.splitlines() if line.startswith("error:")]


def test_one_analysis_lies_in_the_run_under_its_name(rope, capsys):
    main(["analyze", f"checkpoint={rope}", "+analysis=sinks", *SHORT])
    page = rope / "analysis" / "sinks" / "report.html"
    said = capsys.readouterr().out
    assert f"Report: {page}" in said
    assert "- The first key is" in said
    assert "2 held-out texts" in page.read_text()
    numbers = json.loads((page.parent / "sinks" / "numbers.json").read_text())
    assert (numbers["edges"][-1], numbers["training_length"]) == (48, 32)
    assert np.shape(numbers["key_norm"])[:2] == (2, 1)


def test_weights_and_gates_of_the_attenuation_are_a_page_of_one_call(rope, tmp_path, capsys):
    main(
        [
            "analyze",
            f"checkpoint={rope}",
            "+analysis=attenuation",
            f"output={tmp_path}",
            *SHORT,
            "analysis.prefixes=[24]",
            'analysis.attenuation.gates=["sequence<0.97","sequence>0.97+sequence<0.9"]',
            "analysis.attenuation.choice_length=40",
            "analysis.attenuation.tokens=[16,32]",
        ]
    )
    place = tmp_path / "frequency_entropy"
    for n in (16, 32):
        rows = (place / f"attenuation_{n}.csv").read_text().splitlines()
        assert rows[0] == "tokens,gate,pairs,alpha,perplexity"
        assert len(rows) == 1 + 2 * 11
    assert (place / "frequency_entropy_lengths.csv").is_file()
    said = (tmp_path / "report.html").read_text()
    assert "pairs chosen on 40 tokens of validation text" in said
    assert "From 24 to 48 tokens SequenceFE of a query pair" in said


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("analysis.prefixes=[48]", "analysis.prefixes: expected fewer tokens than the text of 48"),
        ("analysis.attenuation.choice_length=60", "choice_length: expected at most 48, the tokens"),
        (
            "analysis.frequency_entropy.frame=32 analysis.attenuation.choice_length=16",
            "choice_length: expected at least 32 tokens, a frame of SpectrumFE",
        ),
        ("analysis.attenuation.alphas=[2]", "analysis.attenuation.alphas[0]: expected at most 1"),
        (
            'analysis.attenuation.gates=["spektrum<1"]',
            "analysis.attenuation.gates: expected an",
        ),
        ("analysis.needle.depth=2", "analysis.needle.depth: expected at most 1"),
        ("analysis.attenuation.tokens=[0]", "analysis.attenuation.tokens[0]: expected 1 or more"),
    ],
)
def test_an_impossible_attenuation_is_refused(rope, word, said, capsys):
    words = [f"checkpoint={rope}", "+analysis=frequency_entropy", *SHORT, *word.split()]
    (line,) = refused(words, capsys)
    assert said in line


def test_heads_are_shown_with_a_real_question_at_any_depth(rope, tmp_path, capsys):
    words = ["analyze", f"checkpoint={rope}", "+analysis=matrix_entropy", f"output={tmp_path}"]
    words += ["analysis.texts=1", "threads=1", "analysis.needle.kind=question"]
    main([*words, "analysis.length=700", "analysis.needle.depth=0", "analysis.needle.by=key"])
    rows = (tmp_path / "matrix_entropy" / "needle_heads.csv").read_text().splitlines()
    assert rows[0] == "layer,head,of,from_token,mean_attention"
    page = (tmp_path / "report.html").read_text()
    assert "shaded: the needle, from token 1 to" in page
    assert "highest effective rank, r = 16 of keys" in page or "effective rank of keys" in page
    with pytest.raises(SystemExit):
        main([*words, "analysis.length=48"])
    assert "analysis.needle.kind: a text of 48 tokens has no room" in capsys.readouterr().err


def effective_rank(rows):
    """exp of the entropy of the squared singular values."""
    power = np.linalg.svd(rows, compute_uv=False) ** 2
    shares = power / power.sum()
    return np.exp(-(shares * np.log(shares)).sum())


def test_a_model_is_analysed_under_a_method_set_for_the_length_of_the_text(rope, tmp_path, capsys):
    """DoPE, Fig. 2: Dynamic NTK with alpha = 48 / 32. That a checkpoint itself is left as it was,
    the second page shows."""
    words = ["analyze", f"checkpoint={rope}", "+analysis=matrix_entropy", *SHORT]
    main([*words, f"output={tmp_path / 'ntk'}", "analysis.method=dynamic_ntk_alpha"])
    assert "read with dynamic NTK (alpha), set for 48 tokens of 32" in capsys.readouterr().out
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
        record = json.loads((tmp_path / name / "matrix_entropy" / "numbers.json").read_text())
        ranks = np.array(record["heads"]["key post_ntk"]["effective rank"])
        expected = [[effective_rank(rows[:, 0].flatten(0, 1).double().numpy())] for rows in keys]
        np.testing.assert_allclose(ranks, expected, rtol=1e-4)


def test_a_file_is_read_whole_in_place_of_held_out_text(rope, tmp_path, capsys):
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
    record = json.loads((tmp_path / "page" / "matrix_entropy" / "numbers.json").read_text())
    assert record["tokens"] == len(ids) + 1
    expected = [[effective_rank(rows[0, 0].double().numpy())] for rows in keys]
    ranks = record["heads"]["key post_ntk"]["effective rank"]
    np.testing.assert_allclose(ranks, expected, rtol=1e-4)
    (said,) = refused([*words, "analysis.length=500"], capsys)
    assert f"analysis.length: {file} has {len(ids)} tokens, too few for a text of 500" in said
    file.write_text("")
    (said,) = refused(words, capsys)
    assert said == f"error: analysis.file: {file} is empty; expected a text."
    (said,) = refused([*words[:2], "analysis.file=nowhere.txt"], capsys)
    assert "analysis.file: there is no file 'nowhere.txt'." in said


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
    with pytest.raises(
        UserError, match=r"^analysis.layers: layer 7 does not exist in a model of 2"
    ):
        use_method(model, candidate, "pi", 64, [7])
    candidate.layout = trained.of_layers([0, 0])
    with pytest.raises(UserError, match=r"nothing to do for PI \(analysis.layers=all changes"):
        use_method(model, candidate, "pi", 64, None)


@pytest.mark.parametrize(("judged", "verdict"), [(True, "breaks"), (False, "not judged")])
def test_an_indicator_that_is_not_judged_says_so(judged, verdict, monkeypatch):
    indicator = Indicator("Entropy", (32, 64, 512), (1.0, 1.0, 3.0), 64, "low", "", judged=judged)
    monkeypatch.setattr(section, "glance", lambda numbers: [indicator])
    report = SimpleNamespace(name="DroPE", training_length=64, length=512, sections=[])
    _, line, _ = summary(report)
    assert line.endswith(verdict)


def test_all_leaves_out_what_does_not_apply_and_compares_with_before_the_drop(
    drope, tmp_path, monkeypatch, capsys
):
    some = {key: STUDIES[key] for key in ("synthetic", "offset_features", "matrix_entropy")}
    monkeypatch.setattr(analysis, "STUDIES", some)  # all of them take ten times as long
    main(["analyze", f"checkpoint={drope}", "+analysis=all", f"output={tmp_path}", *SHORT])
    there = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert there == {"synthetic", "matrix_entropy", "drop"}
    said = capsys.readouterr().out.splitlines()
    (start,) = [i for i, line in enumerate(said) if line.startswith("DroPE, from 32 (trained)")]
    assert len(said) - start < 12
    assert any(re.match(r"\d+ findings about: .*Before and after the drop", line) for line in said)
    assert any(line.startswith("Note: Left out: Rotary offset features") for line in said)
    assert said[-1] == f"Report: {tmp_path}/report.html"
    text = (tmp_path / "report.html").read_text()
    assert "Left out: Rotary offset features" in text
    assert "No positional encoding." in text


def test_a_drop_is_compared_with_another_model_where_one_is_named(rope, drope, tmp_path, capsys):
    words = ["+analysis=drop", f"output={tmp_path}", *SHORT]
    # Its own checkpoint from before the drop.
    main(["analyze", f"checkpoint={drope}", *words])
    assert "RoPE (before-drop)" in (tmp_path / "report.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"drop", "report.html"}
    [said] = refused([f"checkpoint={rope}", *words], capsys)
    assert "compare: +analysis=drop needs the model before the drop" in said


def test_offset_features_of_two_models_are_on_one_page(rope, drope, tmp_path, capsys):
    before = drope / "checkpoints" / "before-drop"
    words = [f"checkpoint={rope}", "+analysis=offset_features", f"output={tmp_path}", *SHORT]
    main(["analyze", *words, f"compare={before}", "analysis.pairs=[1,3]"])
    assert {path.name for path in tmp_path.iterdir()} == {
        *("offset_features", "offset_changes", "report.html")
    }
    changes = tmp_path / "offset_changes"
    assert json.loads((changes / "numbers.json").read_text())["tokens"] == 32
    lines = (changes / "offset_changes_of_pairs.csv").read_text().splitlines()
    assert {line.split(",")[2] for line in lines[1:]} == {"1", "3"}
    assert "Rotary offset features of two models" in capsys.readouterr().out
    [refusal] = refused([*words, f"compare={drope}"], capsys)
    assert "no rotation in any head" in refusal


def test_frames_of_frequency_entropy_are_given_on_the_command_line(rope, tmp_path):
    frames = "analysis.frequency_entropy={window: blackman, frame: 16, hop: 4}"
    words = [f"checkpoint={rope}", "+analysis=frequency_entropy", f"output={tmp_path}", *SHORT]
    main(["analyze", *words, frames, "analysis.chosen=[[1,1],[1,0],[0,0]]"])
    numbers = json.loads((tmp_path / "frequency_entropy" / "numbers.json").read_text())
    assert numbers["frames"] == {"window": "blackman", "frame": 16, "hop": 4}
    assert np.shape(numbers["entropy"]["SpectrumFE query"]) == (2, 2, 8)
    assert (tmp_path / "frequency_entropy" / "frequency_entropy_heads_keys.svg").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "analysis: give +analysis=NAME"),
        (["+analysis=sink"], "there is no analysis 'sink'. Did you mean 'sinks'?"),
        (["+analysis=sinks", "analysis.lenght=3"], "Did you mean 'length'?"),
        (["+analysis=sinks", "analysis.length=1"], "analysis.length: expected 2 or more, got 1"),
        (["+analysis=sinks", "analysis.length=5"], "+analysis=sinks: expected a text of 8 tokens"),
        (["+analysis=sinks", "analysis.length=99999"], "too few for a text of 99,999"),
        (["+analysis=sinks", "analysis.texts=999"], "analysis.texts: 999 texts"),
        (
            ["+analysis=sinks", "analysis.chosen=[[0,1,2]]"],
            "chosen[0]: expected a list of 2",
        ),
        (["+analysis=sinks", "analysis.chosen=[[2,0]]"], "expected layers 0 to 1 and heads 0 to 1"),
        (["+analysis=offset_features", "analysis.pairs=[8]"], "no pair 8; expected 0 to 7"),
        (
            ["+analysis=frequency_entropy", "analysis.frequency_entropy.window=han"],
            "analysis.frequency_entropy.window: expected one of hann, hamming, blackman, "
            "rectangular, got 'han'. Did you mean 'hann'?",
        ),
        (
            ["+analysis=frequency_entropy", "analysis.frequency_entropy={frame: 64, hop: 65}"],
            "analysis.frequency_entropy.hop: expected 1 to 64 tokens",
        ),
        (
            ["+analysis=sinks", "analysis.dtype=fp8"],
            "dtype: expected one of fp32, bf16, got",
        ),
        (["+analysis=sinks", "threads=0"], "threads: expected 1 or more"),
        (
            ["+analysis=sinks", "compare=runs/other"],
            "compare: only for +analysis=drop, offset_features and all, not for 'sinks'",
        ),
        (["+analysis=sinks", "output=/proc/x"], "output: '/proc/x' cannot be written"),
        (["+analysis=sinks", "checkpoint=runs/none"], "neither a run directory"),
        (["+analysis=sinks", "text={source: files}"], "expected files, got none"),
    ],
)
def test_a_mistake_is_one_line(rope, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    lines = refused([f"checkpoint={rope}", *words], capsys)
    assert len(lines) == 1
    assert said in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["+analysis=offset_features", *SHORT],
            r"\+analysis=offset_features: expected a model with a rotary encoding",
        ),
        (
            ["+analysis=all", "analysis.pairs=[0]"],
            "analysis.pairs: there is no pair 0; no head of this model rotates",
        ),
        (
            ["+analysis=sinks", "analysis.method=pi"],
            "analysis.method: .* has no rotation, so there is nothing to do for PI",
        ),
    ],
)
def test_what_needs_a_rotation_is_refused_without_one(drope, words, message, capsys):
    [line] = refused([f"checkpoint={drope}", *words], capsys)
    assert re.search(message, line)


def test_every_study_can_be_asked_for():
    assert kinds() == ("all", *STUDIES, "drop")
