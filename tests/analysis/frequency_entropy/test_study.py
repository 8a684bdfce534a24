"""Frequency entropies in a section: the numbers, and the sentences made of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.signal
import scipy.stats
import torch

from tests.analysis.attention_examples import picture
from trainer.analysis.capture import capture
from trainer.analysis.frequency_entropy.study import FrequencyEntropyStudy
from trainer.analysis.settings import AttenuationSettings, ShortTime, rules
from trainer.analysis.studies.study import Target, run
from trainer.evaluation import weighted_rope
from trainer.positional.layout import Intervention

SIDES = ("query", "key")


def text(length, texts=1):
    return torch.randint(50, (texts, length), generator=torch.Generator().manual_seed(3))


def section_of(target, **attenuation):
    settings = AttenuationSettings(**{"alphas": [], **attenuation})
    target = replace(target, attenuation=settings)
    (section,) = run([FrequencyEntropyStudy(target)], target)
    return section


def sequence_fe(signal):
    power = np.abs(np.fft.fft(signal)[1 : len(signal) // 2]) ** 2
    return scipy.stats.entropy(power) / math.log(len(power))


def spectrum_fe(signal):
    _, _, stft = scipy.signal.spectrogram(
        signal, window="hann", nperseg=1024, noverlap=512, detrend=False, mode="complex"
    )
    return scipy.stats.entropy((np.abs(stft) ** 2).mean(axis=-1)) / math.log(513)


def expected(target, measure, side, pairs=4):
    """``[layers][heads][pairs]`` of one text, from queries and keys after their encoding."""
    layers = []
    capture(target.model, target.ids, layers.append)
    sides = {"query": "rotated_q", "key": "rotated_k"}
    return np.array(
        [
            [
                [measure(np.hypot(head[:, m], head[:, m + pairs])) for m in range(pairs)]
                for head in getattr(heads, sides[side])[0].double().numpy()
            ]
            for heads in layers
        ]
    )


def test_the_numbers_are_those_of_every_pair(tiny_decoder):
    target = Target("tiny", tiny_decoder(), text(1536))
    section = section_of(target)
    for name, measure in (("SpectrumFE", spectrum_fe), ("SequenceFE", sequence_fe)):
        for side in ("query", "key"):
            ours = section.numbers["entropy"][f"{name} {side}"]
            np.testing.assert_allclose(ours, expected(target, measure, side), atol=1e-4)
    queries, keys, norms, of_keys, means = section.pictures
    assert queries.header == ("layer", "head", "pair", "SpectrumFE", "SequenceFE")
    assert len(queries.rows) == 2 * 4 * 4
    assert len(keys.rows) == 2 * 2 * 4
    layer, head, pair, *values = queries.rows[-1]
    assert values == pytest.approx(
        [expected(target, m, "query")[layer, head, pair] for m in (spectrum_fe, sequence_fe)],
        rel=1e-3,
    )
    assert len(means.rows) == 2 * 2 * 2 * 4
    by_row = {row[:4]: row[4] for row in means.rows}
    assert by_row["SequenceFE", "key", 1, 2] == pytest.approx(
        expected(target, sequence_fe, "key")[1, :, 2].mean(), rel=1e-4
    )
    assert {row[0] for row in norms.rows} == {row[0] for row in of_keys.rows} == {0, 1}


def periodic(tiny_decoder, length=600):
    """A text that repeats every four tokens, and so do the norms of queries and keys, nearly."""
    ids = torch.tensor([7, 7, 7, 9]).repeat(length // 4)[None]
    return Target("tiny", tiny_decoder(), ids)


def test_periods_are_counted_and_found_in_their_layer(tiny_decoder):
    target = periodic(tiny_decoder)
    section = section_of(target)
    for side, kind in (("query", "queries"), ("key", "keys")):
        entropy = expected(target, sequence_fe, side)
        low = (entropy < 0.6).sum(axis=(1, 2))
        assert low.any()
        assert (
            f"{low.sum()} of {entropy.size} pairs of {kind} have SequenceFE below 0.6, most "
            f"of them in layer {low.argmax()} ({low.max()})."
        ) in section.findings


def test_noise_has_no_period(tiny_decoder):
    section = section_of(Target("tiny", tiny_decoder(), text(600)))
    sentence = "0 of 32 pairs of queries have SequenceFE below 0.6: no pair has a clear period."
    assert sentence in section.findings


@pytest.mark.parametrize("heads", [4, 2])
def test_the_band_is_the_pair_that_is_lowest_in_most_heads(tiny_decoder, heads):
    model = tiny_decoder(model={"num_attention_heads": heads, "head_dim": 8})
    target = Target("tiny", model, text(1100))
    lowest = expected(target, spectrum_fe, "query").argmin(axis=-1).ravel()
    band = np.bincount(lowest).argmax()
    share = np.mean([abs(pair - band) <= 2 for pair in lowest])
    assert (
        f"The strongest frequency band of queries is most often pair {band}; in {share:.0%} of "
        "heads it lies within 2 pairs of that."
    ) in section_of(target).findings


def test_a_short_text_has_no_spectrum_entropy_and_says_so(tiny_decoder):
    target = Target("tiny", tiny_decoder(), text(1023))
    assert FrequencyEntropyStudy.problems(target) == []
    section = section_of(target, alphas=[0.0])
    assert section.findings[0] == (
        "SpectrumFE is left out: its frames take 1,024 tokens, the text has 1,023."
    )
    assert set(section.numbers["entropy"]) == {"SequenceFE query", "SequenceFE key"}
    assert [s["gate"] for s in section.numbers["sweep"]] == ["SequenceFE < 0.6"]
    (problem,) = FrequencyEntropyStudy.problems(Target("tiny", target.model, text(5)))
    assert "6 tokens or more, got 5" in problem


def test_layers_without_rotation_are_compared_with_the_others(tiny_decoder):
    model = tiny_decoder(layers=["rope", "nope"])
    target = Target("tiny", model, text(300))
    section = section_of(target, alphas=[0.0])
    rope, nope = expected(target, sequence_fe, "query").mean(axis=(1, 2))
    assert (
        f"Mean SequenceFE of queries is {rope:.2f} in layers that rotate and {nope:.2f} in the "
        "others."
    ) in section.findings
    assert {row[0] for row in section.pictures[0].rows} == {0, 1}


def test_a_model_without_rotation_has_entropies_but_no_sweep(tiny_decoder):
    section = section_of(Target("tiny", tiny_decoder(layers=["nope"]), text(300)), alphas=[0.0])
    assert section.numbers["sweep"] == []
    assert len(section.pictures) == 5


def test_layers_with_fewer_pairs_leave_the_rest_open(tiny_decoder):
    model = tiny_decoder(layers=["rope", "nope"], encodings={"rope": {"rotary_fraction": 0.5}})
    section = section_of(Target("tiny", model, text(100)))
    entropy = section.numbers["entropy"]["SequenceFE query"]
    assert all(head[2:] == [None, None] and None not in head[:2] for head in entropy[0])
    assert all(None not in head for head in entropy[1])
    assert len(section.pictures[0].rows) == 4 * 2 + 4 * 4


def test_the_sweep_reads_the_text_and_tells_what_it_costs(tiny_decoder):
    target = periodic(tiny_decoder)
    section = section_of(target, alphas=[0.0], tokens=[100])
    (sweep,) = section.numbers["sweep"]
    with torch.no_grad():
        losses = target.model.token_losses(target.ids[:, :100], target.ids[:, 1:101])
    assert sweep["alpha=1"] == pytest.approx(float(losses.double().mean().exp()))
    assert sweep["pairs"] == sum(
        (expected(target, sequence_fe, side) < 0.6).sum() for side in ("query", "key")
    )
    before, after = sweep["alpha=1"], sweep["alpha=0"]
    (sentence,) = (f for f in section.findings if "perplexity" in f)
    assert re.findall(r"[\d.]*\d", sentence) == [
        str(sweep["pairs"]),
        "0.6",
        "0",
        "100",
        f"{before:.2f}",
        f"{after:.2f}",
    ]
    assert section.pictures[-1].rows == [
        (100, "SequenceFE < 0.6", sweep["pairs"], 0.0, after),
        (100, "SequenceFE < 0.6", sweep["pairs"], 1.0, before),
    ]


def test_chosen_heads_are_those_of_the_norm_maps(tiny_decoder):
    model, ids = tiny_decoder(), text(300)
    section = section_of(Target("tiny", model, ids, chosen=((1, 3),)))
    norms = picture(section, "frequency_entropy_heads_keys")
    assert {row[:2] for row in norms.rows} == {(1, 3)}
    layers = []
    capture(model, ids, layers.append)
    key = layers[1].k[0, 1].numpy()  # query head 3 reads key-value head 1
    by_row = {row[2:5]: row[5] for row in norms.rows}
    expected_norm = np.hypot(key[4:6, 2], key[4:6, 6]).mean()
    assert by_row["key", 2, 4] == pytest.approx(expected_norm, rel=1e-5)


def test_heads_of_one_layer_stand_beside_each_other_in_the_order_asked_for(tiny_decoder):
    """As Fig. 18 has two heads of a layer, and Fig. 2 layers in an order of its own."""
    chosen = ((1, 0), (1, 3), (0, 2), (0, 1), (0, 0))
    section = section_of(Target("tiny", tiny_decoder(), text(1100), chosen=chosen))
    first = picture(section, "frequency_entropy_heads_queries").figure
    titles = [axes.get_title() for axes in first.axes if axes.get_title()]
    assert titles == [f"layer {layer}, head {head}" for layer, head in chosen[:4]]
    entropy = np.array(section.numbers["entropy"]["SequenceFE query"])[1, 3]
    column = first.axes[4 + 1]  # of SequenceFE, the second row
    np.testing.assert_allclose(column.lines[0].get_ydata(), entropy, atol=1e-5)
    second = picture(section, "frequency_entropy_heads_queries_2")
    assert {row[:2] for row in second.rows} == {(0, 0)}


def test_all_layers_are_panels_of_one_figure(tiny_decoder):
    model = tiny_decoder(model={"num_hidden_layers": 6}, layers=["rope", "rope", "nope"])
    section = section_of(Target("tiny", model, text(1100)))
    for measure, name in (("spectrum", "SpectrumFE"), ("sequence", "SequenceFE")):
        grid = picture(section, f"frequency_entropy_all_layers_{measure}")
        titles = [axes.get_title() for axes in grid.figure.axes if axes.get_title()]
        assert titles[:3] == ["layer 0", "layer 1", "layer 2, no rotation"]
        assert len(titles) == 6
        assert len(grid.rows) == 6 * (4 + 2) * 4
        for side in ("query", "key"):
            values = [row[4] for row in grid.rows if row[0] == side]
            expected = np.array(section.numbers["entropy"][f"{name} {side}"]).ravel()
            np.testing.assert_allclose(values, expected, atol=1e-5)
        drawn = grid.figure.axes[2].collections[0].get_offsets()
        expected = np.array(section.numbers["entropy"][f"{name} query"])[2]
        np.testing.assert_allclose(np.asarray(drawn)[:, 1], expected.ravel(), atol=1e-5)


def test_formulas_name_the_frames(tiny_decoder):
    frames = ShortTime("hamming", 256, 100)
    section = section_of(Target("tiny", tiny_decoder(), text(600), frames=frames))
    assert section.numbers["frames"] == {"window": "hamming", "frame": 256, "hop": 100}
    assert "[100 t + n]" in section.formula[1]
    assert "log 129" in section.formula[2]


def test_one_call_has_the_curve_of_every_gate_at_every_length(tiny_decoder):
    """Fig. 4: perplexity by alpha of what Eq. 11 and 12 attenuate, queries and keys by their own
    entropies, here of another text; and both rules of Sec. 5.3 together."""
    model, ids, other = tiny_decoder(), text(1100, 2), text(1060)[:, 30:]
    chosen = Target("tiny", model, other)
    entropies = {(m, s): expected(chosen, m, s) for m in (spectrum_fe, sequence_fe) for s in SIDES}
    high, low = (round(np.median(entropies[m, "query"]), 4) for m in (spectrum_fe, sequence_fe))
    gates = {
        f"spectrum>{high}": {s: entropies[spectrum_fe, s] > high for s in SIDES},
        f"sequence<{low}": {s: entropies[sequence_fe, s] < low for s in SIDES},
    }
    first_gate, second_gate = gates.values()
    gates["+".join(gates)] = {s: first_gate[s] | second_gate[s] for s in SIDES}
    alphas = [0.0, 0.1, 0.9]
    section = section_of(
        Target("tiny", model, ids, choice=other),
        alphas=alphas,
        gates=list(gates),
        choice="validation",
        tokens=[40, 80],
        texts=2,
    )

    def perplexity(pairs, alpha, n):
        rows = []
        for layer in range(2):
            both = [
                np.tile(np.where(pairs[s][layer], alpha, 1.0), (1, 2)) for s in ("query", "key")
            ]
            rows.append(Intervention(*(tuple(map(tuple, side.tolist())) for side in both)))
        layout = weighted_rope.apply(model.layout, tuple(rows))
        with model.using(layout), torch.no_grad():
            logits = model(ids[:, :n]).double()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1 : n + 1].flatten()
        )
        return float(losses.exp())

    pictures = [p for p in section.pictures if p.name.startswith("attenuation")]
    assert [p.name for p in pictures] == ["attenuation_40", "attenuation_80"]
    for n, drawn in zip((40, 80), pictures, strict=True):
        assert "1,030 tokens of validation text" in drawn.caption
        rows = iter(drawn.rows)
        for pairs in gates.values():
            for alpha in (*alphas, 1.0):
                tokens, _, count, drawn_alpha, value = next(rows)
                assert (tokens, drawn_alpha) == (n, alpha)
                assert count == pairs["query"].sum() + pairs["key"].sum()
                assert value == pytest.approx(perplexity(pairs, alpha, n), rel=1e-4)


def test_the_curve_has_more_words_than_one_rule():
    assert rules("spectrum<0.2") == (("spectrum", "below", 0.2),)
    assert rules("spectrum > 0.4 + sequence<.6") == (
        ("spectrum", "above", 0.4),
        ("sequence", "below", 0.6),
    )
    for wrong in ("", "spectrum=0.2", "fe<0.2", "spectrum<2", "sequence<0.6+"):
        (problem,) = map(str, AttenuationSettings(gates=[wrong]).problems())
        assert problem.startswith("analysis.attenuation.gates: expected an entropy and")


def test_shorter_texts_have_entropies_of_their_own(tiny_decoder):
    """App. F: the same head at several lengths."""
    model, ids = tiny_decoder(), text(1100)
    target = Target("tiny", model, ids, chosen=((1, 3), (0, 2)), prefixes=(1050, 60))
    section = section_of(target)
    lengths = picture(section, "frequency_entropy_lengths")
    rows = {row[:4]: row[4:] for row in lengths.rows}
    assert len(rows) == len(lengths.rows) == 3 * 2 * 4
    lowest = []
    for n in (60, 1050, 1100):
        entropies = expected(Target("tiny", model, ids[:, :n]), sequence_fe, "query")
        lowest.append(entropies.argmin(axis=-1))
        spectrum = (
            expected(Target("tiny", model, ids[:, :n]), spectrum_fe, "query")
            if n > 1e3
            else entropies
        )
        for layer, head in ((1, 3), (0, 2)):
            for pair in range(4):
                value = rows[n, layer, head, pair]
                assert value[1] == pytest.approx(entropies[layer, head, pair], abs=1e-4)
                if n == 60:
                    assert math.isnan(value[0])
                else:
                    assert value[0] == pytest.approx(spectrum[layer, head, pair], abs=1e-4)
    same = (np.abs(lowest[0] - lowest[-1]) <= 2).mean()
    (sentence,) = (f for f in section.findings if f.startswith("From 60 to 1,100 tokens Sequence"))
    assert f"in {same:.0%} of heads" in sentence
    assert any(f.startswith("From 1,050 to 1,100 tokens SpectrumFE") for f in section.findings)


@pytest.mark.parametrize(("length", "tokens"), [(256, "1 token"), (257, "2 tokens")])
def test_the_caption_counts_the_tokens_of_a_cell(tiny_decoder, length, tokens):
    section = section_of(Target("tiny", tiny_decoder(), text(length)))
    caption = picture(section, "frequency_entropy_heads_queries").caption
    assert f"means over {tokens}, logarithmic" in caption


def test_the_caption_of_an_attenuation_names_the_texts_of_its_choice(tiny_decoder):
    section = section_of(Target("tiny", tiny_decoder(), text(48, texts=2)), alphas=[0.5])
    caption = next(p.caption for p in section.pictures if p.name.startswith("attenuation"))
    assert "pairs chosen on 2 texts of 48 tokens" in caption
