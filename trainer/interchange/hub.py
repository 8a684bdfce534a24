"""Access to the Hugging Face hub, only if it is reachable."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies

from trainer.common.errors import Problem

WAIT = 5.0
"""Seconds for a connection, of which nothing is read."""


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
        return f"no network: {error.strerror or error}"
    return None


def cached_or_downloaded(download: Callable[..., str], *what: str, **options: str) -> str:
    """Return the path of a file from ``hf_hub_download``, from the local cache without asking the
    hub.

    Raises:
        OSError: the file is not cached and the hub is unreachable; or as the client raises.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return download(*what, local_files_only=True, **options)
    except LocalEntryNotFoundError:
        if reason := no_hub():
            raise OSError(reason) from None
        return download(*what, **options)


@dataclass(frozen=True)
class MissingWeights(Problem):
    """Published weights that are not on this machine, but can be had."""

    is_published: bool = False
    """Whether they are named by their place on the hub."""
