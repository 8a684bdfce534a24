"""The layouts that a run passes through, and drops that would change none of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.common.errors import UserError
from trainer.config import DataConfig, RescaleConfig, RunConfig
from trainer.model.config import ModelConfig
from trainer.positional.encodings import by_name
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS
from trainer.runs.layouts import layout_of_phase, rescaled_layout
from trainer.runs.parsing import parse
from trainer.runs.phases import phases_of


def phase(length=64, **changes):
    (single,) = phases_of(RunConfig(data=DataConfig(sequence_length=length)))
    return replace(single, **changes)


@pytest.mark.parametrize(
    ("factor", "length", "expected"), [(None, 256, 4.0), (3.0, 256, 3.0), (None, 32, 1.0)]
)
def test_frequencies_are_rescaled_as_far_as_a_phase_reaches(tiny_decoder, factor, length, expected):
    layout = tiny_decoder(training_length=64).layout
    longer = phase(rescale=RescaleConfig("pi", factor), length=length)
    slowed = rescaled_layout(layout, longer).layers[0].spectra[0].inv_freq
    wanted = [frequency / expected for frequency in layout.layers[0].spectra[0].inv_freq]
    assert slowed == pytest.approx(wanted)


def test_a_phase_may_give_the_frequencies_a_new_base(tiny_decoder):
    layout = tiny_decoder(training_length=64, windows=[16, None]).layout
    longer = phase(name="b", rescale=RescaleConfig("base", base=2e6), length=256)
    after = layout_of_phase(layout, longer, ModelConfig())
    windowed, whole = (layer.spectra[0] for layer in after.layers)
    assert windowed == layout.layers[0].spectra[0]
    assert whole == by_name("rope", 2 * len(whole.inv_freq), 256, base=2e6)
    assert after.training_length == 256
    slowed = layout.rescaled(RESCALINGS["yarn"], 4.0)
    with pytest.raises(UserError, match=r"phases\.b\.rescale\.base: frequencies that are not"):
        layout_of_phase(slowed, longer, ModelConfig())


def test_a_layout_of_earlier_versions_is_read_as_it_was_trained(tiny_decoder):
    """A temperature without reference refers to the training length of the last phase."""
    values = tiny_decoder(layers=["rope_id"], training_length=128).layout.to_dict()
    values["spectra"][0]["temperature"]["reference"] = None
    longer = phase(length=1024)
    layout = layout_of_phase(Layout.from_dict(values), longer, ModelConfig())
    assert layout.at(1024).spectra[0].temperature.scale == 1


def refused(**values):
    with pytest.raises(UserError) as error:
        parse(RunConfig, {"run_dir": "x", **values})
    return str(error.value).partition(":")[0]


SHORT = {"steps": 100, "sequence_length": 64}
LONGER = {"steps": 100, "sequence_length": 128, "rescale": {"method": "yarn"}}
DROPPED = {"steps": 100, "drop": {"to": "nope"}}


@pytest.mark.parametrize(
    "phases",
    [
        {"a": SHORT, "b": DROPPED, "c": DROPPED},
        {"a": SHORT, "b": LONGER, "c": DROPPED, "d": DROPPED},
    ],
)
def test_a_drop_that_changes_nothing_is_refused_whatever_the_phases_before_it(phases):
    with pytest.raises(UserError, match=rf"phases\.{list(phases)[-1]}: the layers to drop have"):
        parse(RunConfig, {"run_dir": "x", "phases": phases})


def test_frequencies_after_a_rescaling_can_be_replaced_by_those_of_the_encoding():
    phases = {"a": SHORT, "b": LONGER, "c": {"steps": 100, "drop": {"to": "rope"}}}
    parse(RunConfig, {"run_dir": "x", "phases": phases})
