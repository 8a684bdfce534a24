"""The pages of reports and of analyses: one file each that needs nothing else."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from tests.report.examples import EXPERIMENT, METHODS, TRAINED, cell, change, example, loss, report
from trainer.analysis.results import COLUMNS, Results, tidy
from trainer.plotting import Grid, Panel, Plot, draw, over_heads
from trainer.report.pages import (
    _cell,
    inline,
    write_analysis,
    write_comparison,
    write_renderings,
)
from trainer.report.report import RunSummary
from trainer.report.tables import tables


class Page(HTMLParser):
    """Collects what the page would load, and its visible words."""

    def __init__(self):
        super().__init__()
        self.loads, self.tags, self.words, self.open, self.alts = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "svg":
            self.alts.append(dict(attrs).get("aria-label"))
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.loads += [
            v for k, v in attrs if k in ("src", "href", "xlink:href", "data", "srcset", "poster")
        ]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(made, directory):
    write_renderings(made, directory)
    return (directory / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_of_an_experiment_needs_nothing_else(tmp_path):
    small = example()
    notes = ("<script>alert(1)</script>", "A note.")
    write_renderings(replace(small, notes=notes, **EXPERIMENT), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "figures", "tables"}
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert len(page.alts) == len([*(tmp_path / "figures").glob("*.svg")]) > 4
    assert all(load.startswith(("#", "data:image/png;base64,")) for load in page.loads)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids)
    assert {load[1:] for load in page.loads if load.startswith("#")} <= {*ids}
    assert "script" not in page.tags
    assert page.open == []
    assert all(page.alts)
    assert not re.search(r"@import|url\((?!#)", text)
    words = " ".join(" ".join(page.words).split())
    for part in ("<script>alert(1)</script>", "Figure 5 of", "first claim", "not judged"):
        assert part in words
    assert "Claims of the papers: 1 shown, 1 not shown, 1 not judged" in words


def test_the_page_has_the_rows_of_the_tables(tmp_path):
    made = report(
        cell([1.0] * 9 + [0.0] * 11, length=1024),
        cell([0.0] * 20),
        cell([1.0] * 20, method="yarn"),
        cell([1.0] * 5, "Dro|PE_", length=1024),
    )
    page = page_of(made, tmp_path)
    table = page[page.index('<table id="table-1"') : page.index("</table>")]
    rows = [re.sub(r"<br>|</t[hd]>", " ", row) for row in table.split("<tr")[1:]]
    text = [unescape(re.sub(r"<[^>]+>|^[^>]*>", "", row)).split() for row in rows]
    assert [" ".join(words) for words in text] == [
        "Model and method 1024 tokens 1× (trained) 2048 tokens 2×",
        "RoPE 45.0 25.8–65.8 0.0 0.0–16.1",
        "+ YaRN · 100.0↑ 83.9–100.0",
        "Dro|PE_ 100.0 56.6–100.0 ·",
    ]
    assert re.findall(r'class="best">([\d.]+)<', page) == ["100.0", "100.0"]


def test_the_page_of_several_runs_has_their_tables(tmp_path):
    shown = tables(report(cell([1.0] * 5), cell([0.0] * 5, "a: <RoPE>")))
    page = write_comparison(shown, tmp_path / "beside", {"Made": "now", "Command": "c"})
    text = page.read_text(encoding="utf-8")
    assert '<table id="table-1"' in text
    assert "a: &lt;RoPE&gt;" in text


def test_tables_and_figures_of_an_earlier_report_are_removed(tmp_path):
    write_renderings(replace(example(), **EXPERIMENT), tmp_path)
    alone = tmp_path / "alone"
    small = replace(example(), tasks={})
    rows = small.rows[small.rows.task == small.rows.task.iloc[0]]
    small = replace(small, rows=rows)
    (tmp_path / "tables" / "notes.md").touch()
    for place in (tmp_path, alone):
        write_renderings(small, place)
    for name in ("tables", "figures"):
        expected = {path.name for path in (alone / name).glob("*")}
        assert {path.name for path in (tmp_path / name).glob("*")} - {"notes.md"} == expected
    assert (tmp_path / "tables" / "notes.md").exists()


def test_a_run_without_an_evaluation_leaves_no_hole(tmp_path):
    run = RunSummary("RoPE", "rope", 1000, 20, 1280, ((10, 7.1), (20, 7.0)))
    page = page_of(report(runs=(run,)), tmp_path)
    assert "Nothing was evaluated. <code>python -m trainer evaluate" in page
    assert "<dd></dd>" not in page
    assert "How the numbers are made" not in page
    assert ">Loss<" not in page  # a column of nothing
    assert re.findall(r"Figure \d+\.", page) == ["Figure 1."]  # of its training


@pytest.mark.parametrize(("models", "rows_of_each", "expected"), [(1, 1, 1), (3, 5, 2)])
def test_figures_stand_beside_a_long_table_and_each_once(models, rows_of_each, expected, tmp_path):
    cells = [
        cell([1.0, 0.0], f"m{model}", method, length=length)
        for model in range(models)
        for method in [*METHODS][:rows_of_each]
        for length in (TRAINED, 2 * TRAINED)
    ]
    run = RunSummary("m0", "rope", 1000, 20, 1280, ((10, 7.1), (20, 7.0)))
    page = page_of(report(*cells, runs=(run,)), tmp_path)
    numbers = [int(number) for number in re.findall(r"Figure (\d+)\.", page)]
    assert numbers == [1, 2, 3]
    beside = page[: page.index('<table id="table-1"')].count("<figure>")
    assert beside == expected


def test_changes_of_phases_and_troubles_are_on_the_page(tmp_path):
    long = change(1000, 4.25, 4.5, what="phase 'long'", length=4096)
    run = RunSummary("RoPE", "rope", 10, 2000, 64_000, skipped=9, finite=False, changes=(long,))
    page = page_of(replace(report(runs=(run,)), drop=change(500, 3.0, 5.0)), tmp_path)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index('id="changes"') :])
    assert [unescape(cell) for cell in cells] == [
        *("1\u202f000", "phase 'long'", "4\u202f096", "4.250", "4.500", "·"),
    ]
    assert page.count("Warning.</b> RoPE: ") == 2


def results(key):
    values = np.random.default_rng(0).random((2, 4, 3))
    line = over_heads("heads", 0, [32, 64, 128], values)
    figure = draw([Panel("panel", [line], y="y")], Grid(x="tokens"), trained=64)
    places = {"length": [32, 64, 128]}
    rows = tidy({"m": values}, "layer", "head", "length", places=places, model="tiny")
    plots = [Plot(f"{key}_curves", figure, "Curves <by> length (A paper, Fig. 1).")]
    return Results(key, f"Topic {key}", plots, rows.assign(topic=key).reindex(columns=COLUMNS))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page") / "below" / "that"
    page = write_analysis(
        directory,
        [results("one"), results("two")._replace(notes=["Left <out>."])],
        64,
        name="<script>alert(1)</script>",
        lead="Trained & read.",
        made={"Made": "2026-01-02", "Command": "python -m trainer analyze", "Models": "a, step 7"},
        details={"Settings": {"length": 128}},
    )
    assert page == directory / "report.html"
    return directory


def test_the_page_has_everything_inside_and_names_nothing_outside(written):
    page = (written / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "Curves &lt;by&gt; length (A paper, Fig. 1)." in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    for text in (
        "Left &lt;out&gt;.",
        "Trained &amp; read.",
        "Topic two",
        "Figure 2.",
        "a, step 7",
        ">m<",
    ):
        assert text in page


def test_rows_of_all_topics_are_one_table_beside_the_figures(written):
    table = pd.read_csv(written / "results.csv")
    assert tuple(table.columns) == COLUMNS
    expected = pd.concat([results("one").rows, results("two").rows])
    np.testing.assert_allclose(table["value"], expected["value"], rtol=1e-7)
    assert table.groupby("topic").size().to_dict() == {"one": 24, "two": 24}
    for key in ("one", "two"):
        assert sorted(path.name for path in (written / key).iterdir()) == [
            f"{key}_curves.pdf",
            f"{key}_curves.png",
            f"{key}_curves.svg",
        ]


def test_the_page_judges_claims_and_counts_the_verdicts(tmp_path):
    page = page_of(report(observations=EXPERIMENT["observations"]), tmp_path)
    assert "Claims of the papers: 1 shown, 1 not shown, 1 not judged<" in page
    verdicts = re.findall(
        r'class="verdict (\w+)">(.) ([^<]+)<.*?<summary>([^<]+)<', page, re.DOTALL
    )
    assert verdicts == [
        ("yes", "✓", "shown", "first claim"),
        ("no", "✗", "not shown", "second claim"),
        ("open", "–", "not judged", "third claim"),
    ]
    one = page_of(report(observations=EXPERIMENT["observations"][:1]), tmp_path)
    assert "Claims of the papers: 1 shown<" in one


def test_the_page_shows_seeds_by_their_mean(tmp_path):
    seeds = {"A (0)": "A", "A (1)": "A"}
    made = report(*(cell([1.0, 0.0] * 20, name) for name in seeds), seeds=seeds)
    page = page_of(made, tmp_path)
    assert re.findall(r'<th scope="row">([^<]+)<', page) == ["A"]
    assert "(0)" not in page


def test_a_run_has_its_loss_on_the_page(tmp_path):
    runs = tuple(RunSummary(name, "rope", 1000, 20, 1280) for name in ("RoPE", "NoPE"))
    page = page_of(report(loss(3.25, length=TRAINED), runs=runs), tmp_path)
    table = page[page.index("<b>The runs.</b>") :]
    cells = re.findall(r"<td>([^<]*)</td>", table)
    assert [cells[:4], cells[4:8]] == [
        ["1\u202f000", "20", "1\u202f280", "3.250"],
        ["1\u202f000", "20", "1\u202f280", "·"],
    ]


def test_the_page_says_what_guesses_score_and_what_was_trained(tmp_path):
    config = {"evaluation": {"needles": {"needles": 5}}}
    made = report(cell([1.0], task="statements"), config=config, training_share=0.25)
    page = page_of(replace(made, tasks=made.tasks | {"statements": "S"}), tmp_path)
    task = page[page.index("<summary>The task<") :].partition("</details>")[0]
    assert re.findall(r"([\d.]+)%", task) == ["1.1", "20.0", "25"]


def test_a_drawing_in_a_page_has_names_and_colours_of_the_page():
    drawn = '<g id="a" fill="#0072b2"/><use href="#a" clip="url(#a)"/></svg>'
    svg = f"<?xml?><svg><style>*{{}}</style>{drawn}"
    assert inline(svg, "x", 'a "b"') == (
        '<svg role="img" aria-label="a &#34;b&#34;"><g id="x-a" fill="var(--blue)"/>'
        '<use href="#x-a" clip="url(#x-a)"/></svg>'
    )


def test_numbers_in_a_page_have_four_digits_and_commas():
    values = {math.nan: "", 3.0: "3", 12345.0: "12,345", 0.123456: "0.1235", 1234567: "1,234,567"}
    assert [_cell(value) for value in (*values, "007")] == [*values.values(), "007"]
