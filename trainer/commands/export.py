"""``python -m trainer export PATH to=DIR``: a checkpoint for everybody's tools."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command
from trainer.common.processes import stopping_at_once

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.workflows.requests import ExportRequest


def read(composed: Composed) -> ExportRequest:
    """Return the checked request."""
    from trainer.runs.parsing import parse
    from trainer.workflows.requests import ExportRequest

    return parse(ExportRequest, composed.values, composed.problems)


def execute(request: ExportRequest) -> None:
    """Write the directory, and print how it is loaded."""
    from trainer.commands.console import set_up_console

    set_up_console()
    from trainer.workflows.export import export_checkpoint

    with stopping_at_once("Stopped", signal.SIGTERM, is_resumable=False):
        exported = export_checkpoint(request)
    trust = "" if exported.plan.is_native else ", trust_remote_code=True"
    print(f"AutoModelForCausalLM.from_pretrained({request.to!r}{trust})")


HELP = """
python -m trainer export PATH to=DIRECTORY [KEY=VALUE ...]

Writes config.json, model.safetensors, the tokenizer and a model card, from a run or, anew, from
an earlier export or a published model. A temperature that was fitted for a run is no part of it.
A native architecture of transformers (Llama, Mistral, Qwen2, Qwen3, SmolLM3) is chosen wherever one
computes the same; else the model's code goes with it. Where transformers is installed, what was
written is loaded in a fresh process and its logits are compared; nothing is kept if they differ by
more than tolerance.
"""
COMMAND = Command(
    "export",
    HELP,
    read,
    execute,
    output=lambda request: request.to,
    output_keys=("to",),
    subject="checkpoint",
    alone=True,
)
