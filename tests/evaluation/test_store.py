"""Keys and stored results."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.conftest import held_out
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.perplexity import perplexity
from trainer.evaluation.scoring import Prompt
from trainer.evaluation.store import Store, fingerprint
from trainer.evaluation.task import PromptTask, TaskInputs
from trainer.positional.encodings import by_name


@dataclass(frozen=True)
class Asked:
    first: int = 1
    second: str = "a"
    inner: dict[str, Any] = field(default_factory=dict)


def around(value, answers=None):
    """Return a function that reads variables of this one."""

    def inner():
        return value, answers

    return inner


def defaulting(value):
    """Return functions that have a value as the default of an argument."""

    def by_place(text, answers=None, limit=value):
        return limit

    def by_name(text, answers=None, *, limit=value):
        return limit

    return by_place, by_name


def at_least(threshold):
    """Return a decorator that hides what it adds behind the name of the decorated function."""

    def decorate(score):
        @wraps(score)
        def is_enough(text, answers):
            return float(score(text, answers) >= threshold)

        return is_enough

    return decorate


class Scorer:
    def __init__(self, weight):
        self.weight = weight

    def score(self, text, answers):
        return self.weight


def recursive():
    def inner():
        return inner

    return inner


A = np.arange(6)
DIFFERENT = [
    (), ("",), (0,), (0.0,), (False,), (None,), ("0",), (12, 3), (1, 23), ("12", "3"), ((12,), 3),
    ((12, 3),), ([],), ({},), ({"a": 1},), ({"a": 2},), ({"b": 1},), (("a", 1),), (A,),
    (A.reshape(2, 3),), (A.astype(np.int32),), (A + 1,), (A[:3], A[3:]), (A.tolist(),), (Asked(),),
    (Asked(2),), (Asked(second="b"),), (Asked(inner={"x": Asked()}),),
    (Asked(inner={"x": Asked(2)}),), (Asked,), (held_out,), (partial(held_out, 1),),
    (partial(held_out, 2),), (partial(held_out, ids=2),), (around(1),), (around(2),),
    (around(held_out),), (recursive(),), (around(around(1)),), (around(around(2)),),
    (torch.no_grad()(around(3)),), (torch.no_grad()(around(4)),), (around(3),),
    *((function,) for value in (1, 2) for function in defaulting(value)),
    *((at_least(limit)(held_out),) for limit in (0.5, 0.9)),
    (Scorer(1).score,), (Scorer(2).score,), (around({1, 2}),), (around({1, 3}),), (around({12}),),
    (around(re.compile("a")),), (around(re.compile("b")),), (around(re.compile("a", re.DOTALL)),),
]  # fmt: skip


def test_only_equal_values_have_equal_fingerprints():
    prints = [fingerprint(*parts) for parts in DIFFERENT]
    assert len(set(prints)) == len(prints)
    assert prints == [fingerprint(*parts) for parts in DIFFERENT]
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint(A[::2]) == fingerprint(A[::2].copy())
    with pytest.raises(TypeError, match="got <object"):
        fingerprint({"a": [object()]})


def test_a_perplexity_depends_on_all_that_it_reads():
    ids = np.arange(8)

    def print_of(length=4, ids=ids, first_token=0, last=2):
        text = HeldOut(SimpleNamespace(first_token=first_token), held_out(ids), (), None)
        return perplexity(TaskInputs(text, [8, length], last, 1, 1))[1].fingerprint

    for other in ({"ids": ids + 1}, {"first_token": 1}, {"last": 3}):
        assert print_of(**other) != print_of()
    # Each cell reads the last tokens of its own length.
    longer = ids + (ids < 4)
    assert print_of(4, longer) == print_of(4)
    assert print_of(8, longer) != print_of(8)


def test_a_task_of_prompts_depends_on_every_field_of_them():
    prompt = Prompt((1, 2, 3), ("a", "b"), 4, depth=0.5, group=1, label="x")
    others = {
        "tokens": (1, 2, 4),
        "answers": ("a,b",),
        "new_tokens": 5,
        "depth": 0.25,
        "group": 2,
        "label": "y",
    }

    def print_of(asked, **options):
        return PromptTask("task", None, lambda length: asked, None, **options).at(99).fingerprint

    before = print_of([prompt])
    assert {item.name for item in fields(prompt)} == {*others}
    for name, value in others.items():
        assert print_of([replace(prompt, **{name: value})]) != before
    assert print_of([prompt, prompt]) != before
    assert print_of([prompt], never_first=(7,)) != before


def test_values_are_kept_by_key(tmp_path, monkeypatch):
    store = Store(tmp_path, ranks=2)
    # Another process adds a value while this one waits.
    other = Store(tmp_path, rank=1, ranks=2)
    monkeypatch.setattr(
        "trainer.evaluation.store.time.sleep", lambda _: other.add("a", {"x": (1, 2.5)})
    )
    assert store.wait("a") == [{"x": [1, 2.5]}]
    store.add("a", float("inf"))
    assert store.values("a") == [float("inf"), {"x": [1, 2.5]}]
    assert store.values("b") == []
    # Nobody else could add what one process lacks.
    with pytest.raises(RuntimeError, match="b: incomplete"):
        Store(tmp_path).wait("b")


@pytest.mark.parametrize("position", range(0, 90, 3))
def test_a_damaged_line_is_no_value_and_its_file_is_named(tmp_path, caplog, position):
    store = Store(tmp_path)
    values = [{"batch": i, "values": [[0, "a", 0.125 * i]]} for i in range(2)]
    for value in values:
        store.add("a", value)
    (path,) = tmp_path.glob("*/0.*")
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        assert all(value in values for value in store.values("a"))
        assert len(store.values("a")) < 2
    assert [record.args[0] for record in caplog.records] == [path]
    store.add("a", 3)
    assert store.values("a")[-1] == 3


def test_a_line_that_was_cut_short_spoils_none(tmp_path, caplog):
    store = Store(tmp_path)
    for value in (1, 2):
        store.add("a", value)
    (path,) = tmp_path.glob("*/0.*")
    path.write_bytes(path.read_bytes()[:-2])
    assert store.values("a") == [1]
    assert not caplog.records  # it may be being written
    store.add("a", 3)
    assert store.values("a") == [1, 3]


def test_what_is_not_compared_changes_no_key():
    """Encodings of equal frequencies are one, whatever they were made by."""
    spectrum = by_name("rope", 8, 32)
    assert spectrum.origin
    assert fingerprint(spectrum) == fingerprint(replace(spectrum, origin=()))
