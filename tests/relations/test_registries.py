"""Every parameter of what is registered by a name has an effect of its own."""

from __future__ import annotations

import inspect

import pytest

from trainer.common.errors import UserError
from trainer.common.registry import Registry
from trainer.lightning import optimizers
from trainer.lightning.optimizers import OPTIMIZERS, make_optimizer
from trainer.positional import encodings, rescaling
from trainer.positional.encodings import ENCODINGS
from trainer.positional.rescaling import RESCALINGS

OTHER = {
    "base": 500.0,
    "rotary_fraction": 0.75,
    "angle_scale": 0.5,
    "p": 0.5,
    "clipped": 3,
    "temperature": 0.3,
    "exponent": 3.0,
    "fastest_wavelength": 20.0,
    "slowest_wavelength": 50.0,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "truncate": False,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "lr": 0.5,
    "betas": (0.5, 0.6),
    "muon_lr": 0.25,
    "weight_decay": 0.75,
    "decay_embeddings": True,
}


def settings_of(registry, module):
    """Names and settings of what a file of the program registers; tests register others."""
    for name, function in registry.items():
        if function.__module__ == module.__name__:
            parameters = inspect.signature(function).parameters.values()
            kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
            yield name, [p.name for p in parameters if p.kind in kinds]


@pytest.mark.parametrize(("name", "settings"), settings_of(ENCODINGS, encodings))
def test_parameters_of_an_encoding_are_told_apart_and_remembered(name, settings):
    def made(**values):
        parameters = inspect.signature(ENCODINGS[name]).parameters
        shape = {"head_dim": 16, "training_length": 128}
        return ENCODINGS[name](**{k: v for k, v in shape.items() if k in parameters}, **values)

    spectra = [made(), *(made(**{key: OTHER[key]}) for key in settings)]
    assert len({*spectra}) == len(spectra)
    for key, spectrum in zip(settings, spectra[1:], strict=True):
        if spectrum.rotates:
            assert spectrum.origin[0].name == name
            assert spectrum.origin[0].parameters[key] == OTHER[key]


@pytest.mark.parametrize(("name", "settings"), settings_of(RESCALINGS, rescaling))
def test_options_of_a_rescaling_are_told_apart(name, settings):
    inv_freq = encodings.rope(32).inv_freq
    if settings == ["ramp"]:
        settings = ["beta_fast", "beta_slow", "truncate"]
    made = [RESCALINGS[name](inv_freq, 300)]
    made += [RESCALINGS[name](inv_freq, 300, **{key: OTHER[key]}) for key in settings]
    assert len({*made}) == len(made)


@pytest.mark.parametrize(("name", "settings"), settings_of(OPTIMIZERS, optimizers))
def test_settings_of_an_optimizer_are_told_apart(tiny_decoder, name, settings):
    """Those that it has, and those of all."""

    def groups(**values):
        made = make_optimizer(tiny_decoder(), name, **values).param_groups
        keys = "lr", "initial_lr", "betas", "weight_decay", "momentum"
        return str([[group.get(key) for key in keys] for group in made])

    every = [*settings, "weight_decay", "decay_embeddings"]
    made = [groups(), *(groups(**{key: OTHER[key]}) for key in every)]
    assert len({*made}) == len(made)
    for key in settings:
        assert f"{OTHER[key]}" in groups(**{key: OTHER[key]})


def test_a_name_belongs_to_one_function():
    registry = Registry("thing")

    def function():
        pass

    registry.add("a", 1, function)
    registry.add("a", 2, function)  # a file that is run again
    assert registry["a"] == 2
    with pytest.raises(UserError, match="thing: 'a' exists"):
        registry.add("a", 3, lambda: None)
