"""Changes of layouts, and files of published factors."""

from __future__ import annotations

import json
import math

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.positional.examples import one_layer
from trainer.common.errors import UserError
from trainer.evaluation.layouts import (
    TITLES,
    check_published,
    read_factors,
    tempered,
    windowed,
    with_factors,
    with_published,
)
from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.encodings import make_spectrum
from trainer.positional.rescaling import RESCALINGS
from trainer.positional.spectrum import Spectrum


def layout(**positional):
    return build_layout(
        PositionalConfig(**positional),
        num_layers=3,
        num_key_value_heads=2,
        head_dim=8,
        training_length=64,
    )


def test_a_window_is_no_wider_than_the_training_length():
    original = layout(windows=[None, 16])
    changed = windowed(original)
    assert [layer.window for layer in original.layers] == [None, 16, None]
    assert [layer.window for layer in changed.layers] == [64, 16, 64]
    assert changed.spectra == original.spectra


@pytest.mark.parametrize(("coefficient", "exponent"), [(0.412, 1.0), (0.1, 2.0)])
@pytest.mark.parametrize("per", ["sequence", "query"])
def test_temperatures_of_the_papers(coefficient, exponent, per):
    (spectrum,) = tempered(layout(), coefficient, per, exponent).spectra
    assert spectrum.temperature.per == per
    temperature = spectrum.temperature
    assert (temperature.coefficient, temperature.exponent) == (coefficient, exponent)
    if per == "sequence":
        expected = (1 + coefficient * math.log(4)) ** exponent
        assert temperature.at(256, 64).scale == pytest.approx(expected)
    assert spectrum.inv_freq == layout().spectra[0].inv_freq


def test_factors_divide_the_frequencies_beyond_the_training_length():
    original = layout(layers=["rope", "nope"])
    changed = with_factors(original, ((1.0, 2.0, 4.0, 8.0), ()))
    assert changed.layers[1] == original.layers[1]
    before, after = original.layers[0].spectra[0], changed.layers[0].spectra[0]
    assert after.at(64, 64).inv_freq == before.inv_freq
    slow = [f / by for f, by in zip(before.inv_freq, (1.0, 2.0, 4.0, 8.0), strict=True)]
    assert after.at(65, 64).inv_freq == pytest.approx(slow)


def test_every_rescaling_has_a_distinct_title():
    assert list(TITLES) == list(RESCALINGS)
    assert len(set(TITLES.values())) == len(TITLES)


C = 64
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.5, 3.0, 7.0, 8.5]
SCALING = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "factors.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def rotary():
    return one_layer(C, make_spectrum("rope", 8, C, {"base": 1e4}))


def theirs(length, **more):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **SCALING, **more}
    rope["original_max_position_embeddings"] = C
    config = LlamaConfig(
        hidden_size=8,
        num_attention_heads=1,
        max_position_embeddings=C * 8,
        original_max_position_embeddings=C,
        rope_parameters=rope,
    )
    return ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=length)


@pytest.mark.parametrize(
    ("content", "more"),
    [
        (
            {
                "rope_scaling": SCALING,
                "max_position_embeddings": C * 8,
                "original_max_position_embeddings": C,
            },
            {},
        ),
        ({"rope_parameters": {**SCALING, "factor": 3.0}}, {"factor": 3.0}),
        ({**SCALING, "attention_factor": 1.7}, {"attention_factor": 1.7}),
    ],
)
@pytest.mark.parametrize("length", [10, C, C + 1, 8 * C])
def test_a_file_gives_frequencies_and_sizes_of_transformers(written, content, more, length):
    result = with_published(rotary(), read_factors(written(content)), 2.0).at(length)
    inv_freq, attention = theirs(length, **more)
    assert result.spectra[0].inv_freq == pytest.approx(inv_freq.tolist(), rel=1e-6)
    assert result.spectra[0].rotary_scale == pytest.approx(attention)


def test_factors_alone_are_for_the_length_that_is_evaluated(written):
    published = read_factors(written(SCALING))
    for factor in (0.5, 1.0, 2.0, 8.0):
        (spectrum,) = with_published(rotary(), published, factor).spectra
        expected = math.sqrt(1 + math.log(max(factor, 1)) / math.log(C))
        assert spectrum.rotary_scale == pytest.approx(expected)


def test_published_factors_leave_spectra_without_rotation(written):
    still = one_layer(C, Spectrum())
    assert with_published(still, read_factors(written(SCALING)), 4.0) == still


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "it is not JSON"),
        ([1, 2], "holds no keys; it needs short_factor and long_factor"),
        ({"rope_scaling": None}, "rope_scaling has no short_factor and no long_factor; the file"),
        ({"rope_scaling": {"short_factor": [1]}}, "rope_scaling has no long_factor; the file"),
        ({"factors": [1]}, "there is no short_factor and no long_factor; the file needs"),
        ({**SCALING, "long_factor": 3}, "long_factor: expected a list of numbers, got 3"),
        ({**SCALING, "long_factor": []}, "long_factor: expected a list of numbers, got []"),
        (
            {**SCALING, "long_factor": [1, 2]},
            "short_factor has 4 and long_factor has 2 numbers; expected as many in both",
        ),
        ({**SCALING, "long_factor": [1, 2, 3, -1]}, "long_factor: number 4 is -1; expected a"),
        ({**SCALING, "short_factor": [1, "2", 3, 4]}, "short_factor: number 2 is '2'; expected"),
        ({**SCALING, "short_factor": [1e-300, 1, 1, 1]}, "number 1 is 1e-300; expected a positive"),
        ({**SCALING, "factor": "8"}, "factor: expected a positive number from 0.000001 to 10^12"),
    ],
)
def test_a_file_without_valid_factors_is_refused_in_one_line(written, content, message):
    with pytest.raises(UserError, match=r"^evaluation\.longrope\.factors: ") as error:
        read_factors(written(content))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"original_max_position_embeddings": 32}, "expected original_max_position_embeddings of"),
        ({"short_factor": [1, 1], "long_factor": [1, 2]}, "expected 4 factors, one for each pair"),
    ],
)
def test_factors_for_another_model_are_refused(written, change, message):
    check_published(rotary(), read_factors(written(SCALING)))
    with pytest.raises(UserError, match=message):
        check_published(rotary(), read_factors(written({**SCALING, **change})))
