"""DoPE: the choice of heads, and the changes of their bands."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from trainer.analysis.attention import capture
from trainer.analysis.matrix_entropy import matrix_entropy_of
from trainer.evaluation.dope import DopeSettings, apply, lost_bands, select
from trainer.model.generate import generate
from trainer.positional.rescaling import RESCALINGS
from trainer.positional.spectrum import LongFrequencies, Spectrum

IDS = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(7))
SHAPE = {"num_hidden_layers": 3}
VARIANTS = {
    f"{variant}, {removal}": DopeSettings(variant, removal=removal)
    for variant, removal in (
        *product(("by_parts", "by_all"), ("unrotate", "zero")),
        ("by_gaussian", "zero"),
    )
}
every_variant = pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture
def model(tiny_decoder):
    """3 layers of 4 query and 2 key-value heads of 4 pairs, of which all but the fastest
    are slower than a turn in the 32 tokens of training."""
    return tiny_decoder(model=SHAPE)


def chosen_by(model, settings):
    return select(model, IDS, settings, model.layout)


def captured(model, layout):
    """Queries and keys of every layer under a layout."""
    with model.using(layout):
        return capture(model, IDS, lambda heads: heads)


def plain_rank(vectors, r):
    """exp of the entropy of the r largest eigenvalues of the vectors' covariance over its trace
    (Eq. 27 to 30)."""
    size = len(vectors[0])
    gram = [[math.fsum(v[a] * v[b] for v in vectors) for b in range(size)] for a in range(size)]
    trace = math.fsum(gram[a][a] for a in range(size))
    eigenvalues = torch.linalg.eigvalsh(torch.tensor(gram, dtype=torch.float64) / trace)
    largest = sorted(eigenvalues.clamp(min=0).tolist())[-r:]
    shares = [e / math.fsum(largest) for e in largest]
    return math.exp(-math.fsum(p * math.log(p) for p in shares if p > 0))


@pytest.mark.parametrize("by", ["query", "key", "joint"])
def test_all_query_heads_of_all_layers_are_ranked_with_the_keys_they_read(model, by):
    """Sec. 5.1: l x h attention heads, by entropies of queries, keys or both jointly."""
    ranks = {}
    for layer, heads in enumerate(captured(model, model.layout)):
        for h in range(4):
            queries = heads.rotated_q[:, h].flatten(0, 1).double().tolist()
            keys = heads.rotated_k[:, h // 2].flatten(0, 1).double().tolist()
            vectors = {"query": queries, "key": keys, "joint": queries + keys}[by]
            ranks[layer, h] = plain_rank(vectors, 4)
    selection = chosen_by(model, DopeSettings(by=by, r=4, heads=12))
    assert [ranks[place] for place in selection] == pytest.approx(sorted(ranks.values()), rel=1e-5)
    assert {*selection} == {*ranks}


def test_texts_are_read_one_at_a_time_and_count_together(model, monkeypatch):
    """All together would need the memory of all."""
    ids = torch.randint(50, (5, 40), generator=torch.Generator().manual_seed(9))
    layers, read = [], []
    capture(model, ids, layers.append)
    hidden_states = model.hidden_states

    def reading(ids, **options):
        read.append(tuple(ids.shape))
        return hidden_states(ids, **options)

    monkeypatch.setattr(model, "hidden_states", reading)
    selection = select(model, ids, DopeSettings(by="joint", r=4, heads=1), model.layout)
    assert read == [(1, 40)] * 5
    ranks = {}
    for layer, heads in enumerate(layers):
        sides = heads.rotated_q, heads.rotated_k.repeat_interleave(2, dim=1)
        for h in range(4):
            vectors = [row for x in sides for row in x[:, h].flatten(0, 1).double().tolist()]
            ranks[layer, h] = plain_rank(vectors, 4)
    ((layer, h),) = selection
    assert (layer, h) == min(ranks, key=ranks.__getitem__)
    sides = layers[layer].rotated_q, layers[layer].rotated_k.repeat_interleave(2, dim=1)
    others = [other for other in range(4) if other != h]
    expected = [float(x[:, others].double().std(correction=0)) for x in sides]
    assert selection[layer, h] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize(
    ("entropy", "r"), [("vanilla", 1), ("trunc", 1), ("trunc", 4), ("trunc", None)]
)
def test_heads_are_ranked_over_all_layers(model, entropy, r, order):
    settings = DopeSettings(entropy=entropy, r=r, order=order, heads=5, stage="pre_ntk")
    layers = captured(model, model.layout)
    entropies = [matrix_entropy_of(heads, "query", "pre_ntk", model.layout) for heads in layers]
    table = torch.stack(
        [e.band_mean if entropy == "vanilla" else e.effective_rank(r) for e in entropies]
    )
    ranked = table.flatten().argsort(descending=order == "descending")
    assert [*chosen_by(model, settings)] == [divmod(int(i), table.shape[1]) for i in ranked[:5]]


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("entropy", ["trunc", "norm"])
@pytest.mark.parametrize("by", ["query", "key"])
def test_with_r_1_heads_are_sorted_by_the_largest_eigenvalue(model, by, entropy, order):
    """Captions of Tables 1 and 2: ASC takes the heads of lowest entropy, those of the largest
    eigenvalue over the trace. Sec. 5.2 and App. A.2: the score is the spectral norm itself."""
    expected = {}
    for layer, heads in enumerate(captured(model, model.layout)):
        for h in range(4):
            vectors = heads.rotated_q[:, h] if by == "query" else heads.rotated_k[:, h // 2]
            x = vectors.flatten(0, 1).double().numpy()
            norm = np.linalg.svd(x, compute_uv=False)[0] ** 2
            expected[layer, h] = norm if entropy == "norm" else (x**2).sum() / norm
    selection = chosen_by(model, DopeSettings(by=by, entropy=entropy, order=order, heads=12))
    assert {*selection} == {*expected}
    assert [expected[place] for place in selection] == pytest.approx(
        sorted(expected.values(), reverse=order == "descending"), rel=1e-5
    )


def test_stages_see_the_rescaled_and_the_trained_frequencies(model):
    rescaled = model.layout.rescaled(RESCALINGS["pi"], 8.0)

    def ranked(stage, layout):
        settings = DopeSettings(stage=stage, heads=12, entropy="vanilla")
        return [*select(model, IDS, settings, layout)]

    assert ranked("post_ntk", model.layout) == ranked("post_rope", model.layout)
    by_stage = [ranked(stage, rescaled) for stage in ("pre_ntk", "post_ntk", "post_rope")]
    assert len(set(map(tuple, by_stage))) == 3


@every_variant
@torch.no_grad()
def test_heads_change_the_model_but_not_its_trained_layout(model, settings):
    trained = model.layout
    before = model(IDS)
    selection = select(model, IDS, settings, trained.rescaled(RESCALINGS["yarn"], 4.0))
    assert model.layout is trained
    assert chosen_by(model, replace(settings, heads=0)) == {}
    assert apply(trained, {}, settings, model) == trained
    model.layout = apply(trained, selection, settings, model)
    assert not torch.equal(model(IDS), before)
    untouched = set(range(3)) - {layer for layer, _ in selection}
    for layer in untouched:
        assert model.layout.layers[layer] is trained.layers[layer]


@every_variant
@torch.no_grad()
def test_reading_in_parts_and_together_is_reading_alone(model, settings):
    model.layout = apply(model.layout, chosen_by(model, settings), settings, model)
    prompts = [IDS[0, :9].tolist(), IDS[1, :4].tolist()]
    assert generate(model, prompts, 8) == [generate(model, [p], 8)[0] for p in prompts]


CHANGES = {
    "none": lambda layout: layout,
    "yarn": lambda layout: layout.rescaled(RESCALINGS["yarn"], 4.0),
    "dynamic ntk": lambda layout: layout.dynamically_rescaled(RESCALINGS["ntk"]),
}
"""What can have been done to a layout before; at 40 tokens dynamic NTK has an effect."""


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("variant", ["by_parts", "by_all"])
def test_unrotated_bands_pass_and_the_others_turn(model, variant, change):
    """With the temperature and the attention factor that they had."""
    layout = change(model.layout).map(lambda s: s.with_temperature(scale=1.7))
    settings = DopeSettings(variant)
    changed = apply(layout, {(0, 1): (0.0, 0.0)}, settings, model)
    before, after = captured(model, layout)[0], captured(model, changed)[0]
    scale = layout.at(40).spectra[0].rotary_scale
    still = [1, 2, 3, 5, 6, 7] if variant == "by_parts" else list(range(8))
    turning = [c for c in range(8) if c not in still]
    for name, heads, factor in (("q", [1], 1.7 * scale), ("k", [1], scale)):
        plain, old, new = (
            getattr(x, side + name)
            for x, side in ((after, ""), (before, "rotated_"), (after, "rotated_"))
        )
        if name == "k":
            old = old.repeat_interleave(2, dim=1)
        torch.testing.assert_close(new[:, heads][..., still], factor * plain[:, heads][..., still])
        assert torch.equal(new[:, heads][..., turning], old[:, heads][..., turning])
        others = [h for h in range(new.shape[1]) if h not in heads]
        assert torch.equal(new[:, others], old[:, others])


@pytest.mark.parametrize("variant", ["by_parts", "by_all"])
def test_zeros_take_bands_out_of_the_scores_of_a_head(model, variant):
    """Eq. 34 and 35 put them into queries and keys; a product needs but one zero."""
    settings = DopeSettings(variant, removal="zero")
    changed = apply(model.layout, {(0, 1): (0.0, 0.0)}, settings, model)
    before, after = (captured(model, x)[0] for x in (model.layout, changed))
    gone = [1, 2, 3, 5, 6, 7] if variant == "by_parts" else list(range(8))
    expected_q, expected_k = before.rotated_q.clone(), before.rotated_k.repeat_interleave(2, dim=1)
    expected_q[:, 1, :, gone] = 0
    expected_k[:, 1, :, gone] = 0
    torch.testing.assert_close(
        after.rotated_q @ after.rotated_k.repeat_interleave(2, dim=1).mT,
        expected_q @ expected_k.mT,
    )


def test_bands_that_turned_in_training_stay_by_any_rescaling(model):
    """By their frequencies as trained: a rescaling makes no other band slow."""
    settings = DopeSettings("by_parts", heads=12)
    spectrum = model.layout.layers[0].spectra[0]
    expected = [m for m, f in enumerate(spectrum.inv_freq) if f < 2 * math.pi / 32]
    assert lost_bands(spectrum, 32, settings) == expected
    rescaled = model.layout.rescaled(RESCALINGS["pi"], 1000.0)
    whole = select(model, IDS, settings, rescaled)
    spectra = apply(rescaled, whole, settings, model).spectra
    assert [f == 0 for f in spectra[0].inv_freq] == [m in expected for m in range(4)]


def test_noise_has_the_deviations_of_the_retained_heads(model):
    """Of queries and of the keys that they read (Eq. 36 and 37)."""
    selection = chosen_by(model, DopeSettings("by_gaussian", heads=4))
    layers = captured(model, model.layout)
    for (layer, _), noise in selection.items():
        heads = layers[layer]
        lost = [h for i, h in selection if i == layer]
        retained = [h for h in range(4) if h not in lost]
        sides = heads.rotated_q, heads.rotated_k.repeat_interleave(2, dim=1)
        expected = [float(x[:, retained].double().std(correction=0)) for x in sides]
        assert noise == pytest.approx(expected, rel=1e-5)


def test_a_layer_that_retains_no_head_has_the_noise_of_all_of_its_heads(model):
    selection = chosen_by(model, DopeSettings("by_gaussian", heads=12))
    for layer, heads in enumerate(captured(model, model.layout)):
        sides = heads.rotated_q, heads.rotated_k
        expected = [float(x.double().std(correction=0)) for x in sides]
        for head in range(4):
            assert selection[layer, head] == pytest.approx(expected, rel=1e-5)


def test_noise_of_sigma_0_is_none(model):
    selection = chosen_by(model, DopeSettings("by_gaussian", sigma=0.0))
    assert [*selection.values()] == [(0.0, 0.0)]


def test_pairs_that_do_not_turn_are_no_bands():
    spectrum = Spectrum((1.0, 0.01, 0.0))
    assert lost_bands(spectrum, 32, DopeSettings("by_parts")) == [1]
    assert lost_bands(spectrum, 32, DopeSettings("by_all")) == [0, 1]
    # At the end of training, if a model was trained with the frequencies of long sequences.
    slowed = replace(spectrum, long=LongFrequencies(16, (0.1, 0.0, 0.0)))
    assert lost_bands(slowed, 32, DopeSettings("by_parts")) == [0]


@pytest.mark.parametrize("variant", ["by_parts", "by_all"])
def test_zeros_of_all_take_what_does_not_turn_too_and_of_parts_slow_pairs_alone(
    tiny_decoder, variant
):
    """Pairs 0 and 1 turn, in channels 0 and 2, and 1 and 3; the second one is slow."""
    model = tiny_decoder(model=SHAPE, layers=["half_rope"])
    settings = DopeSettings(variant, removal="zero")
    intervention = apply(model.layout, {(0, 1): (0.0, 0.0)}, settings, model).layers[0].intervention
    gone = [1, 3] if variant == "by_parts" else [*range(8)]
    expected = [[float(h != 1 or c not in gone) for c in range(8)] for h in range(4)]
    assert [[*row] for row in intervention.query] == expected


def test_noise_of_sigma_takes_the_place_of_the_queries_and_keys_of_a_head(model):
    settings = DopeSettings("by_gaussian", heads=6, sigma=1.0)
    assert {*chosen_by(model, settings).values()} == {(1.0, 1.0)}
    changed = apply(model.layout, {(1, 2): (1.0, 1.0)}, settings, model)
    before, after = (captured(model, x)[1] for x in (model.layout, changed))
    copies = after.rotated_k.shape[1] // 2
    for new, old, heads in (
        (after.rotated_q, before.rotated_q, [2]),
        (after.rotated_k, before.rotated_k.repeat_interleave(copies, dim=1), [2]),
    ):
        noise = new[:, heads]
        assert torch.equal(noise[0], noise[1])  # of the position, not of the text
        assert float(noise.std()) == pytest.approx(1, rel=0.2)
        others = [h for h in range(new.shape[1]) if h not in heads]
        assert torch.equal(new[:, others], old[:, others])


def test_layers_and_seeds_have_different_noise(model):
    def noise(seed):
        settings = DopeSettings("by_gaussian", heads=12, seed=seed, sigma=1.0)
        selection = chosen_by(model, settings)
        layers = captured(model, apply(model.layout, selection, settings, model))
        return [x[0] for heads in layers for x in (heads.rotated_q, heads.rotated_k)]

    draws = [*noise(0), *noise(1)]
    assert not any(torch.equal(draws[i], draws[j]) for i in range(12) for j in range(i))
    assert all(map(torch.equal, noise(1), draws[6:]))


def test_heads_without_rotation_are_not_among_the_candidates(tiny_decoder):
    model = tiny_decoder(model=SHAPE, layers=["rope", "nope"], heads={"nope": 0.5})
    settings = DopeSettings(heads=4)
    chosen = [*chosen_by(model, settings)]
    assert {layer for layer, _ in chosen} == {0, 2}
    assert {head for _, head in chosen} == {0, 1}
    assert len(chosen_by(model, replace(settings, heads=5))) == 4
