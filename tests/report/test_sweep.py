"""The runs of a sweep: names, table and figures."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.report.described import check, check_csv, check_text, styled
from tests.report.examples import cell, report, statements
from trainer.evaluation.outcomes import Result
from trainer.evaluation.results import PERPLEXITY
from trainer.evaluation.statistics import estimate
from trainer.plotting.style import paper_style
from trainer.report.pages import write_sweep_report
from trainer.report.sweep import (
    Sweep,
    SweptRun,
    csv_sweep,
    effective,
    entries,
    legend,
    markdown_sweep,
    reached,
    short,
    terminal_sweep,
    unfinished,
)
from trainer.report.sweep_figures import axes, measures, sweep_figure

TRIALS = 12


def point(factor, hits=None, *windows, trained=64):
    """Return a result with so many of twelve trials right, and with such losses of windows."""
    scores = () if hits is None else (1.0,) * hits + (0.0,) * (TRIALS - hits)
    loss = sum(windows) / len(windows) if windows else None
    mean = estimate(scores) if scores else None
    return Result("a", int(factor * trained), factor, mean, loss, windows, scores)


def run(place, settings, *points, state="finished", **more):
    return SweptRun(place, f"label {place}", settings, state, reached=points, **more)


def rates():
    """Three learning rates, of which one run has failed and one was measured on other text."""
    return Sweep(
        "rates",
        (
            run("a", {"optimizer.lr": "1e-4"}, problem="It did not start.", state="not started"),
            run(
                *("b", {"optimizer.lr": "1e-3"}),
                *(point(1, 12, 3.0, 3.25), point(4, 2, 3.5, 4.0)),
                **{"tokens": 26_214_400, "loss": 3.0625, "skipped": 0},
            ),
            run(
                *("c", {"optimizer.lr": "1e-2"}),
                *(point(1, 12, 2.5, 2.75), point(4, 10, 3.0, 3.5)),
                **{"tokens": 999, "loss": 2.5, "skipped": 1200, "state": "step 7 of 9"},
            ),
            run(
                *("d", {"optimizer.lr": "1"}),
                *(point(1, None, 9.0), point(4, 9)),
                **{"measured_on": "other", "problem": "Its weights are not finite."},
            ),
        ),
    )


def text_of(renderable, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_the_table_as_markdown():
    check_text(
        markdown_sweep(rates()),
        """
        ## rates

        | run | 64 tokens, 1× (trained) | 256 tokens, 4× | tokens | training loss | skipped updates | state |
        | --- | ---: | ---: | ---: | ---: | ---: | --- |
        | optimizer.lr=1e-4 | · | · | · | · | · | not started |
        | optimizer.lr=1e-3 | 100.0 (75.8–100.0) / 3.125 | 16.7 (4.7–44.8) / 3.750 | 26.2M | 3.062 | 0 | finished |
        | optimizer.lr=1e-2 | 100.0 (75.8–100.0) / 2.625 | 83.3 (55.2–95.3) ↑ / 3.250 | 999 | 2.500 | 1,200 | step 7 of 9 |
        | optimizer.lr=1 | 9.000 | 75.0 (46.8–91.1) / · | · | · | · | finished |

        Success in % with its 95% interval, then the held-out loss (nats per token). ↑ ↓ better or worse than optimizer.lr=1e-3 on the same trials (exact sign test, p < 0.05, not corrected for the number of tests). Bold: better than every other run of its column by this test. A row is one training run: the tests do not cover the choice of its seed. Runs that were measured on other text, tokens or trials than the first are not tested, and their losses are not comparable with the first run's. · not measured. Runs are named by the keys that differ.

        - optimizer.lr=1e-4: not started; It did not start.
        - optimizer.lr=1e-2: step 7 of 9
        - optimizer.lr=1: finished; Its weights are not finite.
        """,  # noqa: E501
    )


@pytest.mark.parametrize(("width", "continues"), [(68, True), (69, False), (100, False)])
def test_the_table_in_a_terminal_continues_below_where_it_is_narrow(width, continues):
    shown = text_of(terminal_sweep(rates(), width), width)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert ("rates (continued)" in shown) == continues
    heads = [line.split() for line in shown.splitlines() if line.startswith("run ")]
    facts = ["tokens", "loss", "updates"]
    first = ["run", "1×", "(trained)"]
    assert heads == ([[*first, *facts], ["run", "4×"]] if continues else [[*first, "4×", *facts]])


def test_a_row_has_lengths_facts_and_a_state_below_its_name():
    shown = text_of(terminal_sweep(rates(), 100), 100)
    check_text(
        shown[: shown.index("Success in %")],
        """
        rates
                                                     64 tokens    256 tokens        train skipped
        run                                       1× (trained)            4× tokens  loss updates
        ─────────────────────────────────────────────────────────────────────────────────────────
        optimizer.lr=1e-4                                    ·             ·      ·     ·       ·
        not started
        optimizer.lr=1e-3                         100.0  3.125   16.7  3.750  26.2M 3.062       0
                                                    75.8–100.0      4.7–44.8
        optimizer.lr=1e-2                         100.0  2.625   83.3↑ 3.250    999 2.500   1,200
        step 7 of 9                                 75.8–100.0     55.2–95.3
        optimizer.lr=1                                   9.000   75.0      ·      ·     ·       ·
                                                                   46.8–91.1
        """,
    )
    assert " ".join(legend(rates()).split()) in " ".join(shown.split())
    assert [line.strip() for line in shown.splitlines()[-3:]] == unfinished(rates())


def test_a_narrow_table_breaks_names_behind_a_comma_then_behind_an_equals_sign():
    settings = {"optimizer.weight_decay": "0.1", "model.name": "never so long"}
    other = {"optimizer.weight_decay": "0.2", "model.name": "never so long, or longer"}
    runs = (
        run("a", settings, point(1, 3)),
        run("b", other, point(1, 3), point(4, 6), state="at step 7 of 9"),
    )
    shown = text_of(terminal_sweep(Sweep("s", runs), 54), 54)
    rows = shown[: shown.index("Success in %")].splitlines()
    names = [line[:18].strip() for line in rows if line[:18].strip()][3:]  # without the head
    assert names[:5] == ["optimizer.weight_d", "ecay=", "0.1,", "model.name=", "never so long"]
    assert names[5:11] == [
        *("optimizer.weight_d", "ecay=", "0.2,", "model.name=", "never so long,", "or longer"),
    ]
    assert names[11] == "at step 7 of 9"
    assert any(row.startswith("model.name=never so long") for row in rows)  # where there is room


def test_states_and_troubles_are_red_in_a_terminal():
    shown = styled(terminal_sweep(rates(), 100), 100)
    assert re.findall(r"<red>(.*?)</>", shown) == ["not started", "step 7 of 9"]
    assert re.findall(r"<bold red>(.*?)</>", shown) == unfinished(rates())


def test_the_numbers_in_full(tmp_path):
    (tmp_path / "sweep.csv").write_text(csv_sweep(rates()))
    check_csv(
        tmp_path / "sweep.csv",
        """
        run, optimizer.lr, run_dir, state, problem, tokens, training_loss, skipped_steps, length, factor, n, retrieval, low, high, p_value, loss, loss_change, loss_change_low, loss_change_high
        optimizer.lr=1e-4, 0.0001, a, not started, It did not start., , , , , , , , , , , , , ,
        optimizer.lr=1e-3, 0.001, b, finished, , 2.621e+07, 3.062, 0, 64, 1, 12, 1, 0.7575, 1, , 3.125, , ,
        optimizer.lr=1e-3, 0.001, b, finished, , 2.621e+07, 3.062, 0, 256, 4, 12, 0.1667, 0.04697, 0.448, , 3.75, , ,
        optimizer.lr=1e-2, 0.01, c, step 7 of 9, , 999, 2.5, 1200, 64, 1, 12, 1, 0.7575, 1, 1, 2.625, -0.16, -0.2211, -0.1036
        optimizer.lr=1e-2, 0.01, c, step 7 of 9, , 999, 2.5, 1200, 256, 4, 12, 0.8333, 0.552, 0.953, 0.007812, 3.25, -0.1333, -0.2206, -0.05693
        optimizer.lr=1, 1, d, finished, Its weights are not finite., , , , 64, 1, , , , , , 9, , ,
        optimizer.lr=1, 1, d, finished, Its weights are not finite., , , , 256, 4, 12, 0.75, 0.4677, 0.9111, , , , ,
        """,  # noqa: E501
    )


def test_losses_alone_are_a_table_too():
    """Lengths vary where training lengths do; losses on other text are not compared."""
    sweep = Sweep(
        "losses",
        (
            run("a", {"k": "1"}, point(1, None, 3.0), point(4, None, 4.0)),
            run("b", {"k": "2"}, point(1, None, 2.5, trained=128)),
        ),
    )
    check_text(
        markdown_sweep(sweep),
        """
        ## losses

        | run | tokens vary, 1× (trained) | 256 tokens, 4× | tokens | training loss | skipped updates | state |
        | --- | ---: | ---: | ---: | ---: | ---: | --- |
        | k=1 | 20.09 | 54.60 | · | · | · | finished |
        | k=2 | 12.18 | · | · | · | · | finished |

        Held-out perplexity, exp of the loss in nats per token. Bold: lower than every other run of its column on the same windows (95% interval of a paired bootstrap). A row is one training run: the tests do not cover the choice of its seed. · not measured. Runs are named by the keys that differ.
        """,  # noqa: E501
    )
    assert sweep.loss_change(sweep.runs[1], 1) is None  # not of the same text
    assert unfinished(sweep) == []
    alone = Sweep("losses", sweep.runs[:1])
    assert legend(alone) == (
        "Held-out perplexity, exp of the loss in nats per token. Bold: lower than every other run "
        "of its column on the same windows (95% interval of a paired bootstrap). A row is one "
        "training run: the tests do not cover the choice of its seed. · not measured."
    )


@pytest.mark.parametrize(
    ("points", "bold"),
    [
        ([point(1, 2), point(1, 12), point(1, 3)], ["1"]),
        ([point(1, 2), point(1, 12), point(1, 10)], []),  # 2 of 12 trials apart
        ([point(1, 12), point(1, 12)], []),
        ([point(1, 12)], []),  # nothing to lead
        (
            [point(1, None, *windows * 3) for windows in ((2.0, 3.0), (2.1, 3.2), (2.3, 3.1))],
            ["0"],
        ),
        ([point(1, None, 2.0, 3.1), point(1, None, 2.1, 3.05)], []),  # one window each
        ([point(1, None, 2.0), point(1, None, 9.0)], []),  # one window gives no interval
        ([point(1, None, 2.0), point(1, None, 2.1, 3.1)], []),  # other windows
        ([point(1, 12, 3.0), point(1, 2, 2.0), point(1, None, 1.0)], ["0"]),
    ],
)
def test_a_lead_is_bold_only_where_a_paired_test_shows_it(points, bold):
    runs = tuple(run(str(n), {"k": str(n)}, at) for n, at in enumerate(points))
    column = entries(Sweep("s", runs), 1)
    assert [place for place, entry in column.items() if entry.best] == bold


@pytest.mark.parametrize("odd", range(3))
def test_a_lead_over_a_run_on_other_trials_is_not_shown(odd):
    """Whichever of the reference, the best and the last run was measured on others."""
    runs = [
        run(str(n), {"k": str(n)}, at, measured_on="others" if n == odd else "")
        for n, at in enumerate([point(1, 2), point(1, 12), point(1, 3)])
    ]
    assert Sweep("s", tuple(runs)).leader(1) is None


def test_zero_retrieval_and_unmeasured_cells_are_never_best():
    runs = (run("a", {"k": "1"}, point(1, 0)), run("b", {"k": "2"}, point(1, 0)))
    unmeasured = (run("c", {"k": "3"}, point(1)), run("d", {"k": "4"}, point(1)))
    for sweep in (Sweep("zero", runs), Sweep("unmeasured", unmeasured)):
        assert not any(entry.best for entry in entries(sweep, 1).values())


def test_nothing_was_evaluated_yet():
    sweep = Sweep("none", (run("a", {"k": "1"}), run("b", {"k": "2"})))
    assert legend(sweep) == "No run has been evaluated yet."
    assert (sweep.reference, sweep.factors, list(sweep_figure(sweep))) == (None, (), [])
    rows = text_of(terminal_sweep(sweep, 80), 80).splitlines()[4:]
    assert [row.split() for row in rows] == [
        ["k=1", "·", "·", "·"],
        ["k=2", "·", "·", "·"],
        legend(sweep).split(),
        [],
    ]


def test_a_sweep_page_links_to_the_pages_of_its_runs(tmp_path):
    with_page, without = tmp_path / "runs" / "b", tmp_path / "runs" / "c"
    with_page.mkdir(parents=True)
    (with_page / "report.html").touch()
    sweep = Sweep(
        "s",
        (run(str(with_page), {"k": "1"}, point(1, 3)), run(str(without), {"k": "2"}, point(1, 4))),
    )
    page = write_sweep_report(sweep, {"Made": "today", "Command": "this"}, tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    text = page.read_text()
    assert text.count('href="../runs/') == 1
    assert 'href="../runs/b/report.html"' in text
    names = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*")}
    figures = {f"figures/sweep.{kind}" for kind in ("svg", "png", "csv")}
    assert names == {"report.html", "table.md", "table.csv", *figures}
    assert (tmp_path / "out" / "table.md").read_text() == markdown_sweep(sweep)
    assert (tmp_path / "out" / "table.csv").read_text() == csv_sweep(sweep)
    for words in ("today", "k=1", "25.0", "33.3", "data:image/svg"):
        assert words in text


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        # Of one or two keys all are named, by ends of two words or as many as tell them apart.
        ([{"a.b.c": "1"}, {"a.b.c": "2"}], ("b.c=1", "b.c=2")),
        (
            [{"a.b.c": "1", "d.b.c": "1", "e": "0"}, {"a.b.c": "2", "d.b.c": "3", "e": "0"}],
            ("a.b.c=1, d.b.c=1", "a.b.c=2, d.b.c=3"),
        ),
        ([{"x.a.b.c": "1", "x.d.b.c": "1"}, {"x.a.b.c": "2"}], ("a.b.c=1, d.b.c=1", "a.b.c=2")),
        # An end that is a key of its own would be misread.
        (
            [{"drop.schedule.peak": "1"}, {"drop.schedule.peak": "2"}],
            ("drop.schedule.peak=1", "drop.schedule.peak=2"),
        ),
        # Of three those in which a run differs from the first, which has its label.
        (
            [{"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": "2", "c": "1"}, {"c": "2"}],
            ("label 0", "a=2, b=2", "c=2"),
        ),
        # Names that two share are told apart by directories.
        ([{"a": "1"}, {"a": "2"}, {"a": "1"}], ("a=1 (0)", "a=2", "a=1 (2)")),
    ],
)
def test_a_run_is_named_by_its_differing_settings(settings, names):
    assert Sweep("s", tuple(run(str(n), s) for n, s in enumerate(settings))).names == names


def test_tests_are_of_the_same_trials_and_windows():
    reference, better, fewer, other, longer = (
        run("a", {"k": "1"}, point(1, 3, 2.0, 4.0)),
        run("b", {"k": "2"}, point(1, 12, 3.0, 6.0)),
        run("c", {"k": "3"}, Result("c", 64, 1, estimate((1.0,)), 3.0, (3.0,), (1.0,))),
        run("d", {"k": "4"}, point(1, 12, 3.0, 6.0), measured_on="x"),
        run("e", {"k": "5"}, point(1, 12, 3.0, 6.0, trained=128)),
    )
    sweep = Sweep("s", (run("z", {"k": "0"}), reference, better, fewer, other, longer))
    assert sweep.reference is reference
    held = sweep.comparison(better, 1)
    assert (held.better, held.worse) == (9, 0)
    assert sweep.loss_change(better, 1).mean == 0.5
    for unpaired in (reference, fewer, other, longer):
        assert sweep.comparison(unpaired, 1) is None
        assert sweep.loss_change(unpaired, 1) is None
    assert sweep.comparison(better, 4) is None


def test_retrieval_comes_from_statements_or_the_mean_over_tasks():
    made = report(*statements("RoPE", (100, None, 50, 25), (4.0, 4.1, None, 4.3)))
    assert [(r.length, r.factor, r.loss, len(r.scores)) for r in reached(made, "RoPE")] == [
        *((64, 1, 4.0, 256), (128, 2, 4.1, 0), (256, 4, None, 256), (512, 8, 4.3, 256)),
    ]
    assert [r.retrieval and r.retrieval.mean for r in reached(made, "RoPE")] == [1, None, 0.5, 0.25]
    tasks = [cell([1.0, 0.0]), cell([0.0], task="multi_value")]
    text = cell([], task=PERPLEXITY, last_loss=3.0, by_window=(2.0, None, 4.0))
    (result,) = reached(report(*tasks, text, cell([1.0], method="pi")), "RoPE")
    assert (result.retrieval.mean, result.scores, result.losses) == (0.25, (1, 0, 0), (2, 4))
    (result,) = reached(report(tasks[1]), "RoPE")
    assert (result.retrieval.mean, result.loss) == (0, None)
    (result,) = reached(report(text), "RoPE")
    assert (result.retrieval, result.scores) == (None, ())


def test_the_effective_length_is_the_last_column():
    made = [report(*statements("RoPE", rates), training_length=64) for rates in FALLING]
    lengths = [effective(by_run, "RoPE") for by_run in made]
    assert [length.text for length in lengths] == ["128", "≥512"]
    sweep = Sweep(
        "s",
        tuple(
            SweptRun(k, k, {"k": k}, "finished", reached=reached(by_run, "RoPE"), effective=length)
            for k, by_run, length in zip("12", made, lengths, strict=True)
        ),
    )
    rows = [row.split(" | ") for row in markdown_sweep(sweep).splitlines() if row[:3] == "| k"]
    assert [row[5] for row in rows] == ["128", "≥512"]
    assert "effective, ≥85% of 1×" in markdown_sweep(sweep)
    assert "Effective: the longest length" in legend(sweep)
    assert "effective" in text_of(terminal_sweep(sweep, 120), 120)


FALLING = ((100, 90, 80, 70), (50, 60, 50, 45))


def test_numbers_are_short():
    counts = (999, 1000, 26_214_400, 10**9, 2 * 10**12)
    assert [short(count) for count in counts] == ["999", "1k", "26.2M", "1B", "2T"]


def figure(sweep):
    with paper_style():
        (plan,) = sweep_figure(sweep)
        return plan, plan.draw()


def test_one_key_of_numbers_is_a_curve(tmp_path):
    """Logarithmic, as the values span more than a factor of eight."""
    plan, drawn = figure(rates())
    assert plan.title == "The runs of the sweep over optimizer.lr"
    assert [panel.get_title() for panel in drawn.axes] == [
        *("loss at 1×", "loss at 4×", "retrieval at 1× (%)", "retrieval at 4× (%)"),
    ]
    check(
        drawn,
        """
        panel 1,4 of 1x4 'retrieval at 4× (%)'
          x log 'optimizer.lr'
          y linear
          line: x 0.0001 0.001 0.01 1; y nan 16.67 83.33 75
          bars: ; 0.001 4.697, 0.001 44.8; 0.01 55.2, 0.01 95.3; 1 46.77, 1 91.11
        """,
        panel=4,
    )
    plan.write(tmp_path / "sweep")
    check_csv(
        tmp_path / "sweep.csv",
        """
        run, optimizer.lr, loss at 1×, loss at 4×, retrieval at 1× (%), retrieval at 4× (%)
        optimizer.lr=1e-4, 0.0001, , , ,
        optimizer.lr=1e-3, 0.001, 3.125, 3.75, 100, 16.67
        optimizer.lr=1e-2, 0.01, 2.625, 3.25, 100, 83.33
        optimizer.lr=1, 1, 9, , , 75
        """,
    )


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ("0 1 100", "linear"),
        ("1 2 8", "linear"),
        ("1 2 9", "log"),
        ("0.5 4 4.5", "log"),
        ("-8 -4 -1", "linear"),
    ],
)
def test_positive_values_that_span_more_than_a_factor_of_eight_are_logarithmic(values, scale):
    runs = (run(value, {"k": value}, point(1, None, 3.0)) for value in values.split())
    assert figure(Sweep("s", tuple(runs)))[1].axes[0].get_xscale() == scale


@pytest.mark.parametrize("key", ["numbers", "words"])
def test_an_axis_does_not_make_a_trend_of_small_differences(key):
    """Losses of 0.006 nats apart, and a trial of twelve."""
    names = {"numbers": ("1", "2", "3"), "words": ("x", "y", "z")}[key]
    points = (point(1, 11, 3.0), point(1, 10, 3.006), point(1, 11, 3.003))
    sweep = Sweep("s", tuple(run(n, {"k": n}, at) for n, at in zip(names, points, strict=True)))
    loss, retrieval = figure(sweep)[1].axes
    limits = "get_ylim" if key == "numbers" else "get_xlim"
    assert getattr(loss, limits)() == pytest.approx((2.903, 3.103))
    assert getattr(retrieval, limits)() == (-4, 106)


def test_an_axis_holds_wide_differences():
    sweep = Sweep("s", tuple(run(n, {"k": n}, point(1, None, float(n))) for n in ("3", "4", "5")))
    assert figure(sweep)[1].axes[0].get_ylim() == pytest.approx((2.88, 5.12))


def grid(*values):
    """Runs by two keys, of which the last misses its loss, and any number at 4×."""
    runs = [
        run(f"{a} {b}", {"one.a": a, "one.b": b}, point(1, n, 3.0 + n), point(4, 12 - n))
        for n, (a, b) in enumerate(values)
    ]
    return Sweep(
        "grid", (*runs[:-1], run(runs[-1].place, runs[-1].settings, point(1, 6), point(4)))
    )


def test_a_grid_with_numbers_is_a_line_for_each_value_of_the_other_key():
    """Along the key with more values; 8 is no more than eight times 1."""
    values = [(a, b) for a in ("1", "2") for b in ("8", "2.5", "1")]
    plan, drawn = figure(grid(*values))
    assert plan.title == "The runs of the sweep over one.b"
    check(
        drawn,
        """
        panel 1,1 of 1x3 'loss at 1×'
          x linear 'one.b'
          y linear
          line: x 1 2.5 8; y 5 4 3
          line: x 1 2.5 8; y nan 7 6
          bars: 1 5, 1 5; 2.5 4, 2.5 4; 8 3, 8 3
          bars: ; 2.5 7, 2.5 7; 8 6, 8 6
        """,
        panel=1,
    )
    check(
        drawn,
        """
        panel 1,3 of 1x3 'retrieval at 4× (%)'
          x linear 'one.b'
          y linear
          line: x 1 2.5 8; y 83.33 91.67 100
          line: x 1 2.5 8; y nan 66.67 75
          bars: 1 55.2, 1 95.3; 2.5 64.61, 2.5 98.51; 8 75.75, 8 100
          bars: ; 2.5 39.06, 2.5 86.19; 8 46.77, 8 91.11
        legend 'one.a=1', 'one.a=2'
        """,
        panel=3,
    )


def test_a_key_that_some_runs_of_a_grid_lack_has_a_line_for_them():
    """As where two sweeps are compared, one of which set a key more."""
    settings = [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "1"}, {"a": "2"}]
    sweep = Sweep("s", tuple(run(str(n), s, point(1, 3)) for n, s in enumerate(settings)))
    (axis,) = axes(sweep)
    assert [(name, [value for value, _ in line]) for name, line in axis.lines] == [
        *(("b=x", [1, 2]), ("no b", [1, 2])),
    ]


def test_a_grid_of_words_is_a_map():
    values = [(a, b) for a in ("never", "always") for b in ("x", "y", "z")]
    plan, drawn = figure(grid(*values))
    assert plan.title == "The runs of the sweep by one.a and one.b"
    check(
        drawn,
        """
        panel 1,3 of 1x3 'retrieval at 4× (%)'
          x linear
          y linear
          image 66.67..100, from -0.5 2.5 1.5 -0.5: 100 91.67 83.33 / 75 66.67 nan
          text '100.0': 0 0
          text '91.7': 1 0
          text '83.3': 2 0
          text '75.0': 0 1
          text '66.7': 1 1
          text '·': 2 1
        below 'one.b'
        left 'one.a'
        """,
        panel=3,
    )


def test_runs_without_a_grid_are_drawn_by_name():
    """Two keys of words with three of four places."""
    sweep = grid(("never", "x"), ("always", "x"), ("always", "y"))
    plan, drawn = figure(sweep)
    assert plan.title == "The runs of the sweep by run"
    check(
        drawn,
        """
        panel 1,1 of 1x3 'loss at 1×'
          x linear
          y linear
          bars: x 3; y 0; 3 0, 3 0
          bars: x 4; y 1; 4 1, 4 1
        """,
        panel=1,
    )
    check(
        drawn,
        """
        panel 1,2 of 1x3 'retrieval at 1× (%)'
          x linear
          y linear
          bars: x 0; y 0; 0 0, 24.25 0
          bars: x 8.333; y 1; 1.487 1, 35.39 1
          bars: x 50; y 2; 25.38 2, 74.62 2
        """,
        panel=2,
    )


def test_keys_that_change_one_at_a_time_have_a_row_each():
    settings = [{"a": "1", "b": "8"}, {"a": "2", "b": "8"}, {"a": "1", "b": "4"}]
    sweep = Sweep("s", tuple(run(str(n), s, point(1, None, 3.0)) for n, s in enumerate(settings)))
    first, second, third = sweep.runs
    a, b = axes(sweep)
    assert (a.key, a.lines) == ("a", (("", ((1, first), (2, second))),))
    assert (b.key, b.lines) == ("b", (("", ((4, third), (8, first))),))
    both = run("3", {"a": "3", "b": "3"}, point(1, None, 3.0))
    assert axes(Sweep("s", (*sweep.runs, both))) == []
    words = run("3", {"a": "inf", "b": "8"}, point(1, None, 3.0))
    assert axes(Sweep("s", (*sweep.runs, words))) == []
    again = run("3", {"a": "1", "b": "8"}, point(1, None, 3.0))
    a, _ = axes(Sweep("s", (*sweep.runs, again)))
    assert a.lines == (("", ((1, first), (1, again), (2, second))),)
    _, drawn = figure(sweep)
    assert [panel.get_xlabel() for panel in drawn.axes] == ["a", "b"]
    assert drawn.get_figheight() == pytest.approx(0.5 + 2 * 1.9)


def test_panels_are_of_the_training_length_and_the_longest_that_all_runs_share():
    """One run was also measured at half its length, another further than the rest."""
    runs = (
        run("a", {"k": "1"}, point(0.5, 12), point(1, 9), point(4, 3)),
        run("b", {"k": "2"}, point(1, 9), point(4, 3), point(8, 0), measured_on="other"),
        run("c", {"k": "3"}, state="not started"),
    )
    plan, _ = figure(Sweep("s", runs))
    assert [m.factor for m in measures(Sweep("s", runs))] == [1, 4]
    assert "at the training length and 4×, the longest length that all runs share" in plan.caption
    assert "measured on other text" in plan.caption
    alike = Sweep("s", (runs[0], replace(runs[1], measured_on=runs[0].measured_on)))
    assert "measured on other text" not in figure(alike)[0].caption


def test_panels_are_of_the_shortest_and_longest_lengths_that_have_numbers():
    sweep = Sweep("s", (run("a", {}, point(1, 3), point(2, 3, 3.0), point(4, None, 3.0)),))
    assert [(m.title, m.factor) for m in measures(sweep)] == [
        ("loss at 4×", 4),
        ("retrieval at 1× (%)", 1),
    ]
    alone = Sweep("s", (run("a", {}, point(2, 3, 3.0)),))
    assert [m.title for m in measures(alone)] == ["loss at 2×", "retrieval at 2× (%)"]
