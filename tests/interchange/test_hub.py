"""Whether the hub can be asked is known before its client tries for half a minute."""

import socket

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

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


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_an_address_without_a_port_has_that_of_its_scheme(monkeypatch, scheme, port):
    asked = []

    def connect(address, timeout):
        asked.append((address, timeout))
        return socket.socket()

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"{scheme}://hub.example")
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert hub.no_hub() is None
    assert asked == [(("hub.example", port), hub.WAIT)]


def test_what_is_here_is_taken_and_else_the_hub_is_asked_where_it_can_be(monkeypatch):
    calls = []

    def download(*what, local_files_only=False, **options):
        calls.append((what, local_files_only, options))
        if local_files_only and what[0] != "here":
            raise LocalEntryNotFoundError("not here")
        return "path"

    def ask(name):
        calls.clear()
        return hub.cached_or_downloaded(download, name, "file", repo_type="dataset")

    kind = {"repo_type": "dataset"}
    monkeypatch.setattr(hub, "no_hub", lambda: None)
    assert ask("here") == "path"
    assert calls == [(("here", "file"), True, kind)]
    assert ask("there") == "path"
    assert calls == [(("there", "file"), True, kind), (("there", "file"), False, kind)]
    monkeypatch.setattr(hub, "no_hub", lambda: "no network")
    with pytest.raises(OSError, match=r"^no network$"):
        ask("there")
    assert len(calls) == 1
