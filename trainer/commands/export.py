"""``python -m trainer export checkpoint=PATH to=DIR``: a checkpoint for everybody's tools."""

from __future__ import annotations

from trainer.commands.configuration import compose_values
from trainer.workflows.export_request import parse_export


def run(words: list[str]) -> None:
    """Write ``checkpoint`` to the directory ``to`` so that transformers loads it."""
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return
    request = parse_export(*compose_values(words, "export"))
    from trainer.commands.console import set_up_console

    set_up_console()
    from trainer.workflows.export import export_checkpoint

    exported = export_checkpoint(request)
    trust = "" if exported.plan.is_native else ", trust_remote_code=True"
    print(f"AutoModelForCausalLM.from_pretrained({request.to!r}{trust})")


HELP = """\
python -m trainer export checkpoint=PATH to=DIRECTORY [tolerance=1e-4] [dtype=float32|bfloat16]

Writes config.json, model.safetensors, the tokenizer and a model card. A native architecture of
transformers (Llama, Mistral, Qwen2, Qwen3, SmolLM3) is chosen wherever one computes the same; else
the model's code goes with it. Where transformers is installed, what was written is loaded in a
fresh process and its logits are compared; nothing is kept if they differ by more than tolerance.

  checkpoint=  a run directory (its newest checkpoint) or a checkpoint in it
  to=          a directory that is new or empty
  tolerance=   how far logits may differ in float32, as a share of the largest
  dtype=       of the weights: float32, or bfloat16 at half the size
"""
