"""Kinds of evaluation, which the key ``kind`` of an option of the group names: what each is asked
for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainer.common.errors import Problem, did_you_mean

LENGTHS = "lengths"
KINDS = (LENGTHS, "multiple_choice", "harness")
OF_A_RUN = (LENGTHS,)
"""Kinds that a run can end with."""


def request_schema(kind: str) -> type[Any]:
    """The dataclass that holds a request of that kind."""
    from trainer.workflows import evaluation_request as requests

    return {
        LENGTHS: requests.EvaluationRequest,
        "multiple_choice": requests.MultipleChoiceRequest,
        "harness": requests.HarnessRequest,
    }[kind]


def kind_problem(name: str, kind: Any, kinds: Iterable[str]) -> Problem:
    """What is wrong with an option whose kind is none of ``kinds``."""
    if kind is None:
        return Problem(
            "evaluation",
            f"{name!r} does not say what it is; begin its defaults list with an option that "
            f"it changes, such as extension, or give it a kind: {', '.join(kinds)}.",
        )
    if kind in KINDS:
        return Problem(
            "evaluation", f"{name!r} is for the evaluate command, not for the end of a run."
        )
    return Problem(
        "evaluation.kind", f"{name!r} is of kind {kind!r}.", did_you_mean(str(kind), kinds)
    )
