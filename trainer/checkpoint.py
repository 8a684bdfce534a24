"""Checkpoints: directories of safetensors files, with ``state.json`` and a manifest.

``step-000800``, or ``before-drop`` for the state just before a drop, holds

- one ``.safetensors`` file a rank, written by torch's distributed checkpoint (DCP), with weights
  ``model.NAME`` and optimizer state ``optim.NAME.KEY``. A rank's shard of a tensor is a slice of
  its first dimension. Names depend on neither strategy nor world size, so that any of them reads
  what another wrote, and any tool reads the weights;
- ``state.json``: what training resumes from, and what describes the model (configuration, layout,
  tokenizer);
- ``manifest.json``: sizes and SHA-256 of the other files.

Nothing is pickled. A checkpoint is written under another name and renamed at its end: it is
complete or absent.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from trainer.common.errors import UserError
from trainer.common.files import checksum, synchronise, write_atomically
from trainer.common.ranks import all_gather, on_rank_zero
from trainer.model.decoder import Decoder

log = logging.getLogger(__name__)

FORMAT = 4
"""Number of the format, in ``state.json``."""
STATE = "state.json"
MANIFEST = "manifest.json"
BEFORE_DROP = "before-drop"
SLOW_DISK = timedelta(hours=2)
"""Longest time that ranks wait for each other while they write a checkpoint."""

Tensors = dict[str, Tensor]


# Tensors


def weights_of(model: Decoder) -> Tensors:
    """Return the parameters by their names in a checkpoint."""
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def tensors_of(model: Decoder, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return this rank's part of a checkpoint: its shards, and on rank 0 the unsharded tensors."""
    tensors = weights_of(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optim.{name}.{key}"] = value
    if dist.is_initialized() and dist.get_rank():
        return {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    return tensors


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the error of a rank instead of DCP's collection, a BaseException."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected here
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None


def readers(path: Path) -> dict[str, Callable[[], Tensor]]:
    """Return a function for each tensor that reads it as a whole, on this rank alone."""
    shards: dict[str, list[tuple[list[int], Path]]] = defaultdict(list)
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name, place in json.loads(opened.metadata()["DCP_SHARDING_INFO"]).items():
                shards[name].append((place["saved_offsets"], file))
    return {name: partial(_joined, name, places) for name, places in shards.items()}


def _joined(name: str, places: list[tuple[list[int], Path]]) -> Tensor:
    """Read the shards of a tensor, which are slices of its first dimension, and join them.

    A file is opened for each tensor: touched pages of an open one count as memory.
    """
    parts = []
    for _, file in sorted(places):
        with safe_open(file, framework="pt") as opened:
            parts.append(opened.get_tensor(name))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def restore(model: Decoder, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load weights and optimizer state, whatever strategy wrote them.

    Raises:
        RuntimeError, ValueError: a parameter is missing, or has another shape.
    """
    reader, parameters = dcp.HuggingFaceStorageReader(str(path)), dict(model.named_parameters())
    tensors = weights_of(model)
    states: dict[str, Tensors] = {}
    for key, saved in reader.read_metadata().state_dict_metadata.items():
        if key.startswith("optim.") and isinstance(saved, TensorStorageMetadata):
            name, _, part = key.removeprefix("optim.").rpartition(".")
            parameter, dtype = parameters[name], saved.properties.dtype
            if saved.size == parameter.shape:  # sharded like the parameter
                value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                value = torch.zeros(saved.size, dtype=dtype, device=parameter.device)
            tensors[key] = states.setdefault(name, {})[part] = value
    with _own_errors():
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    optimizer.state.clear()
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


# Writing


class Writer:
    """Writes checkpoints beside training, one at a time; all ranks call its methods together.

    ``keep``: number of newest regular checkpoints that stay; those of ``permanent`` steps stay as
    well.
    """

    def __init__(self, directory: Path, keep: int, permanent: Collection[int] = ()) -> None:
        self.directory, self.keep, self.permanent = directory, keep, permanent
        # The current GPU is per thread, initially the first one.
        here = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        at_begin = (lambda: None) if here is None else partial(torch.cuda.set_device, here)
        self._thread = ThreadPoolExecutor(1, "checkpoint", at_begin)
        self._work: Future[None] | None = None
        # Both threads would mix their collectives in the group of training.
        self._group = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=SLOW_DISK)

    def save(
        self, name: str, model: Decoder, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Copy the tensors, and let a thread write them, after :meth:`wait`.

        ``state``: contents of ``state.json``, of rank 0.
        """
        self.wait()
        copies = BlockingAsyncStager().stage(tensors_of(model, optimizer))
        described = json.dumps(state | {"format": FORMAT}).encode()
        self._work = self._thread.submit(self._write, name, copies, described)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raise the error of its thread."""
        if self._work is not None:
            work, self._work = self._work, None
            work.result()

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _write(self, name: str, tensors: Tensors, described: bytes) -> None:
        partly = self.directory / f".{name}.partial"
        on_rank_zero(lambda: shutil.rmtree(partly, ignore_errors=True), self._group)
        storage = dcp.HuggingFaceStorageWriter(str(partly), save_distributed=True)
        with _own_errors():
            dcp.save(
                dict(tensors),
                storage_writer=storage,
                process_group=self._group,
                no_dist=self._group is None,
            )
        rank = dist.get_rank() if self._group else 0
        mine = {f.name: _described(f) for f in partly.glob(f"shard-{rank + 1:05d}-*")}
        files = all_gather(mine, self._group)
        on_rank_zero(
            lambda: self._complete(partly, self.directory / name, files, described), self._group
        )

    def _complete(
        self, partly: Path, final: Path, files: list[dict[str, list[Any]]], described: bytes
    ) -> None:
        write_atomically(partly / STATE, described)
        manifest = {STATE: _described(partly / STATE)}
        for of_rank in files:
            manifest |= of_rank
        write_atomically(partly / MANIFEST, json.dumps(manifest, indent=1))
        synchronise(partly)
        shutil.rmtree(final, ignore_errors=True)  # a rename replaces no directory that has files
        partly.rename(final)
        synchronise(final.parent)
        for path in regular_checkpoints(self.directory)[: -self.keep]:
            if step_of(path) not in self.permanent:
                shutil.rmtree(path)


def _described(file: Path) -> list[Any]:
    """Return size and checksum of a file."""
    return [file.stat().st_size, checksum(file)]


# Finding and reading


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


def find_checkpoint(name: str) -> Path:
    """Return the checkpoint that ``checkpoint=`` names: a checkpoint, or a run's newest one.

    Raises:
        UserError: there is none.
    """
    path = Path(name)
    if (path / MANIFEST).is_file():
        return path
    directory = path if path.name == "checkpoints" else path / "checkpoints"
    if checkpoints := regular_checkpoints(directory):
        return checkpoints[-1]
    raise UserError(f"checkpoint: {name!r} is neither a checkpoint nor a run that has one")


def check_sound(path: Path) -> Path:
    """Return the path of a checkpoint whose files match its manifest.

    Raises:
        UserError: they do not.
    """
    try:
        manifest: dict[str, list[Any]] = json.loads((path / MANIFEST).read_bytes())
        with ThreadPoolExecutor() as pool:
            files = [*pool.map(_described, [path / name for name in manifest])]
    except (FileNotFoundError, ValueError):  # a file is missing, or the manifest was cut short
        files = None
    if files is None or files != [*manifest.values()]:
        raise UserError(f"checkpoint: {str(path)!r} is damaged")
    return path


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest regular checkpoint whose files match its manifest; None if there is none.

    Damaged newer ones are renamed, so that they are not found again.

    Raises:
        UserError: there are checkpoints, and all are damaged.
    """
    paths = regular_checkpoints(directory)
    for path in reversed(paths):
        try:
            return check_sound(path)
        except UserError as error:
            log.warning("%s; trying the one before it", error)
        target = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
    if paths:
        raise UserError(f"checkpoint: all in {str(directory)!r} are damaged")
    return None


def read_state(path: Path) -> dict[str, Any]:
    """Return ``state.json`` of a checkpoint.

    Raises:
        UserError: the checkpoint is of another version's format.
    """
    state = json.loads((path / STATE).read_bytes())
    if state.get("format") != FORMAT:
        raise UserError(
            f"checkpoint: {str(path)!r} has format {state.get('format', 1)}, expected {FORMAT}"
        )
    return state
