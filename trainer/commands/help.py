"""Commands, their help, and the bare words among their arguments; imports nothing heavy."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GROUPS = ("evaluation", "analysis")
"""Groups that are chosen with and without a plus."""
TAKE_VALUE = re.compile(r"--?(config-dir|cd|cfg|c|info|i|package|p)")
"""Hydra's flags whose value is the next word."""


@dataclass(frozen=True)
class Command:
    """A command of the program."""

    usage: str
    text: str
    """What it does, in a few lines."""
    root: str
    """The file of ``conf/`` that its configuration starts from."""
    bare: str = ""
    """The key of its first bare word, or of all if the key is ``runs``."""
    groups: tuple[str, ...] = ()
    """Groups whose options its help lists."""


COMMANDS = {
    "train": Command(
        "+experiment=NAME KEY=VALUE ...",
        "Train a model and its controls, evaluate and report: the command if none is named.\n"
        "The same command resumes an interrupted run.",
        "config",
        groups=("experiment",),
    ),
    "recalibrate": Command(
        "MODEL text=FILES [minutes=20] [KEY=VALUE ...]",
        "Drop the positional encoding of a trained model and recalibrate it on the text in these\n"
        "minutes; evaluate it and export it for transformers. docs/pretrained.md has the rules.",
        "recalibrate",
        "checkpoint",
    ),
    "prepare": Command(
        "+experiment=NAME",
        "Turn the text of a run into tokens on disk, once, before it trains on a cluster.",
        "prepare",
        groups=("data",),
    ),
    "evaluate": Command(
        "PATH [compare=[PATH,...]] [+evaluation=NAME] [KEY=VALUE ...]",
        "Measure retrieval and loss of checkpoints, all on the same trials, at multiples of the\n"
        "training length and with every context extension that applies.",
        "evaluate",
        "checkpoint",
        ("evaluation",),
    ),
    "compare": Command(
        "RUN [RUN ...]",
        "Put runs beside each other in one table, from their results.csv.",
        "compare",
        "runs",
    ),
    "analyze": Command(
        "PATH +analysis=NAME [KEY=VALUE ...]",
        "Read held-out text with a model once, and write a page about its attention.",
        "analyze",
        "checkpoint",
        ("analysis",),
    ),
    "generate": Command(
        "PATH prompt=TEXT [prompt=TEXT ...] [KEY=VALUE ...]",
        "Continue texts with a trained checkpoint or a published model.",
        "generate",
        "checkpoint",
    ),
    "export": Command(
        "PATH to=DIRECTORY [KEY=VALUE ...]",
        "Write a checkpoint as a directory that transformers loads, and compare the logits.",
        "export",
        "checkpoint",
    ),
    "plan": Command(
        "+experiment=NAME [gpus=8] [mfu=0.4]",
        "Say what a run will need: parameters, tokens, operations, memory, hours.",
        "plan",
    ),
}


def config_directory() -> Path:
    """``conf/``: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def help_text(name: str) -> str:
    """Return the help of a command."""
    command = COMMANDS[name]
    lines = [f"python -m trainer {'' if name == 'train' else f'{name} '}{command.usage}", ""]
    lines += [command.text, ""]
    if name == "train":
        lines += [
            "Commands:",
            *(f"  {n:12} {c.text.split(chr(10))[0]}" for n, c in COMMANDS.items()),
        ]
        lines.append("")
    for group in command.groups:
        options = sorted(path.stem for path in (config_directory() / group).glob("*.yaml"))
        lines += [f"{group}: {', '.join(options)}", ""]
    lines += [
        "All keys and their values: add --cfg job. Their meanings: trainer/config.py.",
        "Several jobs: --multirun KEY=A,B. Options of your own: --config-dir DIRECTORY.",
    ]
    return "\n".join(lines)


def split_words(words: Sequence[str], bare_key: str) -> tuple[list[str], list[str], list[str]]:
    """Return Hydra's flags, overrides with bare words under their key, and texts of ``prompt=``.

    A bare word has no ``=``, or is an existing path such as ``runs/lr=0.1``.
    """
    flags: list[str] = []
    overrides: list[str] = []
    prompts: list[str] = []
    bare: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        is_path = not equals or ("/" in key and os.path.lexists(word))
        if word.startswith("-") or (flags and TAKE_VALUE.fullmatch(flags[-1])):
            flags.append(word)
        elif bare_key and is_path and word[0] not in "+~":
            bare.append(word)
        elif key == "prompt":
            prompts.append(value)
        else:
            overrides.append(word)
    if bare_key == "runs" and bare:
        overrides.insert(0, f"runs=[{','.join(map(quoted, bare))}]")
    elif bare:
        overrides = [f"{bare_key}={quoted(bare[0])}", *bare[1:], *overrides]
    return flags, overrides, prompts


def quoted(text: str) -> str:
    """Return a text as Hydra reads it back from a word."""
    if re.fullmatch(r"[A-Za-z_/.][\w./+-]*", text):
        return text
    return "'" + text.replace("'", "\\'") + "'"
