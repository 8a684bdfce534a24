"""The curve of training, as a whole."""

from __future__ import annotations

import pytest

from tests.report.described import check
from tests.report.examples import report
from trainer.evaluation.results import Arm, Drop
from trainer.plotting.style import paper_style
from trainer.report.training_figures import training_figure


def drawn(**fields):
    arms = (
        Arm("DroPE", "rope", 1, 4, 3, None, ((1, 5.0), (2, 4.0), (4, None), (100, 3.0))),
        Arm("RoPE", "rope", 1, 2, 3, None, ((1, 6.0), (2, 5.5))),
        Arm("not logged", "rope", 1, 2, 3),
    )
    (plan,) = training_figure(report(arms=arms, **fields), {"DroPE": 4, "RoPE": 0})
    return plan.draw()


def test_losses_over_steps_with_the_drop():
    with paper_style():
        check(
            drawn(drop=Drop(2, 4.0, 8.5, 3.25)),
            """
            panel 1,1 of 1x1
              x linear 'training step'
              y linear 'training loss (nats/token)'
              line: x 1 2 4 100; y 5 4 nan 3
              line: x 1 2 4 100; y 5 4 nan 3
              line: x 1 2; y 6 5.5
              line: x 1 2; y 6 5.5
              line: upright at 2
              note 'encoding dropped at step 2\\nloss 4.00 before, 8.50 after, 3.25 at the end':
                  2 1
            legend 'RoPE', 'DroPE'
            """,
        )


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (Drop(2, 4.0, None), "encoding dropped at step 2\nloss 4.00 before, ? after"),
        (
            Drop(3, None, 8.0, 5.0),
            "encoding dropped at step 3\nloss ? before, 8.00 after, 5.00 at the end",
        ),
        (None, None),
    ],
)
def test_what_a_drop_cost_is_noted(drop, said):
    (axes,) = drawn(drop=drop).axes
    assert [text.get_text() for text in axes.texts] == ([said] if said else [])


def test_a_thick_line_is_the_mean_over_a_fortieth_of_the_points():
    """Three of 120."""
    losses = [float(step % 3) for step in range(120)]
    arm = Arm("RoPE", "rope", 1, 120, 3, None, tuple(enumerate(losses)))
    (plan,) = training_figure(report(arms=(arm,)), {"RoPE": 0})
    raw, thick = plan.draw().axes[0].lines
    assert list(raw.get_ydata()) == losses
    assert list(thick.get_ydata())[:-1] == pytest.approx([0.5, *[1.0] * 118])


def test_ticks_are_whole_steps():
    arm = Arm("RoPE", "rope", 1, 2, 3, None, ((1, 4.0), (2, 3.0)))
    (plan,) = training_figure(report(arms=(arm,)), {"RoPE": 0})
    assert [place % 1 for place in plan.draw().axes[0].get_xticks()] == [0, 0, 0, 0]
