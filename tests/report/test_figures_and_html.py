"""Figures come with their numbers; the page is one file that needs nothing else."""

import csv
import re
import sys
from html.parser import HTMLParser
from subprocess import run

import matplotlib as mpl
import pytest

from tests.report.examples import cells, example
from trainer.report.figures import smoothed, write_figures
from trainer.report.html import write_html
from trainer.report.results import Report

NAMES = ("training", "retrieval", "loss_by_position")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    directory = tmp_path_factory.mktemp("figures")
    report = example(name="<script>alert(1)</script>")
    return report, directory, write_figures(report, directory)


@pytest.fixture(scope="module")
def page(drawn):
    report, directory, figures = drawn
    write_html(report, figures, directory / "report.html")
    return (directory / "report.html").read_text(encoding="utf-8")


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_figure_is_written_as_svg_png_and_csv(drawn):
    _, directory, figures = drawn
    assert tuple(figures) == NAMES
    for name, path in figures.items():
        assert path == directory / f"{name}.svg"
        assert path.read_text().rstrip().endswith("</svg>")
        png = (directory / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        assert len(png) > 10_000
    assert not list(directory.glob(".*"))


def test_the_csv_is_the_input(drawn):
    report, directory, _ = drawn
    rows = read_csv(directory / "retrieval.csv")
    assert [
        (r["method"], int(r["length"]), float(r["retrieval"]), float(r["low"]), float(r["high"]))
        for r in rows
    ] == [(c.method, c.length, c.retrieval, *c.retrieval_ci) for c in report.table]
    rows = read_csv(directory / "training.csv")
    assert [(r["arm"], int(r["step"]), r["training_loss"]) for r in rows] == [
        (arm.name, step, "" if loss is None else repr(loss))
        for arm in report.arms
        for step, loss in arm.curve
    ]
    rows = read_csv(directory / "loss_by_position.csv")
    own = [r for r in rows if r["method"] == "DroPE"]
    assert [(int(r["from_position"]), int(r["to_position"])) for r in own] == [
        (start, start + 64) for start in range(0, 512, 64)
    ]
    assert [r["loss"] for r in own] == ["4.0", "5.0", "6.0", "7.0", "8.0", "9.0", "10.0", ""]


def test_figures_are_the_same_in_every_repetition_and_leave_settings_alone(drawn, tmp_path):
    report, directory, _ = drawn
    before = dict(mpl.rcParams)
    write_figures(report, tmp_path)
    assert dict(mpl.rcParams) == before
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes() == (directory / path.name).read_bytes(), path.name


def test_eighteen_methods_and_missing_numbers_are_drawn(tmp_path):
    methods = [f"method {i}" for i in range(18)]
    table = [c for m in methods for c in cells(m, (100, None, 50, 20))]
    figures = write_figures(Report("r", {}, {}, table=tuple(table)), tmp_path)
    assert tuple(figures) == ("retrieval",)
    assert len(read_csv(tmp_path / "retrieval.csv")) == 18 * 3


def test_a_report_without_numbers_has_no_figures(tmp_path):
    assert write_figures(Report("r", {}, {}), tmp_path) == {}


def test_smoothing_is_a_centred_mean_that_skips_what_is_missing():
    nan = float("nan")
    assert smoothed([1, 2, 3, 4, 5], 3) == [1.5, 2, 3, 4, 4.5]
    assert smoothed([1, nan, 3], 3) == [1, 2, 3]
    assert smoothed([7, 8], 1) == [7, 8]
    assert smoothed([], 3) == []


class Tags(HTMLParser):
    """Collects tags with their attributes, and checks that they close in order."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_refers_to_nothing_outside_itself(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    links = [a[k] for _, a in tags.tags for k in ("src", "href", "srcset") if k in a]
    assert len(links) == len(NAMES)
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags.tags}
    assert "url(" not in page
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)


def test_names_are_escaped(page):
    assert "<script>" not in page
    assert "<h1>&lt;script&gt;alert(1)&lt;/script&gt;</h1>" in page


def test_the_page_is_accessible(page):
    tags = Tags()
    tags.feed(page)
    assert all(attributes.get("alt") for tag, attributes in tags.tags if tag == "img")
    assert all("scope" in attributes for tag, attributes in tags.tags if tag == "th")
    assert ("html", {"lang": "en"}) in tags.tags


def test_the_page_says_what_the_report_says(drawn, page):
    report, _, _ = drawn
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for words in (
        "Trained at 64 tokens and tested at up to 512 (8×)",
        "100.0 98.5–100.0",
        "over 256 trials",
        "50% of the training sequences carried such statements, at the training length only",
        "right in 1.0% of trials",
        "✓ shown first claim.",
        "✗ not shown second claim.",
        "– not judged third claim.",
        "c = 0.200 for DroPE",
        "51 000",
    ):
        assert words in text, words
    for method in report.methods:
        assert f'<th scope="row">{method}</th>' in page


def test_a_bare_report_makes_a_page_too(tmp_path):
    write_html(Report("bare", {}, {}), {}, tmp_path / "r.html")
    assert "<h1>bare</h1>" in (tmp_path / "r.html").read_text()


def test_a_figure_of_an_unknown_kind_is_refused_and_nothing_written(tmp_path):
    (tmp_path / "figure.gif").write_bytes(b"GIF")
    with pytest.raises(ValueError, match=r"not figure\.gif"):
        write_html(Report("r", {}, {}), {"f": tmp_path / "figure.gif"}, tmp_path / "r.html")
    assert [path.name for path in tmp_path.iterdir()] == ["figure.gif"]


def test_the_table_and_the_observations_load_no_plotting_library():
    code = (
        "import sys, trainer.report.table, trainer.report.observations; "
        "print({'torch', 'lightning', 'hydra', 'matplotlib'} & set(sys.modules))"
    )
    result = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
