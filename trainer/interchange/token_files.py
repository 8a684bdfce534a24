"""Files of a published model about its tokens: special tokens, chat template, generation settings.

A run keeps their texts, and an export writes them. Only files and keys that are listed here are
read and written: others, such as ``auto_map``, can name code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainer.common.errors import UserError, os_reason
from trainer.common.formats import read_content

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
COPIED = "special_tokens_map.json", GENERATION_CONFIG, "chat_template.jinja", "chat_template.json"
"""Files that an export contains as they are."""
TOKEN_FILES = (CONFIG, TOKENIZER_CONFIG, *COPIED)
SETTINGS = CONFIG, TOKENIZER_CONFIG, GENERATION_CONFIG
"""Files that name the tokens at which texts and answers end."""
TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
"""Keys of config.json that are kept."""
OF_TOKENIZER = (
    *("tokenizer_class", "model_max_length", "added_tokens_decoder", "add_prefix_space"),
    *("add_bos_token", "add_eos_token", "legacy", "trim_offsets"),
)
"""Keys of tokenizer_config.json that belong to the published tokenizer.json.

A run's own file differs: it has the first token of every training sequence. transformers would
replace that by ``add_bos_token``.
"""
TOKENIZER_KEYS = (
    *(*OF_TOKENIZER, "chat_template", "errors", "padding_side", "truncation_side"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens"),
    "use_default_system_prompt",
)
"""Keys of tokenizer_config.json that are kept, beside those of special tokens."""


def read_token_files(directory: Path, *, to_publish: bool = True) -> dict[str, str]:
    """Return the texts of a published model's files about its tokens, by their names.

    Of config.json, only :data:`TOKEN_IDS`. ``to_publish``: whether an export may contain them.

    Raises:
        UserError: a file is damaged, or, if they are to be published, a link to a file elsewhere.
    """
    if to_publish:
        paths = {name: published_file(directory, name) for name in TOKEN_FILES}
    else:
        paths = {name: directory / name for name in SETTINGS if (directory / name).is_file()}
    files = {name: _text(path) for name, path in paths.items() if path is not None}
    if CONFIG in files:
        values = json.loads(files[CONFIG])
        files[CONFIG] = json.dumps({key: values[key] for key in TOKEN_IDS if key in values})
    return files


def _text(path: Path) -> str:
    """Read a file; JSON must hold keys and values."""
    try:
        text = read_content(path).decode("utf-8")
        if path.suffix == ".json":
            _keys(text)
    except OSError as error:
        raise UserError.at("", f"{str(path)!r} cannot be read ({os_reason(error)}).") from error
    except ValueError as error:
        raise UserError.at("", f"{str(path)!r} is damaged: {error}.") from error
    return text


def _keys(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("expected keys and values")
    return values


def eos_ids(files: Mapping[str, str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that the files call the end of a text, without repetition.

    ``files``: as :func:`read_token_files` returns them.
    """
    word = _settings(files, TOKENIZER_CONFIG).get("eos_token")
    word = word.get("content") if isinstance(word, dict) else word
    first = tokenizer.token_to_id(word) if isinstance(word, str) else None
    ids = [_listed(_settings(files, name), tokenizer) for name in (CONFIG, GENERATION_CONFIG)]
    return tuple(dict.fromkeys([*([] if first is None else [first]), *chain(*ids)]))


def stop_ids(files: Mapping[str, str], tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids at which the model ends an answer, as transformers reads them.

    Empty if the files name none. ``files``: as :func:`read_token_files` returns them.
    """
    for name in (GENERATION_CONFIG, CONFIG):
        if ids := _listed(_settings(files, name), tokenizer):
            return frozenset(ids)
    return frozenset()


def _settings(files: Mapping[str, str], name: str) -> dict[str, Any]:
    return _keys(files[name]) if name in files else {}


def _listed(settings: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the ids under ``eos_token_id``, a number or a list, that the tokenizer has."""
    ids = settings.get("eos_token_id")
    known = (i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and i >= 0)
    return [i for i in known if tokenizer.id_to_token(i) is not None]


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


def write_token_files(files: Mapping[str, str], directory: Path, *, as_published: bool) -> None:
    """Replace the token settings of an exported model by those of a published one.

    ``files``: as :func:`read_token_files` returns them. ``as_published``: whether the export has
    the published tokenizer and length; otherwise settings that depend on these stay as written.

    Raises:
        UserError: the texts are damaged.
    """
    try:
        settings = {n: _keys(text) for n, text in files.items() if n.endswith(".json")}
    except ValueError as error:
        raise UserError.at("checkpoint", f"its token_files are damaged: {error}.") from error
    config, tokens = _read(directory / CONFIG), settings.get(CONFIG, {})
    write_json(directory / CONFIG, config | {key: tokens.get(key) for key in TOKEN_IDS})
    # Without this file, transformers takes the tokens of config.json.
    (directory / GENERATION_CONFIG).unlink()
    for name in COPIED:
        if name in files:
            (directory / name).write_bytes(files[name].encode())
    if GENERATION_CONFIG in settings and not as_published:
        others = {k: v for k, v in settings[GENERATION_CONFIG].items() if k != "max_length"}
        write_json(directory / GENERATION_CONFIG, others)
    path = directory / TOKENIZER_CONFIG
    written = {} if as_published else _read(path)
    if TOKENIZER_CONFIG in settings:
        published = settings[TOKENIZER_CONFIG]
    else:
        published = {"tokenizer_class": "PreTrainedTokenizerFast"} | _named(tokens, directory)
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    names = {key: value for key, value in published.items() if _is_kept(key, as_published)}
    write_json(path, written | names | inputs)


def _is_kept(key: str, as_published: bool) -> bool:
    """Whether an export has this key of a published tokenizer_config.json."""
    if not as_published and key in OF_TOKENIZER:
        return False
    return key in TOKENIZER_KEYS or key.endswith(("_token", "_tokens", "_token_id"))


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


def _read(path: Path) -> dict[str, Any]:
    """Read a file of the export."""
    return _keys(path.read_text(encoding="utf-8"))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write keys and values, indented."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
