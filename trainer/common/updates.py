"""Optimizer updates: their numbers as users give them, a count or a share, and a fresh start."""

from numbers import Integral
from typing import Any

from torch.optim import Optimizer

from trainer.common.errors import UserError


def is_share(number: Any) -> bool:
    """Whether a number is a share of all updates."""
    return isinstance(number, float) and 0 < number < 1


def check_updates(name: str, number: Any) -> None:
    """Raise a UserError unless ``number`` is a number of updates or a share of them."""
    is_integer = isinstance(number, Integral) and not isinstance(number, bool)
    is_count = is_integer and int(number) >= 0
    if not is_count and not is_share(number):
        raise UserError(
            f"{name}: expected a number of updates, such as 500, or a share of them between 0 and "
            f"1, such as 0.85, got {number!r}"
        )


def forget_moments(optimizer: Optimizer) -> None:
    """Clear the state of an optimizer, its counts of updates included."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop("step", None)  # where DeepSpeed's and apex's fused Adam count updates
