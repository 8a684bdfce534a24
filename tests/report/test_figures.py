"""What figures a report has, each as a whole, with the numbers that lie beside it."""

from __future__ import annotations

import math

import pytest

from tests.report.described import check, check_csv
from tests.report.examples import report
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Cell
from trainer.report import files
from trainer.report.figures import write_figures

METHODS = {"none": "as is", "crop": "cropped", "yarn": "YaRN", "pi": "PI"}
SCORES = {
    ("RoPE", "none"): ((1, 1, 1, 1), (1, 0, 0, 0)),
    ("RoPE", "crop"): (None, (1, 1, 0, 0)),
    ("RoPE", "pi"): ((1, 1, 1, 0), None),
    ("DroPE", "none"): ((1, 1, 1, 0), (1, 1, 1, 0)),
    ("DroPE", "yarn"): ((0, 0, 0, 0), (0, 0, 0, 0)),
}


def cells():
    """Two lengths, 64 and 256; of cropping and PI one is missing."""
    for (model, method), both in SCORES.items():
        for factor, scores in zip((1.0, 4.0), both, strict=True):
            if scores is None:
                continue
            where = {"model": model, "method": method, "length": int(64 * factor), "factor": factor}
            yield Cell(task=STATEMENTS, scores=scores, depths=(0.0, 0.0, 1.0, 1.0), **where)
            if method != "yarn":
                first = math.log(10 * factor)
                yield Cell(
                    task=PERPLEXITY,
                    edges=(0, 32, where["length"]),
                    losses=(first, None if model == "DroPE" else first + math.log(2)),
                    last_loss=first,
                    **where,
                )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By name what was drawn, its words, and its numbers."""
    figures = {}

    def keep(figure, path):
        figures[path.stem] = figure
        return path

    given = report(
        *cells(),
        methods=METHODS,
        tasks={STATEMENTS: "Statements", PERPLEXITY: "Perplexity"},
        training_length=64,
        task={"chance": 0.015, "chance_listed": 0.25},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "save", keep)
        written = write_figures(given, tmp_path_factory.mktemp("figures"))
    return {one.path.stem: (figures[one.path.stem], one) for one in written}


def test_figures_come_in_the_order_of_the_page(made):
    assert list(made) == [
        "perplexity_and_retrieval",
        "success_statements",
        "perplexity_by_position",
        "depth_statements",
    ]
    assert not any(one.detail for _, one in made.values())


def test_perplexity_against_retrieval(made):
    """The first model as is and with what keeps perplexity, others as they are."""
    figure, one = made["perplexity_and_retrieval"]
    check(
        figure,
        """
        panel 1,1 of 1x2
          x log
          y linear 'perplexity'
          line: x 64 256; y 10 40
          line: x 256; y 40
          line: x 64 256; y 10 40
          line: upright at 64
        panel 1,2 of 1x2
          x log
          y linear 'success (%)'
          line: x 62.68 250.7; y 100 25
          line: x 256; y 50
          line: x 65.34 261.4; y 75 75
          line: upright at 64
          bars: 62.68 51.01, 62.68 100; 250.7 4.559, 250.7 69.94
          bars: 256 15, 256 85
          bars: 65.34 30.06, 65.34 95.44; 261.4 30.06, 261.4 95.44
        below 'sequence length (multiple of the training length; tokens)'
        legend 'RoPE', 'RoPE + cropped', 'DroPE', 'training length'
        """,
    )
    assert "on the last 64 tokens of held-out" in one.caption
    check_csv(
        one.path.with_suffix(".csv"),
        """
            model, method, length, factor, perplexity, success, low, high
            RoPE, none, 64, 1, 10, 1, 0.5101, 1
            RoPE, none, 256, 4, 40, 0.25, 0.04559, 0.6994
            RoPE, crop, 64, 1, , , ,
            RoPE, crop, 256, 4, 40, 0.5, 0.15, 0.85
            DroPE, none, 64, 1, 10, 0.75, 0.3006, 0.9544
            DroPE, none, 256, 4, 40, 0.75, 0.3006, 0.9544
            """,
    )


def test_success_over_length(made):
    figure, one = made["success_statements"]
    check(
        figure,
        """
        panel 1,1 of 1x1
          x log 'sequence length (multiple of the training length; tokens)'
          y linear 'success (%)'
          line: x 61.39 245.6; y 100 25
          line: x 250.7; y 50
          line: x 64; y 75
          line: x 65.34 261.4; y 75 75
          line: x 66.72 266.9; y 0 0
          line: level at 1.5
          line: level at 25
          line: upright at 64
          note 'training length': 64 1
          bars: 61.39 51.01, 61.39 100; 245.6 4.559, 245.6 69.94
          bars: 250.7 15, 250.7 85
          bars: 64 30.06, 64 95.44
          bars: 65.34 30.06, 65.34 95.44; 261.4 30.06, 261.4 95.44
          bars: 66.72 0, 66.72 48.99; 266.9 0, 266.9 48.99
        legend 'RoPE + PI', 'DroPE', 'RoPE + cropped', 'RoPE', 'DroPE + YaRN', 'chance
            (1.5%)', 'any listed value (25.0%)'
        """,
    )
    assert "Grey" not in one.caption
    check_csv(
        one.path.with_suffix(".csv"),
        """
            model, method, length, factor, success, low, high
            RoPE, none, 64, 1, 1, 0.5101, 1
            RoPE, none, 256, 4, 0.25, 0.04559, 0.6994
            RoPE, crop, 256, 4, 0.5, 0.15, 0.85
            RoPE, pi, 64, 1, 0.75, 0.3006, 0.9544
            DroPE, none, 64, 1, 0.75, 0.3006, 0.9544
            DroPE, none, 256, 4, 0.75, 0.3006, 0.9544
            DroPE, yarn, 64, 1, 0, 0, 0.4899
            DroPE, yarn, 256, 4, 0, 0, 0.4899
            """,
    )


def test_perplexity_by_position(made):
    """Of the longest length that any has."""
    figure, one = made["perplexity_by_position"]
    check(
        figure,
        """
        panel 1,1 of 1x1
          x linear 'position in sequences of 256 tokens'
          y linear 'perplexity'
          line: x 16 144; y 40 80
          line: x 16 144; y 40 80
          line: x 16 144; y 40 nan
          line: upright at 64
          note 'training length': 64 1
        legend 'RoPE', 'RoPE + cropped', 'DroPE'
        """,
    )
    check_csv(
        one.path.with_suffix(".csv"),
        """
            model, method, length, from_position, to_position, perplexity, loss
            RoPE, none, 256, 0, 32, 40, 3.689
            RoPE, none, 256, 32, 256, 80, 4.382
            RoPE, crop, 256, 0, 32, 40, 3.689
            RoPE, crop, 256, 32, 256, 80, 4.382
            DroPE, none, 256, 0, 32, 40, 3.689
            DroPE, none, 256, 32, 256, ,
            """,
    )


def test_success_by_depth(made):
    figure, one = made["depth_statements"]
    check(
        figure,
        """
        panel 1,1 of 1x5 'RoPE'
          x linear
          y linear
          image 0..100, from -0.5 1.5 1.5 -0.5: 100 50 / 100 0
          text '100': 0 0
          text '50': 1 0
          text '100': 0 1
          text '0': 1 1
        panel 1,2 of 1x5 'RoPE + cropped'
          x linear
          y linear
          image 0..100, from -0.5 1.5 1.5 -0.5: nan 100 / nan 0
          text '·': 0 0
          text '100': 1 0
          text '·': 0 1
          text '0': 1 1
        panel 1,3 of 1x5 'RoPE + PI'
          x linear
          y linear
          image 0..100, from -0.5 1.5 1.5 -0.5: 100 nan / 50 nan
          text '100': 0 0
          text '·': 1 0
          text '50': 0 1
          text '·': 1 1
        panel 1,4 of 1x5 'DroPE'
          x linear
          y linear
          image 0..100, from -0.5 1.5 1.5 -0.5: 100 100 / 50 50
          text '100': 0 0
          text '100': 1 0
          text '50': 0 1
          text '50': 1 1
        panel 1,5 of 1x5 'DroPE + YaRN'
          x linear
          y linear
          image 0..100, from -0.5 1.5 1.5 -0.5: 0 0 / 0 0
          text '0': 0 0
          text '0': 1 0
          text '0': 0 1
          text '0': 1 1
        bar 'success (%)' 0..100
        below 'sequence length (multiple of the training length)'
        left 'depth (% of the text)'
        """,
    )
    check_csv(
        one.path.with_suffix(".csv"),
        """
            model, method, length, depth, success
            RoPE, none, 64, 0, 1
            RoPE, none, 64, 100, 1
            RoPE, none, 256, 0, 0.5
            RoPE, none, 256, 100, 0
            RoPE, crop, 64, 0,
            RoPE, crop, 64, 100,
            RoPE, crop, 256, 0, 1
            RoPE, crop, 256, 100, 0
            RoPE, pi, 64, 0, 1
            RoPE, pi, 64, 100, 0.5
            RoPE, pi, 256, 0,
            RoPE, pi, 256, 100,
            DroPE, none, 64, 0, 1
            DroPE, none, 64, 100, 0.5
            DroPE, none, 256, 0, 1
            DroPE, none, 256, 100, 0.5
            DroPE, yarn, 64, 0, 0
            DroPE, yarn, 64, 100, 0
            DroPE, yarn, 256, 0, 0
            DroPE, yarn, 256, 100, 0
            """,
    )
