"""The page of analyses: everything in one file, its numbers beside it."""

import csv
import json
import math
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from tests.report.described import check_text
from trainer.analysis.studies.section import Grid, Indicator, Picture, Section
from trainer.plotting.lines import Frame, Panel, by_length, over_heads
from trainer.plotting.style import WIDTH, blank
from trainer.report import pages
from trainer.report.pages import GeometryReport, write_geometry_report


def section(key):
    line = over_heads("heads", 0, [32, 64, 128], np.random.default_rng(0).random((2, 4, 3)))
    figure = by_length([Panel("panel", [line], Frame("", "y"))], x_label="tokens", trained=64)
    rows = [(1, 0.25), ("x", math.nan)]
    glance = Indicator("Sink <weight>", [32, 64, 128], [0.5, 0.5, 0.1], 64, "high", "a meaning")
    return Section(
        key,
        f"Section {key}",
        "What is measured & how.",
        ("a = ⟨q, k⟩", "b < c"),
        "A paper, Sec. 3.",
        ("The first <finding>.",),
        (Picture(f"{key}_curves", figure, "Curves. More.", ("a", "b"), rows),),
        (Grid("A table.", ("measure", "value"), [("rows", 1234), ("rate", 0.123456)]),),
        {"values": np.array([1.0, math.nan]), "glance": [glance.to_dict()]},
    )  # fmt: skip


def report(*keys, **more):
    fields = {
        "name": "<script>alert(1)</script>",
        "training_length": 64,
        "length": 128,
        "texts": 2,
        "encoding": "All pairs rotate.",
        "sections": [section(key) for key in keys],
        "notes": ("A thing was left out & why.",),
        "settings": {"length": 128},
        "made": {"Made": "2026-01-02", "Command": "python -m trainer analyze", "Of": "a, step 7"},
    }
    return GeometryReport(**fields | more)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page") / "below" / "that"
    assert write_geometry_report(report("one", "two"), directory) == directory / "report.html"
    return directory


def test_a_page_that_fails_leaves_the_old_one_and_its_numbers(tmp_path, monkeypatch):
    place = tmp_path / "out"
    write_geometry_report(report("one"), place)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def interrupt(sections):
        raise KeyboardInterrupt

    monkeypatch.setattr(pages, "glance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_geometry_report(report("one", length=512), place)
    with pytest.raises(KeyboardInterrupt):
        write_geometry_report(report("one"), tmp_path / "new")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    write_geometry_report(report("one", length=512), place)
    assert (place / "report.html").read_bytes() != before[place / "report.html"]


def test_figures_and_numbers_of_every_section_lie_beside_the_page(written):
    assert {str(p.relative_to(written)) for p in written.rglob("*") if p.is_file()} == {
        "report.html",
        *(
            f"{key}/{name}"
            for key in ("one", "two")
            for name in (
                "numbers.json",
                *(f"{key}_curves.{kind}" for kind in ("svg", "png", "csv")),
            )
        ),
    }
    with (written / "one" / "one_curves.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["a", "b"], ["1", "0.25"], ["x", "nan"]]
    numbers = json.loads((written / "one" / "numbers.json").read_text(), parse_constant=pytest.fail)
    assert numbers["training_length"] == 64
    assert numbers["values"] == [1.0, None]


def test_the_page_holds_all_that_it_shows(written):
    text = (written / "report.html").read_text()
    assert len(re.findall(r'<img [^>]*src="data:image/svg\+xml;base64,', text)) == 2
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "The first &lt;finding&gt;." in text
    assert "A thing was left out &amp; why." in text
    assert "2026-01-02, <code>python -m trainer analyze</code>" in text
    assert "<dt>Of</dt><dd>a, step 7</dd>" in text
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text)
    # Links lead to files that are there, and to places on the page.
    for link in re.findall(r'href="([^"#]+)"', text):
        assert (written / link).is_file(), link
    for place in re.findall(r'href="#([^"]+)"', text):
        assert f'id="{place}"' in text


def test_the_glance_names_breaking_indicators(written):
    text = (written / "report.html").read_text()
    assert text.count("✗ breaks") == 2
    assert re.search(r"Sink &lt;weight&gt;</h3>\s*<p[^>]*>0\.5 <span[^>]*>→</span> 0\.1", text)


def test_a_page_within_the_training_length_judges_nothing(tmp_path):
    short = report("one", length=64)
    short.sections[0].numbers["glance"] = [
        Indicator("Sink", [32, 64], [0.5, 0.4], 64, "high", "m").to_dict()
    ]
    text = write_geometry_report(short, tmp_path).read_text()
    assert "nothing beyond the training length was read" in text
    assert "breaks" not in text.split("</style>")[1]


def test_the_page_is_the_last_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(pages, "csv_text", fail)
    with pytest.raises(OSError, match="disk full"):
        write_geometry_report(report("one"), tmp_path)
    assert not (tmp_path / "report.html").exists()


def words_of(page):
    body = page[page.index("<body>") :]
    body = re.sub(r"<br>|</(td|th|dt|dd|b|a|span)>", " ", body)
    text = unescape(re.sub(r"<[^>]+>", "", body))
    return "\n".join(filter(None, (" ".join(line.split()) for line in text.splitlines())))


def test_figures_and_tables_are_numbered_through_all_sections(tmp_path):
    made = report("one", "two", environment={"torch": "2"})
    made.sections[1].grids[0].rows.append(("none", math.nan))
    made.sections[1].grids[0].rows.append(("array", [1, 2]))
    text = words_of(write_geometry_report(made, tmp_path).read_text())
    assert text.startswith(
        "<script>alert(1)</script>: attention geometry\nAll pairs rotate. Trained"
    )
    assert text.count("a meaning; at 64 and 128 tokens\n✗ breaks") == 2
    rule = "it holds, unless more than half of a value that should be high is lost."
    assert rule in text.replace("\n", " ")
    check_text(
        text[text.rindex("Section two") :],
        """
        Section two
        What is measured & how.
        a=⟨q,k⟩
        b<c
        A paper, Sec. 3.
        What these numbers say
        The first <finding>.
        Figure 2. Curves. More.
        Numbers .
        Table 2. A table.
        measure value
        rows 1,234
        rate 0.123
        none ·
        array [1, 2]
        Everything measured: two/numbers.json
        Settings and environment
        Made 2026-01-02
        Command python -m trainer analyze
        Of a, step 7
        Settings
        {
        "length": 128
        }
        Environment
        {
        "torch": "2"
        }
        """,
    )


@pytest.mark.parametrize(("width", "rem"), [(WIDTH, 52), (WIDTH / 2, 26), (2 * WIDTH, 52)])
def test_a_figure_is_as_wide_on_the_page_as_on_paper(tmp_path, width, rem):
    made = report("one")
    picture = replace(made.sections[0].pictures[0], figure=blank(1, width))
    made.sections[0] = replace(made.sections[0], pictures=(picture,))
    page = write_geometry_report(made, tmp_path / "new" / "place").read_text()
    assert f'<img style="--width: {rem}.0rem" src="data' in page
    assert 'alt="Curves"' in page  # the first sentence


def test_numbers_are_strict_json_a_key_a_line(tmp_path):
    made = report("one")
    numbers = {
        "é": (1, 2.5, math.inf),
        "by layer": {0: np.float32(0.5), "deep": [np.array([math.nan, 2.0])]},
        "count": np.int64(7),
        "training_length": 99,
        "words": None,
    }
    made.sections[0] = replace(made.sections[0], numbers=numbers)
    write_geometry_report(made, tmp_path)
    assert (tmp_path / "one" / "numbers.json").read_text(encoding="utf-8").splitlines() == [
        "{",
        '  "training_length": 99,',
        '  "é": [1, 2.5, null],',
        '  "by layer": {"0": 0.5, "deep": [[null, 2.0]]},',
        '  "count": 7,',
        '  "words": null',
        "}",
    ]
