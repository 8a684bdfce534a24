"""The renderings of a report: figures with their numbers, and one page that needs nothing else."""

import csv
import math
import re
import sys
from html.parser import HTMLParser
from subprocess import run

import numpy as np
import pytest

from tests.report.examples import DEPTHS, EXPERIMENT, TRAINED, cell, example, report, statements
from trainer.evaluation.outcomes import Outcomes
from trainer.evaluation.results import PERPLEXITY, Arm, Drop
from trainer.report.figures import Depths, is_panelled, write_figures
from trainer.report.pages import lead, measured, tally, write_renderings
from trainer.report.tables import tables
from trainer.report.training_figures import smoothed, training_figure

FIGURES = {
    "success_mean",
    "success_multi_key",
    "success_multi_value",
    "perplexity_and_retrieval",
    "perplexity_by_position",
    "depth_multi_key",
    "depth_multi_value",
}


@pytest.fixture(scope="module")
def small():
    made = example(models=("RoPE", "DroPE"), methods=("none", "crop", "yarn"), trials=20)
    return report(*made.cells, name="<script>alert(1)</script>", notes=("A note.",))


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    directory = tmp_path_factory.mktemp("lengths")
    write_renderings(small, directory)
    return directory


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_everything_is_there_and_nothing_temporary(written):
    names = {path.name for path in written.iterdir()}
    assert names == {"report.html", "table.md", "table.tex", "table.csv", "figures"}
    assert {path.name for path in (written / "figures").iterdir()} == {
        f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png", "csv")
    }


def test_figures_are_the_same_in_every_repetition(small, written, tmp_path):
    drawn = write_figures(small, tmp_path)
    assert {figure.path.stem for figure in drawn} == FIGURES
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (written / "figures" / path.name).read_bytes(), path.name


def test_the_numbers_of_a_figure_lie_beside_it(small, written):
    found = {(c.model, c.method, c.task, c.length): c for c in small.cells}
    for row in read_csv(written / "figures" / "success_multi_key.csv"):
        scores = found[row["model"], row["method"], "multi_key", int(row["length"])].scores
        assert float(row["success"]) == pytest.approx(np.mean(scores))
    for row in read_csv(written / "figures" / "perplexity_by_position.csv"):
        own = found[row["model"], row["method"], PERPLEXITY, 8192]
        index = own.edges.index(int(row["from_position"]))
        assert float(row["perplexity"]) == pytest.approx(math.exp(own.losses[index]))
        assert float(row["loss"]) == own.losses[index]
    for row in read_csv(written / "figures" / "depth_multi_key.csv"):
        own = found[row["model"], row["method"], "multi_key", int(row["length"])]
        near = [
            s for s, d in zip(own.scores, own.depths, strict=True) if 100 * d == int(row["depth"])
        ]
        assert float(row["success"]) == pytest.approx(np.mean(near))
    rows = read_csv(written / "figures" / "perplexity_and_retrieval.csv")
    assert {(row["model"], row["method"]) for row in rows} == {
        *(("RoPE", "none"), ("RoPE", "crop"), ("RoPE", "yarn"), ("DroPE", "none")),
    }


def test_an_experiment_has_its_training_curves_and_its_story(tmp_path):
    made = report(*statements("RoPE", (100, 90, 50, 10)), **EXPERIMENT, training_length=64)
    drawn = write_renderings(made, tmp_path)
    assert [figure.path.stem for figure in drawn] == [
        *("perplexity_and_retrieval", "success_statements", "training"),
    ]
    rows = read_csv(tmp_path / "figures" / "training.csv")
    assert [(r["arm"], int(r["step"]), r["training_loss"]) for r in rows] == [
        (arm.name, step, "" if loss is None else repr(loss))
        for arm in made.arms
        for step, loss in arm.curve
    ]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for words in (
        "Trained at 64 tokens and tested at up to 512 (8×).",
        "Of 3 observations of the papers: 1 shown, 1 not shown, 1 not judged.",
        "just before 4.100",
        "100.0 4.000 98.5–100.0",
        "50% of the training sequences carried such statements, at the training length only",
        "right in 1.0% of trials",
        "✓ shown first claim.",
        "✗ not shown second claim.",
        "– not judged third claim.",
        "51 000",
    ):
        assert words in text, words


def test_smoothing_is_a_centred_mean_that_skips_what_is_missing():
    nan = float("nan")
    assert smoothed([1, 2, 3, 4, 5], 3) == [1.5, 2, 3, 4, 4.5]
    assert smoothed([1, nan, 3], 3) == [1, 2, 3]
    assert smoothed([7, 8], 1) == [7, 8]
    assert smoothed([], 3) == []


def test_the_jump_at_the_drop_is_drawn_as_a_jump():
    """Smoothed on each side of it by itself: no drawn value lies between the two levels."""
    losses = [4.0 + 0.1 * (step % 2) for step in range(120)] + [
        9.0 + 0.1 * (s % 2) for s in range(80)
    ]
    arm = Arm("DroPE", "rope, dropped", 1, 200, 3, None, tuple(enumerate(losses, 1)))
    (plan,) = training_figure(report(arms=(arm,), drop=Drop(120, 4.0, 9.0)), {"DroPE": 0})
    raw, smooth = (line.get_ydata() for line in plan.draw().axes[0].lines[:2])
    assert list(raw) == losses
    half = len(losses) // 40 // 2
    for i, value in enumerate(smooth):
        low, high = (0, 120) if i < 120 else (120, 200)
        near = losses[max(low, i - half) : min(high, i + half + 1)]
        assert value == pytest.approx(sum(near) / len(near))
    assert abs(smooth[1] - 4.05) < 0.05 < abs(losses[1] - 4.0)


def test_depths_are_rows_of_their_own_until_there_are_many():
    few = Depths.of([cell([1.0] * 5, depths=DEPTHS)])
    assert few.names == ("0", "25", "50", "75", "100")
    depths = tuple(np.linspace(0, 1, 31).tolist())
    many = Depths.of([cell([1.0] * 31, depths=depths)])
    assert many.names[0] == "0–10"
    assert many.names[-1] == "90–100"
    # The end of the text belongs to the last tenth; a tenth without trials is not a zero.
    assert many.means(cell([0.5], depths=(1.0,)))[-1] == 0.5
    assert math.isnan(many.means(cell([0.5], depths=(1.0,)))[0])


def test_many_lines_are_shared_out_among_panels():
    assert not is_panelled([("RoPE", str(i)) for i in range(20)])
    assert not is_panelled([("RoPE", "a"), ("RoPE", "b"), ("DroPE", "a")])
    assert is_panelled([(model, str(i)) for model in ("RoPE", "DroPE") for i in range(5)])


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("factors", "within"), [((0.25, 0.5), 0), ((0.5, 1), 1), ((2, 4), 0)])
def test_the_training_length_is_marked_where_it_was_measured(tmp_path, factors, within):
    made = [cell([1.0, 0.0], length=int(TRAINED * factor)) for factor in factors]
    (drawn,) = write_figures(report(*made), tmp_path)
    # A drawn text stands in a comment beside its outlines.
    assert drawn.path.read_text().count("<!-- training length -->") == within


def test_many_models_and_methods_are_drawn(tmp_path):
    made = example(methods=("none", "yarn"), factors=(1, 2), trials=10)
    made = report(*(c for c in made.cells if c.task == "multi_key"))
    drawn = write_figures(made, tmp_path)
    assert [figure.path.name for figure in drawn] == [
        *("success_multi_key.svg", "depth_multi_key.svg"),
    ]
    assert "Grey" in drawn[0].caption


def test_models_that_differ_in_punctuation_share_no_file(tmp_path):
    cells = [
        cell([1.0, 0.0], model, method, length=n, depths=(0.0, 1.0))
        for model in ("a+b", "a b")
        for method in map(str, range(8))
        for n in (1024,)
    ]
    drawn = write_figures(report(*cells), tmp_path)
    assert len({figure.path for figure in drawn}) == len(drawn) == 2


def test_a_run_without_an_evaluation_leaves_no_hole(tmp_path):
    arm = Arm("RoPE", "rope", 1000, 20, 1280, None, ((10, 7.1), (20, 7.0)))
    whole = report(arms=(arm,), config={"data": {"needles": {"share": 0.0}}})
    write_renderings(whole, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert (tmp_path / "table.md").read_text() == "Nothing was evaluated.\n"
    assert (tmp_path / "table.tex").read_text() == "% Nothing was evaluated.\n"
    assert "Nothing was evaluated. <code>python -m trainer evaluate" in page
    assert "<dd></dd>" not in page
    assert "How the numbers are made" not in page
    assert ">Loss<" not in page  # a column of nothing
    assert "Training loss over training steps for each arm.</figcaption>" in page


def test_loss_by_position_needs_two_positions(tmp_path):
    text = {"task": "perplexity", "length": 1024, "last_loss": 4.0}
    one = report(cell((), edges=(0, 1024), losses=(4.0,), **text))
    two = report(cell((), edges=(0, 512, 1024), losses=(4.0, 4.1), **text))
    assert write_figures(one, tmp_path / "one") == []
    (figure,) = write_figures(two, tmp_path / "two")
    assert figure.path.stem == "perplexity_by_position"
    assert "dashed line" not in figure.caption  # nothing lies beyond the training length


def test_a_report_without_numbers_draws_nothing(tmp_path):
    assert write_figures(report(), tmp_path) == []


class _Page(HTMLParser):
    """Collects what the page would load, and its visible words."""

    def __init__(self):
        super().__init__()
        self.loads, self.tags, self.words, self.open, self.alts = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "img":
            self.alts.append(dict(attrs).get("alt"))
        elif tag not in ("meta", "br"):
            self.open.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "data", "srcset", "poster")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_tables_and_the_observations_load_no_plotting_library():
    code = (
        "import sys, trainer.report.tables, trainer.report.claims; "
        "print({'torch', 'lightning', 'hydra', 'matplotlib'} & set(sys.modules))"
    )
    result = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_the_page_needs_nothing_else(written):
    text = (written / "report.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert len(page.loads) == len(FIGURES)
    assert all(load.startswith("data:image/svg+xml;base64,") for load in page.loads)
    assert "script" not in page.tags
    assert page.open == []
    assert all(alt for alt in page.alts)
    assert not re.search(r"@import|url\(", text)
    words = " ".join(" ".join(page.words).split())
    for part in ("<script>alert(1)</script>", "A note.", "Figure 5 of", "McNemar"):
        assert part in words


def test_the_page_has_every_table(small, written):
    text = (written / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<b>Table \d\. (.*?)\.</b>", text) == [
        *("Mean over tasks", "Multi-key needles", "Multi-value needles", "Held-out perplexity"),
    ]
    outcomes = Outcomes(small)
    assert text.count('<th scope="row"') == 4 * len(outcomes.rows)


def test_the_lead_is_made_of_the_numbers():
    made = report(cell([0.0] * 10), cell([1.0] * 5 + [0.0] * 5, "DroPE"))
    assert lead(made) == (
        "Trained at 1024 tokens and tested at up to 2048 (2×). Of 2 combinations of model and "
        "method DroPE reaches most there in Multi-key needles: 50.0% (23.7–76.3); RoPE has 0.0% "
        "(0.0–27.8)."
    )
    assert lead(report()) == ""
    assert lead(report(cell([0.0] * 10), cell([0.0] * 10, "DroPE"))).endswith(
        "None of 2 combinations of model and method finds anything there in Multi-key needles: "
        "0.0% (0.0–27.8)."
    )
    assert lead(report(cell([1.0] * 10))).endswith(
        "RoPE reaches 100.0% (72.2–100.0) there in Multi-key needles."
    )


def test_one_is_no_plural():
    one = report(cell([1.0]), observations=EXPERIMENT["observations"][:1])
    assert dict(measured(one))["Multi-key needles"].startswith("1 trial at each length")
    assert tally(one.observations) == "Of 1 observation of the papers: 1 shown."
    assert tables(one)[0].note == "1 trial a cell."


def test_what_was_measured_is_said_in_words(small):
    words = dict(measured(small))
    assert words["Models"] == "RoPE, DroPE"
    assert words["Multi-key needles"].startswith("20 trials at each length")
    assert words["Lengths in tokens"] == "1024 (1×), 2048 (2×), 4096 (4×), 8192 (8×)"
