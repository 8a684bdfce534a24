"""Tables in a terminal, as Markdown, LaTeX and CSV."""

import csv
import math
import re
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console

from tests.report.examples import METHODS, cell, example, report, statements
from trainer.report.html import write_html
from trainer.report.latex import escaped, latex_tables
from trainer.report.results import PERPLEXITY
from trainer.report.text import csv_table, markdown_tables, terminal_tables


@pytest.fixture(scope="module")
def small():
    return example(models=("RoPE", "DroPE"), methods=("none", "crop", "yarn"), trials=40)


def lines(made, width=100, color=None):
    console = Console(width=width, color_system=color, force_terminal=color is not None)
    with console.capture() as capture:
        console.print(terminal_tables(made, width))
    return capture.get().splitlines()


@pytest.mark.parametrize(("width", "together"), [(80, 4), (100, 5), (240, 8)])
def test_a_table_has_as_many_lengths_as_fit_and_continues_below(width, together):
    names = {key: title * 4 for key, title in METHODS.items()}
    made = example(models=("RoPE", "DroPE"), factors=(1, 2, 4, 8, 16, 32, 64, 128), trials=8)
    made = report(*made.cells, methods=names)
    shown = [line.rstrip() for line in lines(made, width)]
    assert max(map(len, shown)) <= width
    assert sum("131072 tokens" in line for line in shown) == 4
    heads = [line for line in shown if "tokens  " in line]
    assert {line.count("tokens") for line in heads} <= {together, 8 - together}
    assert any("(continued)" in line for line in shown) == (together < 8)


def test_a_row_has_every_number_and_names_its_model_once(small):
    shown = lines(small)
    (start,) = [i for i, line in enumerate(shown) if line.startswith("Multi-key")]
    # Of every row the values, and below them their intervals.
    pairs = [p for p in pairwise(shown[start:][:20]) if p[1].count("–") == 4]
    assert [row.split()[0] for row, _ in pairs] == ["RoPE", "+", "+", "DroPE", "+"]
    assert sum("exact sign test" in line for line in shown) == 1


def test_the_only_task_has_the_losses_beside_its_scores():
    cells = statements("RoPE", (100, 90, 50, 10), (4.0, 4.1, 4.2, 10.534))
    cells += [replace(c, method="yarn") for c in cells]
    made = report(*cells, statements("DroPE", (90, 80, 70, 60))[0], training_length=64)
    shown = lines(made)
    rows = [p for p in pairwise(shown) if re.search(r"\d–\d", p[1])]
    assert [row.split() for row in rows[0]] == [
        ["RoPE", "100.0", "4.000", "89.8", "4.100", "50.0", "4.200", "10.2", "10.534"],
        ["98.5–100.0", "85.5–93.0", "43.9–56.1", "7.0–14.5"],  # Wilson's, of 256
    ]
    assert rows[1][0].startswith("  + YaRN ")
    assert rows[2][0].split() == ["DroPE", "89.8↓", "·", "·", "·", "·"]
    assert max(map(len, (line.rstrip() for pair in rows for line in pair))) < 80
    assert "held-out loss in nats" in " ".join(" ".join(shown).split())
    assert "perplexity" not in " ".join(shown)
    assert "| **89.8** (85.5–93.0) / 4.100 |" in markdown_tables(made)
    latex = "\\textbf{89.8} {\\scriptsize (85.5--93.0)} / 4.100 &"
    assert latex in latex_tables(made)


def page_of(made):
    with TemporaryDirectory() as directory:
        write_html(made, [], Path(directory, "report.html"))
        return Path(directory, "report.html").read_text()


BOLD = {
    "terminal": (r"\x1b\[1m *(\d+\.\d+)", lambda made: "\n".join(lines(made, color="standard"))),
    "Markdown": (r"\*\*([\d.]+)\*\*", markdown_tables),
    "LaTeX": (r"\\textbf\{([\d.]+)\}", latex_tables),
    "page": (r'class="best">([\d.]+)<', page_of),
}


@pytest.mark.parametrize("kind", BOLD)
def test_the_best_of_a_column_is_bold_and_nothing_else(kind):
    """The most successes of a length, all of them where several are alike; the least perplexity."""
    rates = {("RoPE", 2048): 18, ("RoPE", 4096): 5, ("DroPE", 2048): 6, ("DroPE", 4096): 5}
    rates |= {("NoPE", 2048): 9, ("NoPE", 4096): 2}
    cells = [
        cell([1.0] * hits + [0.0] * (20 - hits), model, length=length)
        for (model, length), hits in rates.items()
    ]
    losses = {"RoPE": 4.0, "DroPE": 3.0, "NoPE": 5.0}
    cells += [cell([], m, task=PERPLEXITY, last_loss=math.log(x)) for m, x in losses.items()]
    pattern, made = BOLD[kind]
    assert re.findall(pattern, made(report(*cells))) == ["90.0", "25.0", "25.0", "3.00"]


def test_names_are_text_not_markup():
    assert any("[red]x[/red]" in line for line in lines(report(cell([1.0], "[red]x[/red]"))))


def test_arrows_are_explained_where_there_is_something_to_compare_with():
    for method in ("none", "yarn"):
        shown = " ".join(lines(report(cell([1.0], method=method))))
        assert "sign test" not in shown
    both = report(cell([1.0], method="none"), cell([1.0], method="yarn"))
    assert "sign test" in " ".join(lines(both))


def test_long_names_break_at_their_hyphens():
    shown = [line.split() for line in lines(report(cell([1.0], "SmolLM2-135M-Instruct")))]
    (row,) = [i for i, words in enumerate(shown) if words[:1] == ["SmolLM2-135M-"]]
    assert shown[row + 1][0] == "Instruct"


def test_markdown_has_a_table_under_every_heading(small):
    text = markdown_tables(small)
    assert re.findall("^## (.*)$", text, re.M) == [
        "Mean over tasks",
        "Multi-key needles",
        "Multi-value needles",
        "Held-out perplexity",
    ]
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {7}
    assert "| a\\|b | as is | **100.0**" in markdown_tables(report(cell([1.0], "a|b")))


def test_latex_is_balanced_and_every_row_is_complete(small):
    text = latex_tables(small)
    assert text.count("\\begin{table}") == text.count("\\end{table}") == 4
    assert text.count("\\toprule") == text.count("\\bottomrule") == 4
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert {line.count("&") for line in rows} == {5}
    assert text.count("{") == text.count("}")
    assert re.findall(r"\\label\{(.*?)\}", text)[:2] == ["tab:summary", "tab:multi-key"]


def test_latex_sets_names_as_they_stand():
    assert escaped("50% of a_b & {c}") == r"50\% of a\_b \& \{c\}"
    assert escaped("~^\\<8×>") == (
        r"\textasciitilde{}\textasciicircum{}\textbackslash{}\textless{}8$\times$\textgreater{}"
    )


def test_csv_has_one_row_a_cell_with_numbers_in_full(small):
    rows = list(csv.DictReader(StringIO(csv_table(small))))
    assert list(rows[0]) == [
        *("model", "method", "task", "length", "factor", "n", "score", "low", "high"),
        *("p_value", "loss", "seconds"),
    ]
    assert len(rows) == len(small.cells)
    for row, own in zip(rows, small.cells, strict=True):
        assert (row["model"], row["method"], int(row["length"])) == (
            *(own.model, own.method, own.length),
        )
        if own.task == PERPLEXITY:
            assert (float(row["loss"]), row["score"], row["p_value"]) == (own.last_loss, "", "")
        else:
            assert float(row["score"]) == pytest.approx(sum(own.scores) / len(own.scores))
            assert float(row["low"]) <= float(row["score"]) <= float(row["high"])
            assert (row["p_value"] == "") == ((own.model, own.method) == ("RoPE", "none"))
