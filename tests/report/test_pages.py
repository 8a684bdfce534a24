"""Pages of a report: templates, warnings, and one page that needs nothing else."""

import csv
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from subprocess import run

import pytest
from jinja2 import DictLoader, UndefinedError
from rich.console import Console

from tests.report.examples import EXPERIMENT, TRAINED, cell, example, report, statements
from trainer.commands import console
from trainer.common.files import csv_text
from trainer.evaluation.outcomes import Outcomes
from trainer.evaluation.results import Arm, Change, Drop, troubles
from trainer.report import files
from trainer.report.figures import (
    is_panelled,
    lengths_frame,
    positions_frame,
    write_figures,
)
from trainer.report.files import base64, render
from trainer.report.pages import lead, measured, tally, write_html, write_renderings
from trainer.report.tables import csv_table, tables
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


def test_all_files_are_written_and_no_temporary_ones_left(written):
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
        "50% of the training sequences contained such statements, at the training length only",
        "right in 1.0% of trials",
        "✓ shown first claim.",
        "✗ not shown second claim.",
        "– not judged third claim.",
        "51 000",
    ):
        assert words in text, words


def test_smoothing_is_a_centred_mean_without_missing_values():
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
    single = report(cell((), edges=(0, 1024), losses=(4.0,), **text))
    two = report(cell((), edges=(0, 512, 1024), losses=(4.0, 4.1), **text))
    assert write_figures(single, tmp_path / "one") == []
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
        "method, DroPE scores highest there in Multi-key needles: 50.0% (23.7–76.3); RoPE has 0.0% "
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


def test_a_unit_below_the_training_length_is_not_called_trained():
    """Models of context 8,192 whose lengths count from 1,024."""
    made = report(cell([1.0] * 10), cell([1.0] * 10, length=1024), longest_context=8192)
    assert lead(made).startswith(
        "Trained at up to 8192 tokens and tested at up to 2048 (2× 1024 tokens)."
    )
    (table,) = tables(made)
    assert [column[1] for column in table.columns[:2]] == ["1×", "2×"]
    frame = lengths_frame(made, {1024: 1.0, 2048: 2.0}, "y", lambda axes: None)
    assert frame.x_label == "sequence length (multiple of 1024 tokens; tokens)"
    assert frame.vertical is None
    frame = positions_frame(made, 16_384, lambda axes: None)
    assert frame.vertical == (8192, "training length")


def test_rows_of_equal_means_are_all_bold_and_the_lead_says_how_many():
    """(4 / 11 + 5 / 11) / 3 and (1 / 11 + 4 / 11 + 4 / 11) / 3 differ as floats."""

    def made(method, *hits):
        scores = [float(depth < n) for n in hits for depth in range(11)]
        groups = tuple(text for text in range(3) for _ in range(11))
        return cell(scores, method=method, groups=groups)

    equal = report(made("none", 0, 4, 5), made("yarn", 1, 4, 4), made("pi", 0, 0, 0))
    (table,) = tables(equal)
    assert [(entry.value, entry.best) for *_, (entry,) in table.rows] == [
        *(("27.3", True), ("0.0", False), ("27.3", True)),
    ]
    assert lead(equal).endswith(
        "Of 3 combinations of model and method, 2 score highest, all alike (RoPE is one), there in "
        "Multi-key needles: 27.3% (7.3–64.0)."
    )


def test_one_is_no_plural():
    single = report(cell([1.0]), observations=EXPERIMENT["observations"][:1])
    assert dict(measured(single))["Multi-key needles"].startswith("1 trial at each length")
    assert tally(single.observations) == "Of 1 observation of the papers: 1 shown."
    assert tables(single)[0].note == "1 trial a cell."


def test_words_and_numbers_tell_trials_from_texts():
    made = report(cell([1.0, 0.0, 1.0, 1.0], groups=(0, 0, 1, 1)))
    on_two = "4 trials on 2 texts"
    assert tables(made)[0].note == (
        f"{on_two} a cell. Arrows count each text once; the effective number of trials of an "
        "interval lies between texts and trials."
    )
    assert dict(measured(made))["Multi-key needles"].startswith(f"{on_two} at each length")
    head, row = (line.split(",") for line in csv_table(made).split())
    assert dict(zip(head, row, strict=True))["n"] == "2"


def test_changes_of_a_phase_are_in_the_terminal_and_on_the_page(tmp_path, monkeypatch):
    """Of the run itself the drop has a line of its own."""
    long = Change(1000, "phase 'long'", 4096, 4.25, 4.5, 3.125)
    main = Arm("RoPE", "rope", 10, 2000, 64_000, changes=(Change(500, "dropped", 64, 3, 5), long))
    other = Arm("NoPE", "nope", 10, 2000, 64_000, changes=(replace(long, loss_end=None),))
    whole = replace(report(arms=(main, other)), drop=Drop(500, 3.0, 5.0))
    shown = StringIO()
    monkeypatch.setattr(console, "Console", lambda **_: Console(file=shown, width=200))
    console.print_report(whole, "runs/x", existing=False)
    after = "after step 1000: phase 'long'; held-out loss at 4,096 tokens 4.250 before, then 4.500"
    messages = " ".join(shown.getvalue().split())
    assert f"RoPE, {after} to 3.125. NoPE, {after} to ?." in messages
    assert messages.count("just after") == 1
    write_html(whole, [], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index('id="changes"') :])
    assert cells[6:12] == [
        "1\u202f000",
        "phase &#39;long&#39;",
        "4\u202f096",
        "4.250",
        "4.500",
        "3.125",
    ]
    assert cells[17] == "·"


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({}, []),
        ({"skipped": 9}, ["RoPE: 9 of 1,000 updates were left out"]),
        ({"curve": ((990, 2.0), (1000, 2.0))}, []),
        (
            {"curve": ((980, 2.0), (990, 2.0))},
            ["RoPE: its metrics.csv ends at step 990 of 1,000, and with it its curve of the loss"],
        ),
        ({"rewinds": 2}, ["RoPE: it diverged and went back to a checkpoint 2 times"]),
        (
            {"rewinds": 1, "finite": False},
            ["RoPE: it diverged and went", "RoPE: the norm of its weights is"],
        ),
    ],
)
def test_troubles_of_training_are_in_the_terminal_and_on_the_page(
    fields, messages, tmp_path, monkeypatch
):
    arm = Arm("RoPE", "rope", 10, 1000, 64_000, **fields)
    pairs = zip(troubles([arm]), messages, strict=True)
    assert all(trouble.startswith(message) for trouble, message in pairs)
    shown = StringIO()
    monkeypatch.setattr(console, "Console", lambda **_: Console(file=shown, width=100))
    console.print_report(report(arms=(arm,)), "runs/x", existing=False)
    write_html(report(arms=(arm,)), [], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (
        shown.getvalue().count("Warning: RoPE: ")
        == page.count("Warning.</b> RoPE: ")
        == len(messages)
    )


@pytest.fixture
def template(monkeypatch):
    """Set a text as if it were one of the templates."""

    def fill(text, filters=None, **values):
        monkeypatch.setattr(files, "PackageLoader", lambda _: DictLoader({"a": text}))
        return render("a", filters or {}, **values)

    return fill


def test_values_are_escaped(template):
    assert template("<p>{{ x }}</p>", x="<b> & c") == "<p>&lt;b&gt; &amp; c</p>"


def test_a_missing_value_is_an_error(template):
    with pytest.raises(UndefinedError, match="'x' is undefined"):
        template("{{ x }}")


def test_lines_of_tags_leave_nothing(template):
    assert template("a\n  {% if x %}\nb\n  {% endif %}\nc", x=True) == "a\nb\nc"


def test_filters_of_all_templates(template):
    assert template("{{ x | mathml | safe }}", x="a/b").startswith("<math><mfrac>")
    assert template("{{ x | pretty | safe }}", x={"é": [1]}) == '{\n  "é": [\n    1\n  ]\n}'
    assert template("{{ x | twice }}", {"twice": lambda x: 2 * x}, x=3) == "6"


def test_csv_quotes_separators_and_ends_every_line():
    rows = [("a,b", 'c"d'), (1, None)]
    assert csv_text(("x", "y"), rows) == 'x,y\n"a,b","c""d"\n1,\n'


def test_a_file_as_an_address(tmp_path):
    (tmp_path / "a").write_bytes(b"\x00\xff")
    assert base64(tmp_path / "a") == "AP8="
