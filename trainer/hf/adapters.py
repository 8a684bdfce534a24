"""Adapters of peft on a base without rotation.

Whoever loads an adapter loads the base that it names. The base of an adapter that is trained
without rotation is therefore written without rotation.
"""

import filecmp
import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers.utils import CONFIG_NAME

from trainer.common.files import write_atomically
from trainer.hf.rotation import (
    adapters_in,
    drop_rotation,
    find_parts,
    is_dropped,
    name_base,
    rope_parameters_written,
)

WEIGHTS = "model*.safetensors", "pytorch_model*.bin"
INDICES = "*.index.json"
DESCRIPTIONS = "*.json", "*.jinja", "*.txt", "*.model"  # also of the tokenizer
NOT_OF_THE_BASE = {CONFIG_NAME, "adapter_config.json", "trainer_state.json"}


def save_dropped_base(model: nn.Module, directory: str | Path) -> Path:
    """Write the base of an adapter without rotation, and name it in what the adapter saves.

    Weights are linked from where the base was loaded, or copied to another file system. The first
    rank writes; all ranks call this. ``restore_rotation`` names the base with rotation again.

    Args:
        model: an adapter of peft after :func:`drop_rotation`; may be wrapped.
        directory: of the written base.

    Returns:
        The directory that the adapter names.

    Raises:
        ValueError: ``model`` has no adapter, or rotates.
    """
    if not adapters_in(model):
        raise ValueError(f"{type(model).__name__} has no adapter: use save_pretrained")
    if not is_dropped(model):
        raise ValueError(f"{type(model).__name__} rotates: call drop_rotation first")
    written = write_dropped_base(model, Path(directory))
    if written is None:
        return Path(find_parts(model).top.name_or_path)
    name_base(model, str(written))
    return written


def write_dropped_base(model: nn.Module, directory: Path) -> Path | None:
    """Do the writing of :func:`save_dropped_base`; return the absolute path.

    None: ``model`` has no adapter, or its base was loaded without rotation.
    """
    parts = find_parts(model)
    if not adapters_in(model) or parts.is_loaded_dropped():
        return None
    if dist.is_initialized() and dist.get_rank() > 0:
        return directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    source = _directory_of(parts.loaded_from(), getattr(parts.top.config, "_commit_hash", None))
    if source is None:
        drop_rotation(_without_adapters(model)).save_pretrained(directory)
        return directory.resolve()
    if source.resolve() == directory.resolve():
        raise ValueError(f"{directory}: expected another directory than that of the base")
    for pattern in (*WEIGHTS, INDICES):
        for file in directory.glob(pattern):
            if not (source / file.name).exists():  # of another base
                file.unlink()
    for pattern in WEIGHTS:
        for file in source.glob(pattern):
            _link(file, directory / file.name)
    for pattern in DESCRIPTIONS:
        for file in source.glob(pattern):
            if file.name not in NOT_OF_THE_BASE:  # no link: others may write over it in place
                write_atomically(directory / file.name, file.read_bytes())
    config = type(parts.top.config).from_pretrained(source)
    config.get_text_config(decoder=True).rope_parameters = rope_parameters_written(parts)
    config.save_pretrained(directory)
    return directory.resolve()


def _directory_of(name: str, revision: str | None) -> Path | None:
    """Return the directory that a model was loaded from, if it still has weights."""
    if not name:
        return None
    directory = Path(name)
    if not directory.is_dir():
        try:
            config = try_to_load_from_cache(name, CONFIG_NAME, revision=revision)
        except HFValidationError:  # a path that is gone
            return None
        if not isinstance(config, str):
            return None
        directory = Path(config).parent
    has_weights = any(file for pattern in WEIGHTS for file in directory.glob(pattern))
    return directory if has_weights else None


def _without_adapters(model: Any) -> Any:
    """Return a copy of the model that an adapter was put on."""
    for adapter in model.modules():
        if hasattr(adapter, "peft_config") and hasattr(adapter, "unload"):
            return deepcopy(adapter).unload()
    raise ValueError("the adapter's base is in no directory: save it and load it from there first")


def _link(source: Path, target: Path) -> None:
    """Make ``target`` the file ``source``, by a hard link, or on another file system by a copy."""
    source = source.resolve()  # the hub's cache has symbolic links
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copy2(source, partial)
    partial.replace(target)
