"""The page of analyses: everything in one file, its numbers beside it."""

import csv
import json
import math
import re

import numpy as np
import pytest

from trainer.report.geometry import page
from trainer.report.geometry.drawing import Panel, by_length, over_heads
from trainer.report.geometry.glance import Indicator
from trainer.report.geometry.page import GeometryReport, write_geometry_report
from trainer.report.geometry.section import Grid, Picture, Section


def section(key):
    line = over_heads("heads", 0, [32, 64, 128], np.random.default_rng(0).random((2, 4, 3)))
    figure = by_length([Panel("panel", "y", [line])], x_label="tokens", trained=64)
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
    given = {
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
    return GeometryReport(**given | more)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page")
    assert write_geometry_report(report("one", "two"), directory) == directory / "report.html"
    return directory


def test_a_page_that_fails_leaves_the_old_one_and_its_numbers(tmp_path, monkeypatch):
    place = tmp_path / "out"
    write_geometry_report(report("one"), place)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def interrupt(sections):
        raise KeyboardInterrupt

    monkeypatch.setattr(page, "glance", interrupt)
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


def test_the_glance_says_what_breaks(written):
    text = (written / "report.html").read_text()
    assert text.count("✗ breaks") == 2
    assert re.search(r"Sink &lt;weight&gt;</h3>\s*<p[^>]*>0\.5 <span[^>]*>→</span> 0\.1", text)


def test_nothing_beyond_the_training_length_is_said_so(tmp_path):
    given = report("one", length=64)
    given.sections[0].numbers["glance"] = [
        Indicator("Sink", [32, 64], [0.5, 0.4], 64, "high", "m").to_dict()
    ]
    text = write_geometry_report(given, tmp_path).read_text()
    assert "nothing beyond the training length was read" in text
    assert "breaks" not in text.split("</style>")[1]


def test_the_page_is_the_last_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(page, "csv_text", fail)
    with pytest.raises(OSError, match="disk full"):
        write_geometry_report(report("one"), tmp_path)
    assert not (tmp_path / "report.html").exists()
