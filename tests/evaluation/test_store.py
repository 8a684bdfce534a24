"""Pieces are kept under all that they depend on."""

from __future__ import annotations

import json

import pytest

from trainer.common.errors import UserError
from trainer.evaluation.store import Store


def test_a_piece_is_made_once_for_its_key(tmp_path):
    store = Store(tmp_path)
    made = []

    def make():
        made.append(1)
        return {"x": [1, 2.5, None]}

    assert store.get("cell", {"a": 1}, make) == {"x": [1, 2.5, None]}
    assert store.get("cell", {"a": 1}, make) == {"x": [1, 2.5, None]}
    assert store.has("cell", {"a": 1})
    assert not store.has("cell", {"a": 2})
    assert not store.has("fit", {"a": 1})
    assert len(made) == 1


def test_the_order_of_a_key_does_not_matter(tmp_path):
    store = Store(tmp_path)
    assert store.path("cell", {"a": 1, "b": 2}) == store.path("cell", {"b": 2, "a": 1})


def test_nothing_is_kept_of_what_fails(tmp_path):
    def fail():
        raise RuntimeError

    with pytest.raises(RuntimeError):
        Store(tmp_path).get("cell", {}, fail)
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_json_lacks_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        Store(tmp_path).get("cell", {}, lambda: float("nan"))


@pytest.mark.parametrize("content", [b"{", b"{}", b"[]", b"\xff"])
def test_what_a_damaged_file_held_is_made_again(tmp_path, content, caplog):
    store, path = Store(tmp_path), Store(tmp_path).path("cell", {"a": 1})
    store.get("cell", {"a": 1}, lambda: 2)
    path.write_bytes(content)
    assert not store.has("cell", {"a": 1})
    assert store.get("cell", {"a": 1}, lambda: 3) == 3
    assert store.get("cell", {"a": 1}, lambda: 4) == 3
    said = f"{path} is damaged; what it held is measured again"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_what_is_not_what_was_written_is_made_again(tmp_path, caplog):
    store, path = Store(tmp_path), Store(tmp_path).path("cell", {})
    store.get("cell", {}, lambda: {"scores": [1.0, 0.5]})
    path.write_text(path.read_text().replace("0.5", "1.0"))
    assert not store.has("cell", {})
    assert len(caplog.messages) == 1
    assert store.get("cell", {}, lambda: 3) == 3


def test_pieces_have_a_format_and_those_of_before_have_the_first(tmp_path):
    store = Store(tmp_path)
    store.get("cell", {"a": 1}, lambda: 2)
    path = store.path("cell", {"a": 1})
    piece = json.loads(path.read_bytes())
    assert piece.pop("format") == 1
    del piece["sha256"]
    path.write_text(json.dumps(piece))
    assert store.get("cell", {"a": 1}, lambda: 3) == 2
    path.write_text(json.dumps(piece | {"format": 2}))
    with pytest.raises(UserError, match=r"output: .* has format 2, .*choose another output"):
        store.get("cell", {"a": 1}, lambda: 3)
