"""The configuration of a run as it was written: read, and not composed anew."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from trainer.common.errors import UserError
from trainer.formats import adapter, first_problem
from trainer.runs.config import RunConfig
from trainer.runs.numbers import number_problems

CHANGED_SINCE = ("evaluation", "monitor", "logger")
"""Groups that earlier versions had in other forms, and that say nothing of what was trained."""


def saved_config(values: dict[str, Any], what: str) -> RunConfig:
    """The configuration that a run was written with, also one of other plugins or another version;
    ``what``: how an error begins.

    Raises:
        UserError: it is damaged.
    """
    try:
        config = adapter(RunConfig).validate_python(values)
    except ValidationError as error:
        if not {e["loc"][0] for e in error.errors()} <= {*CHANGED_SINCE}:
            raise UserError.at(what, f"{first_problem(error)}.") from error
        rest = {key: value for key, value in values.items() if key not in CHANGED_SINCE}
        config = adapter(RunConfig).validate_python(rest)
    numbers = [*number_problems(config), *config.trainer.problems(), *config.data.problems()]
    if numbers:
        raise UserError.at(what, f"{numbers[0]}")
    return config
