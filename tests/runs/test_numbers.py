"""Which numbers no computation goes on with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from trainer.runs.numbers import number_problems


@dataclass
class Inner:
    vocab_size: int = 1 << 24
    seed: int = 1 << 62


@dataclass
class Group:
    """Everything in it is just small enough."""

    seed: int = 0
    threads: int = 1024
    lr: float = 1000.0
    trials: int = 1_000_000
    lengths: list[float] = field(default_factory=lambda: [1, 1e6, -1e6])
    any_int: int = 1 << 62
    any_float: float = 1e300
    flag: bool = True
    none: Any = None
    inner: Inner = field(default_factory=Inner)
    controls: dict[str, Any] = field(default_factory=lambda: {"a": {"seed": -1}})


def test_what_is_just_small_enough_is_no_problem():
    assert list(number_problems(Group())) == []


WHOLE = "expected a whole number from 0 to 2^62"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": -1}, f"seed: {WHOLE}, got -1."),
        ({"seed": (1 << 62) + 1}, f"seed: {WHOLE}, got {(1 << 62) + 1}."),
        ({"inner": Inner(seed=-2)}, f"inner.seed: {WHOLE}, got -2."),
        ({"threads": 1025}, "threads: expected at most 1,024, got 1025."),
        ({"trials": -1_000_001}, "trials: expected at most 1,000,000, got -1000001."),
        (
            {"inner": Inner((1 << 24) + 1)},
            "inner.vocab_size: expected at most 16,777,216, got 16777217.",
        ),
        ({"lengths": [1, 2e6]}, "lengths[1]: expected at most 1,000,000, got 2000000.0."),
        (
            {"any_int": (1 << 62) + 1},
            f"any_int: expected at most {1 << 62:,}, got {(1 << 62) + 1}.",
        ),
        ({"any_float": math.nan}, "any_float: expected a finite number, got nan."),
        ({"none": {"a": [(0, -math.inf)]}}, "none.a[0][1]: expected a finite number, got -inf."),
    ],
)  # fmt: skip
def test_a_number_is_named_by_its_place(changes, said):
    assert list(number_problems(Group(**changes))) == [said]
    (deeper,) = number_problems(Group(**changes), "top")
    assert deeper == f"top.{said}"
