"""The terminal table is readable at 100 columns, whatever the methods are called."""

import re

import pytest
from rich.console import Console

from tests.report.examples import cells, example
from trainer.report.results import Cell, Report
from trainer.report.summary import summary
from trainer.report.table import markdown_table, terminal_table


def lines(report, width=100):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(terminal_table(report))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [100, 240])
def test_twenty_methods_with_long_names_fit_100_columns(width):
    names = [f"method {i} " + "with a very long name " * 3 for i in range(20)]
    assert max(map(len, lines(example(names), width))) <= 100


def test_a_short_name_takes_one_line_with_every_number():
    report = example(["RoPE + NTK-aware"])
    (row,) = [line for line in lines(report) if "NTK" in line]
    numbers = " ".join(re.findall(r"[\d.]+", row))
    assert numbers == "100.0 0.7 4.00 89.8 3.7 4.10 50.0 6.1 4.20 10.2 3.7 10.50"


def test_names_are_text_not_markup():
    assert any("[red]RoPE[/red]" in line for line in lines(example(["[red]RoPE[/red]"])))


def test_the_training_length_and_the_units_are_named():
    text = " ".join(lines(example()))
    for words in ("64 tokens", "1× (trained)", "8×", "retrieval in %", "95% Wilson", "nats"):
        assert words in text


def test_more_than_four_lengths_continue_below():
    table = tuple(Cell("m", 64 * n, float(n), 0.5, (0.4, 0.6), 4.0) for n in range(1, 8))
    text = lines(Report("r", {}, {}, table=table))
    assert max(map(len, text)) <= 100
    assert sum(line.strip().startswith("m ") for line in text) == 2


def test_what_was_not_measured_is_a_dot():
    report = Report("r", {}, {}, table=(Cell("a", 64, 1.0, None, None, 4.0), Cell("b", 128, 2.0)))
    (row,) = [line for line in lines(report) if line.strip().startswith("a ")]
    assert row.split() == ["a", "·", "4.00", "·", "·"]
    assert "| a | · / 4.000 | · |" in markdown_table(report)


def test_markdown_has_one_row_per_method_with_whole_intervals():
    rows = markdown_table(example(["a|b", "c"])).splitlines()
    assert rows[0].startswith("| method | 64 tokens, 1× (trained) |")
    assert rows[2].startswith("| a\\|b | 100.0 (98.5–100.0) / 4.000 |")
    assert len({line.replace("\\|", "").count("|") for line in rows[:4]}) == 1


def test_the_summary_is_made_of_the_numbers():
    assert summary(example()) == (
        "Trained at 64 tokens and tested at up to 512 (8×), where retrieval ranges from 10.2% "
        "(RoPE) to 12.1% (DroPE). Of 3 observations of the papers: 1 shown, 1 not shown, "
        "1 not judged."
    )
    alone = Report("r", {}, {}, table=tuple(cells("RoPE", (100, 50, 25, None))))
    assert summary(alone) == (
        "Trained at 64 tokens and tested at up to 256 (4×), where RoPE retrieves 25.0% of the "
        "needles."
    )
    assert summary(Report("r", {}, {})) == ""
