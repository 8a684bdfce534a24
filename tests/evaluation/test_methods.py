"""Methods by name: their parts, combinations, fits and keys, and models without rotation."""

from __future__ import annotations

import math
import runpy
from copy import copy
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.evaluation.conftest import fit_text
from trainer.analysis import weighted_rope
from trainer.analysis.attention import capture
from trainer.analysis.frequency_entropy import choose_factors
from trainer.common.errors import UserError
from trainer.common.registry import Registry
from trainer.config import (
    ChoiceSettings,
    DopeSettings,
    EvaluationConfig,
    LongRopeSettings,
    ManyShotSettings,
    NeedleTaskSettings,
    TemperatureSettings,
    WeightedRopeSettings,
)
from trainer.evaluation import dope
from trainer.evaluation.fitting import FitText
from trainer.evaluation.method import METHODS, Method, method
from trainer.evaluation.methods import (
    changed,
    dropped,
    known_methods,
    layout_inputs,
    layouts_for,
    tokens_read,
    why_not,
)
from trainer.evaluation.needles import NEEDLE_TASKS, needle_task
from trainer.evaluation.scoring import exact_number
from trainer.evaluation.store import fingerprint
from trainer.evaluation.temperature import GRID, tempered
from trainer.positional.config import PositionalConfig, TemperatureConfig, build_layout
from trainer.positional.rescaling import RESCALINGS, TITLES
from trainer.workflows.evaluate import applicable

CONFIG = EvaluationConfig(
    lengths=[1, 2],
    dope=DopeSettings(heads=1),
    longrope=LongRopeSettings(evaluations=9, windows=2),
    temperature=TemperatureSettings(coefficient=0.5, models="all"),
)
TEXT = fit_text(range(50), count=2)


@pytest.fixture
def fitting(tiny_decoder):
    def make(**positional):
        ids = np.random.default_rng(1).integers(1, 50, 300)
        model = tiny_decoder(**positional)
        return SimpleNamespace(model=model, text=fit_text(ids, count=2))

    return make


def layout(**positional):
    return build_layout(
        PositionalConfig(**positional),
        num_layers=3,
        num_key_value_heads=2,
        head_dim=8,
        training_length=64,
    )


def layouts_of(name, have, factors, config=CONFIG):
    return layouts_for(name, have.model.layout, factors, config, lambda: have.model, have.text)


def layout_of(name, have, factor, config=CONFIG):
    ((layout,), _) = layouts_of(name, have, [factor], config)
    return layout


DYNAMIC = [*(f"dynamic_{name}" for name in RESCALINGS), "dynamic_ntk_alpha"]


@pytest.mark.parametrize("name", [*RESCALINGS, *DYNAMIC, "longrope", "temperature"])
def test_parts_that_need_a_factor_change_nothing_for_1_or_less(fitting, name):
    have = fitting()
    for factor in (0.5, 1.0):
        changed = layout_of(name, have, factor)
        for length in (16, 32):
            assert changed.at(length) == have.model.layout.at(length)
        assert layout_of(name, have, factor).at(64) == layout_of(name, have, 1.0).at(64)
    assert layout_of(name, have, 2.0).at(64) != have.model.layout.at(64)


@pytest.mark.parametrize("name", sorted(RESCALINGS))
def test_the_dynamic_part_is_the_static_one_at_its_length(fitting, name):
    have = fitting()
    static = layout_of(name, have, 2.0).at(64)
    dynamic = layout_of(f"dynamic_{name}", have, 2.0).at(64)
    for a, b in zip(static.spectra, dynamic.spectra, strict=True):
        np.testing.assert_allclose(a.inv_freq, b.inv_freq, rtol=1e-12)


@pytest.mark.parametrize("alpha", [None, 1.0, 4.0])
def test_dynamic_ntk_has_the_factor_of_dope_appendix_a2(fitting, alpha):
    """theta_m = base'^(-2 m / d), base' = base (alpha n / C - (alpha - 1))^(d / (d - 2)), with
    alpha = L_target / L_original where none is given."""
    have, C, d, target = fitting(), 32, 8, 2.0
    config = replace(CONFIG, dynamic_ntk_alpha=alpha)
    layout = layout_of("dynamic_ntk_alpha", have, target, config)
    a = target if alpha is None else alpha
    for n in (16, 32, 48, 64, 256):
        base = 10_000.0 * max(a * n / C - (a - 1), 1.0) ** (d / (d - 2))
        expected = [base ** (-2 * m / d) for m in range(d // 2)]
        (result,) = layout.at(n).spectra
        np.testing.assert_allclose(result.inv_freq, expected, rtol=1e-12)


def test_rope_id_s_temperature_takes_another_exponent(fitting):
    have = fitting()
    for settings, expected in (
        (TemperatureSettings(), (0.1 * np.log(2) + 1) ** 2),
        (TemperatureSettings(rope_id_exponent=1.0), 0.1 * np.log(2) + 1),
    ):
        config = replace(CONFIG, temperature=settings)
        (result,) = layout_of("temperature_rope_id", have, 2.0, config).at(64).spectra
        assert result.temperature.scale == pytest.approx(expected)


def test_joined_parts_apply_from_left_to_right(fitting):
    have = fitting()
    joined = layout_of("yarn+weighted_rope", have, 2.0)
    alone = layout_of("yarn", have, 2.0)
    assert joined.spectra == alone.spectra
    config = EvaluationConfig(weighted_rope=[WeightedRopeSettings(tau=1.0, alpha=0.5)])
    weighted = layout_of("pi+weighted_rope", have, 2.0, config)
    assert all(layer.intervention is not None for layer in weighted.layers)
    assert weighted.spectra == layout_of("pi", have, 2.0).spectra


@pytest.mark.parametrize("heads", [1, 5])
def test_dope_chooses_its_heads_under_the_rescaling_before_it(fitting, heads):
    have = fitting(model={"num_hidden_layers": 4})
    config = replace(CONFIG, dope=DopeSettings(heads=heads, stage="post_rope"))
    ids = torch.from_numpy(have.text.windows(64))
    rescaled = have.model.layout.rescaled(RESCALINGS["yarn"], 2.0)
    chosen = dope.select(have.model, ids, config.dope, rescaled)
    assert layout_of("yarn+dope", have, 2.0, config) == dope.apply(
        rescaled, chosen, config.dope, have.model
    )
    plain = dope.select(have.model, ids, config.dope, have.model.layout)
    assert layout_of("dope", have, 2.0, config) == dope.apply(
        have.model.layout, plain, config.dope, have.model
    )


def test_factors_are_searched_once_for_all_coefficients_of_a_temperature(fitting, monkeypatch):
    searched = []
    monkeypatch.setattr(FitText, "loss", lambda *given: 1.0)
    monkeypatch.setattr(
        "trainer.evaluation.longrope.longrope_factors",
        lambda layout, s, *given: searched.append(s) or [(1.0,) * 4],
    )
    config = replace(CONFIG, lengths=[2, 4], temperature=TemperatureSettings(models="all"))
    layouts_of("longrope+temperature", fitting(), [2.0, 4.0], config)
    assert searched == [2.0, 4.0]


def test_unfitted_parts_apply_from_left_to_right():
    before = layout()
    result = changed("drop+temperature_rope_id", before, 2.0, CONFIG)
    assert result == tempered(dropped(before, 2.0, CONFIG), 0.1, 2.0)
    halved = changed("pi+yarn", before, 2.0, CONFIG)
    assert halved == before.rescaled(RESCALINGS["pi"], 2.0).rescaled(RESCALINGS["yarn"], 2.0)


def test_cropping_reads_the_last_tokens_with_any_other_part():
    names = {"crop": 64, "crop+pi": 64, "pi+crop": 64, "none": None, "pi+yarn": None}
    assert {name: tokens_read(name, layout()) for name in names} == names


@pytest.mark.parametrize("layers", [None, [0]])
@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_a_drop_leaves_no_layer_with_positions(fitting, encoding, layers):
    have = fitting(layers=[encoding], windows=[16, None])
    result = layout_of("drop", have, 2.0, replace(CONFIG, layers=layers))
    assert {spectrum.rotates or spectrum.alibi for spectrum in result.spectra} == {False}


def test_dropping_keeps_a_temperature_that_was_trained(fitting):
    have = fitting(temperature=TemperatureConfig(coefficient=1.0, reference=1))
    (before,), (dropped,) = have.model.layout.spectra, layout_of("drop", have, 2.0).spectra
    assert (dropped.rotates, dropped.temperature) == (False, before.temperature)
    assert dropped.temperature.coefficient == 1


@pytest.mark.parametrize("encoding", ["rope", "half_rope", "p_rope"])
def test_dropped_scores_are_products_without_rotation(fitting, encoding):
    have = fitting(layers=[encoding])
    layers = []
    with have.model.using(layout_of("drop", have, 2.0)):
        capture(have.model, torch.arange(40)[None] % 50, layers.append)
    for layer in layers:
        q, k = (np.repeat(x[0].double().numpy(), 4 // x.shape[1], 0) for x in (layer.q, layer.k))
        expected = q @ k.swapaxes(1, 2)
        keys = layer.rotated_k[0].repeat_interleave(4 // layer.k.shape[1], dim=0)
        result = layer.rotated_q[0] @ keys.mT
        np.testing.assert_allclose(result.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["weighted_rope+temperature", "dope+temperature"])
def test_a_temperature_is_fitted_to_heads_that_are_changed_already(fitting, name):
    """Which layouts are never stored."""
    every = WeightedRopeSettings("sequence", "below", 1.0, 0.5)
    config = replace(
        CONFIG,
        weighted_rope=[every],
        dope=DopeSettings(heads=2, removal="zero"),
        temperature=TemperatureSettings(models="all"),
    )
    result = layout_of(name, fitting(), 2.0, config)
    assert any(layer.intervention is not None for layer in result.layers)
    assert all(0 <= s.temperature.coefficient <= 2 for s in result.spectra)


@pytest.mark.parametrize(
    ("layers", "changed"),
    [(None, [1]), ("all", [0, 1]), ([0], [0]), ([-1, 0], [0, 1])],
)
@pytest.mark.parametrize(
    "name",
    [
        *RESCALINGS,
        *(f"dynamic_{rescaling}" for rescaling in RESCALINGS),
        *("dynamic_ntk_alpha", "longrope", "temperature", "temperature_rope_id"),
    ],
)
def test_a_part_changes_the_layers_that_see_beyond_training_or_are_chosen(
    fitting, name, layers, changed
):
    have = fitting(windows=[16, None])
    result = layout_of(name, have, 2.0, replace(CONFIG, layers=layers)).at(64)
    trained = have.model.layout.layers
    differ = [i for i, layer in enumerate(result.layers) if layer != trained[i]]
    assert differ == changed
    if name in RESCALINGS:
        (spectrum,) = have.model.layout.spectra
        stretch = RESCALINGS[name](spectrum.inv_freq, 32)
        slowed = stretch.frequencies(spectrum.inv_freq, 2.0)
        assert all(result.layers[i].spectra[0].inv_freq == slowed for i in changed)


def test_a_window_that_a_method_gives_does_not_keep_it_from_rescaling(fitting):
    have = fitting()
    result = layout_of("window+pi", have, 2.0)
    assert {layer.window for layer in result.layers} == {32}
    slowed = [f / 2 for f in have.model.layout.spectra[0].inv_freq]
    assert result.spectra[0].inv_freq == pytest.approx(slowed)


def test_a_search_goes_through_the_spectra_of_the_layers_that_change(fitting):
    """Of two encodings one stands in layers with windows: it has no factors."""
    have = fitting(layers=["rope", "half_rope"], windows=[16, None])
    result = layout_of("longrope", have, 2.0).at(64)
    assert result.layers[0] == have.model.layout.layers[0]
    assert result.layers[1] != have.model.layout.layers[1]
    all_layers = layout_of("longrope", have, 2.0, replace(CONFIG, layers="all")).at(64)
    assert all_layers.layers[0] != have.model.layout.layers[0]


def test_lengths_that_round_to_the_training_length_have_nothing_to_fit(fitting):
    have = fitting()
    config = replace(CONFIG, lengths=[1.001])
    assert layout_of("temperature", have, 1.0, config) == have.model.layout


@pytest.mark.parametrize("name", ["dope", "weighted_rope", "longrope", "temperature"])
def test_a_fit_reads_texts_of_the_length_in_tokens(tiny_decoder, monkeypatch, name):
    """115 / 100 * 100 is 114.99999999999999."""
    model, read, windows = tiny_decoder(training_length=100), [], FitText.windows
    monkeypatch.setattr(FitText, "loss", lambda *given: 1.0)
    monkeypatch.setattr(FitText, "windows", lambda *a: read.append(a[1]) or windows(*a))
    fitted = TemperatureSettings(models="all")
    config = replace(CONFIG, lengths=[115 / 100], temperature=fitted)
    text = fit_text([*range(1, 49)] * 4, count=1)
    layouts_for(name, model.layout, [115 / 100], config, lambda: model, text)
    assert read == [115]


def test_a_search_divides_the_frequencies_of_the_method_before(fitting):
    """The first candidate divides by one."""
    have = fitting()
    config = replace(CONFIG, longrope=LongRopeSettings(evaluations=1, windows=1))
    (spectrum,) = layout_of("pi+longrope", have, 2.0, config).at(64).spectra
    trained = have.model.layout.spectra[0].inv_freq
    assert spectrum.inv_freq == pytest.approx([f / 2 for f in trained])


def test_pairs_are_chosen_under_the_rescaling_before_them(fitting):
    have = fitting()
    rules = [WeightedRopeSettings("sequence", "below", 0.9, 0.5)]
    config = replace(CONFIG, weighted_rope=rules)
    rescaled = have.model.layout.rescaled(RESCALINGS["pi"], 2.0)
    ids = torch.from_numpy(have.text.windows(64))
    chosen, plain = (
        choose_factors(have.model, ids, rules, layout) for layout in (rescaled, have.model.layout)
    )
    assert chosen != plain
    result = layout_of("pi+weighted_rope", have, 2.0, config)
    assert result == weighted_rope.apply(rescaled, chosen)


def test_heads_chosen_at_another_length_serve_the_evaluated_one(fitting):
    """DoPE, Tables 3 and 4: heads by the entropy of queries under Dynamic NTK on texts of 64
    tokens, removed at 32."""
    have = fitting()
    ids = have.text.windows(64)
    rescaled = have.model.layout.dynamically_rescaled(RESCALINGS["ntk"])
    config = replace(CONFIG, dope=DopeSettings(heads=3, r=4), choice=ChoiceSettings(length=2))
    chosen = dope.select(have.model, torch.from_numpy(ids), config.dope, rescaled)
    (layout,), notes = layouts_of("dynamic_ntk+dope", have, [1.0], config)
    assert layout == dope.apply(rescaled, chosen, config.dope, have.model)
    names = ", ".join(f"L{layer}H{head}" for layer, head in chosen)
    assert notes == [f"{names}, chosen on {len(ids)} texts of 64 tokens (validation)"]


def test_pairs_of_another_length_are_taken_for_the_evaluated_one(fitting):
    have = fitting()
    rules = [WeightedRopeSettings("sequence", "below", 0.9, 0.5)]
    config = replace(CONFIG, weighted_rope=rules, choice=ChoiceSettings(length=2))
    ids = torch.from_numpy(have.text.windows(64))
    expected = choose_factors(have.model, ids, rules, have.model.layout)
    (layout,), (note,) = layouts_of("weighted_rope", have, [1.0], config)
    assert layout == weighted_rope.apply(have.model.layout, expected)
    assert layout != layout_of("weighted_rope", have, 1.0, replace(config, choice=CONFIG.choice))
    count = weighted_rope.count_pairs(expected)
    assert note == (
        f"{count} pairs of queries and keys, chosen on 2 texts of 64 tokens (validation)"
    )


def test_one_scale_fitted_at_the_target_length_serves_all_lengths(fitting):
    """DroPE, App. C.2: beta* = 1 + c ln s with the c of the least perplexity at one target
    length, here by brute force over the whole grid."""
    have = fitting(layers=["nope"])
    settings = TemperatureSettings(lengths=[2.0])
    windows = torch.from_numpy(have.text.windows(64))
    ids = torch.cat([torch.zeros(2, 1, dtype=torch.long), windows], dim=1)

    def perplexity(c):
        with have.model.using(tempered(have.model.layout, c)), torch.no_grad():
            logits = have.model(ids[:, :-1]).double()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows.flatten()).exp()

    config = replace(CONFIG, lengths=[1, 2, 4], temperature=settings)
    (spectrum,) = layout_of("temperature", have, 4.0, config).spectra
    scale, c = spectrum.temperature.at(128, 32).scale, spectrum.temperature.coefficient
    assert scale == pytest.approx(1 + c * np.log(4))
    assert perplexity(c) <= min(map(perplexity, GRID)) * (1 + 1e-6)


def test_a_choice_is_made_once_for_all_tasks(fitting, monkeypatch):
    have, chosen = fitting(), []
    select = dope.select
    monkeypatch.setattr(dope, "select", lambda *a: chosen.append(a) or select(*a))
    (first, second), _ = layouts_of("dope", have, [2.0, 2.0])
    assert first == second
    assert len(chosen) == 1


def test_methods_that_cannot_change_a_model_say_why(fitting):
    """RNoPE-SWA rotates in layers with windows alone; Mistral has a window in all of its layers."""
    trained = TemperatureConfig(coefficient=1.0, reference=1)
    free = replace(CONFIG, temperature=TemperatureSettings(models="free"))
    nope, mistral = {"layers": ["nope"]}, {"windows": [16]}
    rnope_swa = {"layers": ["rope", "nope"], "windows": [16, None]}
    for name, encoding, config, why in (
        ("yarn", nope, CONFIG, "no rotation"),
        ("dope+temperature", nope, CONFIG, "no rotation"),
        ("temperature", nope, free, None),
        ("temperature", {"layers": ["alibi"]}, free, "has positions"),
        ("temperature", {"layers": ["alibi"]}, CONFIG, None),
        ("temperature", nope | {"temperature": trained}, CONFIG, "follow the length"),
        ("temperature_rope_id", nope | {"temperature": trained}, CONFIG, "follow the length"),
        ("yarn", mistral, CONFIG, "no such layer"),
        ("yarn", rnope_swa, CONFIG, "no such layer"),
        ("yarn", rnope_swa, replace(CONFIG, layers=[1]), "no such layer"),
        ("yarn", rnope_swa, replace(CONFIG, layers="all"), None),
        ("temperature", rnope_swa, CONFIG, None),
        ("temperature", mistral, CONFIG, "no such layer"),
    ):
        model = fitting(**encoding).model
        said = why_not(name, SimpleNamespace(layout=model.layout, computed_by=None), config)
        assert said == "" if why is None else why in said


def test_the_key_of_fits_follows_the_text_and_its_windows():
    others = [
        fit_text(range(1, 51), count=2),
        replace(TEXT, count=3),
        replace(TEXT, held_out=replace(TEXT.held_out, bos=(1,))),
    ]
    assert len({fingerprint(layout_inputs("dope", text, CONFIG)) for text in (TEXT, *others)}) == 4


OF_LAYOUTS = {
    "layers": [1],
    "temperature": TemperatureSettings(coefficient=0.5),
    "dynamic_ntk_alpha": 2.0,
    "longrope": LongRopeSettings(windows=5),
    "choice": ChoiceSettings(texts=5),
    "dope": DopeSettings(heads=2),
    "weighted_rope": [],
    "needles": NeedleTaskSettings(seed=2),
    "many_shot": ManyShotSettings(trials=5),
}
"""Another value of each key that a method or the prompts of its choice may read."""
NOT_OF_LAYOUTS = {
    *("enabled", "training_length", "methods", "dtype", "fit_windows", "lengths", "tokens"),
    *("tasks", "windows", "limit", "batch_tokens"),
    *("ruler", "longbench", "multiple_choice", "harness", "settings"),
}
"""Keys that a fit does not read, or that its key holds in another form."""


def changing(name, config):
    """The keys of :data:`OF_LAYOUTS` that change the key of a method's layouts."""
    before = fingerprint(layout_inputs(name, TEXT, config))
    changed = {key: replace(config, **{key: value}) for key, value in OF_LAYOUTS.items()}
    return {k for k, c in changed.items() if fingerprint(layout_inputs(name, TEXT, c)) != before}


def test_the_key_of_fits_has_every_key_that_they_may_read(monkeypatch):
    assert {field.name for field in fields(EvaluationConfig)} == {*OF_LAYOUTS} | NOT_OF_LAYOUTS
    monkeypatch.setitem(METHODS, "mine", Method("mine", lambda layout, *_: layout))
    config = replace(CONFIG, choice=ChoiceSettings(text="standard"))
    assert changing("mine", config) == {*OF_LAYOUTS}


OF_KEY = {"layers", "batch_tokens"}
"""What the keys of all layouts have."""


@pytest.mark.parametrize("name", sorted(known_methods()))
def test_the_key_of_a_method_has_what_it_reads_and_no_settings_of_others(
    fitting, monkeypatch, name
):
    config = replace(CONFIG, choice=ChoiceSettings(text="validation", texts=1))
    have = fitting(model={"num_hidden_layers": 2})
    names = {field.name for field in fields(EvaluationConfig)}
    read = set()

    def noting(self, key):
        read.update(names & {key})
        return object.__getattribute__(self, key)

    # A layer's choice is resolved in a copy, which reads every field of the configuration.
    monkeypatch.setattr("trainer.evaluation.methods.replace", lambda config, **_: config)
    monkeypatch.setattr(EvaluationConfig, "__getattribute__", noting)
    layouts_of(name, have, [2.0], config)
    monkeypatch.undo()
    assert changing(name, config) - {"layers"} == read - OF_KEY - {"lengths"}
    assert known_methods()[name].is_fitted or "lengths" not in read


def test_a_joint_fit_has_all_lengths_in_its_key_and_others_have_none():
    other = replace(CONFIG, lengths=[1, 3])
    for name, is_joint in (("temperature", True), ("yarn+temperature", True), ("dope", False)):
        inputs = [fingerprint(layout_inputs(name, TEXT, each)) for each in (CONFIG, other)]
        assert (inputs[0] != inputs[1]) is is_joint


def test_the_key_of_fits_has_the_code_of_a_plugin_s_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.evaluation.task.TASKS", Registry("task"))
    monkeypatch.setitem(NEEDLE_TASKS, "mine", None)
    plugin = tmp_path / "plugin.py"
    plugin.write_text("def mine(haystack, settings, length):\n    return []\n")
    needle_task(exact_number)(runpy.run_path(str(plugin))["mine"])
    config = replace(CONFIG, choice=ChoiceSettings(text="mine"))
    before = fingerprint(layout_inputs("dope", TEXT, config))
    plugin.write_text("def mine(haystack, settings, length):\n    return [1]\n")
    assert fingerprint(layout_inputs("dope", TEXT, config)) != before


def test_the_key_of_fits_has_the_prompts_that_heads_are_chosen_on(tmp_path):
    file = tmp_path / "math.jsonl"
    config = replace(CONFIG, choice=ChoiceSettings(text="many_shot_skip"))
    config = replace(config, many_shot=replace(config.many_shot, file=str(file)))
    settings = []
    for content in ("{}", "{} "):
        file.write_text(content)
        settings.append(layout_inputs("dope", TEXT, config))
    for choice in (ChoiceSettings(length=2.0), ChoiceSettings(texts=1), config.choice):
        changed = replace(CONFIG, choice=choice)
        settings.append(layout_inputs("dope", TEXT, changed))
    assert len({str(each) for each in settings}) == 5
    assert config.needles in settings[0]


def test_a_window_is_no_wider_than_the_training_length(fitting):
    windows = [None, 16, 31, 32, 33, 64]
    have = fitting(windows=windows, model={"num_hidden_layers": 6})
    narrowed = layout_of("window", have, 2.0)
    assert [layer.window for layer in narrowed.layers] == [32, 16, 31, 32, 32, 32]
    assert narrowed.spectra == have.model.layout.spectra


@pytest.mark.parametrize(("coefficient", "exponent"), [(0.412, 1.0), (0.1, 2.0)])
def test_temperatures_of_the_papers(coefficient, exponent):
    (spectrum,) = tempered(layout(), coefficient, exponent).spectra
    temperature = spectrum.temperature
    assert temperature.per == "sequence"
    assert (temperature.coefficient, temperature.exponent) == (coefficient, exponent)
    expected = (1 + coefficient * math.log(4)) ** exponent
    assert temperature.at(256, 64).scale == pytest.approx(expected)
    assert spectrum.inv_freq == layout().spectra[0].inv_freq


def test_every_part_has_a_distinct_title():
    methods = known_methods().values()
    assert len({method.title for method in methods}) == len(methods)


@pytest.fixture
def models(tiny_decoder):
    """Two that rotate, one of which transformers computes, and one without positions, of 32."""

    def made(name, program=None, **encoding):
        model = tiny_decoder(**encoding)
        return SimpleNamespace(
            name=name, config=model.config, layout=model.layout, computed_by=program
        )

    return [made("rope"), made("hf", "transformers"), made("nope", layers=["nope"])]


def test_each_model_has_the_methods_that_do_something_to_it(models):
    config = EvaluationConfig(methods=["none", "pi", "yarn", "window", "temperature"])
    found, notes = applicable(models, config)
    assert found == {
        "rope": ["none", "pi", "yarn", "window"],
        "hf": ["none", "pi", "yarn"],
        "nope": ["none", "window", "temperature"],
    }
    assert notes == []  # every method changes some model


def test_a_method_that_changes_no_model_is_named_with_the_reasons(models):
    config = EvaluationConfig(methods=["none", "temperature"])
    _, notes = applicable(models[:2], config)
    (note,) = notes
    assert note.startswith("temperature: rope has positions")
    with pytest.raises(UserError, match=r"evaluation\.methods: dynamic_pi: hf is computed by"):
        applicable(models[1:], EvaluationConfig(methods=["dynamic_pi"]))


def test_layers_are_checked_before_anything_is_measured(models):
    with pytest.raises(UserError, match=r"^evaluation\.layers: rope: .*-2 to 1, got \[1, 5\]"):
        applicable(models, EvaluationConfig(methods=["none", "yarn"], layers=[1, 5]))


def test_a_plugins_method_replaces_none_of_another_file(monkeypatch):
    monkeypatch.setattr("trainer.evaluation.method.METHODS", copy(METHODS))
    for _ in range(2):  # a plugin may be run again
        method("mine", "mine")(lambda layout, factor, config: layout)
    with pytest.raises(UserError, match=r"'temperature' exists"):
        method("temperature", "mine")(lambda layout, factor, config: layout)


@pytest.mark.parametrize("name", ["temperature", "dynamic_pi", "ntk_alpha"])
def test_a_rescaling_and_a_method_of_one_name_are_refused(monkeypatch, name):
    """A plugin's rescaling would take the place of the program's method in silence."""
    monkeypatch.setitem(RESCALINGS, name, RESCALINGS["pi"])
    monkeypatch.setitem(TITLES, name, "mine")
    with pytest.raises(UserError, match=f"'{name}'"):
        known_methods()
