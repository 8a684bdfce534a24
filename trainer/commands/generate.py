"""``python -m trainer generate PATH prompt=TEXT ...``: what does a checkpoint write?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command, reading

if TYPE_CHECKING:
    from trainer.workflows.requests import GenerationRequest


def execute(request: GenerationRequest) -> None:
    """Print one continuation as it grows, several with their prompts at the end."""
    from trainer.commands.console import show
    from trainer.workflows.generate import continue_prompts

    streamed = request.stream and len(request.prompts) == 1
    try:
        done = continue_prompts(
            request,
            show=lambda text: show(text, end=""),
            say=lambda text: print(text, file=sys.stderr),
        )
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    if streamed:
        print()
    elif len(done.texts) == 1:
        show(done.texts[0])
    else:
        for prompt, text in zip(request.prompts, done.texts, strict=True):
            show(f"{prompt}{text}\n")
    print(done.speed(), file=sys.stderr)


HELP = """
python -m trainer generate PATH prompt=TEXT [prompt=TEXT ...] [KEY=VALUE ...]

Continues a text with a trained checkpoint or a published model. The text goes to standard output;
which checkpoint it is and tokens a second go to standard error. Where an evaluation has fitted a
softmax temperature for the checkpoint, it is used. A prompt is taken as it is; several grow
together and are shown at the end, each with its prompt before it.
"""
COMMAND = Command(
    "generate",
    HELP,
    reading("GenerationRequest", "prompts"),
    execute,
    single="give several prompts in one command, or run it for each checkpoint.",
    verbatim="prompt",
    subject="checkpoint",
    alone=True,
)
