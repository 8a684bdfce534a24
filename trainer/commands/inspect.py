"""``python -m trainer inspect runs/NAME [step=N]``: what did a step read?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command, reading

if TYPE_CHECKING:
    from trainer.workflows.requests import InspectionRequest


def execute(request: InspectionRequest) -> None:
    """Read the samples again and print them."""
    from trainer.runs.directory import check_models

    check_models(request.checkpoint)
    from trainer.commands.console import set_up_console, show

    set_up_console()
    from trainer.workflows.inspect_step import inspect_step

    for line in inspect_step(request):
        show(line)


HELP = """
python -m trainer inspect runs/NAME [step=N] [samples=K] [characters=M]

Reads the samples of a step of any run again and shows them as text: where each is from, where
documents end (¶), how many of its tokens count in the loss, and a hash of its tokens. The first
line ends with the certificate of the step, the sum of the hashes of all its samples. A checkpoint
stores the certificate of its last step (certificate.last_step) beside the certificate of the whole
run (certificate.samples).
"""
COMMAND = Command(
    "inspect",
    HELP,
    reading("InspectionRequest"),
    execute,
    single="one step is shown at a time; run it for each.",
    subject="checkpoint",
)
