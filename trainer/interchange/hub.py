"""Whether the Hugging Face hub can be asked at all."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

WAIT = 5.0
"""Seconds for a connection, of which nothing is read."""


def no_hub() -> str | None:
    """Why the hub cannot be reached, or None. Known at once, where its client would try again for
    half a minute; a proxy is trusted to reach it."""
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
