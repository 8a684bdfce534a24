"""Checkpoints: directories of safetensors files, with ``state.json`` and a manifest.

``step-000800``, or ``before-drop`` for the state just before a drop, holds

- one ``.safetensors`` file a rank, written by torch's distributed checkpoint (DCP), with weights
  ``model.NAME``, optimizer state ``optim.NAME.KEY`` and random generators ``rng.DEVICE.RANK``. A
  rank's shard of a tensor is a slice of its first dimension. Names depend on neither strategy nor
  world size, so that any of them reads what another wrote, and any tool reads the weights;
- ``state.json``: what training resumes from, and what describes the model (configuration, layout,
  tokenizer);
- ``manifest.json``: sizes and SHA-256 of the other files.

Nothing is pickled. A checkpoint is written under another name and renamed at its end: it is
complete or absent.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import shutil
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

import trainer
from trainer.common.errors import UserError
from trainer.common.files import checksum, synchronise, write_durably
from trainer.common.ranks import all_gather, on_rank_zero
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout

log = logging.getLogger(__name__)

FORMAT = 3
"""Number of the format, in ``state.json``; versions up to 0.2 wrote 1 and 2."""
STATE = "state.json"
MANIFEST = "manifest.json"
BEFORE_DROP = "before-drop"
SLOW_DISK = timedelta(hours=2)
"""Longest time that ranks wait for each other while they write a checkpoint."""
MOST_THREADS = 8
"""Files that are hashed simultaneously."""

Tensors = dict[str, Tensor]


# Tensors


def tensors_of(model: Decoder, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return this rank's part of a checkpoint: its shards, and on rank 0 the unsharded tensors."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optim.{name}.{key}"] = value if value.dim() else value.reshape(1)
    if rank:
        tensors = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    return tensors | _random_states(rank)


def _random_states(rank: int) -> Tensors:
    """Return the states of this rank's generators; training does not use them, but plugins may."""
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


class Reader(dcp.HuggingFaceStorageReader):
    """DCP's reader of safetensors, which reads the headers of a checkpoint's files once."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.name = path.name
        self.metadata = super().read_metadata()

    def read_metadata(self) -> Metadata:
        """Return names, shapes and places of all tensors."""
        return self.metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shapes and dtypes by name."""
        tensors = self.metadata.state_dict_metadata
        return {k: v for k, v in tensors.items() if isinstance(v, TensorStorageMetadata)}

    def check(self, tensors: Tensors) -> None:
        """Check that the checkpoint has ``tensors`` in these shapes.

        Raises:
            UserError: names the first that is missing or has another shape.
        """
        for name, tensor in tensors.items():
            size = tuple(self.tensors[name].size) if name in self.tensors else None
            if size != tuple(tensor.shape):
                raise UserError(
                    f"checkpoint: {name} has shape {size} in {self.name}, expected "
                    f"{tuple(tensor.shape)}"
                )

    def load(self, tensors: Tensors, *, alone: bool = False) -> None:
        """Read ``tensors`` in place, all ranks together or each ``alone``."""
        alone = alone or not dist.is_initialized()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected here
            dcp.load(dict(tensors), storage_reader=self, no_dist=alone)


def restore(model: Decoder, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load weights, optimizer state and random states, whatever strategy wrote them.

    Raises:
        UserError: a parameter is missing, or has another shape.
    """
    reader, parameters = Reader(path), dict(model.named_parameters())
    weights: Tensors = {f"model.{name}": p.detach() for name, p in parameters.items()}
    rank = dist.get_rank() if dist.is_initialized() else 0
    random = {k: v for k, v in _random_states(rank).items() if k in reader.tensors}
    reader.check(weights)
    states: dict[str, Tensors] = {}
    for key, saved in reader.tensors.items():
        if key.startswith("optim."):
            name, _, part = key.removeprefix("optim.").rpartition(".")
            states.setdefault(name, {})[part] = _empty(parameters[name], saved)
    flat = {f"optim.{n}.{part}": v for n, state in states.items() for part, v in state.items()}
    reader.load(weights | flat | random)
    optimizer.state.clear()
    for name, state in states.items():
        is_scalar = {part: value.shape != parameters[name].shape for part, value in state.items()}
        optimizer.state[parameters[name]] = {
            part: value.reshape(()) if is_scalar[part] else value for part, value in state.items()
        }
    for name, value in random.items():
        (torch.cuda if ".cuda." in name else torch).set_rng_state(value)


def _empty(parameter: Tensor, saved: TensorStorageMetadata) -> Tensor:
    """Allocate a tensor of optimizer state, sharded like its parameter, or a scalar as ``[1]``."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if saved.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
    return torch.zeros(saved.size, dtype=saved.properties.dtype, device=local.device)


def load_decoder(
    path: Path, state: dict[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Load a checkpoint's decoder, with its layout, directly onto the device and in ``dtype``."""
    with torch.device("meta"):
        model = Decoder(model_config(state), Layout.from_dict(state["layout"])).to(dtype)
    reader = Reader(path)
    reader.check({f"model.{name}": p for name, p in model.named_parameters()})
    model.to_empty(device=device)
    reader.load({f"model.{name}": p.detach() for name, p in model.named_parameters()})
    return model


# Writing


class Writer:
    """Writes checkpoints into ``directory`` beside training, one at a time.

    All ranks call its methods together. ``keep``: number of newest regular checkpoints that stay;
    those of every ``keep_every``-th step and of ``permanent`` steps stay as well.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 3,
        keep_every: int | None = None,
        permanent: frozenset[int] = frozenset(),
    ) -> None:
        self.directory = directory
        self.keep, self.keep_every, self.permanent = keep, keep_every, permanent
        self.seconds = 0.0
        """Duration of the last write."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work: Future[None] | None = None
        self._stager: tuple[frozenset[str], BlockingAsyncStager] | None = None
        # In the group of training, collectives of both threads would mix.
        self._group = _group_of_threads(dist.group.WORLD) if dist.is_initialized() else None

    def save(
        self, name: str, model: Decoder, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Copy the tensors, and let a thread write them, after :meth:`wait`.

        ``state``: contents of ``state.json``, of rank 0.
        """
        self.wait()
        tensors, device = tensors_of(model, optimizer), next(model.parameters()).device
        names = frozenset(tensors)
        if self._stager is None or self._stager[0] != names:
            # GPU tensors go into the same pinned memory every time.
            self._stager = names, BlockingAsyncStager(torch.cuda.is_available())
        staged = self._stager[1].stage(tensors)
        self._work = self._thread.submit(self._write, name, staged, state, device)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raise the error of its thread."""
        if self._work is not None:
            work, self._work = self._work, None
            try:
                work.result()
            except CheckpointException as error:  # a BaseException with the errors of all ranks
                raise OSError(str(next(iter(error.failures.values()))[0])) from error

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _write(
        self, name: str, tensors: Tensors, state: dict[str, Any], device: torch.device
    ) -> None:
        if device.type == "cuda":  # the current device is per thread, initially GPU 0
            torch.cuda.set_device(device)
        start, partly = time.monotonic(), self.directory / f".{name}.partial"
        rank = dist.get_rank() if self._group else 0
        on_rank_zero(lambda: shutil.rmtree(partly, ignore_errors=True), self._group)
        try:
            write_tensors(partly, tensors, self._group)
            mine = sorted(partly.glob(f"shard-{rank + 1:05d}-*"))
            files = all_gather([(f.name, f.stat().st_size, checksum(f)) for f in mine], self._group)
            on_rank_zero(partial(self._finish, name, [*chain(*files)], state), self._group)
        except BaseException:
            if rank == 0:
                shutil.rmtree(partly, ignore_errors=True)
            raise
        self.seconds = time.monotonic() - start

    def _finish(self, name: str, files: list[tuple[str, int, str]], state: dict[str, Any]) -> None:
        partly, final = self.directory / f".{name}.partial", self.directory / name
        described = json.dumps(state | {"format": FORMAT}).encode()
        write_durably(partly / STATE, described)
        files = [*files, (STATE, len(described), checksum(partly / STATE))]
        manifest = {file: [size, digest] for file, size, digest in files}
        write_durably(partly / MANIFEST, json.dumps(manifest, indent=1).encode())
        synchronise(partly)
        if final.exists():  # a rename cannot replace a directory that has files
            remove(final)
        partly.rename(final)
        synchronise(final.parent)
        self._rotate()

    def _rotate(self) -> None:
        paths = regular_checkpoints(self.directory)
        for path in paths[: -self.keep]:
            step = step_of(path)
            is_kept = self.keep_every is not None and step % self.keep_every == 0
            if not is_kept and step not in self.permanent:
                remove(path)


def write_tensors(
    directory: Path, tensors: Tensors, group: dist.ProcessGroup | None = None
) -> None:
    """Write a safetensors file a rank, all ranks of ``group`` together (None: this rank alone)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected here
        writer = dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


@lru_cache(maxsize=1)
def _group_of_threads(world: object) -> dist.ProcessGroup:
    """Create the threads' process group once for all writers of a job.

    ``world`` distinguishes several jobs in one process.
    """
    return dist.new_group(backend="gloo", timeout=SLOW_DISK)


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


def damage(path: Path, *, hashed: bool = True) -> str | None:
    """Describe how a checkpoint's files differ from its manifest, or return None.

    ``hashed``: compare contents as well as sizes.
    """

    def look(file: tuple[str, list[Any]]) -> str | None:
        name, (size, digest) = file
        if not (path / name).is_file():
            return f"{name} is missing"
        if (path / name).stat().st_size != size:
            return f"{name} has {(path / name).stat().st_size} bytes, expected {size}"
        if hashed and checksum(path / name) != digest:
            return f"{name} has another checksum"
        return None

    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    manifest = json.loads((path / MANIFEST).read_bytes())
    with ThreadPoolExecutor(MOST_THREADS) as pool:
        return next(filter(None, pool.map(look, manifest.items())), None)


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest regular checkpoint whose files match its manifest; None if there is none.

    Damaged newer ones are renamed, so that they are not found again.

    Raises:
        UserError: there are checkpoints, and all are damaged.
    """
    paths = regular_checkpoints(directory)
    for path in reversed(paths):
        if (wrong := damage(path)) is None:
            return path
        log.warning("Checkpoint %s is damaged (%s); trying the one before it", path.name, wrong)
        target = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
    if paths:
        raise UserError(f"checkpoint: all in {str(directory)!r} are damaged")
    return None


def read_state(path: Path, *, hashed: bool = True) -> dict[str, Any]:
    """Return ``state.json`` of a checkpoint after checking its files.

    ``hashed``: as for :func:`damage`.

    Raises:
        UserError: the checkpoint is damaged, or of another version's format.
    """
    if (wrong := damage(path, hashed=hashed)) is not None:
        raise UserError(f"checkpoint: {str(path)!r} is damaged: {wrong}")
    state = json.loads((path / STATE).read_bytes())
    if state.get("format") != FORMAT:
        raise UserError(
            f"checkpoint: {str(path)!r} has format {state.get('format', 1)}, and this version "
            f"reads format {FORMAT} alone; versions up to 0.2 wrote 1 and 2"
        )
    return state


def model_config(state: dict[str, Any]) -> ModelConfig:
    """Return the model configuration stored in a checkpoint."""
    return TypeAdapter(ModelConfig).validate_python(state["model"])


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
