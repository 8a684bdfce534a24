"""Self-contained checkpoints: names, contents, finding, loading.

A checkpoint is a directory ``step-000800``, or ``before-drop`` for the state just before a drop. It
contains the tensors in torch's distributed format, and ``state.json``: counters, callbacks, and all
that evaluation needs (model configuration, present layout, tokenizer, the run's configuration).
"""

from __future__ import annotations

import json
import logging
import math
import platform
import re
import shutil
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import trainer
from trainer.common.errors import Problem, UserError, near_path, raise_all
from trainer.common.formats import FIRST, check_format, read_plain
from trainer.common.validation import adapter
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout
from trainer.runs.checkpoint_files import MANIFEST, damage, damage_together, visible_damage
from trainer.runs.config import RunConfig
from trainer.runs.directory import check_mark
from trainer.runs.index import read_index
from trainer.runs.phases import tokens_at
from trainer.runs.ranks import on_rank_zero
from trainer.runs.saved_state import FORMAT, STATE, read_saved
from trainer.runs.state import Tensors, check_shapes, load, tensors_in
from trainer.runs.training_config import TrainerConfig

log = logging.getLogger(__name__)

BEFORE_DROP = "before-drop"
FREE_MODEL_KEYS = "attention_backend", "from_pretrained", "from_run"
"""Keys of the model's configuration that do not affect its shape."""


def description(
    config: RunConfig, model: Decoder, tokenizer_json: str, step: int
) -> dict[str, Any]:
    """Return the part of ``state.json`` that evaluation needs, in plain values."""
    return {
        "format": FORMAT,
        "step": step,
        "tokens": tokens_at(config, step),
        "model": asdict(model.config),
        "layout": model.layout.to_dict(),
        "tokenizer": tokenizer_json,
        "config": json.loads(json.dumps(asdict(config))),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of this program and of the installed libraries that affect results."""
    versions = {
        "unrope": trainer.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # includes the build, such as +cu130
    }
    for name in ("lightning", "numpy", "datasets", "tokenizers"):
        with suppress(PackageNotFoundError):  # not every run needs datasets
            versions[name] = version(name)
    return versions


def step_name(step: int) -> str:
    """Return the name of a regular checkpoint."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    """Return the step of a regular checkpoint."""
    return int(path.name.removeprefix("step-"))


def regular_checkpoints(directory: Path) -> list[Path]:
    """Return the regular checkpoints in a directory, oldest first."""
    paths = [p for p in directory.glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(paths, key=step_of)


def newest_sound_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest regular checkpoint whose files match its manifest, or None.

    All ranks call it together and get the same result.

    Raises:
        UserError: there are checkpoints, and all are damaged.
    """
    paths = on_rank_zero(lambda: regular_checkpoints(run_dir / "checkpoints"))
    for path in reversed(paths):
        if (wrong := damage_together(path)) is None:
            return path
        log.warning("Checkpoint %s is damaged (%s); trying the one before it", path.name, wrong)
    if paths:
        raise UserError.at(
            "checkpoint",
            f"every checkpoint in {str(run_dir / 'checkpoints')!r} is damaged "
            f"({', '.join(p.name for p in paths)}). Restore one{_way_by_the_drop(run_dir)}, or "
            "set overwrite=true to start again from nothing.",
        )
    return None


def _way_by_the_drop(run_dir: Path) -> str:
    """Suggest the before-drop checkpoint if all others are damaged."""
    path = run_dir / "checkpoints" / BEFORE_DROP
    if not on_rank_zero(path.is_dir) or damage_together(path) is not None:
        return ""
    name = step_name(on_rank_zero(lambda: read_state(path, hashed=False)["step"]))
    return f", or put a copy of {BEFORE_DROP!r}, which is whole, in the place of {name!r} to go on"


def set_aside(paths: list[Path]) -> None:
    """Rename checkpoints that a run does not continue from, so that they are no longer found."""
    for path in paths:
        target = path.with_name(f"unused-{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)


def rotate(directory: Path, config: TrainerConfig, steps: frozenset[int] = frozenset()) -> None:
    """Keep the last ``keep_checkpoints``, every ``keep_every``-th step, the ``keep_best`` and
    ``steps``."""
    paths = regular_checkpoints(directory)
    retained = {*paths[-config.keep_checkpoints :], *(p for p in paths if step_of(p) in steps)}
    if config.keep_every:
        retained |= {path for path in paths if step_of(path) % config.keep_every == 0}
    if config.keep_best:
        retained |= set(sorted(paths, key=training_loss)[: config.keep_best])
    for path in paths:
        if path not in retained:
            remove(path)


def training_loss(path: Path) -> float:
    """Return the last training loss logged before a checkpoint; infinity if unknown or damaged."""
    try:
        loss = read_plain(path / STATE)["loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf
    return loss if isinstance(loss, float) and not math.isnan(loss) else math.inf


def remove(path: Path) -> None:
    """Delete a checkpoint; renaming it first makes it disappear atomically."""
    hidden = path.with_name(f".{path.name}.removed")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove partly written and partly removed checkpoints of killed processes."""
    for pattern in (".*.partial", ".*.removed"):
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def find_checkpoint(name: str) -> Path:
    """Return the checkpoint that ``checkpoint=`` names: a checkpoint, or a run's newest one.

    Raises:
        UserError: there is none.
    """
    path = Path(name)
    if (path / MANIFEST).is_file():
        return path
    if path.is_dir():
        directory = path if path.name == "checkpoints" else path / "checkpoints"
        if checkpoints := regular_checkpoints(directory):
            return checkpoints[-1]
        before = directory / BEFORE_DROP
        hint = f" but {str(before)!r}" if before.is_dir() else ""
        raise UserError.at("checkpoint", f"there is no checkpoint in {name!r}{hint}.")
    if path.is_file():
        raise UserError.at("checkpoint", f"{name!r} is a file; a checkpoint is a directory.")
    message = f"{name!r} is neither a run directory nor a checkpoint."
    raise UserError.at("checkpoint", message, near_path(path))


def read_state(path: Path, hashed: bool = True) -> dict[str, Any]:
    """Read a checkpoint's ``state.json`` after checking its files against the manifest.

    ``hashed``: check the contents; False checks only sizes.

    Raises:
        UserError: the checkpoint is damaged or of a newer format.
    """
    if path.parent.name == "checkpoints":
        check_mark(path.parent.parent, "checkpoint")
    if (wrong := (damage if hashed else visible_damage)(path)) is not None:
        others = sorted(
            p.parent.name for p in path.parent.glob(f"*/{MANIFEST}") if p.parent != path
        )
        hint = f" Others beside it: {', '.join(others)}." if others else ""
        raise UserError.at("checkpoint", f"{path.name!r} is damaged: {wrong}.", hint)
    state = read_saved(path)
    check_format(
        state.get("format", FIRST),
        FORMAT,
        "checkpoint",
        repr(str(path)),
        "give a checkpoint that an older one wrote",
    )
    return state


def model_config(state: dict[str, Any]) -> ModelConfig:
    """Return the model configuration stored in a checkpoint."""
    return adapter(ModelConfig).validate_python(state["model"])


def load_decoder(path: Path, state: dict[str, Any], device: str = "cpu") -> Decoder:
    """Load the decoder of a checkpoint, with its layout, directly onto the device; runs no stored
    code.

    Raises:
        UserError: weights and description contradict each other.
    """
    with torch.device("meta"):
        model = Decoder(model_config(state), Layout.from_dict(state["layout"]))
    shapes: Tensors = {f"model.{name}": p for name, p in model.named_parameters()}
    index = read_index(path)
    saved = tensors_in(index)
    check_shapes(shapes, saved, path.name)  # before allocating memory
    if more := [key for key in saved if key.startswith("model.") and key not in shapes]:
        raise UserError.at(
            "checkpoint", f"{path.name!r} holds {more[0]!r}, which the model has not."
        )
    model.to_empty(device=device)
    load({f"model.{name}": p.detach() for name, p in model.named_parameters()}, path, index)
    return model


def check_same_model(state: dict[str, Any], model: Decoder, name: str) -> None:
    """Check that a checkpoint's model has the shape of ``model``.

    Raises:
        UserError: names every key of the model configuration that differs.
    """
    # Keys unknown to an earlier version had their default values.
    saved, wanted = asdict(ModelConfig()) | state["model"], asdict(model.config)
    raise_all(
        Problem(
            f"model.{key}",
            f"the checkpoint {name!r} has {saved[key]!r}, the run {wanted[key]!r}.",
        )
        for key in wanted
        if saved[key] != wanted[key] and key not in FREE_MODEL_KEYS
    )
