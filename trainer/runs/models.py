"""Models by the name a user gives: a run, a checkpoint, or published weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer

from trainer.checkpoint import MANIFEST, find_checkpoint, load_decoder, model_config, read_state
from trainer.common.errors import UserError
from trainer.common.files import checksum
from trainer.evaluation.saved_model import SavedModel
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
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.runs.descriptions import checkpoint_label, is_dropped, made_now, role, without_home
from trainer.runs.directory import saved_config
from trainer.runs.phases import training_length_at


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


def find_model(reference: str) -> SavedModel:
    """Find the model that ``checkpoint=`` or ``compare=`` names.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if reference.startswith("hf:"):
        return _computed_by_transformers(reference)
    if (path := published_place(reference)) is not None:
        published = read_pretrained(reference)
        return SavedModel(
            name=path.stem if path.is_file() else Path(reference).name,
            reference=reference,
            path=path,
            tokenizer=published.require_tokenizer(),
            config=published.config,
            layout=published.layout,
            longest_context=published.layout.longest,
            weights=published.decoder,
            hash=_files_fingerprint(path),
            named_bos=published.bos_token,
            eos=published.eos,
            stops=published.stops,
        )
    path = find_checkpoint(reference)
    state = read_state(path)
    config, tokenizer = saved_config(state["config"]), Tokenizer.from_str(state["tokenizer"])
    layout = Layout.from_dict(state["layout"])
    model = SavedModel(
        name=checkpoint_label(config, state["step"], path.name),
        reference=reference,
        path=path,
        tokenizer=tokenizer,
        config=model_config(state),
        layout=layout,
        longest_context=layout.longest,
        weights=partial(load_decoder, path, state),
        hash=checksum(path / MANIFEST),
        run=config,
        role=role(config, is_dropped(config, state["step"])),
        state=state,
        eos=(state["end_of_text"],),
        stops=stop_ids(state["token_files"], tokenizer),
    )
    return model.with_training_length(
        training_length_at(config, state["step"]) if state["step"] else None
    )


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
        tokenizer=tokenizer,
        config=model.config,
        layout=model.layout,
        longest_context=model.layout.longest,
        weights=load,
        hash=f"{program} {_files_fingerprint(path)}",
        computed_by=program,
        named_bos=named_bos(read_config(path)),
        eos=eos_ids(files, tokenizer),
        stops=stop_ids(files, tokenizer),
    )


def _files_fingerprint(path: Path) -> str:
    """Return a fingerprint of names, sizes and times of files; hashing contents would take long."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return str([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])


def origin(models: Sequence[SavedModel]) -> dict[str, str]:
    """Describe the origin of a page about models as terms and values, without anything that
    identifies a person."""
    places = [
        f"{model.name}: {model.path}"
        + (f", step {model.state['step']:,}" if "step" in model.state else "")
        + (f", computed by {model.computed_by}" if model.computed_by else "")
        for model in models
    ]
    return made_now() | {"Of": without_home("; ".join(places))}
