"""What the first screen compares, and its sentence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.report.examples import cell, loss, report, statements
from trainer.evaluation.results import PERPLEXITY, STATEMENTS
from trainer.report.answer import answer_of, sentence
from trainer.report.tables import tables, write_tables

TITLES = {STATEMENTS: "Numbers found", PERPLEXITY: "Perplexity"}
CONFIG = {"evaluation": {"needles": {"needles": 4}}}


def experiment(drope=(100, 99, 97, 95), yarn=(100, 100, 100, 50), rope=(100, 60, 20, 10)):
    cells = [*statements("RoPE", rope), *statements("DroPE", drope)]
    for about, measured in statements("RoPE", yarn, losses=(None,) * 4):
        cells.append(({**about, "method": "yarn"}, measured))
    made = report(*cells, training_length=64, tasks=TITLES, config=CONFIG)
    return replace(made, origins={"DroPE": "RoPE"})


def test_a_dropped_model_stands_against_its_origin_and_the_best_other():
    answer = answer_of(experiment())
    assert answer.task == STATEMENTS
    assert answer.rows == [("DroPE", "none"), ("RoPE", "none"), ("RoPE", "yarn")]
    assert sentence(experiment()) == (
        "At 512 tokens, 8× the training length, DroPE is ahead of RoPE, which it came from, and "
        "ahead of RoPE + YaRN, the best other. Numbers found at 64, 128, 256 and 512 tokens: DroPE "
        "100, 99, 97 and 95%; RoPE 100, 60, 20 and 10%; RoPE + YaRN 100, 100, 100 and 50%."
    )


@pytest.mark.parametrize(
    ("far", "standing"),
    [(60, "ahead of"), *((far, "level with") for far in (94, 95, 96)), (100, "behind")],
)
def test_a_lead_is_beyond_the_interval_of_the_difference(far, standing):
    words = sentence(experiment(yarn=(100, 100, 100, far)))
    assert f"{standing} RoPE + YaRN" in words


@pytest.mark.parametrize(("near", "is_learned"), [(40, False), (60, True)])
def test_a_lead_needs_a_model_that_has_learned_the_task(near, is_learned):
    unlearned = (22, 20, 20, 4)
    words = sentence(experiment((near, 20, 20, 20), yarn=unlearned, rope=unlearned))
    assert ("ahead of" in words) == is_learned
    assert f"{near}, 20, 20 and 20%" in words


def test_a_report_of_guesses_lists_no_scores():
    """One of four values is right by chance; whoever finds nothing of another task has 0%."""
    chance = (25, 27, 22, 0)
    words = sentence(experiment(chance, yarn=chance, rope=chance))
    assert words.startswith("No model has learned the task")
    assert words.count(".") == 2  # in 25.0%, and at the end
    nothing = report(*(cell([0.0] * 20, name, length=1024) for name in ("RoPE", "DroPE")))
    assert sentence(nothing).startswith("No model has learned the task")
    assert "Multi-key" not in sentence(nothing)
    one = report(cell([0.0] * 19 + [1.0], length=1024))
    assert sentence(one) == "Multi-key needles at 1024 tokens: RoPE 5%."


def test_two_seeds_far_apart_are_uncertain_not_guesses():
    cells = (cell([1.0] * n + [0.0] * (20 - n), f"seed {n}", length=1024) for n in (12, 19))
    means = replace(report(*cells), seeds={"seed 12": "RoPE", "seed 19": "RoPE"}).over_seeds()
    assert sentence(means) == (
        "No model has learned the task for certain: no 95% interval is above 0.0%, the score of "
        "guesses."
    )


def test_a_report_of_losses_alone_has_an_answer_too():
    cells = [loss((value,) * 2, length=n) for n, value in ((1024, 1.0), (2048, 2.0))]
    words = sentence(report(*cells))
    assert words == "Held-out perplexity at 1024 and 2048 tokens: RoPE 2.7 and 7.4."
    assert sentence(report()) == ""


@pytest.mark.parametrize(
    ("further", "standing"),
    [
        ((-0.3, -0.2, -0.4, -0.3), "ahead of"),
        ((-0.3, 0.2, -0.2, 0.2), "level with"),
        ((0.3, -0.2, 0.2, -0.2), "level with"),
        ((0.3, 0.2, 0.4, 0.3), "behind"),
    ],
)
def test_a_lower_loss_on_the_same_windows_is_ahead(further, standing):
    """Whatever the windows themselves differ by."""
    windows = (2.0, 3.0, 4.0, 5.0)
    ours = tuple(loss + more for loss, more in zip(windows, further, strict=True))
    cells = [loss(windows, "RoPE"), loss(ours, "DroPE")]
    words = sentence(report(*cells, origins={"DroPE": "RoPE"}))
    assert f"DroPE is {standing} RoPE, which it came from" in words


def test_a_loss_that_is_not_finite_is_compared_with_nothing():
    cells = [
        loss(losses, model, length=length)
        for model, length, losses in (
            ("DroPE", 1024, (1.0, 2.0)),
            ("DroPE", 2048, (1.0, 2.0)),
            ("RoPE", 1024, (1.0, 2.0)),
            ("RoPE", 2048, (math.nan, 3.0)),
        )
    ]
    words = sentence(report(*cells, origins={"DroPE": "RoPE"}))
    assert "not comparable with RoPE" in words
    assert "RoPE 4.5 and not finite" in words


def test_tables_are_written_for_papers(tmp_path):
    made = report(cell([1.0] * 9 + [0.0] * 11, "R_1|a", length=1024), cell([1.0] * 5, length=2048))
    write_tables(tables(made), tmp_path)
    caption, _, *lines = (tmp_path / "1.md").read_text().splitlines()
    assert "95% intervals" in caption
    assert lines == [
        "|  | 1024 tokens 1× (trained) | 2048 tokens 2× |",
        "| --- | ---: | ---: |",
        "| R_1/a | **45.0** (25.8–65.8) | · |",
        "| RoPE | · | **100.0** (56.6–100.0) |",
    ]
    latex = (tmp_path / "1.tex").read_text()
    assert r"R\_1|a & \textbf{45.0} (25.8--65.8) & $\cdot$ \\" in latex
    assert r"95\% intervals" in latex
    assert r"\toprule" in latex


def test_the_answer_is_of_rows_that_were_measured_at_most_lengths():
    cells = [cell([1.0, 0.0], length=length) for length in (1024, 2048)]
    answer = answer_of(report(*cells, cell([1.0, 1.0], "DroPE", length=2048)))
    assert answer.rows == [("RoPE", "none")]


def test_the_best_other_is_not_the_origin_even_if_that_is_better():
    answer = answer_of(experiment(rope=(100,) * 4, yarn=(100, 100, 100, 50)))
    assert (answer.origin, answer.rival) == (("RoPE", "none"), ("RoPE", "yarn"))


def test_of_many_lengths_the_first_and_the_last_three_are_told():
    words = sentence(report(*(loss((0.1 * n,) * 2, length=1024 * n) for n in range(1, 7))))
    assert words.endswith("at 1024, 4096, 5120 and 6144 tokens: RoPE 1.1, 1.5, 1.6 and 1.8.")


def test_tables_for_papers_have_marks(tmp_path):
    write_tables(tables(report(cell([0.0] * 20), cell([1.0] * 20, method="yarn"))), tmp_path)
    assert "| + YaRN | **100.0**↑ (83.9–100.0) |" in (tmp_path / "1.md").read_text()
    assert r"\textbf{100.0}$\uparrow$ (83.9--100.0)" in (tmp_path / "1.tex").read_text()
