"""Pieces are kept under all that they depend on."""

from __future__ import annotations

import pytest

from trainer.errors import UserError
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
def test_a_damaged_file_is_named(tmp_path, content):
    store = Store(tmp_path)
    store.get("cell", {"a": 1}, lambda: 2)
    store.path("cell", {"a": 1}).write_bytes(content)
    with pytest.raises(UserError, match=r"cell-.*\.json' is damaged; remove it"):
        store.get("cell", {"a": 1}, lambda: 2)
