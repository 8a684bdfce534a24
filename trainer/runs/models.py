"""Models by the name a user gives: a run, a checkpoint, or published weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from trainer.checkpoint import MANIFEST, find_checkpoint, load_decoder, model_config, read_state
from trainer.common.errors import UserError
from trainer.common.files import checksum
from trainer.config import RunConfig
from trainer.data.tokenizer import TextTokenizer, end_tokens, own_first_token
from trainer.interchange.hub import find_pretrained
from trainer.interchange.pretrained import read_pretrained
from trainer.interchange.token_files import stop_ids
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.runs.descriptions import checkpoint_label, is_dropped, made_now, role, without_home
from trainer.runs.directory import saved_config
from trainer.runs.phases import training_length_at

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Types of weights, as commands call them."""
TRAINED_AT = ", trained at "
"""Before a training length in a fingerprint."""


@dataclass(frozen=True)
class Candidate:
    """A model that can be loaded, with its name in tables.

    ``reference``: the user's name for it. ``run``: configuration of the run that trained it (None:
    published weights). ``fingerprint``: changes whenever the weights change. ``load``: loads it
    onto a device, by default the CPU, and in a dtype, by default float32. ``role``: its role in
    comparisons, such as ``drope``. ``state``: the description in its checkpoint. ``computed_by``:
    the program that computes it, if not this one. ``named_bos``: id of the first token of a text,
    if a published configuration gives one. ``stored_length``: the training length in its files, if
    ``layout`` has another. ``eos``: ids that its settings call the end of a text.
    """

    reference: str
    name: str
    path: Path
    tokenizer: Tokenizer
    config: ModelConfig
    layout: Layout
    fingerprint: str
    run: RunConfig | None
    load: Callable[..., LanguageModel]
    role: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    computed_by: str | None = None
    named_bos: int | None = None
    stored_length: int | None = None
    eos: tuple[int, ...] = ()

    def with_training_length(self, length: int | None) -> Candidate:
        """Return the same model with another C; None: as it is.

        Its fingerprint changes as well, unless ``length`` is the one in its files: methods and
        lengths count from C.
        """
        if length in (None, self.layout.training_length):
            return self
        assert length is not None
        stored = self.stored_length or self.layout.training_length
        layout, weights = self.layout.with_training_length(length), self.load

        def load(*place: Any) -> LanguageModel:
            model = weights(*place)
            model.layout = layout
            return model

        of_weights = self.fingerprint.partition(TRAINED_AT)[0]
        trained = "" if length == stored else f"{TRAINED_AT}{length}"
        return replace(
            self,
            layout=layout,
            load=load,
            fingerprint=of_weights + trained,
            stored_length=stored,
        )

    def ending_at(self, stops: frozenset[int]) -> Candidate:
        """Return the same model whose answers end at ``stops`` and at the end of a text.

        Its fingerprint changes if other tokens end them than names alone tell. Without any ids in
        its settings it stays as it is.
        """
        if not (stops or self.eos):
            return self
        named, end = end_tokens(self.tokenizer, self.eos), self.text_tokenizer.end_of_text
        ends = stops | {end} if stops else named
        mark = "" if ends == named else f", ends at {sorted(ends)}"
        weights = self.load

        def load(*place: Any) -> LanguageModel:
            model = weights(*place)
            model.end_tokens = ends
            return model

        return replace(self, load=load, fingerprint=self.fingerprint + mark)

    @property
    def longest_context(self) -> int:
        """The longest context that the model was ever trained with, in tokens."""
        return self.stored_length or self.layout.training_length

    @property
    def home(self) -> Path:
        """The run directory; for published weights a directory of their name among the runs."""
        return self.path.parent.parent if self.run is not None else Path("runs", self.name)

    @property
    def text_tokenizer(self) -> TextTokenizer:
        """Its tokenizer, for text of its own."""
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
        from trainer.interchange.adapted import read_adapted  # imports transformers

        adapted = read_adapted(reference)
        return Candidate(
            reference,
            f"{adapted.path.resolve().name}-hf",
            adapted.path,
            adapted.tokenizer,
            adapted.config,
            adapted.layout,
            f"{adapted.computed_by} {_files_fingerprint(adapted.path)}",
            None,
            adapted.load,
            computed_by=adapted.computed_by,
            named_bos=adapted.bos_token,
            eos=adapted.eos,
        ).ending_at(adapted.stops)
    if (path := published_place(reference)) is not None:
        published = read_pretrained(reference)
        return Candidate(
            reference,
            path.stem if path.is_file() else Path(reference).name,
            path,
            published.require_tokenizer(),
            published.config,
            published.layout,
            _files_fingerprint(path),
            None,
            published.decoder,
            named_bos=published.bos_token,
            eos=published.eos,
        ).ending_at(published.stops)
    path = find_checkpoint(reference)
    state = read_state(path)
    config = saved_config(state["config"])
    candidate = Candidate(
        reference,
        checkpoint_label(config, state["step"], path.name),
        path,
        Tokenizer.from_str(state["tokenizer"]),
        model_config(state),
        Layout.from_dict(state["layout"]),
        checksum(path / MANIFEST),
        config,
        partial(load_decoder, path, state),
        role(config, is_dropped(config, state["step"])),
        state,
        eos=(state["end_of_text"],),
    )
    stops = stop_ids(state.get("token_files", {}), candidate.tokenizer)
    candidate = candidate.ending_at(stops)
    length = training_length_at(config, state["step"]) if state["step"] else None
    return candidate.with_training_length(length)


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
