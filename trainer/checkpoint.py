"""Checkpoints: directories of safetensors files, with ``state.json`` and a manifest.

``step-000800``, or ``before-drop`` for the state just before a drop, holds

- ``.safetensors`` files of each rank, written by torch's distributed checkpoint (DCP), with weights
  ``model.NAME``, optimizer state ``optim.NAME.KEY`` and tensors of callbacks ``lightning.PATH``. A
  rank's shard of a tensor is a slice of its first dimension. Names depend on neither strategy nor
  world size, so that any of them reads what another wrote, and any tool reads the weights;
- ``state.json``: what training resumes from, and what describes the model (configuration, layout,
  tokenizer); under ``lightning`` what Lightning and callbacks keep;
- ``manifest.json``: sizes and SHA-256 of the other files.

Nothing is pickled. A checkpoint is renamed when it is complete.
"""

import json
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
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
from torch.distributed.tensor import DTensor

from trainer.common.errors import UserError
from trainer.common.files import checksum, synchronise, visible_names, write_atomically
from trainer.common.processes import current_ranks
from trainer.common.ranks import all_gather, on_rank_zero
from trainer.interchange.pretrained import read_tensor
from trainer.model.decoder import Decoder

log = logging.getLogger(__name__)

FORMAT = 5
"""Number of the format, in ``state.json``; 4 had no tensors of callbacks."""
STATE = "state.json"
MANIFEST = "manifest.json"
BEFORE_DROP = "before-drop"
DAMAGED = "damaged-"
FILE_BYTES = 2**27
"""Bytes of a rank's tensors in one file: safetensors makes a copy of a file's contents."""

Tensors = dict[str, Tensor]
Readers = Mapping[str, Callable[[], Tensor]]


def optimizer_tensors(model: Decoder, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's state by its names in a checkpoint; raise a UserError about a value
    that is no tensor."""
    tensors: Tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise UserError(f"optimizer: expected tensors in its state, got {key}={value!r}")
            tensors[f"optim.{name}.{key}"] = value
    return tensors


TENSOR, ITEMS, TUPLE = MARKS = "__tensor__", "__items__", "__tuple__"


def split_tensors(value: Any, path: str, tensors: Tensors) -> Any:
    """Return ``value`` as JSON can hold it, and put its tensors into ``tensors`` by their paths.

    Raises:
        UserError: a part of it is not a number, string, list, tuple, tensor or dictionary of
            strings or numbers, or two tensors have one path, as in ``{0: x, "0": y}``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if path in tensors:
            raise UserError(f"checkpoint: expected one tensor at {path}, got two; rename a key")
        tensors[path] = value
        return {TENSOR: path}
    if isinstance(value, list | tuple):
        parts = [split_tensors(x, f"{path}.{i}", tensors) for i, x in enumerate(value)]
        return {TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, Mapping) and all(isinstance(key, str | int | float) for key in value):
        items = [[key, split_tensors(x, f"{path}.{key}", tensors)] for key, x in value.items()]
        if all(isinstance(key, str) and key not in MARKS for key in value):
            return dict(items)
        return {ITEMS: items}
    raise UserError(
        f"checkpoint: {path} is a {type(value).__name__}; expected numbers, strings, lists, "
        "tuples, tensors and dictionaries of strings or numbers"
    )


def join_tensors(value: Any, read: Readers) -> Any:
    """Undo :func:`split_tensors`; ``read`` has a function for each tensor."""
    if isinstance(value, list):
        return [join_tensors(x, read) for x in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        return read[value[TENSOR]]()
    if value.keys() == {TUPLE}:
        return tuple(join_tensors(x, read) for x in value[TUPLE])
    if value.keys() == {ITEMS}:
        return {key: join_tensors(x, read) for key, x in value[ITEMS]}
    return {key: join_tensors(x, read) for key, x in value.items()}


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the error of a rank instead of DCP's collection, a BaseException."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def readers(path: Path) -> Readers:
    """Return a function for each tensor that reads it as a whole, on this rank alone."""
    shards: dict[str, list[tuple[list[int], Path]]] = defaultdict(list)
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name, place in json.loads(opened.metadata()["DCP_SHARDING_INFO"]).items():
                shards[name].append((place["saved_offsets"], file))
    return {name: partial(_joined, name, places) for name, places in shards.items()}


def _joined(name: str, places: list[tuple[list[int], Path]]) -> Tensor:
    """Read the shards of a tensor, which are slices of its first dimension, and join them."""
    parts = [read_tensor(file, name) for _, file in sorted(places)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def restore(model: Decoder, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load weights and optimizer state, whatever strategy wrote them.

    Raises:
        RuntimeError, ValueError, KeyError: a parameter is missing, or has another shape.
    """
    reader = dcp.HuggingFaceStorageReader(str(path))
    parameters = dict(model.named_parameters())
    tensors: Tensors = {f"model.{name}": x.detach() for name, x in parameters.items()}
    states: dict[str, Tensors] = {}
    for key, saved in reader.read_metadata().state_dict_metadata.items():
        if key.startswith("optim.") and isinstance(saved, TensorStorageMetadata):
            name, _, part = key.removeprefix("optim.").rpartition(".")
            parameter = parameters[name]
            dtype = saved.properties.dtype
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
    """Writes checkpoints in a background thread, one at a time; all ranks call it together.

    ``keep``: number of newest regular checkpoints in ``directory`` that stay; those of
    ``permanent`` steps and of multiples of ``every`` stay as well.
    """

    def __init__(
        self, directory: Path, keep: int, permanent: Collection[int] = (), every: int | None = None
    ) -> None:
        self.directory = directory
        self.keep = keep
        self.permanent = permanent
        self.every = every
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._work: Future[None] | None = None
        # Both threads would mix their collectives in the group of training.
        self._group = None
        self._rank = 0
        if dist.is_initialized():
            slow_disk = timedelta(hours=2)
            self._group = dist.new_group(backend="gloo", timeout=slow_disk)
            self._rank = dist.get_rank()

    def save(self, path: Path, tensors: Tensors, state: dict[str, Any]) -> None:
        """Copy the tensors, and let a thread write them to ``path``, after :meth:`wait`.

        ``tensors``: this rank's shards, and those that all ranks have, which rank 0 writes.
        ``state``: contents of ``state.json``, of rank 0.
        """
        self.wait()
        if self._rank:
            tensors = {name: x for name, x in tensors.items() if isinstance(x, DTensor)}
        partial_path = path.with_name(f".{path.name}.partial")
        storage = dcp.HuggingFaceStorageWriter(
            str(partial_path), fqn_to_index_mapping=files_of(tensors), save_distributed=True
        )
        # Copied by the storage, which would wait for the GPU's work every 10 MB otherwise.
        copies = storage.stage(tensors)
        described = json.dumps(state | {"format": FORMAT}).encode()
        self._work = self._thread.submit(self._write, path, storage, copies, described)

    @property
    def has_failed(self) -> bool:
        """Whether the checkpoint that was being written could not be."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raise UserError if it cannot be."""
        if self._work is not None:
            work, self._work = self._work, None
            work.result()

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _write(
        self, path: Path, storage: dcp.HuggingFaceStorageWriter, tensors: Tensors, state: bytes
    ) -> None:
        """Write a checkpoint, and delete those that it replaces."""
        partial_path = Path(storage.path)
        try:
            on_rank_zero(lambda: shutil.rmtree(partial_path, ignore_errors=True), self._group)
            with _own_errors():
                dcp.save(
                    tensors,
                    storage_writer=storage,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            written = partial_path.glob(f"shard-{self._rank + 1:05d}-*")
            files = all_gather({f.name: _size_and_checksum(f) for f in written}, self._group)
            on_rank_zero(lambda: self._complete(partial_path, files, state), self._group)
        except Exception as error:
            # Without a collective: another rank may be elsewhere.
            if self._rank == 0:
                shutil.rmtree(partial_path, ignore_errors=True)
            raise UserError(f"checkpoint: cannot write {str(path)!r}: {error}") from error
        if self._rank == 0:
            self._prune()

    def _complete(self, path: Path, files: list[dict[str, list[Any]]], state: bytes) -> None:
        """Add the state and the manifest to a partial checkpoint, and rename it; ``files``: of all
        ranks."""
        write_atomically(path / STATE, state)
        manifest = {STATE: _size_and_checksum(path / STATE)}
        for rank_files in files:
            manifest |= rank_files
        write_atomically(path / MANIFEST, json.dumps(manifest, indent=1))
        synchronise(path)
        settle(path.parent)

    def _prune(self) -> None:
        for old in regular_checkpoints(self.directory)[: -self.keep]:
            step = step_of(old)
            if step in self.permanent or is_due(step, self.every):
                continue
            try:
                shutil.rmtree(old)
            except OSError as error:
                log.warning("checkpoint: cannot delete %s: %s", old, error)


def settle(directory: Path) -> None:
    """Create a directory of checkpoints; rename those written whole, and delete the parts of others
    that a killed process left."""
    directory.mkdir(parents=True, exist_ok=True)
    for partial_path in directory.glob(".*.partial"):
        if not (partial_path / MANIFEST).exists():  # written last
            shutil.rmtree(partial_path)
            continue
        path = partial_path.with_name(partial_path.stem[1:])
        shutil.rmtree(path, ignore_errors=True)  # a rename replaces no directory that has files
        partial_path.rename(path)
        synchronise(directory)


def files_of(tensors: Tensors) -> dict[str, int]:
    """Return the number of the file, from 1, that holds each tensor: :data:`FILE_BYTES` in each.

    DCP uses those of rank 0 on all ranks, which have shards of the same sizes.
    """
    files: dict[str, int] = {}
    number = 1
    size = 0
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if size and size + local.nbytes > FILE_BYTES:
            number += 1
            size = 0
        files[name] = number
        size += local.nbytes
    return files


def _size_and_checksum(file: Path) -> list[Any]:
    """Return a file's entry in the manifest."""
    return [file.stat().st_size, checksum(file)]


# Finding and reading


def step_name(step: int) -> str:
    """Return the name of a regular checkpoint."""
    return f"step-{step:06d}"


def is_due(step: int, every: int | None) -> bool:
    """Whether a step is a multiple of ``every``; None: never."""
    return every is not None and step % every == 0


def step_of(path: Path) -> int:
    """Return the step of a regular checkpoint."""
    return int(path.name.removeprefix("step-"))


def regular_checkpoints(directory: Path) -> list[Path]:
    """Return the regular checkpoints in a directory, oldest first; none if it is missing."""
    names = [name for name in visible_names(directory) if re.fullmatch(r"step-\d+", name)]
    return sorted((directory / name for name in names), key=step_of)


def find_checkpoint(name: str) -> Path:
    """Return the checkpoint that ``checkpoint=`` names, itself or a run's newest one, or raise."""
    path = Path(name).expanduser()
    if (path / MANIFEST).is_file():
        return path
    directory = path if path.name == "checkpoints" else path / "checkpoints"
    checkpoints = regular_checkpoints(directory)
    if checkpoints:
        return checkpoints[-1]
    expected = "a run that has a checkpoint, or a directory of config.json and model.safetensors"
    raise UserError(f"checkpoint: expected {expected}, got {name!r}")


def check_sound(path: Path) -> Path:
    """Return the path of a checkpoint whose files match its manifest, or raise a UserError.

    All ranks call this together; without a process group each answers for its share alone.
    """
    if not all(all_gather(_is_share_sound(path))):
        fault = "damaged" if path.exists() else "missing"
        raise UserError(f"checkpoint: {str(path)!r} is {fault}")
    return path


def _is_share_sound(path: Path) -> bool:
    """Whether this rank's share of a checkpoint's files matches the manifest."""
    ranks = current_ranks()
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = {STATE, *(n for n in visible_names(path) if n.endswith(".safetensors"))}
        if not isinstance(manifest, dict) or manifest.keys() != files or len(files) == 1:
            return False
        names = sorted(manifest)[ranks.rank :: ranks.world_size]
        with ThreadPoolExecutor() as pool:
            actual = [*pool.map(_size_and_checksum, [path / name for name in names])]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return False  # an error of the disk or of rights is not damage: nothing is renamed
    return actual == [manifest[name] for name in names]


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest sound checkpoint, the one before the drop last; None if there is none.

    Damaged ones are renamed, so that they are not found again. All ranks call this together.

    Raises:
        UserError: there are checkpoints, and all are damaged, now or at an earlier call.
        OSError: one cannot be read.
    """
    paths = on_rank_zero(lambda: [*directory.glob(BEFORE_DROP), *regular_checkpoints(directory)])
    for path in reversed(paths):
        try:
            check_sound(path)
        except UserError as error:
            log.warning("%s; trying the one before it", error)
            on_rank_zero(partial(_put_aside, path))
            continue
        if path.name == BEFORE_DROP:
            log.warning("Only %s is left of the run's checkpoints", BEFORE_DROP)
        return path
    damaged = on_rank_zero(lambda: [*directory.glob(f"{DAMAGED}*")])
    if damaged:
        raise UserError(
            f"checkpoint: all in {str(directory)!r} are damaged; overwrite=true starts again"
        )
    return None


def _put_aside(path: Path) -> None:
    target = path.with_name(f"{DAMAGED}{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def read_state(path: Path) -> dict[str, Any]:
    """Return ``state.json`` of a checkpoint; raise a UserError if it is of another version's
    format."""
    state = json.loads((path / STATE).read_bytes())
    version = state.get("format", 1)
    if version == FORMAT - 1:
        state["lightning"] = {"callbacks": state.pop("user_callbacks")}
    elif version != FORMAT:
        raise UserError(f"checkpoint: {str(path)!r} has format {version}, expected {FORMAT}")
    return state
