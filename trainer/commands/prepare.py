"""``python -m trainer prepare +experiment=NAME``: text becomes tokens on disk, once."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command
from trainer.commands.train import read_run
from trainer.common.processes import stopping_at_once

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.runs.config import RunConfig


def read(composed: Composed) -> RunConfig:
    """Return the checked configuration of the run whose text is prepared."""
    return read_run(composed)


def execute(config: RunConfig) -> None:
    """Prepare, and say what there is."""
    from trainer.commands.console import set_up_console

    set_up_console()
    from trainer.workflows.prepare import prepare_texts

    with stopping_at_once("Stopped", signal.SIGTERM):
        for line in prepare_texts(config):
            print(line)


HELP = """
python -m trainer prepare +experiment=NAME
python -m trainer prepare data=files 'data.files=[texts/*.jsonl]' tokenizer.path=tokenizer.json

Reads the text of a run, tokenizes it on all cores and writes it as flat files of token ids, which
sequences of any length are cut from. Interrupted, the same command goes on; done, it does nothing.
Memory does not grow with the text.
"""
COMMAND = Command(
    "prepare",
    HELP,
    read,
    execute,
    single="text is prepared once, for all runs that read it.",
    described=("data",),
)
