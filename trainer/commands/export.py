"""``python -m trainer export PATH to=DIR``: a checkpoint as transformers reads it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command, reading
from trainer.common.processes import stopping_at_once

if TYPE_CHECKING:
    from trainer.workflows.requests import ExportRequest


def execute(request: ExportRequest) -> None:
    """Write the directory, and print how it is loaded."""
    from trainer.commands.console import set_up_console

    set_up_console()
    from trainer.workflows.export import export_checkpoint

    with stopping_at_once("Stopped", signal.SIGTERM, is_resumable=False):
        exported = export_checkpoint(request)
    trust = "" if exported.plan.is_native else ", trust_remote_code=True"
    print(f"Load it with: AutoModelForCausalLM.from_pretrained({request.to!r}{trust})")


HELP = """
python -m trainer export PATH to=DIRECTORY [KEY=VALUE ...]

Writes config.json, model.safetensors (several files if the model is large), the tokenizer and a
short README, from a run, an earlier export or a published model. A temperature that was fitted for
a run is left out, unless temperature_at=LENGTH writes it into the weights. A native architecture of
transformers (Llama, Mistral, Qwen2, Qwen3, SmolLM3) is chosen if one computes the same; otherwise
the model's code is written too. transformers loads the export and its logits are compared; nothing
is kept if they differ by more than tolerance.
"""
COMMAND = Command(
    "export",
    HELP,
    reading("ExportRequest"),
    execute,
    output=lambda request: request.to,
    output_keys=("to",),
    subject="checkpoint",
    alone=True,
)
