"""Published models: in a directory, or on the Hugging Face hub, if it is reachable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainer.common.errors import UserError

FILES = "*.json", "model*.safetensors", "chat_template.jinja", "README.md"


def cached_or_downloaded(download: Callable[..., str], *arguments: str, **options: Any) -> str:
    """Return the path of a file or snapshot, from the local cache without asking the hub.

    Raises:
        OSError: it is not cached, and the hub is unreachable or has no such file.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return download(*arguments, local_files_only=True, **options)
    except LocalEntryNotFoundError:
        return download(*arguments, **options)


def find_pretrained(name: str) -> Path:
    """Return the directory that ``model.from_pretrained`` names; a hub id is downloaded once.

    Raises:
        UserError: there is none.
    """
    path = Path(name).expanduser()
    if os.path.isdir(path):  # noqa: PTH112  also False for a name that is too long
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        # Without a network an interrupted download is found too; reading it fails.
        return Path(cached_or_downloaded(snapshot_download, name, allow_patterns=[*FILES]))
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise UserError(
            f"model.from_pretrained: no directory {name!r}, and no such model from the hub: {error}"
        ) from error


def tokenizer_from_file(path: str) -> Tokenizer:
    """Load the tokenizer with truncation and padding disabled."""
    tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
