"""The help of a command with a few files of its own, as a user reads it."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf

from trainer.commands.hydra import files as config_files
from trainer.commands.hydra.command import Command
from trainer.commands.hydra.files import ConfigFiles, read_file
from trainer.commands.hydra.help import COLUMN, _keys, _two_columns, help_text

FILES = {
    "start": """\
# What the file is for, which is said of no key.
defaults:
  - common
  - /model: small
  - /data/text@data: files
  - optional loss: none
  - override hydra/launcher: basic
  - task: ???
  - _self_
name: mine  # of the directory that it writes,
            # and of its plots
seed: 0
# how often it is
# tried again
tries: 3

# a remark about no key

far:
  near: {low: 1, high: [2, 3]}  # two in one line
  empty: {}
hydra:
  run: {dir: x}
""",
    "common": "threads: null  # of a process\nseed: 7  # of whatever is drawn\n",
    "model/tiny": "layers: 1\nwidth: 8  # channels\n",
    "model/small": "# A small one.\ndefaults: [tiny, _self_]\nlayers: 2  # how deep\n",
    "data/text/files": "paths: []  # of files\n",
    "task/count": "# Counts.\n# All of it.\n\nto: 10  # where it ends\n",
    "task/sum": "a_number_of_a_long_name: 12.5  # said below it, and where it does not end in "
    "a hundred columns it goes on\n",
    "whole/all": "# @package _global_\n# Sets much.\nmodel:\n  width: 16  # wider\n",
    "other/thing": "a: 1\n",
    "plain": "defaults:\n  - task: ???\n",
}
BEGIN = """\
About it.

Keys (KEY=VALUE):
  threads=null                  of a process
  seed=0                        of whatever is drawn
  name=mine                     of the directory that it writes, and of its plots
  tries=3                       how often it is tried again
  far.near.                     two in one line
  far.near.low=1
  far.near.high=[2, 3]
  far.empty={}"""
END = """\
Flags:
  --help                        this text
  --cfg job [--package GROUP]   print all values
  --config-dir DIR              a directory with groups and experiments of your own
  --version                     of the program"""
SEVERAL = "\n  --multirun                    a job for each of several values or options: seed=0,1"
GROUPS = "Groups (GROUP=OPTION; what its keys are: GROUP=OPTION --help):\n"


def command(root, **parts):
    return Command(root, "\nAbout it.\n", read=None, execute=None, **parts)


@pytest.fixture
def files(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(config_files, "config_directory", lambda: tmp_path)
    return ConfigFiles()


def test_the_text_without_words(files):
    assert (
        help_text(command("start", described=("task",)), [], files)
        == f"""\
{BEGIN}

Options of task (+task=NAME):
  count                         Counts. All of it.
  sum

Keys of task=count; of another: +task=NAME --help:
  task.to=10                    where it ends

{GROUPS}  data/text: files
  model: small, tiny
  whole: all

{END}{SEVERAL}"""
    )


def test_groups_that_words_choose_show_their_keys(files):
    words = ["+task=sum", "model=small", "+whole=all", "seed=3", "other=thing"]
    assert (
        help_text(command("start", flags={"--go": "begin"}, single="alone"), words, files)
        == f"""\
{BEGIN}

Keys of task=sum:
  task.a_number_of_a_long_name=12.5
                                said below it, and where it does not end in a hundred columns it
                                goes on

Keys of model=small:
  model.layers=2                how deep
  model.width=8                 channels

Keys of whole=all:
  model.width=16                wider

{GROUPS}  data/text: files
  model: small, tiny
  task: count, sum
  whole: all

{END}
  --go                          begin"""
    )


def test_options_of_the_whole_configuration_are_those_of_commands_with_a_model(files):
    assert (
        help_text(command("plain", single="alone"), [], files)
        == f"""\
About it.

{GROUPS}  task: count, sum

{END}"""
    )


MINE = """\
# @package _global_
# About the file.
controls:
  no-drop: {drop: {enabled: false}, seed: 1}  # trains on
  # without any
  # encoding
  NoPE: &nope
    label: >-  # a block
      note: a text, # all of it
    lines: |
      note: two
      lines
    about: "a # b"  # in quotes
    list:  # of items
           # and their weights
      - name: x  # of an item
        weight: 3
  again: *nope  # the same
  more:
    <<: *nope
    about: c
  low:  # on its own line
    {seed: 2}
  windows: [1,  # of no key
            2]  # of both
"""


def test_keys_and_comments_are_those_of_yaml(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    nope = [
        ("label", "'note: a text, # all of it'", "a block"),
        ("lines", r'"note: two\nlines\n"', ""),
        ("about", "'a # b'", "in quotes"),
        ("list", "[{name: x, weight: 3}]", "of items and their weights"),
    ]
    assert [(key.path, key.default, key.meaning) for key in _keys(path)] == [
        ("controls.no-drop", None, "trains on"),
        ("controls.no-drop.drop.enabled", "false", ""),
        ("controls.no-drop.seed", "1", ""),
        ("controls.NoPE", None, "without any encoding"),
        *((f"controls.NoPE.{name}", *rest) for name, *rest in nope),
        ("controls.again", None, "the same"),
        *((f"controls.again.{name}", *rest) for name, *rest in nope),
        *((f"controls.more.{name}", *rest) for name, *rest in nope),
        ("controls.more.about", "c", ""),
        ("controls.low", None, "on its own line"),
        ("controls.low.seed", "2", ""),
        ("controls.windows", "[1, 2]", "of both"),
    ]


def leaves(content, prefix=""):
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_every_key_of_the_projects_files_is_listed_with_its_value_and_comment():
    for path in config_files.config_directory().rglob("*.yaml"):
        content = {k: v for k, v in read_file(path).items() if k not in ("defaults", "hydra")}
        keys = _keys(path)
        listed = {
            key.path: OmegaConf.to_container(OmegaConf.create(f"value: {key.default}"))["value"]
            for key in keys
            if key.default is not None
        }
        assert listed == dict(leaves(content)), path
        text = path.read_text().partition("\nhydra:")[0]
        comments = re.findall(r"^ *\w+:.*?  # (.*)", text, re.MULTILINE)
        meanings = " ".join(key.meaning for key in keys)
        assert [comment for comment in comments if comment not in meanings] == [], path


@pytest.mark.parametrize("length", [COLUMN - 2, COLUMN - 1, COLUMN, COLUMN + 1])
def test_what_is_said_stands_beside_a_key_that_leaves_two_blanks_and_else_below_it(length):
    key = "k" * length
    below = f"{key}\n{' ' * COLUMN}said"
    assert _two_columns(key, "said") == (f"{key}  said" if length == COLUMN - 2 else below)


def test_a_word_that_is_longer_than_a_line_is_not_broken():
    assert _two_columns("k" * 130, "said").split("\n")[0] == "k" * 130
