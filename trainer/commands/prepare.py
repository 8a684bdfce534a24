"""``python -m trainer prepare +experiment=NAME``: text becomes tokens on disk, once."""

from __future__ import annotations

import signal
from dataclasses import field
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command
from trainer.commands.train import read_run
from trainer.common.errors import Problem
from trainer.common.fields import configuration
from trainer.common.processes import stopping_at_once
from trainer.data.config import PrepareConfig

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.workflows.prepare import PrepareRequest


@configuration
class PrepareKeys:
    """Keys of this command; the others are a run's."""

    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    """Which part of the text is prepared, by how many processes."""
    verify: bool = False
    """Compare every byte of what is prepared with its checksums."""


def read(composed: Composed) -> PrepareRequest:
    """Return the checked request."""
    keys, problems, composed = composed.split(PrepareKeys)
    problems += keys.prepare.problems()
    if keys.verify and keys.prepare.part != PrepareConfig.part:
        problems.append(Problem("prepare.part", "verify=true reads the whole text; leave it out."))
    config = read_run(composed, problems)
    from trainer.workflows.prepare import PrepareRequest

    return PrepareRequest(config, keys.prepare, keys.verify)


def execute(request: PrepareRequest) -> None:
    """Prepare or verify, and say what there is."""
    from trainer.commands.console import set_up_console

    set_up_console()
    from trainer.workflows.prepare import prepare

    with stopping_at_once("Stopped", signal.SIGTERM):
        for line in prepare(request):
            print(line)


HELP = """
python -m trainer prepare +experiment=NAME [prepare.part=3/16]
python -m trainer prepare data=files 'data.files=[texts/*.jsonl.zst]' tokenizer.path=tokenizer.json

Reads the text of a run, tokenises it on all cores and writes it as flat files of token ids, which
sequences of any length are cut from. Interrupted, the same command goes on; done, it does nothing.
Several processes or nodes share the work by prepare.part. Memory does not grow with the text.
"""
COMMAND = Command(
    "prepare",
    HELP,
    read,
    execute,
    single="text is prepared once, for all runs that read it.",
    described=("prepare", "data"),
)
