"""The page about what can be reproduced is what its data say, and its commands are right."""

from __future__ import annotations

import functools
import re
import shlex
from copy import deepcopy
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from scripts.write_reproduce import DATA, DOCS, PAGE, STATES, page
from trainer.commands import config_files, configuration
from trainer.commands.train import read_run
from trainer.workflows import evaluation_request

ROOT = Path(__file__).parents[2]
WHOLE = yaml.safe_load(DATA.read_text())
ITEMS = [item for paper in WHOLE["papers"] for item in paper["items"]]
COMMANDS = sorted({command for item in ITEMS for command in item.get("command", ())})
FILES = config_files.ConfigFiles()
COMPOSED, READ = configuration.compose_with_hydra, functools.cache(config_files.read_file)
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


@pytest.mark.parametrize("place", sorted({item["result"] for item in ITEMS if "result" in item}))
def test_our_results_are_where_the_page_says(place):
    file, _, anchor = place.partition("#")
    titles = re.findall(r"^#+ (.*)$", (DOCS / file).read_text(), re.MULTILINE)
    assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@functools.cache
def composed(root, lines, files):
    return COMPOSED(root, list(lines), files)


@pytest.fixture
def place(monkeypatch, tmp_path):
    """Where a reader has the problems of MATH and lm-eval. Reading configuration files, which takes
    nearly all of the time, is done once for all commands."""
    once = lambda root, lines, files, _: deepcopy(composed(root, tuple(lines), files))  # noqa: E731
    monkeypatch.setattr(configuration, "compose_with_hydra", once)
    monkeypatch.setattr(config_files, "read_file", READ)
    monkeypatch.setattr(evaluation_request, "find_spec", lambda name: name)
    monkeypatch.chdir(tmp_path)
    Path("math.jsonl").touch()


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_are_right(words, place):
    first, *rest = shlex.split(words)
    if first == "pytest":
        *files, wanted = [word for word in rest if word != "-k"] if "-k" in rest else [*rest, ""]
        assert all(re.search(rf"def test_\w*{wanted}", (ROOT / f).read_text()) for f in files)
    elif first in ("evaluate", "analyze"):
        command = import_module(f"trainer.commands.{first}").COMMAND
        command.read(configuration.compose_words(rest, command.root, FILES))
    elif re.fullmatch(r"\+experiment=\w+", words):  # planned in tests/commands/test_plan.py
        assert (ROOT / "conf" / "experiment" / f"{first.partition('=')[2]}.yaml").is_file()
    else:
        read_run(configuration.compose_words([first, *rest], files=FILES), weights=False)
