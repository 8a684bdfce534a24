"""What an analysis needs, and which model stands beside the one that is analysed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models

from trainer.analysis.settings import AttenuationSettings
from trainer.analysis.studies import study as interface
from trainer.common.errors import UserError
from trainer.runs.metrics_file import write_metrics
from trainer.workflows import analyze
from trainer.workflows.requests import AnalysisConfig, AnalysisRequest


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
