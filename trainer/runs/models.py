"""Models by the name a user gives: a run, a checkpoint, or published weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from trainer.checkpoint import MANIFEST, find_checkpoint, load_decoder, model_config, read_state
from trainer.common.errors import UserError
from trainer.common.files import checksum
from trainer.config import RunConfig
from trainer.data.tokenizer import TextTokenizer, end_tokens, own_first_token
from trainer.interchange.pretrained import read_pretrained
from trainer.interchange.published import (
    eos_ids,
    find_pretrained,
    named_bos,
    read_config,
    read_token_files,
    read_tokenizer,
    stop_ids,
)
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.runs.descriptions import checkpoint_label, is_dropped, made_now, role, without_home
from trainer.runs.directory import saved_config
from trainer.runs.phases import training_length_at

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of weights, as commands call them."""


@dataclass(frozen=True)
class Candidate:
    """A model that can be loaded, with its name in tables.

    ``reference``: the user's name for it. ``weights``: loads it onto a device, by default the CPU,
    and in a dtype, by default float32. ``hash``: of its weights. ``run``: configuration of the run
    that trained it (None: published weights). ``role``: its role in comparisons, such as ``drope``.
    ``state``: the description in its checkpoint. ``computed_by``: the program that computes it, if
    not this one. ``named_bos``: id of the first token of a text, if a published configuration gives
    one. ``stored_length``: the training length in its files, if ``layout`` has another. ``eos``:
    ids that its settings call the end of a text; ``stops``: of an answer.
    """

    reference: str
    name: str
    path: Path
    tokenizer: Tokenizer
    config: ModelConfig
    layout: Layout
    weights: Callable[..., LanguageModel]
    hash: str
    run: RunConfig | None = None
    role: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    computed_by: str | None = None
    named_bos: int | None = None
    stored_length: int | None = None
    eos: tuple[int, ...] = ()
    stops: frozenset[int] = frozenset()

    def load(self, *place: Any) -> LanguageModel:
        """Load the model with its training length and the tokens that end its answers.

        ``place``: device and dtype.
        """
        model = self.weights(*place)
        if self.stored_length is not None:
            model.layout = self.layout
        if self.end_tokens is not None:
            model.end_tokens = self.end_tokens
        return model

    @property
    def end_tokens(self) -> frozenset[int] | None:
        """Ids that end an answer; None if its settings name none."""
        if self.stops:
            return self.stops | {self.text_tokenizer.end_of_text}
        return end_tokens(self.tokenizer, self.eos) if self.eos else None

    @property
    def fingerprint(self) -> str:
        """Text that changes with the weights, with C, and with tokens that end answers besides
        those that the tokenizer names."""
        ends, C = self.end_tokens, self.layout.training_length
        named = ends in (None, end_tokens(self.tokenizer, self.eos))
        mark = "" if named or ends is None else f", ends at {sorted(ends)}"
        trained = "" if self.stored_length in (None, C) else f", trained at {C}"
        return f"{self.hash}{mark}{trained}"

    def with_training_length(self, length: int | None) -> Candidate:
        """Return the same model with another C, from which methods and lengths count; None: as it
        is."""
        if length is None or length == self.layout.training_length:
            return self
        stored = self.stored_length or self.layout.training_length
        layout = self.layout.with_training_length(length)
        return replace(self, layout=layout, stored_length=stored)

    @property
    def longest_context(self) -> int:
        """The longest context that the model was ever trained with or that its own rescaling
        reaches, in tokens."""
        return max(self.stored_length or 0, self.layout.longest)

    @property
    def home(self) -> Path:
        """The run directory; for published weights a directory of their name among the runs."""
        return self.path.parent.parent if self.run is not None else Path("runs", self.name)

    @property
    def text_tokenizer(self) -> TextTokenizer:
        """Tokenizer for text that the model reads."""
        return TextTokenizer(self.tokenizer, self.eos)

    @property
    def bos_token(self) -> int | None:
        """Id of the first token of texts, if any: the tokenizer's own, or end-of-text as in
        training."""
        if (first := own_first_token(self.tokenizer)) is not None:
            return first
        return self.text_tokenizer.end_of_text if self.run is not None else None

    @property
    def parameters(self) -> int:
        """Number of parameters, computed from the shape without reading weights."""
        with torch.device("meta"):
            model = Decoder(self.config, self.layout)
        return sum(parameter.numel() for parameter in model.parameters())


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Give the models distinct names.

    Models of equal name, such as two seeds of a recipe, get the directory of their run as a suffix,
    or else the user's name for them.

    Raises:
        UserError: a model appears twice, or two names remain equal.
    """
    shared = Counter(candidate.name for candidate in candidates)
    for marks in ([c.home.resolve().name for c in candidates], [c.reference for c in candidates]):
        names = [
            f"{candidate.name} ({mark})" if shared[candidate.name] > 1 else candidate.name
            for candidate, mark in zip(candidates, marks, strict=True)
        ]
        if len(set(names)) == len(names):
            return [replace(c, name=name) for c, name in zip(candidates, names, strict=True)]
    raise UserError(f"compare: {names} are named twice")


def published_place(reference: str) -> Path | None:
    """Return the directory of published weights, or None if a run is named.

    OWNER/NAME is looked for on the hub if there is no directory OWNER here.
    """
    path = Path(reference)
    if (path / "config.json").is_file():
        return path
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", reference) and not path.parent.exists():
        return find_pretrained(reference)
    return None


def find_candidate(reference: str) -> Candidate:
    """Find the model that ``checkpoint=`` or ``compare=`` names.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if reference.startswith("hf:"):
        return _computed_by_transformers(reference)
    if (path := published_place(reference)) is not None:
        published = read_pretrained(reference)
        return Candidate(
            reference,
            path.stem if path.is_file() else Path(reference).name,
            path,
            published.require_tokenizer(),
            published.config,
            published.layout,
            published.decoder,
            _files_fingerprint(path),
            named_bos=published.bos_token,
            eos=published.eos,
            stops=published.stops,
        )
    path = find_checkpoint(reference)
    state = read_state(path)
    config, tokenizer = saved_config(state["config"]), Tokenizer.from_str(state["tokenizer"])
    candidate = Candidate(
        reference,
        checkpoint_label(config, state["step"], path.name),
        path,
        tokenizer,
        model_config(state),
        Layout.from_dict(state["layout"]),
        partial(load_decoder, path, state),
        checksum(path / MANIFEST),
        run=config,
        role=role(config, is_dropped(config, state["step"])),
        state=state,
        eos=(state["end_of_text"],),
        stops=stop_ids(state["token_files"], tokenizer),
    )
    length = training_length_at(config, state["step"]) if state["step"] else None
    return candidate.with_training_length(length)


def _computed_by_transformers(reference: str) -> Candidate:
    """Find the model that ``hf:DIRECTORY`` names; its weights are read and not kept.

    Raises:
        UserError: transformers cannot compute it by itself, or its attention cannot be observed.
    """
    from trainer.interchange.adapted import read_adapted  # imports transformers

    path = Path(reference.removeprefix("hf:")).expanduser()
    model, tokenizer, files = read_adapted(path), read_tokenizer(path), read_token_files(path)
    if tokenizer is None:
        raise UserError(f"{reference}: there is no tokenizer.json beside its weights")
    program = f"transformers {version('transformers')}"

    def load(device: str = "cpu", dtype: torch.dtype = torch.float32) -> LanguageModel:
        return read_adapted(path, dtype).to(device)

    return Candidate(
        reference,
        f"{path.resolve().name}-hf",
        path,
        tokenizer,
        model.config,
        model.layout,
        load,
        f"{program} {_files_fingerprint(path)}",
        computed_by=program,
        named_bos=named_bos(read_config(path)),
        eos=eos_ids(files, tokenizer),
        stops=stop_ids(files, tokenizer),
    )


def _files_fingerprint(path: Path) -> str:
    """Return a fingerprint of names, sizes and times of files; hashing contents would take long."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return str([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])


def origin(candidates: Sequence[Candidate]) -> dict[str, str]:
    """Describe the origin of a page about models as terms and values, without anything that
    identifies a person."""
    places = [
        f"{candidate.name}: {candidate.path}"
        + (f", step {candidate.state['step']:,}" if "step" in candidate.state else "")
        + (f", computed by {candidate.computed_by}" if candidate.computed_by else "")
        for candidate in candidates
    ]
    return made_now() | {"Of": without_home("; ".join(places))}
