"""Models by the name a user gives: a run, a checkpoint, or published weights."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from trainer.checkpoint import (
    MANIFEST,
    check_sound,
    find_checkpoint,
    read_state,
    readers,
)
from trainer.common.errors import UserError
from trainer.common.fields import adapter
from trainer.common.files import checksum
from trainer.data.tokenizer import special_tokens
from trainer.evaluation.saved_model import SavedModel
from trainer.interchange.pretrained import Pretrained, read_pretrained, waits
from trainer.interchange.published import (
    find_pretrained,
    read_token_files,
    read_tokenizer,
)
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.language_model import LanguageModel
from trainer.positional.config import PositionalConfig
from trainer.positional.layout import Layout
from trainer.runs.descriptions import name_and_role, without_home
from trainer.runs.directory import saved_config
from trainer.runs.phases import phase_before, phases_of


def find_model(reference: str) -> SavedModel:
    """Find the model that ``checkpoint=`` or ``compare=`` names.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if reference.startswith("hf:"):
        return _computed_by_transformers(reference)
    path = Path(reference)
    length: int | None = None
    # OWNER/NAME is looked for on the hub if there is no directory OWNER here.
    is_on_hub = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", reference) and not path.parent.exists()
    if is_on_hub or (path / "config.json").is_file():
        path, weights = find_pretrained(reference), read_pretrained(reference)
        details: dict[str, Any] = {"name": Path(reference).name, "hash": _files_fingerprint(path)}
    else:
        path = check_sound(find_checkpoint(reference))
        state, weights = read_state(path), read_run(path)
        run, step = saved_config(state["config"]), state["step"]
        title, role = name_and_role(run, step)
        details = {
            "name": title if step == run.trainer.max_steps else f"{title} ({path.name})",
            "hash": checksum(path / MANIFEST),
            "run": run,
            "role": role,
            "state": state,
        }
        if step:
            length = phase_before(phases_of(run), step).config.data.sequence_length
    model = SavedModel(
        reference=reference,
        path=path,
        config=weights.config,
        layout=weights.layout,
        longest_context=weights.layout.longest,
        weights=weights.decoder,
        tokens=special_tokens(
            weights.require_tokenizer(), weights.token_files, weights.end_of_text
        ),
        **details,
    )
    return model.with_training_length(length)


def starting_weights(config: ModelConfig) -> Pretrained | None:
    """Return the model that ``model.from_pretrained`` or ``model.from_run`` names, or None.

    Reads no weights.

    Raises:
        UserError: the model does not exist or is not supported, or both keys are set.
    """
    if config.from_pretrained is not None and config.from_run is not None:
        raise UserError("model: expected one of from_pretrained and from_run, got both")
    if config.from_pretrained is not None:
        return read_pretrained(config.from_pretrained)
    return None if config.from_run is None else read_run(find_checkpoint(config.from_run))


def read_run(path: Path) -> Pretrained:
    """Return the model in a checkpoint; its weights are read later, one at a time."""
    state = read_state(path)
    config = adapter(ModelConfig).validate_python(state["model"])
    layout = Layout.from_dict(state["layout"])
    tokenizer = Tokenizer.from_str(state["tokenizer"])
    read = readers(path)
    with torch.device("meta"):
        names = [name for name, _ in Decoder(config, layout).named_parameters()]

    return Pretrained(
        str(path),
        config,
        layout,
        tokenizer,
        {name: read[f"model.{name}"] for name in names if not waits(name, layout)},
        token_files=state["token_files"],
        end_of_text=state["end_of_text"],
    )


def encodings_of(reference: str) -> PositionalConfig:
    """Return the encodings of the checkpoint that ``model.from_run`` names.

    Layers and heads left by a partial drop keep the names that they had before.

    Raises:
        UserError: there is no checkpoint.
    """
    state = read_state(find_checkpoint(reference))
    config = saved_config(state["config"])
    positional = config.positional
    for phase in phases_of(config):
        change = phase.settings.drop
        if change is not None and phase.start < state["step"] and not change.of_what:
            positional = replace(positional, layers=[change.to], heads={})
    return positional


def _computed_by_transformers(reference: str) -> SavedModel:
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

    return SavedModel(
        name=f"{path.resolve().name}-hf",
        reference=reference,
        path=path,
        config=model.config,
        layout=model.layout,
        longest_context=model.layout.longest,
        weights=load,
        hash=f"{program} {_files_fingerprint(path)}",
        computed_by=program,
        tokens=special_tokens(tokenizer, files),
    )


def _files_fingerprint(path: Path) -> str:
    """Return a fingerprint of names, sizes and times of files; hashing contents would take long."""
    files = sorted(path.iterdir())
    return str([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])


def origin(models: Sequence[SavedModel]) -> dict[str, str]:
    """Describe the origin of a page about models by time, command and places, without anything that
    identifies a person."""
    places = [
        f"{model.name}: {model.path}"
        + (f", step {model.state['step']:,}" if "step" in model.state else "")
        + (f", computed by {model.computed_by}" if model.computed_by else "")
        for model in models
    ]
    words = shlex.join(["python", "-m", "trainer", *sys.argv[1:]])
    return {
        "Made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "Command": without_home(words),
        "Of": without_home("; ".join(places)),
    }
