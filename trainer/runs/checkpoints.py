"""Self-contained checkpoints on disk: names, contents, writing, finding, loading.

A checkpoint is written under a temporary name, flushed to disk, listed in a manifest of sizes and
checksums, and renamed. It is complete or absent, and the manifest later reveals damage.

It is a directory ``step-000800``, or ``before-drop`` for the state just before a drop. It
contains the tensors in torch's distributed format, and ``state.json``: counters, callbacks, and all
that evaluation needs (model configuration, present layout, tokenizer, the run's configuration).
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer
from trainer.common.errors import Problem, UserError, os_reason, raise_all
from trainer.common.fields import adapter
from trainer.common.files import checksum, synchronise, write_durably
from trainer.common.formats import FIRST, Count, check_format, read_as, read_plain
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.layout import Layout
from trainer.runs.config import RunConfig
from trainer.runs.directory import check_mark, nothing_at
from trainer.runs.index import read_index
from trainer.runs.phases import tokens_at
from trainer.runs.ranks import all_gather, on_rank_zero
from trainer.runs.saved_state import FORMAT, STATE, read_saved
from trainer.runs.state import Tensors, check_shapes, load, tensors_in
from trainer.runs.training_config import TrainerConfig

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
Manifest = dict[str, tuple[Count, str]]
"""Sizes and checksums (SHA-256) by the names of files."""
MOST_THREADS = 8
"""Files that one process hashes at once; hashing releases the interpreter's lock."""
_known: dict[tuple[str | int, ...], str] = {}
"""Checksums of the files that this process has hashed or written, by :func:`_identity`."""


def _identity(path: Path) -> tuple[str | int, ...]:
    """Return a key of a file's content that survives a rename of its directory."""
    status = path.stat()
    return path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def digests(directory: Path, pattern: str = "*") -> dict[str, list[int | str]]:
    """Return ``{name: [size, checksum]}`` of the files that match."""
    return {
        path.name: [path.stat().st_size, checksum(path)]
        for path in sorted(directory.glob(pattern))
        if path.is_file() and path.name != MANIFEST
    }


def write_manifest_and_rename(
    partial: Path, final: Path, files: dict[str, list[int | str]]
) -> None:
    """Write the manifest into a complete directory and rename the directory, durably."""
    write_durably(partial / MANIFEST, json.dumps(files, indent=1).encode())
    synchronise(partial)
    if final.exists():  # left by a rewind; a rename cannot replace a directory that has files
        replaced = final.with_name(f".{final.name}.removed")
        final.rename(replaced)
        shutil.rmtree(replaced)
    partial.rename(final)
    synchronise(final.parent)
    # Every rank has hashed its files while it wrote them: they need not be read again.
    _remember(final, [(name, str(digest)) for name, (_, digest) in files.items()])


def damage(directory: Path) -> str | None:
    """Describe damage to a checkpoint's files, or return None; a process hashes each file only
    once."""
    wrong, files = _to_hash(directory)
    return wrong or _difference(directory, files)


def visible_damage(directory: Path) -> str | None:
    """Describe damage that sizes alone reveal, or return None; reads no file."""
    return _to_hash(directory)[0]


def damage_together(directory: Path) -> str | None:
    """Describe damage, as :func:`damage` does, with each rank hashing a share of the files."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrong, files = on_rank_zero(lambda: _to_hash(directory))
    if wrong is not None:
        return wrong
    difference = _difference(directory, files[rank::ranks])
    if difference is not None and ranks > 1:
        difference += f", on {os.uname().nodename}"
    wrong = next(filter(None, all_gather(difference)), None)
    if wrong is None:
        _trust(directory)
    return wrong


def _trust(directory: Path) -> None:
    """Remember the files of a sound checkpoint as verified, whichever rank hashed them."""
    try:
        expected = read_as(directory / MANIFEST, Manifest)
        _remember(directory, [(name, digest) for name, (_, digest) in expected.items()])
    except FileNotFoundError:
        log.debug("%s cannot be seen from this node", directory)


def _to_hash(directory: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """Return visible damage or None, and the files still to hash with their expected checksums.

    The largest files come first, so that ranks get equal shares.
    """
    try:
        expected = read_as(directory / MANIFEST, Manifest)
    except FileNotFoundError:
        return f"{MANIFEST} is missing", []
    except (OSError, ValueError) as error:
        return f"{MANIFEST} is no list of files with sizes and checksums ({error})", []
    if not expected:
        return f"{MANIFEST} lists no files", []
    for name, (size, _) in expected.items():
        if (wrong := _visible_difference(directory, name, size)) is not None:
            return wrong, []
    by_size = sorted(expected, key=lambda name: expected[name][0], reverse=True)
    files = [(name, expected[name][1]) for name in by_size]
    return None, [(n, d) for n, d in files if _known.get(_identity(directory / n)) != d]


def _difference(directory: Path, files: list[tuple[str, str]]) -> str | None:
    """Describe the first of ``files`` with a wrong checksum, or return None."""

    def look(file: tuple[str, str]) -> str | None:
        name, digest = file
        try:
            before = _identity(directory / name)
            if checksum(directory / name) != digest:
                return f"{name} has changed (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({os_reason(error)})"
        _known[before] = digest
        return None

    with ThreadPoolExecutor(MOST_THREADS) as pool:
        return next(filter(None, pool.map(look, files)), None)


def _remember(directory: Path, files: list[tuple[str, str]]) -> None:
    _known.update({_identity(directory / name): digest for name, digest in files})


def _visible_difference(directory: Path, name: str, size: int) -> str | None:
    """Describe how a file differs from its manifest entry without reading it, or return None."""
    path = directory / name
    if name != path.name or name in ("", ".."):
        return f"{MANIFEST} names a file elsewhere ({_shown(name)})"
    if not os.path.isfile(path):  # noqa: PTH113  False also for what can be no name
        return f"{_shown(name)} is missing"
    if path.stat().st_size != size:
        return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def _shown(name: str) -> str:
    """Escape a name so that it fits on one line."""
    return name if name.isprintable() and len(name) < 100 else f"{name[:60]!r}..."


BEFORE_DROP = "before-drop"
UNUSED = "unused-"
"""Prefix of a checkpoint that its run does not continue from."""
FREE_MODEL_KEYS = "attention_backend", "from_pretrained", "from_run"
"""Keys of the model's configuration that do not affect its shape."""


def description(
    config: RunConfig,
    model: Decoder,
    tokenizer_json: str,
    end_of_text: int,
    token_files: Mapping[str, str],
    step: int,
) -> dict[str, Any]:
    """Return the part of ``state.json`` that evaluation and export need, in plain values.

    ``end_of_text``: id of the token after documents. ``token_files``: of the published model in
    which training began, see :mod:`~trainer.interchange.token_files`; empty without one.
    """
    return {
        "format": FORMAT,
        "step": step,
        "tokens": tokens_at(config, step),
        "model": asdict(model.config),
        "layout": model.layout.to_dict(),
        "tokenizer": tokenizer_json,
        "end_of_text": end_of_text,
        "token_files": dict(token_files),
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
        target = path.with_name(f"{UNUSED}{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)


def rotate(directory: Path, config: TrainerConfig, steps: frozenset[int] = frozenset()) -> None:
    """Keep the last ``keep_checkpoints``, as many healthy ones, every ``keep_every``-th step, the
    ``keep_best`` and ``steps``."""
    paths = regular_checkpoints(directory)
    retained = {*paths[-config.keep_checkpoints :], *(p for p in paths if step_of(p) in steps)}
    retained |= set(islice(filter(is_healthy, reversed(paths)), config.keep_checkpoints))
    if config.keep_every:
        retained |= {path for path in paths if step_of(path) % config.keep_every == 0}
    if config.keep_best:
        retained |= set(sorted(paths, key=training_loss)[: config.keep_best])
    for path in paths:
        if path not in retained:
            remove(path)


def is_healthy(path: Path, *, may_be_skipped: bool = False) -> bool:
    """Whether a checkpoint's parameters are finite and its last update was not skipped.

    True if unknown or damaged. ``may_be_skipped``: whether a skipped update counts as healthy: it
    leaves the weights as they are.
    """
    try:
        state = read_plain(path / STATE)
        is_skipped = bool(state["tally"]["skipped_in_a_row"])
        return state.get("finite_parameters", True) and (may_be_skipped or not is_skipped)
    except (OSError, ValueError, KeyError, TypeError):
        return True


def healthy_checkpoints(directory: Path, step: int) -> list[Path]:
    """Return the healthy regular checkpoints of at most ``step`` steps, the newest first.

    If there is none, the newest with finite parameters is returned.
    """
    paths = [path for path in reversed(regular_checkpoints(directory)) if step_of(path) <= step]
    finite = (path for path in paths if is_healthy(path, may_be_skipped=True))
    return [*filter(is_healthy, paths)] or [*islice(finite, 1)]


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
        if not directory.is_dir():
            raise UserError.at(
                "checkpoint",
                f"{name!r} is neither a run directory nor a checkpoint: it has no checkpoints/ and "
                f"no {MANIFEST}.",
            )
        before = directory / BEFORE_DROP
        hint = f" but {str(before)!r}" if before.is_dir() else ""
        raise UserError.at("checkpoint", f"there is no checkpoint in {name!r}{hint}.")
    if path.is_file():
        raise UserError.at("checkpoint", f"{name!r} is a file; a checkpoint is a directory.")
    raise UserError(nothing_at(name))


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


def load_decoder(
    path: Path, state: dict[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Load the decoder of a checkpoint, with its layout, directly onto the device and in ``dtype``;
    runs no stored code.

    Raises:
        UserError: weights and description contradict each other.
    """
    with torch.device("meta"):
        model = Decoder(model_config(state), Layout.from_dict(state["layout"])).to(dtype)
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
