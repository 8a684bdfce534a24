"""The configuration of a run as it was written: read, and not composed anew."""

from __future__ import annotations

from typing import Any

from trainer.common.errors import UserError
from trainer.common.validation import checked
from trainer.runs.config import RunConfig

CHANGED_SINCE = ("evaluation", "monitor", "logger")
"""Groups that earlier versions had in other forms, and that say nothing of what was trained."""


def saved_config(values: dict[str, Any], key: str, what: str) -> RunConfig:
    """Return the configuration that a run was written with, also by another version or with other
    plugins: keys that are not known are ignored.

    Args:
        values: what was written.
        key: the configuration key that errors name.
        what: names the file in errors.

    Raises:
        UserError: it is damaged.
    """
    config, _, wrong = checked(RunConfig, values)
    damaged = [problem for problem in wrong if problem.key.split(".")[0] not in CHANGED_SINCE]
    if problems := [*damaged, *config.trainer.problems(), *config.data.problems()]:
        raise UserError.at(key, f"{what}: {problems[0]}")
    return config
