"""The page of analyses: everything in one file, its numbers beside it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from trainer.analysis.topic import COLUMNS, Results, tidy
from trainer.plotting.panels import Panel, draw, over_heads
from trainer.plotting.style import Plot
from trainer.report.pages import write_analysis


def results(key):
    values = np.random.default_rng(0).random((2, 4, 3))
    line = over_heads("heads", 0, [32, 64, 128], values)
    figure = draw([Panel("panel", [line], y="y")], x="tokens", trained=64)
    places = {"length": [32, 64, 128]}
    rows = tidy({"m": values}, "layer", "head", "length", places=places, model="tiny")
    plots = [Plot(f"{key}_curves", figure, "Curves <by> length (A paper, Fig. 1).")]
    return Results(key, f"Topic {key}", plots, rows.assign(topic=key).reindex(columns=COLUMNS))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("page") / "below" / "that"
    page = write_analysis(
        directory,
        [results("one"), results("two")],
        name="<script>alert(1)</script>",
        training_length=64,
        lead="Trained & read.",
        made={"Made": "2026-01-02", "Command": "python -m trainer analyze", "Of": "a, step 7"},
        details={"Settings": {"length": 128}},
    )
    assert page == directory / "report.html"
    return directory


def test_the_page_has_everything_inside_and_names_nothing_outside(written):
    page = (written / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "Curves &lt;by&gt; length (A paper, Fig. 1)." in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    for text in ("Trained &amp; read.", "Topic two", "Figure 2.", "a, step 7", ">m<"):
        assert text in page


def test_rows_of_all_topics_are_one_table_beside_the_figures(written):
    table = pd.read_csv(written / "results.csv")
    assert tuple(table.columns) == COLUMNS
    expected = pd.concat([results("one").rows, results("two").rows])
    np.testing.assert_allclose(table["value"], expected["value"], rtol=1e-7)
    assert table.groupby("topic").size().to_dict() == {"one": 24, "two": 24}
    for key in ("one", "two"):
        assert sorted(path.name for path in (written / key).iterdir()) == [
            f"{key}_curves.png",
            f"{key}_curves.svg",
        ]
