"""Files of a published model, in a directory or on the Hugging Face hub: configuration, tokenizer,
and settings of its tokens.

A run keeps the texts of the files about tokens, chat template and generation, and an export writes
them. Only files that are listed here are read and written: others can name code.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.common.files import expecting

FILES = "*.json", "model*.safetensors", "chat_template.jinja", "README.md"
"""Files that are downloaded from the hub."""
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
COPIED = "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
"""Files that an export contains as they are."""
TOKEN_FILES = (CONFIG, TOKENIZER_CONFIG, GENERATION_CONFIG, *COPIED)
TOKEN_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
"""Keys of config.json that are kept."""
OF_TOKENIZER = (
    *("tokenizer_class", "model_max_length", "added_tokens_decoder", "add_prefix_space"),
    *("add_bos_token", "add_eos_token", "legacy", "trim_offsets", "auto_map", "model_input_names"),
)
"""Keys of tokenizer_config.json that an export does not take: tokenizer.json has them, or they are
of the published class and length."""


def load_quietly(directory: Path, **options: Any) -> Any:
    """Return what ``AutoModelForCausalLM`` loads from a directory in float32, without its bar; from
    safetensors, and without running code of the model unless ``options`` trust it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    safe = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype="float32", **safe | options)
    finally:
        if had_bars:
            logging.enable_progress_bar()


def find_pretrained(name: str) -> Path:
    """Return the directory of a model; a hub id is downloaded, or found in the cache."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.count("/") > 1:
        raise UserError(f"{name!r} is no directory, and no OWNER/NAME of the hub")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=[*FILES]))


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json``; raise a UserError if transformers would read other weights too."""
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{directory}: merge the adapter of peft into its base (merge_and_unload)")
    path = directory / CONFIG
    with expecting("the configuration of a model in JSON", path):
        values: dict[str, Any] = {**json.loads(path.read_text("utf-8"))}
    if values.get("transformers_weights") is not None:
        raise UserError(f"{path}: transformers_weights is not supported")
    return values


def tokenizer_from_file(path: Path | str) -> Tokenizer:
    """Load the tokenizer with truncation and padding disabled."""
    content = Path(path).read_bytes()
    with expecting("a tokenizer", Path(path)):
        tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """Read ``tokenizer.json``, or return None if there is none."""
    path = directory / TOKENIZER
    return tokenizer_from_file(path) if path.is_file() else None


def own_first_token(tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that the tokenizer puts before every text, such as ``<s>``, or
    None. Embedding models only append one, their end of text."""
    encoding = tokenizer.encode("a")
    if 0 in encoding.sequence_ids and encoding.sequence_ids[0] is None:  # None: no part of the text
        return encoding.ids[0]
    return None


def read_token_files(directory: Path) -> dict[str, str]:
    """Return the texts of a published model's files about its tokens, by their names.

    Of config.json, only :data:`TOKEN_IDS`, which may stand in its ``text_config``.
    """
    paths = {name: directory / name for name in TOKEN_FILES}
    files = {name: path.read_text("utf-8") for name, path in paths.items() if path.is_file()}
    if CONFIG in files:
        values = json.loads(files[CONFIG])
        named = {key: value for key, value in values.items() if value is not None}
        values = (values.get("text_config") or {}) | named
        files[CONFIG] = json.dumps({key: values[key] for key in TOKEN_IDS if key in values})
    return files


def settings(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the values of a file, or none if it is not there."""
    values: dict[str, Any] = json.loads(files.get(name, "{}"))
    return values
