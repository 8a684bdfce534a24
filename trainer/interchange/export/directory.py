"""An exported model as a directory: complete and verified, or absent."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing

from trainer.common.errors import UserError
from trainer.common.files import partial_directory
from trainer.common.formats import read_plain
from trainer.interchange.export.engines import verdicts
from trainer.interchange.export.gate import TEXT, largest_difference, transformers_is_here
from trainer.interchange.export.plan import DTYPES, Plan, make_plan, round_weights, write_weights
from trainer.model.decoder import Decoder

log = logging.getLogger(__name__)

CODE = Path(__file__).with_name("custom")
TOKEN_FILES = (
    *("special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files of a published model about its tokens, beside tokenizer_config.json."""
TOKENIZER_KEYS = (
    *("tokenizer_class", "model_max_length", "added_tokens_decoder", "chat_template", "errors"),
    *("add_prefix_space", "clean_up_tokenization_spaces", "spaces_between_special_tokens"),
    *("padding_side", "truncation_side", "legacy", "trim_offsets", "use_default_system_prompt"),
)
"""Keys of tokenizer_config.json that are kept, beside those of special tokens."""


@dataclass(frozen=True)
class Exported:
    """Result of an export; ``difference``: see :func:`largest_difference`, None without a
    comparison."""

    plan: Plan
    difference: float | None


def check_destination(to: Path) -> None:
    """Check that a directory is new or empty."""
    if to.is_dir() and any(to.iterdir()):
        raise UserError.at(
            "to", f"{str(to)!r} is not empty; choose another directory, or remove it."
        )
    if to.exists() and not to.is_dir():
        raise UserError.at(
            "to", f"{str(to)!r} is a file; expected a directory that is new or empty."
        )


def export_model(
    model: Decoder,
    tokenizer: Tokenizer,
    end: int,
    to: Path,
    *,
    card: Callable[[Plan, float | None], str] | None = None,
    tolerance: float = 1e-4,
    dtype: str = "float32",
    like: Path | None = None,
    longest: int | None = None,
) -> Exported:
    """Write a decoder so that transformers loads it, and compare the loaded model's logits.

    Args:
        model: float32, on the CPU; its weights are rounded in place if ``dtype`` requires it.
        tokenizer: the model's.
        end: id of the end-of-text token.
        to: a new or empty directory.
        card: makes the text of ``README.md`` from the plan and the largest difference.
        tolerance: limit of the difference.
        dtype: a key of :data:`DTYPES`.
        like: a published model's directory; its tokens, chat template and generation settings stay.
        longest: ``max_position_embeddings`` of a model on which it has no influence, beyond which
            engines refuse prompts; the training length by default.

    Raises:
        UserError: the directory cannot be written, or the loaded model differs; nothing is left
            then.
    """
    check_destination(to)
    tokenizer = prompting(tokenizer, end) if like is None else tokenizer
    plan = make_plan(model.config, model.layout)
    if longest is not None:
        plan = replace(plan, values=plan.values | {"max_position_embeddings": longest})
    _log_plan(plan)
    made = [parent for parent in to.absolute().parents if not parent.exists()]
    try:
        to.absolute().parent.mkdir(parents=True, exist_ok=True)
        with partial_directory(to.absolute()) as partial:
            write_files(model, plan, tokenizer, end, partial, dtype)
            if like is not None:
                _keep_tokens(like, partial)
            difference = _gate(model, plan, tokenizer, partial, tolerance, dtype)
            if card is not None:
                (partial / "README.md").write_text(card(plan, difference), encoding="utf-8")
            partial.rename(to)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError.at("to", f"{str(to)!r} cannot be written ({reason}).") from error
    finally:
        for parent in made:
            with suppress(OSError):  # it holds the model
                parent.rmdir()
    return Exported(plan, difference)


def write_files(
    model: Decoder, plan: Plan, tokenizer: Tokenizer, end: int, directory: Path, dtype: str
) -> None:
    """Write everything but the card."""
    kind = plan.architecture.removesuffix("ForCausalLM").lower()
    bos = next(iter(tokenizer.encode("").ids), end)
    tokens = {"bos_token_id": bos, "eos_token_id": end}
    config = {
        "architectures": [plan.architecture],
        "model_type": kind,
        **plan.values,
        **tokens,
        "pad_token_id": None,
        "dtype": dtype,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", tokens | {"pad_token_id": end})
    token = tokenizer.id_to_token(end)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.id_to_token(bos),
        "eos_token": token,
        "pad_token": token,
        "model_max_length": plan.values["max_position_embeddings"],
        "model_input_names": ["input_ids", "attention_mask"],  # else token_type_ids come with them
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_weights(model, plan, directory, dtype)
    if not plan.is_native:
        for path in CODE.glob("*_unrope.py"):
            shutil.copyfile(path, directory / path.name)


def _keep_tokens(published: Path, directory: Path) -> None:
    """Replace the directory's token settings by those of a published model.

    Of its tokenizer_config.json, only keys that are known to describe tokens are kept: others, such
    as ``auto_map``, can name code.
    """
    theirs = _read_keys(published / "config.json")
    tokens = {key: theirs.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    path = directory / "config.json"
    _write_json(path, _read_keys(path) | tokens)
    # Without this file, transformers takes the tokens of config.json.
    (directory / "generation_config.json").unlink()
    for name in TOKEN_FILES:
        if (file := published_file(published, name)) is not None:
            if name.endswith(".json"):
                _read_keys(file)
            shutil.copyfile(file, directory / name)
    if (file := published_file(published, "tokenizer_config.json")) is not None:
        settings = {
            key: value
            for key, value in _read_keys(file).items()
            if key in TOKENIZER_KEYS or key.endswith(("_token", "_tokens", "_token_id"))
        }
    else:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | _named(tokens, directory)
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    _write_json(directory / "tokenizer_config.json", settings | inputs)


def published_file(directory: Path, name: str) -> Path | None:
    """Return the path of a published model's file, or None if it has none of this name.

    Raises:
        UserError: it is a link to a file elsewhere, which an export would publish.
    """
    path = directory / name
    if not path.is_file():
        return None
    model, target = directory.resolve(), path.resolve()
    # The hub's cache links the files of models--NAME/snapshots/REVISION to models--NAME/blobs.
    blobs = [model.parents[1] / "blobs"] if model.parent.name == "snapshots" else []
    if not any(target.is_relative_to(place) for place in (model, *blobs)):
        raise UserError.at(
            "checkpoint",
            f"{str(path)!r} is a link to {str(target)!r}, outside the model; replace it by a copy "
            "if that file belongs to the model, or remove it.",
        )
    return path


def _named(tokens: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Return the special tokens of the directory's tokenizer that have these ids, by their kind."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    words = {index: word for word, index in tokenizer.get_vocab().items()}
    named = {}
    for key, ids in tokens.items():
        first = next(iter(ids), None) if isinstance(ids, list) else ids
        if type(first) is int and first in words:
            named[key.removesuffix("_id")] = words[first]
    return named


def _read_keys(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds keys and values."""
    try:
        values = read_plain(path)
    except ValueError as error:
        raise UserError.at("", f"{str(path)!r} is damaged: {error}.") from error
    if not isinstance(values, dict):
        raise UserError.at("", f"{str(path)!r} is damaged: expected keys and values.")
    return values


def prompting(tokenizer: Tokenizer, end: int) -> Tokenizer:
    """Return the tokenizer with the token before every prompt that began every training sequence.

    It is the end-of-text token, unless the tokenizer adds one of its own.
    """
    if tokenizer.num_special_tokens_to_add(is_pair=False):
        return tokenizer
    copy, token = Tokenizer.from_str(tokenizer.to_str()), tokenizer.id_to_token(end)
    template = TemplateProcessing(single=[token, "$A"], special_tokens=[(token, end)])
    # The tokenizer's file has to hold it: transformers ignores add_bos_token beside it.
    before = [tokenizer.post_processor] if tokenizer.post_processor else []
    copy.post_processor = Sequence([*before, template])
    return copy


def _gate(
    model: Decoder,
    plan: Plan,
    tokenizer: Tokenizer,
    directory: Path,
    tolerance: float,
    dtype: str,
) -> float | None:
    if not transformers_is_here():
        log.warning(
            "transformers is not installed (pip install 'unrope[export]'): the export was not "
            "loaded and compared"
        )
        return None
    if dtype != "float32":
        round_weights(model, plan, DTYPES[dtype])
    text_ids = tokenizer.encode(TEXT).ids
    difference = largest_difference(model.eval(), directory, text_ids, custom=not plan.is_native)
    log.info("Loaded by transformers, logits differ by %.1e of the largest", difference)
    if model.layout.frequencies_follow_length:
        C = model.layout.training_length
        log.info(
            "Compared beyond %d tokens without a cache only: transformers keeps rotated keys", C
        )
    if not difference <= tolerance:
        raise UserError.at(
            "export",
            f"logits of the export as transformers loads it differ by {difference:.1e} of the "
            f"largest, more than tolerance={tolerance:g}; nothing was kept.",
        )
    return difference


def _log_plan(plan: Plan) -> None:
    log.info("%s", ", ".join(map(str, verdicts(plan.values, plan.architecture))))
    if plan.is_native:
        log.info("Written as %s", plan.architecture)
        return
    log.info("Written with its own code, because no architecture of transformers represents it:")
    for reason in dict.fromkeys(plan.refusals.values()):
        names = [n.removesuffix("ForCausalLM") for n, r in plan.refusals.items() if r == reason]
        log.info("%s: no place for %s", ", ".join(names), reason)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
