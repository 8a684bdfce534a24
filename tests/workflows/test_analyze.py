"""Which analyses are made, and the texts: how long, how many, from where."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.data.conftest import held_out
from trainer.analysis.target import Target
from trainer.common.errors import UserError
from trainer.config import AnalysisConfig, AnalysisRequest, PlotsConfig
from trainer.data.tokenizer import SpecialTokens, train_tokenizer
from trainer.workflows import analyze
from trainer.workflows.analyze import choice_texts, needle_prompt, page_texts


def test_what_cannot_be_made_is_left_out_of_all_and_refused_alone(tiny_decoder):
    ids = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(1))
    model = tiny_decoder(layers=["nope"]).eval()

    def analyses(kind):
        return analyze.analyses_of(Target("tiny", model, ids, AnalysisConfig(kind)))

    with pytest.raises(UserError, match=r"^analysis.kind: expected a model that rotates"):
        analyses("offset_features")
    (results,) = analyses("synthetic")
    assert results.key == "synthetic"
    with pytest.raises(UserError, match=r"^compare: analysis 'drop'"):
        analyses("drop")
    target = Target("tiny", model, ids, AnalysisConfig("synthetic"))
    with pytest.raises(UserError, match=r"^compare: analysis 'synthetic' .* got 2$"):
        analyze.analyses_of(target, target)


@pytest.mark.parametrize("name", ["a", "target", "self"])
def test_an_argument_that_an_analysis_does_not_take_is_refused(tiny_decoder, name):
    config = AnalysisConfig("synthetic", arguments={name: 1})
    target = Target("tiny", tiny_decoder().eval(), torch.zeros(1, 40, dtype=torch.long), config)
    with pytest.raises(UserError, match=rf"^analysis\.arguments: synthetic: .*'{name}'"):
        analyze.analyses_of(target)


def test_another_checkpoint_or_other_settings_leave_an_analysis_as_it_is(finished, tmp_path):
    run = shutil.copytree(finished[0].run_dir, tmp_path / "run")
    config = AnalysisConfig("synthetic", length=16, texts=1)
    asked = AnalysisRequest(str(run), analysis=config)
    before = AnalysisRequest(str(run / "checkpoints" / "before-drop"), analysis=config)
    longer = replace(asked, analysis=replace(config, length=17))
    pages = {}
    for request, place in ((asked, "synthetic"), (before, "synthetic-2"), (longer, "synthetic-3")):
        _, pages[place] = analyze.analyze(request)
        assert pages[place].parent == run / "analysis" / place
    assert analyze.analyze(replace(before, plots=PlotsConfig(size=9)))[1] == pages["synthetic-2"]
    _, named = analyze.analyze(replace(before, name="mine"), "all")
    assert named.parent == run / "analysis" / "mine"
    assert "RoPE (before its drop)" in named.read_text()
    assert "RoPE (before its drop)" not in pages["synthetic"].read_text()
    with pytest.raises(UserError, match=r"^name: "):
        analyze.analyze(replace(longer, name="mine"))


def test_the_model_before_the_drop_is_first_and_the_page_is_of_the_other(
    finished, tmp_path, monkeypatch
):
    named = {}

    def analyses_of(*targets):
        named["targets"] = [target.name for target in targets]
        return []

    def write_analysis(output, results, training_length, **texts):
        named["page"] = texts["name"]
        named["C"] = training_length, texts["lead"].partition(" tokens")[0]
        return output

    def find_model(reference):
        model = find(reference)
        if "before-drop" in reference:
            return replace(model, layout=model.layout.with_training_length(1024))
        return model

    find = analyze.find_model
    monkeypatch.setattr(analyze, "find_model", find_model)
    monkeypatch.setattr(analyze, "analyses_of", analyses_of)
    monkeypatch.setattr(analyze, "write_analysis", write_analysis)
    config = AnalysisConfig("drop", length=16, texts=1)
    asked = AnalysisRequest(finished[0].run_dir, str(tmp_path / "page"), analysis=config)
    analyze.analyze(asked)
    C = finished[0].data.sequence_length
    assert named["targets"] == ["RoPE (before its drop)", "DroPE"]
    assert named["page"] == "DroPE"
    assert named["C"] == (C, f"Trained at {C:,}")


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("drop", "step-000012", "before-drop"),
        ("all", "step-000012", "before-drop"),
        ("sinks", "step-000012", None),
        ("drop", "before-drop", None),
    ],
)
def test_a_run_is_compared_with_its_state_before_the_drop(tmp_path, monkeypatch, kind, name, other):
    (tmp_path / "before-drop").mkdir()
    monkeypatch.setattr(analyze, "find_model", lambda reference: reference)
    saved = SimpleNamespace(path=tmp_path / name, run="run", reference="a")
    found = analyze._other(AnalysisRequest("a"), saved, kind)
    assert found == (other and str(tmp_path / other))


def test_analyses_of_two_models_come_last_with_the_later_model_alone_in_the_others(
    tiny_decoder, monkeypatch
):
    def topic(name, models):
        def function(*targets):
            return name, [target.name for target in targets]

        function.name, function.kind, function.models = name, name, models
        return function

    topics = {name: topic(name, models) for name, models in (("b", 2), ("d", 1), ("c", 1))}
    monkeypatch.setattr(analyze, "TOPICS", topics)
    ids = torch.zeros(1, 40, dtype=torch.long)
    first, last = (Target(name, tiny_decoder(), ids, AnalysisConfig()) for name in ("x", "y"))
    both = [("c", ["y"]), ("d", ["y"])]
    assert analyze.analyses_of(first, last) == [*both, ("b", ["x", "y"])]
    assert analyze.analyses_of(last) == both


def test_a_method_of_an_analysis_leaves_layers_with_windows_alone(tiny_decoder):
    layout = tiny_decoder(windows=[16, None]).layout
    saved = SimpleNamespace(name="tiny", layout=layout, training_length=32, computed_by=None)
    model = SimpleNamespace(layout=None)
    analyze.use_method(model, saved, "pi", 64)
    windowed, full = (layer.spectra[0].inv_freq for layer in model.layout.layers)
    assert windowed == layout.spectra[0].inv_freq
    assert full == pytest.approx([frequency / 2 for frequency in windowed])


@pytest.mark.parametrize(
    ("key", "fit", "beyond"),
    [("pairs", [1, 3], [4, 1]), ("prefixes", [6, 40], [41, 6]), ("prefixes", [6, 40], [40, 5])],
)
def test_a_pair_or_a_prefix_that_does_not_exist_is_refused(tiny_decoder, key, fit, beyond):
    model = tiny_decoder(layers=["rope"]).eval()
    assert model.config.head_size == 8  # which has 4 pairs
    ids = torch.zeros(1, 40, dtype=torch.long)
    config = AnalysisConfig("synthetic", **{key: fit})
    analyze.check_choices(Target("tiny", model, ids, config))
    config = AnalysisConfig("synthetic", **{key: beyond})
    with pytest.raises(UserError, match=rf"^analysis\.{key}: "):
        analyze.analyses_of(Target("tiny", model, ids, config))


@pytest.mark.parametrize("place", [(2, 0), (0, 4)])
def test_a_head_that_the_model_has_not_is_refused(tiny_decoder, place):
    config = AnalysisConfig("synthetic", chosen=[(1, 3), place])
    target = Target("tiny", tiny_decoder().eval(), torch.zeros(1, 40, dtype=torch.long), config)
    with pytest.raises(UserError, match=r"^analysis.chosen: .* 2 layers of 4 heads"):
        analyze.analyses_of(target)


END = 10**6


def split(tokens, first=0):
    """So many tokens that count up, with a separator behind every tenth."""
    return np.insert(np.arange(first, first + tokens), np.arange(10, tokens, 10), END)


def texts(tokens=1000, C=32, bos=7, named=8, read=page_texts, page=None, tokenizer=None, **config):
    corpus = SimpleNamespace(
        test=held_out(split(tokens)),
        validation=held_out(split(tokens, 10_000)),
        end_of_text=END,
    )
    layout = SimpleNamespace(training_length=C)
    special = SpecialTokens(tokenizer, bos, named, END, frozenset())
    candidate = SimpleNamespace(layout=layout, tokens=special)
    more = () if page is None else (page,)
    return read(corpus, AnalysisConfig(**config), candidate, *more)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ({"tokens": 50_000}, (16, 256)),  # 8 times the training length, 16 texts at most
        ({"tokens": 50_000, "C": 64}, (8, 512)),  # 4,096 tokens in all
        ({"tokens": 50_000, "C": 1024}, (1, 4096)),
        ({"tokens": 50_000, "C": 4096}, (1, 8192)),  # but twice the training length
        ({"tokens": 600}, (2, 256)),  # what there is
        ({"tokens": 510}, (2, 256)),  # a text needs a token less than its length
        ({"tokens": 509}, (1, 256)),
        ({"tokens": 99}, (1, 100)),  # and is no longer than that
        ({"length": 100, "texts": 10}, (10, 100)),
        ({"length": 1001}, (1, 1001)),
        ({"length": 2, "tokens": 3}, (3, 2)),
    ],
)
def test_lengths_and_numbers(given, shape):
    found = texts(**given)
    assert found.shape == shape
    assert END not in found[:, 1:]
    rows = found[:, 1:].numpy()
    assert (np.diff(rows, axis=1) == 1).all()  # each is a running text
    assert rows[-1, -1] == given.get("tokens", 1000) - 1


def test_they_end_evenly_spaced():
    assert texts(length=101, texts=4)[:, -1].tolist() == [249, 499, 749, 999]


@pytest.mark.parametrize(
    ("bos", "named", "first"), [(7, 8, 7), (0, 8, 0), (None, 8, 8), (None, 0, 0), (None, None, END)]
)
def test_they_begin_with_the_models_first_token_or_a_separator(bos, named, first):
    assert texts(bos=bos, named=named)[:, 0].unique().tolist() == [first]


@pytest.mark.parametrize("given", [{"length": 1002}, {"length": 101, "texts": 11}])
def test_what_does_not_fit_is_an_error(given):
    with pytest.raises(UserError, match=r"^analysis: expected text for .* tokens, got 1000$"):
        texts(**given)


def test_others_are_chosen_on_where_it_is_asked_for():
    page = texts(length=50, texts=3)
    assert texts(read=choice_texts, page=page) is None
    apart = {"choice": "validation"}
    config = AnalysisConfig()
    of = type(config.attenuation)
    same = texts(read=choice_texts, page=page, attenuation=of(**apart))
    assert same.shape == (3, 50)
    assert same[:, 1].tolist() == [10_284, 10_617, 10_951]


def test_a_file_is_read_whole_or_as_far_as_is_asked(tmp_path):
    tokenizer, path = train_tokenizer([], 257, []), tmp_path / "a.txt"
    path.write_text("A text of a file. " * 30)
    ids = tokenizer.encode(path.read_text(), add_special_tokens=False).ids
    whole = texts(tokenizer=tokenizer, file=str(path))
    assert whole.tolist() == [[7, *ids]]
    assert texts(tokenizer=tokenizer, file=str(path), length=11, texts=1).tolist() == [
        [7, *ids[:10]]
    ]


@pytest.fixture(scope="module")
def byte_tokenizer():
    return train_tokenizer([], 257, [])


def test_what_is_asked_for_is_what_was_stated(byte_tokenizer):
    words = byte_tokenizer.encode("So it goes. " * 200).ids
    ids = torch.tensor([words[:2000], words[12:2012]])
    made = needle_prompt(byte_tokenizer, ids, 1500, 0.1)
    assert made.ids.shape == (2, 1500)
    assert len(needle_prompt(byte_tokenizer, ids[[0] * 6], 1500, 0.1).ids) == 4
    for row in made.ids.tolist():
        stated = byte_tokenizer.decode(row[made.needle])
        asked = byte_tokenizer.decode(row[-made.question :])
        pattern = r" One of the special magic numbers for (.+) is: \d{7}\."
        key = re.fullmatch(pattern, stated)[1]
        assert asked == f"\n\nThe special magic number for {key} mentioned in the provided text is:"
    # As long as it has to be at least, and not a token shorter.
    least = 5 * (made.needle.stop - made.needle.start + made.question)
    assert needle_prompt(byte_tokenizer, ids, least, 0.1) is not None
    assert needle_prompt(byte_tokenizer, ids, least - 1, 0.1) is None


def test_a_statement_stands_at_any_depth(byte_tokenizer):
    ids = torch.tensor([byte_tokenizer.encode("So it goes. " * 200).ids[:2000]])
    first, early, last = (
        needle_prompt(byte_tokenizer, ids, 1500, depth) for depth in (0.0, 0.1, 1.0)
    )
    assert first.needle.start == 1
    text = 1500 - (early.needle.stop - early.needle.start) - early.question
    assert abs(early.needle.start - 0.1 * text) <= 2
    asked = byte_tokenizer.decode(last.ids[0, -last.question :].tolist())
    assert asked.startswith("\n\nThe special magic number for")
    assert last.needle.stop == 1500 - last.question
