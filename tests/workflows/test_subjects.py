"""Which methods do something to which models, and what is wrong is said for all at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainer.commands.hydra.composing import compose_words
from trainer.commands.train import read_run
from trainer.common.errors import Problem, UserError
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.method_config import (
    ChoiceSettings,
    DopeSettings,
    TemperatureSettings,
    WeightedRopeSettings,
)
from trainer.evaluation.methods import keeps_frequencies
from trainer.evaluation.plan import Subject
from trainer.evaluation.store import fingerprint
from trainer.runs.layouts import configured_layout, layouts_of_phases
from trainer.workflows import subjects
from trainer.workflows.subjects import applicable, held_out_corpus, multiplying, subject_of


@pytest.fixture
def models(tiny_decoder):
    """Two that rotate, one of which transformers computes, and one without positions, of 32."""

    def subject(name, own=True, **encoding):
        model = tiny_decoder(**encoding)
        return Subject(name, "", model.config, model.layout, lambda: model, own)

    return [
        subject("rope"),
        subject("hf", own=False),
        subject("nope", layers=["nope"]),
    ]


def test_each_model_has_the_methods_that_do_something_to_it(models):
    config = EvaluationConfig(methods=["none", "pi", "yarn", "window", "temperature"])
    found, notes = applicable(models, config)
    assert {name: [made.key for made in of] for name, of in found.items()} == {
        "rope": ["none", "pi", "yarn", "window"],
        "hf": ["none", "pi", "yarn"],
        "nope": ["none", "window", "temperature"],
    }
    assert notes == [
        "nope has no rotation, so there is nothing to do for PI, YaRN.",
        "hf is computed by transformers, and the decoder of this program is needed for sliding "
        "window.",
    ]


def test_a_rescaling_that_keeps_all_frequencies_is_named(tiny_decoder):
    """RoPE-ID, App. A.9: the thresholds of YaRN do not work for such high frequencies."""

    def subject(name, training_length, slowest):
        encoding = {"fastest_wavelength": 32.0, "slowest_wavelength": slowest}
        encodings = {"encodings": {"rope_id": encoding}, "layers": ["rope_id"]}
        model = tiny_decoder(training_length=training_length, **encodings)
        return Subject(name, "", model.config, model.layout, lambda: model)

    models = [subject("4k", 4096, 2048.0), subject("128k", 131_072, 2048.0)]
    methods = ["none", "pi", "yarn", "dynamic_yarn", "llama3", "pi+yarn", "yarn_full_range"]
    found, notes = applicable(models, EvaluationConfig(methods=methods))
    assert [made.key for made in found["128k"]] == methods
    assert notes == [
        "128k has no pair slow enough for YaRN, dynamic YaRN, Llama 3: all frequencies stay, and "
        "yarn_full_range slows them."
    ]


def test_the_evaluation_of_rope_id_at_128k_rescales_its_frequencies():
    config = read_run(compose_words(["+experiment=rope_id_128k"]), [], weights=False)
    *_, tuned = layouts_of_phases(config, configured_layout(config))
    assert tuned.training_length == 131_072
    assert not any(keeps_frequencies(name, tuned, None) for name in config.evaluation.names)


def test_a_temperature_that_no_model_takes_is_named(models):
    """Where one takes it, the others are not meant: a table shows which."""
    config = EvaluationConfig(methods=["none", "temperature"])
    _, notes = applicable([model for model in models if model.name != "nope"], config)
    assert notes == [
        f"{name} has positions, and a temperature is for models without "
        "(evaluation.temperature.models)."
        for name in ("rope", "hf")
    ]


def test_layers_are_checked_in_every_model_and_named(models, tiny_decoder):
    model = tiny_decoder(windows=[16, None])
    windows = Subject("windows", "", model.config, model.layout, lambda: model, True)
    found, notes = applicable([*models, windows], EvaluationConfig(methods=["none", "yarn"]))
    assert [made.key for made in found["windows"]] == ["none", "yarn"]
    assert notes[1:] == [
        "windows: evaluation.layers leaves rescalings and temperatures to 1 layer of 2 (1)."
    ]
    with pytest.raises(UserError) as error:
        applicable(models, EvaluationConfig(methods=["none", "yarn"], layers=[1, 5]))
    assert tuple(map(str, error.value.problems)) == (
        "evaluation.layers: layer 5 does not exist in a model of 2 layers; expected 0 to 1, the "
        "nearest is 1.",
    )


def test_what_cannot_be_chosen_is_said_together(models):
    config = EvaluationConfig(
        methods=["none", "yarn+dope", "weighted_rope", "temperature"],
        lengths=[0.1, 2],
        dope=DopeSettings(heads=9),
        temperature=TemperatureSettings(lengths=[1.01, 2]),
        weighted_rope=[WeightedRopeSettings("sequence", "above", 0.6, 0.1)],
    )
    with pytest.raises(UserError) as error:
        applicable(models, config)
    assert tuple(map(str, error.value.problems)) == (
        "evaluation.dope.heads: expected at most 8, the query heads that rotate, got 9.",
        "evaluation.temperature.lengths: 1.01 times the training length of 32 tokens is no more "
        "than that; nothing is fitted there.",
        "evaluation.choice.length: a text to choose on has 6 tokens or more, and 0.1 times the "
        "training length of 32 is 3; here that is 0.188 or more.",
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),  # nobody chooses
        ({"methods": ["dope"]}, None),  # of a text of two tokens
        ({"methods": ["weighted_rope"]}, "6 tokens or more, and 0.16 times the training length"),
        ({"methods": ["weighted_rope"], "choice": ChoiceSettings(length=0.2)}, None),
        (
            {"methods": ["dope"], "choice": ChoiceSettings(length=0.04)},
            "2 tokens or more, and 0.04 times the training length of 32 is 1; here that is 0.0625",
        ),
    ],
)
def test_texts_to_choose_on_are_as_long_as_what_is_chosen_needs(models, changes, said):
    rules = [WeightedRopeSettings("sequence", "above", 0.6, 0.1)]
    config = EvaluationConfig(**{"lengths": [0.16, 2], "weighted_rope": rules} | changes)
    if said is None:
        assert applicable(models[:1], config)[0]["rope"]
    else:
        with pytest.raises(UserError) as error:
            applicable(models[:1], config)
        (problem,) = map(str, error.value.problems)
        assert said in problem


def test_a_subject_is_told_from_others_by_its_weights_and_their_type():
    def print_of(dtype, device="cpu", tf32=True, **changes):
        own = {"fingerprint": "1", "name": "a", "computed_by": None, "config": 1, "layout": 2}
        given = SimpleNamespace(**{**own, **changes})
        return subject_of(given, dtype, device, tf32=tf32).fingerprint

    first = print_of("fp32")
    assert print_of("bf16") != first
    assert print_of("fp32", fingerprint="2") != first
    assert print_of("fp32", name="b") == print_of(None) == first
    # Cells of before there was TF32 keep their keys on the CPU, and with trainer.tf32=false.
    assert print_of("fp32", device="cuda", tf32=False) == first == fingerprint("1", "fp32")
    assert print_of("bf16", device="cuda") == print_of("bf16")


@pytest.mark.parametrize(("supported", "same_as"), [(True, "bf16"), (False, "fp32")])
def test_a_gpu_evaluates_in_bf16_and_float32_there_is_tf32(monkeypatch, supported, same_as):
    """So that results of one precision are never taken for those of another."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: supported)
    own = SimpleNamespace(fingerprint="1", name="a", computed_by=None, config=1, layout=2)
    keys = {dtype: subject_of(own, dtype, "cuda").fingerprint for dtype in (None, "bf16", "fp32")}
    assert keys[None] == keys[same_as]
    assert keys["fp32"] == fingerprint("1", "tf32")
    assert len({*keys.values(), fingerprint("1", "fp32")}) == 3


@pytest.mark.parametrize(
    ("device", "tf32", "within"),
    [("cuda", True, "high"), ("cuda", False, "highest"), ("cpu", True, "medium")],
)
def test_float32_is_multiplied_in_tf32_on_a_gpu_and_left_alone_on_a_cpu(device, tf32, within):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with multiplying(device, tf32):
            assert torch.get_float32_matmul_precision() == within
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_where_nothing_is_done_to_any_model_it_is_said_why(models):
    with pytest.raises(UserError) as error:
        applicable(models[1:], EvaluationConfig(methods=["dynamic_pi"]))
    assert tuple(map(str, error.value.problems)) == (
        "evaluation.methods: hf is computed by transformers, and the decoder of this program is "
        "needed for dynamic PI.",
        "evaluation.methods: nope has no rotation, so there is nothing to do for dynamic PI.",
    )


OWN, GIVEN = DataConfig(sequence_length=7), DataConfig(sequence_length=9)
OF_RUN = TokenizerConfig(vocab_size=300)


@pytest.fixture
def opened(monkeypatch):
    """What text is prepared of, for a model of a run or of elsewhere; tokenizers are words."""

    def of(text, *, own=True, trained=False, state=None, found="the same", problem=None):
        asked = []

        def prepare(*given, **options):
            asked.append((given, options))
            if problem is not None:
                raise UserError(Problem(*problem.split(": ", 1)))
            return SimpleNamespace(tokenizer=found)

        monkeypatch.setattr(subjects, "prepare_corpus", prepare)
        monkeypatch.setattr(subjects, "same_tokens", lambda one, other: one == other)
        model = SimpleNamespace(is_trained=trained)
        run = SimpleNamespace(model=model, data=OWN, tokenizer=OF_RUN) if own else None
        candidate = SimpleNamespace(
            run=run, tokenizer="the same", text_tokenizer="the same, for text", state=state or {}
        )
        held_out_corpus(text, candidate)
        return asked[0]

    return of


def test_a_model_is_read_the_text_of_its_run_as_the_run_has_read_it(opened):
    assert opened(None) == ((OWN, OF_RUN), {"wanted": None})
    state = {"data": {"texts": ["a directory"]}}
    assert opened(None, state=state) == ((OWN, OF_RUN), {"wanted": ["a directory"]})
    with pytest.raises(UserError, match="it was trained with another tokenizer than its text"):
        opened(None, found="another")


@pytest.mark.parametrize(
    ("text", "how", "source"),
    [
        (GIVEN, {}, GIVEN),
        (GIVEN, {"own": False}, GIVEN),
        (None, {"own": False}, DataConfig()),
        (None, {"trained": True}, OWN),  # with the tokenizer of the weights it began with
    ],
)
def test_other_text_is_read_in_the_models_own_tokens(opened, text, how, source):
    assert opened(text, **how) == ((source, TokenizerConfig(), "the same, for text"), {})


def test_what_is_wrong_with_other_text_is_said_of_its_own_key(opened):
    said = "data.files: there is no file"
    with pytest.raises(UserError, match=r"^text\.files: there is no file$"):
        opened(GIVEN, problem=said)
    for own in (True, False):
        with pytest.raises(UserError, match=r"^data\.files: there is no file$"):
            opened(None, own=own, problem=said)
