"""Phases: where they begin, which samples they read, and their layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.config import DataConfig, RescaleConfig, RunConfig
from trainer.positional.encodings import by_name
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import ORDERS, layout_of_phase, phases_of

SMALL = {
    "run_dir": "runs/small",
    "model": {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    },
    "data": {"sequence_length": 32},
    "trainer": {"batch_size": 4},
}  # fmt: skip


def configured(phases, **changes):
    return parse(merged({**SMALL, "phases": phases}, changes))


phase = st.fixed_dictionaries(
    {"steps": st.integers(1, 6)},
    optional={
        "sequence_length": st.sampled_from([16, 32, 64]),
        "batch_size": st.sampled_from([2, 4, 8]),
    },
)


@given(st.lists(phase, min_size=1, max_size=5))
def test_steps_read_on_where_the_one_before_ended_and_begin_anew_with_another_length(given_phases):
    run = configured({f"p{i}": phase for i, phase in enumerate(given_phases)})
    phases, step, tokens, orders = run.phases, 0, 0, []
    for wanted in given_phases:
        length, size = wanted.get("sequence_length", 32), wanted.get("batch_size", 4)
        for _ in range(wanted["steps"]):
            if not orders or orders[-1][0] != length:
                orders.append([length, 0])
            current = phases.at(step)
            assert current.length == length
            assert current.seed == ORDERS * (len(orders) - 1)
            assert current.first_sample(step) == orders[-1][1]
            assert current.tokens_at(step) == tokens
            orders[-1][1] += size
            step, tokens = step + 1, tokens + length * size
    assert run.config.trainer.max_steps == run.steps == step
    assert phases.tokens == tokens
    assert phases[-1].length == orders[-1][0]


def test_without_phases_a_drop_makes_two():
    values = merged(SMALL, {"drop": {"at": 40}, "trainer": {"max_steps": 50}})
    run = parse(values)
    before, after = run.phases
    config = run.config
    assert (before.start, before.end, after.start, after.end) == (0, 40, 40, 50)
    assert before.factor(20) == config.schedule.over(50)(20)
    assert after.factor(42) == config.drop.schedule.over(10)(2)
    assert after.first_sample(41) == 164
    assert run.kept_steps == frozenset()


@pytest.mark.parametrize(
    ("share", "steps", "expected"),
    [(0.5, 50, 25), (0.85, 1000, 850), (0.29, 100, 29), (0.57, 100, 57), (0.58, 50, 29)],
)
def test_a_drop_after_a_share_of_the_run_is_at_the_nearest_step(share, steps, expected):
    """In binary, 0.29 * 100 is a little less than 29."""
    values = merged(SMALL, {"drop": {"at": share}, "trainer": {"max_steps": steps}})
    phases = parse(values).phases
    assert phases.drop_step == expected
    assert [phase.end for phase in phases] == [expected, steps]


def test_checkpoints_stay_at_ends_of_phases_and_where_controls_branch_off():
    run = configured({"a": {"steps": 4}, "b": {"steps": 3}}, controls={"early": {"branch": 2}})
    assert run.kept_steps == {2, 4, 7}


@pytest.mark.parametrize(
    "changes",
    [
        {"positional": {"layers": ["half_rope"]}},
        {"model": {"qk_norm": {"when": "after_drop"}}},
        {"model": {"num_hidden_layers": 3}},
        {"optimizer": {"name": "muon"}},
        {"seed": 7},
    ],
)
def test_a_branch_continues_with_the_model_optimizer_and_order_of_its_run(changes):
    run = {**SMALL, "drop": {"at": 50}, "optimizer": {"name": "adamw"}}
    control = {"branch": 32, **changes}
    with pytest.raises(UserError, match=r"differ from the run.s before step 32"):
        parse(merged(run, {"controls": {"x": control}}))
    allowed = {"branch": 32, "model": {"attention_backend": "sdpa"}, "data": {"num_workers": 2}}
    parse(merged(run, {"controls": {"x": allowed}}))


def test_the_same_mixture_in_other_words_is_read_on_and_other_weights_are_another():
    mixture = {
        name: {"files": [f"{name}.txt"], "source": "files", "weight": w}
        for name, w in (("a", 1), ("b", 2))
    }
    run = configured(
        {
            "one": {"steps": 3}, "two": {"steps": 3, "weights": {"b": 2.0, "a": 1.0}},
            "three": {"steps": 3, "weights": {"a": 1.0, "b": 3.0}},
            "four": {"steps": 3, "weights": {}},
        },
        data={"mixture": mixture, "sequence_length": 64},
    )  # fmt: skip
    assert [phase.seed // ORDERS for phase in run.phases] == [0, 0, 1, 2]
    assert run.phases[3].data.texts == run.phases[0].data.texts


def run_of(**changes):
    return parse(merged({"run_dir": "x", "trainer": {"max_steps": 20}}, changes))


def test_a_control_that_does_not_branch_off_may_read_other_samples():
    other = {"trainer": {"batch_size": 4}}
    assert run_of(controls={"c": other}).config.controls == {"c": other}
    with pytest.raises(
        UserError, match=r"^controls\.c\.branch: .* differ from the run.s before step 5"
    ):
        run_of(controls={"c": {**other, "branch": 5}})


def test_phases_have_what_they_change_and_else_what_the_run_has():
    mixture = {
        name: {"files": [f"{name}.txt"], "source": "files", "weight": 1} for name in ("a", "b", "c")
    }
    rates = {"warmup_steps": 1, "peak": 0.5}
    run = configured(
        {
            "one": {"steps": 2},
            "two": {"steps": 8, "sequence_length": 64, "batch_size": 2,
                    "micro_batch_size": 1, "weights": {"c": 3.0, "a": 1.0}},
            "three": {"steps": 5, "schedule": rates, "drop": {}, "optimizer_state": "reset"},
            "four": {"steps": 4, "rescale": {"factor": 2.0}, "optimizer_state": "reset_new"},
            "five": {"steps": 3, "schedule": rates},
        },
        data={"mixture": mixture},
        seed=9,
    )  # fmt: skip
    phases, config = run.phases, run.config
    first, two, three, four, _ = phases
    assert [(phase.start, phase.end) for phase in phases] == [
        (0, 2), (2, 10), (10, 15), (15, 19), (19, 22),
    ]  # fmt: skip
    assert [phase.has_change for phase in phases] == [False, False, True, True, False]
    assert [phase.samples for phase in phases] == [0, 0, 0, 20, 36]
    assert [phase.seed - 9 for phase in phases] == [
        0, 1_000_003, 2_000_006, 2_000_006, 2_000_006,
    ]  # fmt: skip
    assert [phase.tokens for phase in phases] == [0, 256, 1280, 1920, 2432]
    assert (two.length, two.batch_size, two.micro_batch_size) == (64, 2, 1)
    assert {name: text["weight"] for name, text in two.data.mixture.items()} == {"c": 3.0, "a": 1.0}
    for phase in (first, three, four):
        assert phase.data == config.data
        assert (phase.batch_size, phase.micro_batch_size) == (4, None)
    assert three.factor(12) == config.phases["three"].schedule.over(5)(2)
    assert four.factor(16) == config.schedule.over(22)(16)


def lengthened(layout, length, rescale=None):
    """The layout of a phase with sequences of ``length`` tokens."""
    config = RunConfig(data=DataConfig(sequence_length=length))
    (single,) = phases_of(config)
    return layout_of_phase(config, replace(single, name="b", rescale=rescale), layout)


@pytest.mark.parametrize(("factor", "expected"), [(None, 4.0), (3.0, 3.0)])
def test_frequencies_are_rescaled_as_far_as_a_phase_reaches(tiny_decoder, factor, expected):
    layout = tiny_decoder(training_length=64).layout
    slowed = lengthened(layout, 256, RescaleConfig("pi", factor))
    wanted = [frequency / expected for frequency in layout.layers[0].spectra[0].inv_freq]
    assert slowed.layers[0].spectra[0].inv_freq == pytest.approx(wanted)
    with pytest.raises(UserError, match=r"phases\.b\.rescale: its sequences are no longer"):
        lengthened(layout, 32, RescaleConfig("pi"))


@pytest.mark.parametrize(
    ("changes", "description"),
    [
        ({"rescale": {"factor": 2}, "drop": {"to": "nope", "windows": [64, None]}},
         "frequencies rescaled for longer sequences (yarn); dropped the encoding (nope); "
         "windows 64, none"),
        ({"rescale": {"base": 5e5}}, "new base of the frequencies (500,000)"),
        ({"optimizer_state": "reset"},
         "phase 'b' with sequences of 32 tokens, optimizer_state reset"),
    ],
)  # fmt: skip
def test_a_phase_describes_all_its_changes(changes, description):
    run = configured({"a": {"steps": 1}, "b": {"steps": 1} | changes})
    assert run.phases[1].description == description


def test_a_phase_may_give_the_frequencies_a_new_base(tiny_decoder):
    layout = tiny_decoder(training_length=64, windows=[16, None]).layout
    after = lengthened(layout, 256, RescaleConfig(base=2e6))
    windowed, whole = (layer.spectra[0] for layer in after.layers)
    assert windowed == layout.layers[0].spectra[0]
    assert whole == by_name("rope", 2 * len(whole.inv_freq), 256, base=2e6)
    assert after.training_length == 256
    slowed = layout.rescaled(RESCALINGS["yarn"], 4.0)
    with pytest.raises(ValueError, match="frequencies that are not"):
        lengthened(slowed, 256, RescaleConfig(base=2e6))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"drop": {"to": "rppe"}}, "drop.to"),
        ({"drop": {"layers": [99]}}, "drop.layers"),
        ({"drop": {"heads": [99]}}, "drop.heads"),
        ({"rescale": {"factor": 2, "layers": [99]}}, "rescale.layers"),
        ({"rescale": {"factor": 2, "method": "yrn"}}, "rescale.method"),
    ],
    ids=str,
)
def test_a_change_that_the_model_does_not_have_is_refused_by_its_key(changes, key):
    with pytest.raises(UserError, match=rf"^phases\.b\.{key}: "):
        configured({"a": {"steps": 1}, "b": {"steps": 1} | changes})
    if "drop" in changes:
        with pytest.raises(UserError, match=f"^{key}: "):
            parse({"drop": {"at": 1, **changes["drop"]}, "trainer": {"max_steps": 2}})


@pytest.mark.parametrize("base", [None, 2e6])
def test_a_phase_of_shorter_sequences_leaves_the_training_length(tiny_decoder, base):
    layout = tiny_decoder(training_length=64).layout
    rescale = None if base is None else RescaleConfig(base=base)
    assert lengthened(layout, 32, rescale).training_length == 64
    assert lengthened(layout, 32) == layout


def test_a_temperature_without_reference_refers_to_the_length_of_the_last_phase(tiny_decoder):
    values = tiny_decoder(layers=["rope_id"], training_length=128).layout.to_dict()
    values["spectra"][0]["temperature"]["reference"] = None
    layout = lengthened(Layout.from_dict(values), 1024)
    assert layout.at(1024).spectra[0].temperature.scale == 1
