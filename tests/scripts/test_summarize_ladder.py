"""The ladder's tables and figures follow from its raw numbers."""

from __future__ import annotations

import csv

import pytest

from scripts import summarize_ladder
from scripts.summarize_ladder import Numbers, claims, interval, recovery_figure, share, table

LOSSES = {"RoPE": (4.0, 5.0), "DroPE 5%": (4.4, 5.25), "NoPE from scratch": (4.8, 6.0)}


@pytest.fixture
def numbers(tmp_path, monkeypatch):
    """Two seeds of one rung, written by hand."""
    monkeypatch.setattr(summarize_ladder, "RAW", tmp_path)
    cells, arms, verdicts = [], [], []
    for index, seed in enumerate((8, 9)):
        for arm, losses in LOSSES.items():
            place = {"rung": "0.4M", "seed": seed, "arm": arm}
            arms.append({**place, "share": share(arm), "recovered": 0.5 + index / 4})
            for factor in (1, 8):
                cell = {"factor": factor, "retrieval": 1 / factor, "loss": losses[index]}
                cells.append({**place, "length": 64 * factor, **cell})
                if arm != "RoPE":
                    cells.append({**cells[-1], "arm": f"{arm} + temperature", "retrieval": 0.75})
                else:
                    cells.append({**cells[-1], "arm": "RoPE + YaRN"})
        row = {"rung": "0.4M", "seed": seed, "arm": "DroPE 5%", "source": "DroPE"}
        verdicts.append({**row, "claim": "A", "shown": ("shown", "not shown")[index]})
        verdicts.append({**row, "claim": "B", "shown": "not judged"})
    for name, rows in (("cells", cells), ("arms", arms), ("claims", verdicts)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, summarize_ladder.HEADS[name])
            writer.writeheader()
            writer.writerows(rows)
    return Numbers()


def test_the_interval_over_two_seeds_has_students_quantile():
    # With one degree of freedom t is Cauchy's, whose quantile is a tangent; here s / sqrt(n) = 1.
    assert interval([3.0, 5.0]) == pytest.approx((4.0, 4 - 12.7062, 4 + 12.7062), abs=1e-3)
    assert interval([3.0]) == (3.0, 3.0, 3.0)


def test_the_table_compares_every_arm_with_rope_of_the_same_seed(numbers):
    rope, drope, nope = table(numbers).splitlines()[2:]
    assert rope.startswith("| 0.4M | RoPE | 2 | 4.500 (4.000 to 5.000) |  |")
    # +10% and +5%: the mean is 7.5, and half of their distance times 12.706 is 31.8.
    assert "| +7.5 [-24.3, +39.3] | 62 (50 to 75) | 100.0 | 12.5 | 75.0 |" in drope
    assert "| +20.0 [+20.0, +20.0] |" in nope


def test_a_claim_that_no_seed_could_judge_is_not_counted(numbers):
    assert claims(numbers).splitlines()[2:] == ["| A (DroPE) | 1 of 2 |", "| B (DroPE) | – |"]


def test_the_figure_has_nope_from_scratch_as_a_whole_share(numbers, tmp_path):
    recovery_figure(numbers)
    summarize_ladder.reach_figure(numbers, "0.4M")
    assert {path.name for path in tmp_path.glob("*.svg")} == {"recovery.svg", "reach_0_4m.svg"}
    assert [share(arm) for arm in ("RoPE", "DroPE 40%, no norm", "NoPE from scratch")] == [
        *("", "40", "100")
    ]


def test_a_run_replaces_the_numbers_of_its_own_arms_alone(numbers, monkeypatch, tmp_path):
    place = {"rung": "0.4M", "seed": 8}
    row = {**place, "length": 64, "factor": "1", "loss": "9.000000"}
    new = [("cells", {**row, "arm": arm}) for arm in ("RoPE", "RoPE + PI")]
    monkeypatch.setattr(summarize_ladder, "rows_of", lambda run: iter(new))
    before = summarize_ladder.read("cells")
    summarize_ladder.collect([tmp_path])
    after = summarize_ladder.read("cells")
    of_seed = [(r["arm"], r["loss"]) for r in after if r["seed"] == "8" and "RoPE" in r["arm"][:4]]
    assert of_seed == [("RoPE", "9.000000"), ("RoPE + PI", "9.000000")]
    assert [r for r in after if r["seed"] == "9"] == [r for r in before if r["seed"] == "9"]
    assert len(summarize_ladder.read("arms")) == 6
