"""What an analysis needs, and which model stands beside the one that is analysed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models

from trainer.analysis.settings import AttenuationSettings
from trainer.analysis.studies import study as interface
from trainer.common.errors import UserError
from trainer.runs.memory import needed_memory
from trainer.runs.metrics_file import write_metrics
from trainer.runs.parsing import parse
from trainer.workflows import analyze
from trainer.workflows.requests import AnalysisConfig, AnalysisRequest


def test_texts_that_do_not_fit_into_memory_are_named(tiny_decoder, monkeypatch):
    config, ids = tiny_decoder().config, torch.zeros(3, 1000, dtype=torch.long)
    needed = needed_memory(config, 3000, 2)
    monkeypatch.setattr(analyze, "free_memory", lambda device: needed)
    analyze._check_memory(config, ids, models=2, device="cpu")
    monkeypatch.setattr(analyze, "free_memory", lambda device: needed - 1)
    size = f"{needed / 2**20:.1f} MiB"
    with pytest.raises(UserError) as error:
        analyze._check_memory(config, ids, models=2, device="cpu")
    assert tuple(map(str, error.value.problems)) == (
        f"analysis.length: 3 x 1,000 tokens need about {size}, and {size} are free; take fewer or "
        "shorter texts.",
    )


class FoundError(Exception):
    """A target was made."""


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ({"kind": "sinks"}, [(0.1, 4, 32)]),
        ({"kind": "sinks", "needle": {"kind": "question"}}, [(0.1, 4, 32)]),
        (
            {"kind": "matrix_entropy", "needle": {"kind": "question", "depth": 0.5}},
            [(0.5, 4, 32), (0.5, 1, 64)],
        ),
        (
            {"kind": "all", "needle": {"kind": "question", "depth": 1.0}},
            [(1.0, 4, 32), (1.0, 1, 64)],
        ),
        ({"kind": "matrix_entropy", "needle": {"depth": 0.2}}, [(0.2, 4, 32)]),
    ],
)
def test_studies_get_what_was_asked_for(tiny_decoder, tmp_path, monkeypatch, words, asked):
    """Copies of needles are as long as the training length, and questions as a text."""
    model, ids = tiny_decoder(), torch.arange(4 * 64).view(4, 64)
    choice, prompts, made, checked = ids + 1, [], [], []

    def prompt(tokenizer, ids, length, seed, depth):
        assert (tokenizer, seed) == ("words", 3)
        prompts.append((depth, len(ids), length))
        return prompts[-1]

    def target(*given, **more):
        made.append((given, more))
        raise FoundError

    found = SimpleNamespace(
        name="model", path=tmp_path, home=tmp_path, config=model.config, layout=model.layout,
        tokenizer="words", load=lambda device: model,
    )  # fmt: skip
    monkeypatch.setattr(analyze, "find_candidate", lambda given: found)
    monkeypatch.setattr(analyze, "_other", lambda *_: None)
    monkeypatch.setattr(analyze, "_check_memory", lambda *_, **needs: checked.append(needs))
    monkeypatch.setattr(analyze, "held_out_corpus", lambda text, of: "corpus")
    monkeypatch.setattr(analyze, "page_texts", lambda corpus, *_: ids)
    monkeypatch.setattr(analyze, "choice_texts", lambda corpus, config, of, page: choice)
    monkeypatch.setattr(analyze, "needle_prompt", prompt)
    monkeypatch.setattr(analyze, "Target", target)
    words |= {"chosen": [[1, 0]], "seed": 3, "pairs": [2, 0], "prefixes": [8, 16]}
    words |= {"frequency_entropy": {"frame": 4}, "attenuation": {"alphas": [0.5]}}
    request = parse(AnalysisRequest, {"checkpoint": "x", "threads": 1, "analysis": words})
    with pytest.raises(FoundError):
        analyze.analyze(request)
    (((name, of, read, chosen, seed, copy), more),) = made
    assert (name, of, chosen, seed, copy) == ("model", model, ((1, 0),), 3, asked[0])
    torch.testing.assert_close(read, ids)
    config = request.analysis
    assert more == {
        "pairs": (2, 0), "frames": config.frequency_entropy, "prefixes": (8, 16),
        "attenuation": config.attenuation, "choice": choice, "needle": config.needle,
        "question": asked[1] if len(asked) > 1 else None,
    }  # fmt: skip
    assert prompts == asked
    assert checked == [{"models": 1, "device": "cpu"}]
    monkeypatch.setattr(analyze, "_other", lambda *_: found)
    monkeypatch.setattr(analyze, "distinct", lambda both: both)
    with pytest.raises(FoundError):
        analyze.analyze(request)
    assert checked[1] == {"models": 2, "device": "cpu"}


@pytest.fixture
def beside(tiny_decoder, monkeypatch):
    """What stands beside a model, where another of these layers and words is named."""

    def found(kind, layers=("rope",), words=("a", "b")):
        def candidate(given, layers, words):
            tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
            layout = tiny_decoder(layers=list(layers)).layout
            return SimpleNamespace(reference=given, tokenizer=tokenizer, layout=layout)

        monkeypatch.setattr(
            analyze, "find_candidate", lambda given, key: candidate(given, layers, words)
        )
        request = AnalysisRequest("this", compare="that")
        return analyze._other(request, candidate("this", ["rope"], ["a", "b"]), kind).reference

    return found


def test_a_model_beside_it_has_the_same_words_and_for_offsets_a_rotation(beside):
    assert beside("drop", ["nope"]) == beside("all", ["nope"]) == "that"
    assert beside("offset_features", ["rope", "nope"]) == "that"  # in some layer
    for asked, said in (
        (
            ("sinks",),
            "compare: only for +analysis=drop, offset_features and all, not for 'sinks'.",
        ),
        (("drop", ["rope"], ["a", "c"]), "compare: 'that' has another tokenizer than the check"),
        (
            ("offset_features", ["nope"]),
            "compare: +analysis=offset_features expected a model with a rotary encoding, and "
            "'that' has no rotation in any head.",
        ),
    ):
        with pytest.raises(UserError) as error:
            beside(*asked)
        (problem,) = map(str, error.value.problems)
        assert problem.startswith(said)


@pytest.mark.parametrize("own", [True, False])
def test_a_drop_of_the_runs_own_is_shown_with_its_loss(tmp_path, monkeypatch, own):
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "seconds": 9.0}, {"step": 3, "loss": 2.0}]
    write_metrics(tmp_path / "metrics.csv", rows)
    monkeypatch.setattr(analyze, "DropStudy", lambda *given: given)
    run = SimpleNamespace(drop_step=2)
    candidate = SimpleNamespace(run=run if own else None, home=tmp_path)
    curve = ([(1, 3.0), (3, 2.0)], 2) if own else ()
    assert analyze._drop("before", "after", candidate) == ("before", "after", *curve)


@pytest.mark.parametrize(
    ("output", "name", "place"),
    [(None, None, "home/analysis/sinks"), (None, "mine", "home/analysis/mine"), ("o", "mine", "o")],
)
def test_a_page_lies_in_the_run_under_its_name(monkeypatch, output, name, place):
    monkeypatch.setattr(analyze, "find_candidate", lambda _: SimpleNamespace(home=Path("home")))

    def refuse(*given):
        raise UserError.at("", f"{given}")

    monkeypatch.setattr(analyze, "check_writable", refuse)
    request = {"checkpoint": "x", "threads": 1, "output": output, "analysis": {"kind": "sinks"}}
    with pytest.raises(UserError) as error:
        analyze.analyze(parse(AnalysisRequest, request), name)
    assert tuple(map(str, error.value.problems)) == (f"{(place, 'output')}",)


@pytest.mark.parametrize(
    ("positional", "said"),
    [
        ({"layers": ["nope"]}, "No positional encoding."),
        ({"layers": ["alibi", "nope"]}, "No rotation, a bias by distance (ALiBi)."),
        ({"layers": ["nope", "alibi"]}, "No rotation, a bias by distance (ALiBi)."),
        ({"layers": ["rope"]}, "4 of 4 channel pairs of a head rotate."),
        ({"layers": ["rope", "half_rope"]}, "2 or 4 of 4 channel pairs of a head rotate."),
        ({"layers": ["rope", "nope"]}, "0 or 4 of 4 channel pairs of a head rotate."),
    ],
)
def test_what_happens_to_queries_and_keys_in_a_sentence(tiny_decoder, positional, said):
    assert analyze._encoding(SimpleNamespace(model=tiny_decoder(**positional))) == said


def test_every_layer_and_section_of_every_study_moves_the_bar(tiny_decoder, monkeypatch):
    seen, layers = [], ["first", "second"]

    class Study:
        def __init__(self, target):
            self.target, self.heads = target, []

        def on_layer(self, heads):
            self.heads.append(heads)

        def section(self):
            return self.heads

    class Bar:
        def __init__(self, *given):
            seen.append(given)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            seen.append("ended")

        def advance_to(self, step):
            seen.append(step)

    def capture(model, ids, on_layer):
        for heads in layers:
            on_layer(heads)

    monkeypatch.setattr(analyze, "Progress", Bar)
    monkeypatch.setattr(interface, "capture", capture)
    target = SimpleNamespace(
        model=tiny_decoder(layers=["rope", "rope"]),
        ids=torch.zeros(2, 30, dtype=torch.long),
        prefix=None,
    )
    assert analyze._run([Study(target), Study(target)], target) == [layers, layers]
    assert seen == [("Analysing", 6, 10.0), *range(7), "ended"]


class Made:
    """A study of the target that it can be made of."""

    def __init__(self, target):
        self.target = target


def study(title, *problems):
    return type("Own", (Made,), {"title": title, "problems": staticmethod(lambda target: problems)})


def test_what_cannot_be_made_is_left_out_of_all_and_refused_alone(monkeypatch):
    found = {
        "a": study("First"),
        "b": study("Second", "no room.", "no pairs."),
        "c": study("Third"),
    }
    monkeypatch.setattr(analyze, "STUDIES", found)
    made, notes = analyze._studies("the target", "all")
    assert [type(one) for one in made] == [found["a"], found["c"]]
    assert {one.target for one in made} == {"the target"}
    assert notes == ["Left out: Second: no room.", "Left out: Second: no pairs."]
    (one,), notes = analyze._studies("the target", "c")
    assert (type(one), notes) == (found["c"], [])
    with pytest.raises(UserError) as error:
        analyze._studies("the target", "b")
    assert tuple(map(str, error.value.problems)) == (
        "+analysis=b: no room.",
        "+analysis=b: no pairs.",
    )
    assert analyze._studies("the target", "drop") == ([], [])


@pytest.mark.parametrize(("choice", "keys"), [("page", ["choice_length"]), ("validation", [])])
def test_only_pairs_chosen_on_the_page_need_its_length(choice, keys):
    settings = AttenuationSettings(choice=choice, choice_length=1000)
    problems = analyze._length_problems(AnalysisConfig(attenuation=settings), length=999)
    assert [problem.key.removeprefix("analysis.attenuation.") for problem in problems] == keys
