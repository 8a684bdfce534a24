#!/usr/bin/env python
"""Write docs/architectures.md: the drop in every decoder of transformers, tried on tiny models.

python scripts/write_architectures.py [MODEL_TYPE ...]    # with types: print their rows alone
"""

from __future__ import annotations

from trainer.common import spinning  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto

from trainer.hf import drop_rotation, is_dropped, restore_rotation
from trainer.hf.rotation import find_parts

SHAPES = yaml.safe_load(Path(__file__).with_name("architectures.yaml").read_text())
PAGE = Path(__file__).resolve().parent.parent / "docs" / "architectures.md"
TEXT = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
IMAGES = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
LARGEST = 50_000_000  # parameters of a model that is still tiny
EXACT = 1e-6
TOLERANCE = 1e-4  # of the largest logit: functions of transformers also permute channels
IDS = torch.arange(3, 51)[None]


@dataclass(frozen=True)
class Row:
    """A tiny model that was dropped, saved, loaded and restored."""

    name: str
    form: str
    """rope_type that describes it without rotation."""
    changed: float
    """Largest change of a logit by the drop; this and the others as a share of the largest."""
    from_reference: float
    """Largest difference of logits to the model whose rotation functions return their inputs."""
    reloaded: float
    """Largest difference of logits to the model that transformers loads from what it saves."""
    restored: float
    """Largest difference of logits to the model before the drop, once it is restored."""

    @property
    def is_right(self) -> bool:
        """Whether the drop does what it says, and the test could have told otherwise."""
        is_exact = self.reloaded <= EXACT and self.restored == 0
        return is_exact and self.from_reference < TOLERANCE < self.changed


class UnbuiltError(Exception):
    """No tiny model of this type can be built or run."""


class UnrotatedError(Exception):
    """Models of this type have no rotary module of transformers."""


def names() -> list[str]:
    """Return all model types of decoders, and the variants of SHAPES."""
    return sorted({*TEXT, *IMAGES, *SHAPES["variants"]})


def build(name: str) -> Any:
    """Return a tiny model of a type or variant, in float32.

    Raises:
        UnbuiltError: there is a reason in SHAPES, or its classes raise.
    """
    if name in SHAPES["unbuilt"]:
        raise UnbuiltError(SHAPES["unbuilt"][name])
    model_type = name.partition(" ")[0]
    changes = SHAPES["changes"].get(model_type, {}) | SHAPES["variants"].get(name, {})
    text = SHAPES["text"] | changes.get("text", {})
    for key in changes.get("without", []):
        del text[key]
    if model_type in IMAGES:
        kind: Any = AutoModelForImageTextToText
        vision = SHAPES["vision"] | changes.get("vision", {})
        values = SHAPES["tokens"] | {"text_config": text, "vision_config": vision}
    else:
        kind = AutoModelForCausalLM
        values = text
    try:
        config = AutoConfig.for_model(model_type, **values)
        with torch.device("meta"):
            size = sum(p.numel() for p in kind.from_config(config).parameters())
        if size <= LARGEST:
            torch.manual_seed(0)
            model = kind.from_config(config, dtype=torch.float32).eval()
    except Exception as error:  # whatever its classes raise is the reason
        raise UnbuiltError(first_line(error)) from error
    if size > LARGEST:
        raise UnbuiltError(f"{size / 1e6:.0f} million parameters with the tiny configuration")
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)  # so that positions matter
    return model


@torch.no_grad()
def measure(name: str) -> Row:
    """Drop, save, load and restore a tiny model.

    Raises:
        UnbuiltError: it cannot be built, or not run on text alone.
        UnrotatedError: it has no rotary module.
        ValueError: the drop is refused.
    """
    model = build(name)
    try:
        decoder = find_parts(model).decoder
    except ValueError as error:
        raise UnrotatedError(str(error)) from error
    try:
        before = logits(model)
    except Exception as error:  # whatever it raises is the reason
        raise UnbuiltError(first_line(error)) from error
    if share(before, saved_and_loaded_logits(model)) > EXACT:
        raise UnbuiltError("what transformers loads computes otherwise, with rotation, too")
    with rotation_functions_return_their_inputs(sys.modules[type(decoder).__module__]):
        reference = logits(model)
    drop_rotation(model)
    dropped = logits(model)
    parameters = yaml.safe_dump(find_parts(model).decoder.config.rope_parameters)
    form = "longrope" if "longrope" in parameters else "llama3"
    reloaded = saved_and_loaded_logits(model)
    restored = logits(restore_rotation(model))
    return Row(
        name,
        form,
        share(before, dropped),
        share(reference, dropped),
        share(dropped, reloaded),
        share(before, restored),
    )


def share(a: Tensor, b: Tensor) -> float:
    """Return the largest difference as a share of the largest value of ``a``."""
    return ((a - b).abs().max() / a.abs().max()).item()


def saved_and_loaded_logits(model: Any) -> Tensor:
    """Return the logits of what transformers loads from what the model saves."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        loaded = type(model).from_pretrained(directory).eval()
    if is_dropped(loaded) != is_dropped(model):
        raise ValueError(
            "what transformers loads is dropped where the model is not, or the reverse"
        )
    return logits(loaded)


def first_line(error: Exception) -> str:
    """Return the kind of an error and the last line of its message, which pydantic's end with."""
    message = str(error).strip().splitlines() or [""]
    text = message[-1].strip()
    return text if text.startswith("ValueError") else f"{type(error).__name__}: {text}"


def logits(model: nn.Module) -> Tensor:
    """Return the logits of the fixed ids."""
    return model(input_ids=IDS, use_cache=False).logits


@contextmanager
def rotation_functions_return_their_inputs(module: Any) -> Iterator[None]:
    """Replace a file's apply_rotary functions for a while."""
    functions = {
        name: value
        for name, value in vars(module).items()
        if name.startswith("apply_") and "rotary" in name and "vision" not in name
    }
    for name, function in functions.items():
        setattr(module, name, inputs_of(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(module, name, function)


def inputs_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature of ``function`` that returns queries and keys as they
    are, or its one input."""
    second = list(inspect.signature(function).parameters)[1]
    if second in ("k", "xk", "key", "k_pe", "key_states"):
        return lambda q, k, *_, **__: (q, k)
    return lambda x, *_, **__: x


INTRODUCTION = """# Architectures

```python
from trainer.hf import drop_rotation

drop_rotation(model).save_pretrained("dropped")  # transformers loads it as it is
```

```sh
python scripts/write_architectures.py
```

writes this page: the drop in every decoder of transformers {version} that a configuration of at
most {largest:.0f} million parameters builds ([configurations](../scripts/architectures.yaml)). A
vision-language model keeps its vision tower; the drop changes its text decoder. Numbers are the
largest difference of a logit as a share of the largest logit, in float32 on a CPU, for 48 tokens:

- **changed**: by the drop. Matrices are multiplied by 8, so that positions matter before training.
- **reference**: to the same model whose `apply_rotary` functions return queries and keys as they
  are. Some of these functions also permute channels, which changes the order of sums.
- **reloaded**: to the model that transformers loads from what the dropped model saves.
- **restored**: to the model before the drop, after `restore_rotation`.

| model type | described by | changed | reference | reloaded | restored |
| --- | --- | --- | --- | --- | --- |
"""
OTHERS = """
## Refused

The drop raises and changes nothing: the model's configuration class cannot describe it without
rotation.

| model type | reason |
| --- | --- |
{refused}
## Without a rotary module

{unrotated}.

## Not tried

| model type | reason |
| --- | --- |
{unbuilt}"""


def page(rows: list[Row], problems: dict[str, Exception]) -> str:
    """Return docs/architectures.md."""
    lines = []
    for row in rows:
        numbers = (row.changed, row.from_reference, row.reloaded, row.restored)
        cells = " | ".join(f"{number:.1g}" for number in numbers)
        lines.append(f"| {row.name} | {row.form} | {cells} |")

    def table(kind: type[Exception]) -> str:
        chosen = {name: error for name, error in problems.items() if type(error) is kind}
        cells = [f"| {name} | {reason(error)} |\n" for name, error in chosen.items()]
        return "".join(cells)

    unrotated = [name for name, error in problems.items() if type(error) is UnrotatedError]
    head = INTRODUCTION.format(version=transformers.__version__, largest=LARGEST / 1e6)
    others = OTHERS.format(
        refused=table(ValueError), unrotated=", ".join(unrotated), unbuilt=table(UnbuiltError)
    )
    return head + "\n".join(lines) + "\n" + others


def reason(error: Exception) -> str:
    """Return an error's message for a cell of a table."""
    text = " ".join(str(error).split()).replace("|", "\\|")
    return text if len(text) <= 160 else text[:157] + "..."


def main(chosen: list[str]) -> int:
    """Print the rows and, without a choice, write the page; return how many are wrong."""
    transformers.logging.set_verbosity_error()
    rows: list[Row] = []
    problems: dict[str, Exception] = {}
    for name in chosen or names():
        try:
            row = measure(name)
        except (UnbuiltError, UnrotatedError, ValueError) as error:
            problems[name] = error
            print(f"{name:28} {type(error).__name__}: {reason(error)}", flush=True)
        else:
            rows.append(row)
            print(f"{name:28} {'right' if row.is_right else 'WRONG'} {row}", flush=True)
    if not chosen:
        PAGE.write_text(page(rows, problems))
    return sum(not row.is_right for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
