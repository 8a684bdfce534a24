"""The page about what can be reproduced is what its data say, and its commands are right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from scripts.write_reproduce import DATA, DOCS, PAGE, STATES, page
from trainer.commands.evaluate import COMMAND
from trainer.commands.hydra import composing as configuration
from trainer.workflows import requests

ROOT = Path(__file__).parents[2]
WHOLE = yaml.safe_load(DATA.read_text())
ITEMS = [item for paper in WHOLE["papers"] for item in paper["items"]]
COMMANDS = sorted({command for item in ITEMS for command in item.get("command", ())})
KEYS = {"item", "state", "command", "see", "result", "scale", "differs"}


def test_the_page_is_what_its_script_writes():
    assert PAGE.read_text() == page(WHOLE), "python scripts/write_reproduce.py"


def test_no_line_is_too_long_to_compare():
    assert max(map(len, PAGE.read_text().splitlines())) < 700


@pytest.mark.parametrize("paper", WHOLE["papers"], ids=lambda paper: paper["title"][:20])
def test_items_are_complete(paper):
    names = [item["item"] for item in paper["items"]]
    assert len(set(names)) == len(names)
    for item in paper["items"]:
        assert item.keys() <= KEYS, item
        assert item["state"] in STATES, item
        assert item.get("see", names[0]) in names, item
        assert ("command" in item or "see" in item) == (item["state"] not in ("missing", "drawing"))
        if item["state"] in ("part", "missing"):
            assert item["differs"], item
        if item["state"] == "smaller":
            assert (DOCS / item["result"].partition("#")[0]).is_file(), item
            assert item["scale"], item
        if item["state"] == "command_only":
            assert not {"result", "scale"} & item.keys(), item


@pytest.mark.parametrize("place", sorted({item["result"] for item in ITEMS if "result" in item}))
def test_our_results_are_where_the_page_says(place):
    file, _, anchor = place.partition("#")
    titles = re.findall(r"^#+ (.*)$", (DOCS / file).read_text(), re.MULTILINE)
    assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("words", [words for words in COMMANDS if words.startswith("pytest ")])
def test_tests_that_are_named_are_there(words):
    """The program's commands are tried in tests/end_to_end/test_reproduced.py."""
    files, _, wanted = words.removeprefix("pytest ").partition(" -k ")
    for file in files.split():
        for words_of_names in wanted.strip("'").split(" or "):
            assert re.search(rf"def test_\w*{words_of_names}", (ROOT / file).read_text())


@pytest.mark.parametrize("words", [words for words in COMMANDS if "harness" in words])
def test_commands_for_lm_eval_are_right(words, tmp_path, monkeypatch):
    monkeypatch.setattr(requests, "find_spec", lambda name: name)
    composed = configuration.compose_words(shlex.split(words)[1:], COMMAND.root)
    assert COMMAND.read(composed).request.evaluation.tasks


def test_both_states_of_what_was_not_done_as_in_the_paper_are_counted():
    """By the rows of every section, which are counted here as lines of the page."""
    head, *sections = PAGE.read_text().split("\n## ")
    table = [line.strip("| ").split(" | ") for line in head.splitlines() if line.startswith("|")]
    names = next(cells for cells in table if cells[0] == "paper")
    for section in sections:
        (counted,) = [cells for cells in table if section.startswith(cells[0])]
        for state in ("measured at a smaller scale", "command only"):
            rows = re.findall(rf"^\| [^|]+ \| {state} \| .*$", section, re.MULTILINE)
            assert int(counted[names.index(state)]) == len(rows)
            linked = [row for row in rows if re.search(r"\]\(results/\S+\)", row)]
            assert linked == (rows if state.startswith("measured") else [])
