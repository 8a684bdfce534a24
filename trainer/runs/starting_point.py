"""Starting point of a run: its newest sound checkpoint, or what it takes from another model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from trainer.common.errors import UserError, renaming
from trainer.data.corpus import Corpus
from trainer.data.dataset import TrainingSamples
from trainer.interchange.pretrained import Pretrained, read_pretrained
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig
from trainer.positional.layout import Layout
from trainer.runs.checkpoints import (
    damage_together,
    find_checkpoint,
    model_config,
    newest_sound_checkpoint,
    read_state,
    regular_checkpoints,
    remove_leftovers,
    set_aside,
    step_of,
)
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import is_dropped, label, without_home
from trainer.runs.directory import saved_config
from trainer.runs.index import read_index
from trainer.runs.metrics_file import continue_metrics
from trainer.runs.phases import Phase, phase_at, phase_before, phases_of
from trainer.runs.ranks import on_rank_zero
from trainer.runs.saved_state import RunState, read_run_state, saved_eos
from trainer.runs.state import check_shapes, load, tensors_in

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Starting point of a run: a checkpoint, or none.

    ``state`` is its ``state.json`` as plain values, ``run_state`` the part that training resumes
    from; None without a checkpoint, and for a checkpoint that training does not resume from.
    """

    checkpoint: Path | None
    state: dict[str, Any]
    run_state: RunState | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state.get("step", 0)


def starting_point(config: RunConfig, branch: Path | None) -> Start:
    """Find the starting point: newest sound checkpoint, branch, or none; cut the metrics file to
    it.

    All ranks call this together: each reads a share of the files, and all get the same result.

    Raises:
        UserError: all checkpoints of the run are damaged, or the branch's.
    """
    run_dir = Path(config.run_dir)
    on_rank_zero(lambda: _tidy(run_dir / "checkpoints"))
    newest = newest_sound_checkpoint(run_dir)
    if newest is None and branch is not None:
        damage_together(branch)  # remembers sound files, so that they are not read again
    return on_rank_zero(lambda: _begin(run_dir, newest, branch))


def _tidy(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)


def _begin(run_dir: Path, newest: Path | None, branch: Path | None) -> Start:
    if newest is not None:
        later = regular_checkpoints(run_dir / "checkpoints")
        set_aside([p for p in later if step_of(p) > step_of(newest)])
    elif branch is not None and not branch.is_dir():
        raise UserError.at(
            "controls", f"{str(branch)!r}, where this run branches off, was not written."
        )
    start = newest or branch
    state = read_state(start) if start is not None else {}
    run_state = None
    if start is not None:
        if "tally" in state:  # missing from earlier versions, which are refused with a reason
            run_state = read_run_state(start, state)
        log.info("Resuming from %s (step %d)", start.name, state["step"])
    source = branch.parent.parent / "metrics.csv" if branch is not None else None
    left_out = continue_metrics(run_dir / "metrics.csv", state.get("step", 0), source)
    if start is None and left_out:
        log.warning(
            "%s has no checkpoint: begins again from nothing, without the rows of metrics.csv "
            "until step %d",
            *(without_home(str(run_dir)), left_out[-1]["step"]),
        )
    return Start(start, state, run_state)


def data_fingerprints(corpus: Corpus, phase: Phase) -> dict[str, Any]:
    """Return hashes of everything that determines a phase's samples, and of the run's texts."""
    data, mixed = phase.config.data, corpus.mixed(phase.config.data)
    order = [
        mixed.fingerprint,
        phase.seed,
        data.sequence_length,
        asdict(data.needles),
    ]
    digest = hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16]
    return {"corpus": corpus.fingerprint, "order": digest, "texts": corpus.fingerprints}


def texts_read(run_dir: Path) -> list[str] | None:
    """Return fingerprints of the texts that the run in a directory has read, or None."""
    for path in reversed(regular_checkpoints(run_dir / "checkpoints")):
        try:
            return json.loads((path / "state.json").read_bytes())["data"]["texts"]
        except (OSError, ValueError, KeyError, TypeError):  # validated on resume
            continue
    return None


NUMERICS = {
    "fp32": "float32",
    "bf16": "bfloat16 activations and products, float32 weights, gradients and optimizer",
}
"""Dtypes of a run by ``trainer.precision``, the same under every strategy."""


def say_other_numerics(state: dict[str, Any], config: RunConfig) -> None:
    """Log that a run resumes with a precision other than its checkpoint's."""
    now, trained = NUMERICS[config.trainer.precision], state["config"]["trainer"]["precision"]
    before = state.get("numerics", f"{trained} as an earlier version computed it")
    if before != now and (trained, config.trainer.precision) != ("fp32", "fp32"):
        log.warning("Goes on from step %d in %s; until there: %s", state["step"], now, before)


def samples_of(corpus: Corpus, phase: Phase) -> TrainingSamples:
    """Return the training samples of a phase."""
    data = phase.config.data
    return TrainingSamples(corpus.mixed(data), data, phase.seed)


def epochs_read(corpus: Corpus, phases: Sequence[Phase]) -> Callable[[int], dict[str, float]]:
    """Return a function from step to the number of times each text has been read."""
    orders: dict[int, list[Phase]] = {}
    for phase in phases:
        orders.setdefault(phase.order, []).append(phase)
    samples = {order: samples_of(corpus, of_one[0]) for order, of_one in orders.items()}

    def read(step: int) -> dict[str, float]:
        total = {part.name: 0.0 for part in corpus.parts}
        for order, of_one in orders.items():
            if of_one[0].start < step or not of_one[0].start:
                last = phase_at(of_one, max(min(step, of_one[-1].end) - 1, 0))
                count = last.first_sample(min(step, last.end))
                for name, times in samples[order].epochs(count).items():
                    total[name] += times
        return total

    return read


def check_same_data(state: dict[str, Any], corpus: Corpus, config: RunConfig) -> None:
    """Check that text and order are unchanged.

    Raises:
        UserError: the checkpoint was trained on other samples.
    """
    if "data" not in state:
        raise UserError.at(
            "checkpoint",
            "an earlier version of this program wrote it, whose order of samples this one does "
            "not have; evaluate, analyze and export read it, training does not go on: "
            "overwrite=true starts again.",
        )
    phase = phase_before(phases_of(config), state["step"])
    if state["data"] != data_fingerprints(corpus, phase):
        raise UserError.at(
            "data",
            "the checkpoint was trained on other text, or in another order, than this command "
            "reads (changed files, another version of Python, another seed); give the same, or "
            "overwrite=true.",
        )


FROM_RUN = "model.from_run"
OF_MODEL = "model."
"""How the names of a checkpoint's weights begin."""


def starting_weights(config: ModelConfig) -> Pretrained | None:
    """Return the model that ``model.from_pretrained`` or ``model.from_run`` names, or None.

    Reads and hashes no weights; see ``damage_together`` for the process that does.

    Raises:
        UserError: the model does not exist or is damaged, or both keys are set.
    """
    if config.from_pretrained is not None and config.from_run is not None:
        raise UserError.at("model", "from_pretrained and from_run are given; leave out one.")
    if config.from_pretrained is not None:
        return read_pretrained(config.from_pretrained)
    if config.from_run is None:
        return None
    with renaming(checkpoint=FROM_RUN):
        return _of_run(config.from_run)


def normalizes(layout: Layout) -> bool:
    """Whether any query and key norms are enabled.

    Otherwise the norms still wait for a drop, and are no part of the published weights.
    """
    return any(layer.qk_norm for layer in layout.layers)


def encodings_of(reference: str) -> tuple[PositionalConfig, str | None]:
    """Return the encodings of the checkpoint that ``model.from_run`` names, and their label.

    The label is None if it follows from the encodings; a run that trained on keeps that of the run
    before it.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    with renaming(checkpoint=FROM_RUN):
        path = _checkpoint(reference)
        state = read_state(path, hashed=False)
    file = f"the configuration in {str(path)!r}"
    config, step = saved_config(state["config"], FROM_RUN, file), state["step"]
    positional, depth = config.positional, config.model.num_hidden_layers
    dropped = is_dropped(config, step)
    for phase in phases_of(config):
        change = phase.drop
        if change is None or phase.start >= step or change.heads is not None:
            continue  # A partial drop leaves an encoding that has no name.
        chosen = {layer % depth for layer in change.layers or range(depth)}
        before = [positional.layers[i % len(positional.layers)] for i in range(depth)]
        layers = [change.to if i in chosen else name for i, name in enumerate(before)]
        if len(chosen) == depth:
            layers, positional = [change.to], replace(positional, heads={})
        positional = replace(positional, layers=layers)
    if dropped:
        return positional, label(config, dropped)
    return positional, config.label if config.model.from_run else None


def _of_run(reference: str) -> Pretrained:
    path = _checkpoint(reference)
    state, index = read_state(path, hashed=False), read_index(path)
    config, layout = model_config(state), Layout.from_dict(state["layout"])
    with torch.device("meta"):
        shapes = dict(Decoder(config, layout).named_parameters())
    check_shapes({OF_MODEL + n: p for n, p in shapes.items()}, tensors_in(index), path.name)
    wait = not normalizes(layout)
    tensors = {
        name: _Saved(name, tuple(p.shape), path, index)
        for name, p in shapes.items()
        if not (wait and any(norm in name for norm in ("q_norm", "k_norm")))
    }
    return Pretrained(
        str(path),
        config,
        layout,
        Tokenizer.from_str(state["tokenizer"]),
        tensors,
        token_files=lambda: state.get("token_files", {}),
        eos=saved_eos(state),
    )


@dataclass(frozen=True)
class _Saved:
    """A weight in a checkpoint, to be read later."""

    name: str
    shape: tuple[int, ...]
    checkpoint: Path
    index: Metadata

    def read_into(self, out: Tensor) -> None:
        """Fill ``out``, converting to its dtype; each rank reads independently."""
        saved = torch.empty(self.shape)
        load({OF_MODEL + self.name: saved}, self.checkpoint, self.index, alone=True)
        out.copy_(saved)


def _checkpoint(reference: str) -> Path:
    if not reference:
        raise UserError.at(
            "model.from_run",
            "expected a run directory or a checkpoint, got nothing; null begins from nothing.",
        )
    return find_checkpoint(reference)
