"""Any decoder of transformers from a local directory, computed by transformers itself.

No code of a model is run and no pickle is read: the architecture must be transformers' own, and the
weights safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from trainer.common.errors import UserError, did_you_mean, first_line, near_path
from trainer.interchange.hf_config import is_own, named_bos
from trainer.interchange.pretrained import read_config, read_tokenizer
from trainer.interchange.token_files import eos_ids, read_token_files, stop_ids
from trainer.model.config import ModelConfig
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

PREFIX = "hf:"
"""Before the directory of a model that transformers is to compute."""
IMPLEMENTATIONS = (None, "eager", "sdpa", "grouped_mm", "batched_mm")
"""Implementations of attention and experts that a configuration may ask for. For any other name,
transformers may download a kernel from the hub and run it."""


@dataclass(frozen=True)
class Adapted:
    """A model that was found and tried; ``load`` reads its weights again.

    ``bos_token``: see :func:`~trainer.interchange.hf_config.named_bos`. ``eos`` and ``stops``: see
    :func:`~trainer.interchange.token_files.eos_ids` and ``stop_ids`` there.
    """

    path: Path
    tokenizer: Tokenizer
    config: ModelConfig
    layout: Layout
    computed_by: str
    bos_token: int | None
    eos: tuple[int, ...]
    stops: frozenset[int]

    def load(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LanguageModel:
        """Load the model onto a device in ``dtype``; it is converted before it gets there."""
        return _read(self.path).to(dtype).to(device)


def read_adapted(name: str) -> Adapted:
    """Find the model that ``hf:DIRECTORY`` names, and determine the behaviour of its layers.

    Reads its weights without keeping them.

    Raises:
        UserError: transformers is not installed, there is no such directory, or it contains no
            model that transformers can compute and that can be observed.
    """
    if find_spec("transformers") is None:
        raise UserError.at(
            "checkpoint",
            f"{name!r} asks for the package transformers, which is not installed; pip install "
            "'unrope[transformers]', or leave out hf: for the architectures that this program "
            "reads itself.",
        )
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if not os.path.isdir(path):  # noqa: PTH112  also False for a name that is too long
        raise UserError.at(
            "checkpoint",
            f"hf: takes a local directory, and there is none at {str(path)!r}.",
            near_path(path),
        )
    try:
        values = read_config(path)
        tokenizer = read_tokenizer(path)
        if tokenizer is None:
            raise UserError.at(
                "", "there is no tokenizer.json; put the model's beside its weights."
            )
        settings = read_token_files(path)
        _check_type(values)
        _check_own_files(path, values)
        model = _read(path)
    except UserError as error:
        key = f"checkpoint: {name}"
        raise UserError(*(problem.in_file(key) for problem in error.problems)) from error
    by = f"transformers {version('transformers')}"
    ends = eos_ids(settings, tokenizer), stop_ids(settings, tokenizer)
    return Adapted(path, tokenizer, model.config, model.layout, by, named_bos(values), *ends)


def _check_type(values: dict[str, Any]) -> None:
    """Refuse models for which transformers would need the model's own code."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = values.get("model_type")
    if is_own(values):
        raise UserError.at(
            "",
            "it is an export of this program, whose code is not run here; leave out hf: and this "
            "program computes it itself.",
        )
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES:
        raise UserError.at(
            "config.json",
            f"model_type: transformers {version('transformers')} has no {kind!r}, and code of a "
            "model is never run.",
            did_you_mean(str(kind), CONFIG_MAPPING_NAMES),
        )


def _check_own_files(path: Path, values: dict[str, Any]) -> None:
    """Refuse models for which transformers would read or run something outside their directory."""
    if (path / "adapter_config.json").exists():
        raise UserError.at(
            "adapter_config.json",
            "an adapter names another model's weights; merge it into them and save the result.",
        )
    if values.get("transformers_weights") is not None:
        raise UserError.at(
            "config.json",
            "transformers_weights: not supported; call the weights model.safetensors.",
        )
    for key, value in _implementations(values):
        if value not in IMPLEMENTATIONS:
            raise UserError.at(
                "config.json",
                f"{key}: expected {', '.join(map(repr, IMPLEMENTATIONS[1:]))} or null, got "
                f"{value!r}.",
            )


def _implementations(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every ``*_implementation`` key at any depth, with its value."""
    for key, value in values.items():
        if str(key).endswith("_implementation"):
            yield key, value
        elif isinstance(value, dict):
            yield from _implementations(value)


def _read(path: Path) -> Any:
    import transformers

    from trainer.interchange.adapted.model import AdaptedModel

    log = transformers.logging
    level, progress = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, info = loaded
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))
    except Exception as error:  # transformers raises nearly every type
        raise UserError.at("", f"transformers cannot compute it: {first_line(error)}") from error
    finally:
        log.set_verbosity(level)
        if progress:
            log.enable_progress_bar()
    if missing := sorted(info["missing_keys"]):
        raise UserError.at("", f"tensors that are missing: {', '.join(map(repr, missing[:5]))}.")
    return AdaptedModel(model)
