"""Rotations against numbers that transformers 5.23.0 gave once (tests/golden/rope.json)."""

import json

import pytest
import torch

from tests.golden.files import GOLDEN
from trainer.interchange.hf_rope import ROPE_TYPES, spectrum_from_rope_parameters
from trainer.positional.rotation import rotary_table

CASES = json.loads((GOLDEN / "rope.json").read_text())


def name(case):
    return f"{case['rope']['rope_type']} {case['head_dim']} at {case['length']}"


def test_each_type_is_in_the_file():
    assert {case["rope"]["rope_type"] for case in CASES} == set(ROPE_TYPES)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_frequencies_and_tables_are_those_of_transformers(case):
    training_length = case["training_length"]
    spectrum = spectrum_from_rope_parameters(case["rope"], case["head_dim"], training_length)
    spectrum = spectrum.at(case["length"], training_length)
    expected = torch.tensor(case["inv_freq"])
    torch.testing.assert_close(torch.tensor(spectrum.inv_freq), expected, rtol=1e-6, atol=0)
    assert spectrum.rotary_scale == pytest.approx(case["attention_factor"], rel=1e-6)
    positions = torch.tensor(case["positions"])
    for table, wanted in zip(
        rotary_table(spectrum, positions), (case["cos"], case["sin"]), strict=True
    ):
        # transformers computes the phase in float32: it is off by 2^-24 of itself, and so are its
        # frequencies, while ours are exact to float64.
        error = (table - torch.tensor(wanted)).abs().amax(dim=-1)
        assert (error <= 2e-7 + 1e-7 * positions).all(), error
