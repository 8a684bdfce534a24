"""Whether the hub can be asked is known before its client tries for half a minute."""

import socket

import pytest

from trainer.interchange import hub


@pytest.fixture
def at(monkeypatch):
    """A function that moves the hub to a port of this machine, without a proxy before it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)

    def move(port):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")

    return move


def test_a_hub_that_listens_is_asked_and_one_that_does_not_is_not(at):
    with socket.create_server(("127.0.0.1", 0)) as server:
        at(server.getsockname()[1])
        assert hub.no_hub() is None
    assert hub.no_hub() == "no network: Connection refused"


def test_a_proxy_is_trusted_and_a_setting_obeyed(at, monkeypatch):
    at(1)
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy"})
    assert hub.no_hub() is None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.no_hub() == "HF_HUB_OFFLINE is set"
