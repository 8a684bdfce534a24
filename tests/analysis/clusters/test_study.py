"""The section about clusters: words against numbers, and what is drawn."""

import numpy as np
import pytest
import torch

from tests.analysis.attention_examples import picture
from trainer.analysis.capture import capture
from trainer.analysis.clusters.study import ClustersStudy
from trainer.analysis.studies.study import Target, run

C, T = 32, 80


def target_of(model, **more):
    ids = torch.randint(0, 50, (1, T), generator=torch.Generator().manual_seed(1))
    return Target("tiny", model.eval(), ids, **more)


def section_of(target):
    return run([ClustersStudy(target)], target)[0]


def test_findings_and_indicators_say_what_the_numbers_are(tiny_decoder):
    section = section_of(target_of(tiny_decoder()))
    rotated, plain = section.numbers["rotated"], section.numbers["plain"]
    cross = np.array(rotated["cross_cosine"])[..., -1]
    share = 100 * (cross < 0).mean()
    findings = " ".join(section.findings)
    assert f"queries and keys as they meet is {cross.mean():+.3f}" in findings.split("(2.5 C)")[1]
    assert f"below 0 in {share:.0f}% of 8 heads" in findings
    separation, rank = section.numbers["glance"]
    assert separation["values"] == pytest.approx(
        np.array(rotated["silhouette"]).mean((0, 1)), abs=1e-5
    )
    expected = np.array(rotated["key_stable_rank"]).mean((0, 1)) / np.array(
        plain["key_stable_rank"]
    ).mean((0, 1))
    assert rank["values"] == pytest.approx(expected, abs=1e-5)
    assert (separation["wanted"], rank["wanted"]) == ("high", "low")
    assert rank["name"] == "Stable rank of keys, after / before rotation"
    assert rank["meaning"] == "1: the rotation leaves the cloud tight"


def test_prefixes_within_the_training_length_are_read_without_the_later_tokens(tiny_decoder):
    model = tiny_decoder()
    target = target_of(model, chosen=((1, 3),))
    model.layout = model.layout.map(lambda s: s.with_temperature(coefficient=3.0))
    section, layers = section_of(target), []
    capture(model, target.ids[:, :C], layers.append)
    q = layers[1].rotated_q[0, 3].double().numpy()
    expected = (q**2).sum() / np.linalg.svd(q, compute_uv=False)[0] ** 2
    assert section.numbers["lengths"] == [32, 64, 80]
    measured = section.numbers["rotated"]["query_stable_rank"][1][3]
    assert measured[0] == pytest.approx(expected, rel=1e-4)
    capture(model, target.ids, layers.append)
    q = layers[3].rotated_q[0, 3].double().numpy()
    expected = (q**2).sum() / np.linalg.svd(q, compute_uv=False)[0] ** 2
    assert measured[2] == pytest.approx(expected, rel=1e-4)
    # The panel of C shows the same vectors: distances in the plane are those of a rotation.
    rows = picture(section, "clusters_snapshots").rows
    cloud = np.array([row[6:] for row in rows if row[:5] == (1, 1, C, "plain", "keys")])
    keys = layers[1].k[0, 1].double().numpy()
    assert np.linalg.matrix_rank(np.c_[keys, np.ones(C), cloud]) == 9


def test_without_a_rotation_the_stable_rank_stands_for_itself(tiny_decoder):
    section = section_of(target_of(tiny_decoder(layers=["nope"])))
    rank = section.numbers["glance"][1]
    assert (rank["name"], rank["meaning"]) == ("Stable rank of keys", "low: one tight cloud")
    expected = np.array(section.numbers["rotated"]["key_stable_rank"]).mean((0, 1))
    assert rank["values"] == pytest.approx(expected, abs=1e-5)


def test_a_model_that_rotates_shows_both_versions_side_by_side(tiny_decoder):
    pictures = {p.name: p for p in section_of(target_of(tiny_decoder())).pictures}
    assert set(pictures) == {
        *("clusters_cosine", "clusters_snapshots", "clusters_separation"),
        *("clusters_singular_values", "clusters_first_component", "clusters_dot"),
    }
    assert {row[0] for row in pictures["clusters_cosine"].rows} == {"plain", "rotated"}
    assert {row[2] for row in pictures["clusters_snapshots"].rows} == {C, T}
    assert len(pictures["clusters_singular_values"].figure.axes) == 4


def test_a_model_without_rotation_shows_one_version(tiny_decoder):
    section = section_of(target_of(tiny_decoder(layers=["nope"])))
    pictures = {p.name: p for p in section.pictures}
    assert {row[0] for row in pictures["clusters_cosine"].rows} == {"rotated"}
    assert {row[3] for row in pictures["clusters_snapshots"].rows} == {"rotated"}
    assert len(pictures["clusters_singular_values"].figure.axes) == 2
    assert "No head rotates" in " ".join(section.findings)
    assert len(section.grids[0].header) == 3


def test_chosen_heads_are_shown_and_no_others(tiny_decoder):
    target = target_of(tiny_decoder(), chosen=((1, 3), (1, 2)))
    shown = picture(section_of(target), "clusters_snapshots")
    # Query heads 2 and 3 read key head 1.
    assert {row[:2] for row in shown.rows} == {(1, 1)}
    assert "as chosen" in shown.caption


def test_a_text_within_the_training_length_has_one_column_a_version(tiny_decoder):
    ids = torch.randint(0, 50, (2, 20))
    section = section_of(Target("tiny", tiny_decoder().eval(), ids))
    assert section.grids[0].header == (
        *("measure", "20 tokens, before rotation", "20 tokens, after rotation"),
    )
    assert sum("tokens the cosine" in finding for finding in section.findings) == 1


def test_a_text_of_a_few_tokens_is_refused(tiny_decoder):
    model = tiny_decoder()
    assert ClustersStudy.problems(Target("t", model, torch.zeros(1, 3, dtype=torch.long)))
    assert not ClustersStudy.problems(Target("t", model, torch.zeros(1, 4, dtype=torch.long)))
