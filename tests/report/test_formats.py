"""Tables in a terminal, as Markdown, LaTeX and CSV."""

import math
import re
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console

from tests.report.described import check_csv, check_text, styled
from tests.report.examples import METHODS, cell, example, report, statements
from trainer.evaluation.results import PERPLEXITY, Cell
from trainer.report.pages import measured, write_html
from trainer.report.tables import (
    EFFECTIVE_LEGEND,
    Entry,
    csv_table,
    escaped,
    latex_tables,
    markdown_tables,
    tables,
    terminal_cell,
    terminal_tables,
)


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


def test_the_only_task_has_the_losses_beside_its_scores():
    cells = statements("RoPE", (100, 90, 50, 10), (4.0, 4.1, 4.2, 10.534))
    cells += [replace(c, method="yarn") for c in cells]
    made = report(*cells, statements("DroPE", (90, 80, 70, 60))[0], training_length=64)
    shown = lines(made)
    rows = [p for p in pairwise(shown) if re.search(r"\d–\d", p[1])]
    assert [row.split() for row in rows[0]] == [
        ["RoPE", "100.0", "4.000", "89.8", "4.100", "50.0", "4.200", "10.2", "10.534", "128"],
        ["98.5–100.0", "85.5–93.0", "43.9–56.1", "7.0–14.5"],  # Wilson's, of 256
    ]
    assert rows[1][0].startswith("  + YaRN ")
    assert rows[2][0].split() == ["DroPE", "89.8↓", "·", "·", "·", "·", "·"]
    assert max(map(len, (line.rstrip() for pair in rows for line in pair))) < 95
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


def test_arrows_are_explained_if_rows_are_compared():
    for method in ("none", "yarn"):
        shown = " ".join(lines(report(cell([1.0], method=method))))
        assert "sign test" not in shown
    both = report(cell([1.0], method="none"), cell([1.0], method="yarn"))
    assert "sign test" in " ".join(lines(both))


def test_long_names_break_at_their_hyphens():
    shown = [line.split() for line in lines(report(cell([1.0], "SmolLM2-135M-Instruct")))]
    (row,) = [i for i, words in enumerate(shown) if words[:1] == ["SmolLM2-135M-"]]
    assert shown[row + 1][0] == "Instruct"


def test_latex_is_balanced_and_every_row_is_complete(small):
    text = latex_tables(small)
    assert text.count("\\begin{table}") == text.count("\\end{table}") == 4
    assert text.count("\\toprule") == text.count("\\bottomrule") == 4
    rows = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert {line.count("&") for line in rows} == {5, 6}
    assert text.count("{") == text.count("}")
    assert re.findall(r"\\label\{(.*?)\}", text)[:2] == ["tab:summary", "tab:multi-key"]


def test_latex_sets_names_as_they_stand():
    assert escaped("50% of a_b & {c}") == r"50\% of a\_b \& \{c\}"
    assert escaped("~^\\<8×>") == (
        r"\textasciitilde{}\textasciicircum{}\textbackslash{}\textless{}8$\times$\textgreater{}"
    )


@pytest.fixture(scope="module")
def whole():
    """Two tasks at two lengths, one with labels; some cells are missing."""

    def cells(model, method, keys, values, losses):
        for n, length in enumerate((64, 256)):
            where = {"length": length, "factor": length / 64, "model": model, "method": method}
            if keys[n] is not None:
                scores = (1.0,) * keys[n] + (0.0,) * (12 - keys[n])
                yield Cell(task="keys", scores=scores, seconds=1.5, **where)
            if values[n]:
                labels = ("qa|0–4K", "qa|4–8K", "code|4–8K", "code|16K")[: len(values[n])]
                yield Cell(task="values", scores=values[n], labels=labels, **where)
            if losses[n]:
                windows = (losses[n] - 0.25, losses[n] + 0.25)
                yield Cell(task=PERPLEXITY, last_loss=losses[n], by_window=windows, **where)

    full, half = (1.0, 0.5, 0.75, 1.0), (0.5, 0.0, 0.25, 0.5)
    return report(
        *cells("RoPE", "none", (12, 2), (full, (1.0, 0.5)), (3.0, 7.0)),
        *cells("RoPE", "yarn", (3, 12), (half, half), (None, 3.5)),
        *cells("Dro|PE_", "none", (12, None), (full, None), (3.0, 13.0)),
        methods={"none": "as is", "yarn": "YaRN"},
        tasks={"keys": "Keys", "values": "Values", PERPLEXITY: "Perplexity"},
        training_length=64,
    )


def test_markdown_has_every_number_with_its_interval_and_mark(whole):
    text = markdown_tables(whole)
    check_text(
        text[: text.index("Success in %")],
        """
        ## Mean over tasks

        Unweighted mean over Keys, Values; 2 to 12 trials of each. Differences are tested on one score per text, its mean over the tasks with equally many texts.

        | model | method | 64 tokens, 1× (trained) | 256 tokens, 4× | effective, ≥85% of 1× |
        | --- | --- | ---: | ---: | ---: |
        | RoPE | as is | **90.6** (69.4–100.0) | 45.8 (7.9–64.7) | 64 |
        | RoPE | YaRN | 28.1 (10.5–50.6) ↓ | **65.6** (45.8–83.1) | **≥256** |
        | Dro\\|PE_ | as is | **90.6** (69.4–100.0) | · | · |
        """,  # noqa: E501
    )
    check_text(
        text[text.index("## Perplexity") :],
        """
        ## Perplexity

        exp of the mean loss on the last 64 tokens of held-out sequences, the same tokens at every length, so that more context only adds what lies before them.

        | model | method | 64 tokens, 1× (trained) | 256 tokens, 4× |
        | --- | --- | ---: | ---: |
        | RoPE | as is | 20.09 | 1097 |
        | RoPE | YaRN | · | **33.12** |
        | Dro\\|PE_ | as is | 20.09 | 4e+05 |

        Bold: the lowest of a column. · not measured.
        """,  # noqa: E501
    )


def test_averages_by_label_are_tables_at_every_length(whole):
    by_label = [table for table in tables(whole) if table.detail]
    assert [(table.note, [head for head, _ in table.columns]) for table in by_label] == [
        (f"At {length} tokens ({factor}).", heads)
        for length, factor in ((64, "1×"), (256, "4×"))
        for heads in (["code", "qa"], ["0–4K", "4–8K", "16K"])
    ]
    values = [[entry and entry.value for entry in entries] for *_, entries in by_label[2].rows]
    assert values == [[None, "75.0"], ["37.5", "25.0"]]


def test_a_legend_explains_everything_that_a_table_shows(whole):
    reference = (
        "Success in %, with its 95% interval. ↑ ↓ better or worse than the reference on the same "
        "trials (exact sign test, p < 0.05, not corrected for the number of tests). Reference: the "
        "same model as it is; of other models as they are: RoPE. Bold: the highest of a column."
    )
    summary, _, _, by_label, *_ = tables(whole)
    assert summary.legend == f"{reference} {EFFECTIVE_LEGEND} · not measured."
    assert by_label.legend == reference


def test_a_latex_table_needs_booktabs_alone(whole):
    first, second, *_ = latex_tables(whole).split("\n\n")
    head, caption, rows = re.fullmatch(r"(.*)\\caption\{(.*)\}\n(\\label.*)", first, re.S).groups()
    assert head.startswith("% Needs \\usepackage{booktabs}.\n\\begin{table}\n\\centering")
    assert caption.startswith("Mean over tasks. Unweighted mean over Keys, Values; 2 to 12 trials")
    assert "Success in \\%, with its 95\\% interval. $\\uparrow$ $\\downarrow$ better" in caption
    check_text(
        rows,
        """
        \\label{tab:summary}
        \\begin{tabular}{llrrr}
        \\toprule
         & & 64 tokens & 256 tokens & effective \\\\
        model & method & 1$\\times$ (trained) & 4$\\times$ & $\\geq$85\\% of 1$\\times$ \\\\
        \\midrule
        RoPE & as is & \\textbf{90.6} {\\scriptsize (69.4--100.0)} & 45.8 {\\scriptsize (7.9--64.7)} & 64 \\\\
         & YaRN & 28.1 {\\scriptsize (10.5--50.6)}$^{\\downarrow}$ & \\textbf{65.6} {\\scriptsize (45.8--83.1)} & \\textbf{$\\geq$256} \\\\
        \\midrule
        Dro\\textbar{}PE\\_ & as is & \\textbf{90.6} {\\scriptsize (69.4--100.0)} & $\\cdot$ & $\\cdot$ \\\\
        \\bottomrule
        \\end{tabular}
        \\end{table}
        """,  # noqa: E501
    )
    assert second.startswith("\\begin{table}")


def test_a_table_in_the_terminal(whole):
    shown = "\n".join(line.rstrip() for line in lines(whole, 80))
    check_text(
        shown[shown.index("Keys\n") : shown.index("Values\n")],
        """
        Keys
                                 64 tokens     256 tokens      effective
        model                 1× (trained)             4×     ≥85% of 1×
        ────────────────────────────────────────────────────────────────
        RoPE                         100.0           16.7             64
                                75.8–100.0       4.7–44.8
          + YaRN                     25.0↓         100.0↑           ≥256
                                  8.9–53.2     75.8–100.0

        Dro|PE_                      100.0              ·              ·
                                75.8–100.0
        12 trials a cell.
        """,
    )
    assert shown.count("Success in %") == 1  # once for the tables that share it


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (Entry("97.3", "92.4–99.1"), " 97.3 \n<dim>92.4–99.1</>\n"),
        (Entry("97.3", "92.4–99.1", "↑"), " 97.3<green>↑</>\n<dim>92.4–99.1</>\n"),
        (Entry("97.3", mark="↓", loss="4.000"), " 97.3<red>↓</><cyan> 4.000</>\n"),
        (Entry("97.3", best=True), "<bold> 97.3</>\n"),
        (None, "<dim>·</>\n"),
    ],
)
def test_colours_of_a_cell_in_the_terminal(entry, shown):
    assert styled(terminal_cell(entry), 20) == shown


def test_csv_has_a_row_for_each_cell(whole, tmp_path):
    (tmp_path / "table.csv").write_text(csv_table(whole))
    check_csv(
        tmp_path / "table.csv",
        """
        model, method, task, length, factor, n, score, low, high, p_value, loss, seconds
        RoPE, none, keys, 64, 1, 12, 1, 0.7575, 1, , , 1.5
        RoPE, none, values, 64, 1, 4, 0.8125, 0.4635, 1, , , 0
        RoPE, none, perplexity, 64, 1, 2, , , , , 3, 0
        RoPE, none, keys, 256, 4, 12, 0.1667, 0.04697, 0.448, , , 1.5
        RoPE, none, values, 256, 4, 2, 0.75, 0, 1, , , 0
        RoPE, none, perplexity, 256, 4, 2, , , , , 7, 0
        RoPE, yarn, keys, 64, 1, 12, 0.25, 0.08894, 0.5323, 0.003906, , 1.5
        RoPE, yarn, values, 64, 1, 4, 0.3125, 0, 0.6615, 0.125, , 0
        RoPE, yarn, keys, 256, 4, 12, 1, 0.7575, 1, 0.001953, , 1.5
        RoPE, yarn, values, 256, 4, 4, 0.3125, 0, 0.6615, , , 0
        RoPE, yarn, perplexity, 256, 4, 2, , , , , 3.5, 0
        Dro|PE_, none, keys, 64, 1, 12, 1, 0.7575, 1, 1, , 1.5
        Dro|PE_, none, values, 64, 1, 4, 0.8125, 0.4635, 1, 1, , 0
        Dro|PE_, none, perplexity, 64, 1, 2, , , , , 3, 0
        Dro|PE_, none, perplexity, 256, 4, 2, , , , , 13, 0
        """,
    )


def test_measured_lists_models_methods_lengths_tasks_and_time(whole):
    assert measured(whole) == [
        ("Models", "RoPE, Dro|PE_"),
        ("Methods", "as is, YaRN"),
        ("Lengths in tokens", "64 (1×), 256 (4×)"),
        ("Keys", "12 trials at each length, the same for all models and methods"),
        ("Values", "2 to 4 trials at each length, the same for all models and methods"),
        ("Perplexity", "held-out text; windows of all lengths end with the same tokens"),
        ("Time", "7.5 s of measuring 15 cells"),
    ]
    slow = report(cell([1.0], seconds=90.0))
    assert measured(slow)[-1] == ("Time", "1.5 minutes of measuring 1 cell")
    assert [term for term, _ in measured(report(cell([1.0])))][-1] == "Multi-key needles"
    assert measured(report(cell([1.0], seconds=60.0)))[-1][1].startswith("1.0 minutes")


def test_the_page_has_the_rows_of_the_tables(whole):
    page = page_of(whole)
    table = page[page.index('<table id="table-1"') : page.index("</table>")]
    rows = [re.sub(r"<br>|</t[hd]>", " ", row) for row in table.split("<tr")[1:]]
    text = [unescape(re.sub(r"<[^>]+>|^[^>]*>", "", row)).split() for row in rows]
    assert [" ".join(words) for words in text] == [
        "Model and method 64 tokens 1× (trained) 256 tokens 4× effective ≥85% of 1×",
        "RoPE 90.6 69.4–100.0 45.8 7.9–64.7 64",
        "+ YaRN 28.1↓ 10.5–50.6 65.6 45.8–83.1 ≥256",
        "Dro|PE_ 90.6 69.4–100.0 · ·",
    ]
