"""Checkpoints that describe themselves: names, contents, finding, loading.

A checkpoint is a file ``step-000800.ckpt`` (``before-drop.ckpt`` for the state just before a drop)
with Lightning's training state and, under ``unrope``, all that evaluation needs: model
configuration, layout as it is now, tokenizer, the run's configuration.
"""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import trainer
from trainer.errors import UserError, did_you_mean
from trainer.model.config import ModelConfig, QKNormConfig
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout
from trainer.training.config import RunConfig

BEFORE_DROP = "before-drop.ckpt"


def description(
    config: RunConfig, model: Decoder, tokenizer_json: str, step: int
) -> dict[str, Any]:
    """What a checkpoint says of itself, in plain values."""
    return {
        "version": trainer.__version__,
        "step": step,
        "model": asdict(model.config),
        "layout": model.layout.to_dict(),
        "tokenizer": tokenizer_json,
        "config": json.loads(json.dumps(asdict(config))),
    }


def step_file(step: int) -> str:
    """The name of a regular checkpoint."""
    return f"step-{step:06d}.ckpt"


def regular_checkpoints(directory: Path) -> list[Path]:
    """The regular checkpoints in a directory, oldest first."""
    return sorted(directory.glob("step-*.ckpt"))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The furthest regular checkpoint of a run, or None."""
    found = regular_checkpoints(run_dir / "checkpoints")
    return found[-1] if found else None


def find_checkpoint(given: str) -> Path:
    """The checkpoint file that ``checkpoint=`` means: a file, or the newest one of a run directory.

    Raises:
        UserError: there is none.
    """
    path = Path(given)
    if path.is_file():
        return path
    if path.is_dir():
        directory = path if path.name == "checkpoints" else path / "checkpoints"
        if found := regular_checkpoints(directory):
            return found[-1]
        raise UserError(f"checkpoint: there is no checkpoint in {given!r}.")
    nearby = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
    raise UserError(
        f"checkpoint: {given!r} is neither a run directory nor a checkpoint."
        + did_you_mean(path.name, nearby)
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint's contents; never runs code from it.

    Raises:
        UserError: the file is damaged or is no checkpoint of this program.
    """
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, OSError) as error:
        others = sorted(p.name for p in path.parent.glob("*.ckpt") if p != path)
        hint = f" Others beside it: {', '.join(others)}." if others else ""
        raise UserError(
            f"checkpoint: {path.name!r} cannot be read; it is damaged or no checkpoint.{hint}"
        ) from error
    if not isinstance(contents, dict) or "unrope" not in contents:
        raise UserError(f"checkpoint: {path.name!r} was not written by this program.")
    return contents


def load_decoder(contents: dict[str, Any]) -> Decoder:
    """The decoder a checkpoint holds, with its layout as it was.

    Raises:
        UserError: weights and description do not fit each other.
    """
    about = contents["unrope"]
    shape = dict(about["model"])
    config = ModelConfig(**shape | {"qk_norm": QKNormConfig(**shape["qk_norm"])})
    model = Decoder(config, Layout.from_dict(about["layout"]))
    weights = {
        name.removeprefix("model."): tensor for name, tensor in contents["state_dict"].items()
    }
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"checkpoint: the weights do not fit their description: {error}") from error
    return model


def check_same_shape(contents: dict[str, Any], model: Decoder, name: str) -> None:
    """Refuse to continue from a checkpoint of another model.

    Raises:
        UserError: naming every key of the model configuration that differs.
    """
    saved, wanted = contents["unrope"]["model"], asdict(model.config)
    differing = [
        f"model.{key}: the checkpoint {name!r} has {saved.get(key)!r}, the run {wanted[key]!r}."
        for key in wanted
        if saved.get(key) != wanted[key] and key != "attention_backend"
    ]
    if differing:
        raise UserError(*differing)


def publish(temporary: Path, path: Path) -> None:
    """Give a completely written file its name, durably."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
