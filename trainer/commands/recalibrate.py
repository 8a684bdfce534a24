"""``python -m trainer recalibrate MODEL text=FILES minutes=20``: a trained model without RoPE."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.hydra.command import Command
from trainer.commands.train import read_run
from trainer.common.errors import UserError, raise_all
from trainer.common.fields import OptionalText, Positive, configuration
from trainer.common.words import override_value

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.runs.config import RunConfig


@configuration
class RecalibrateKeys:
    """Keys of this command; the others are a run's."""

    minutes: Positive = 20.0
    """Minutes of recalibration and evaluation together; preparing text and exporting add to
    them."""
    text: OptionalText | list[str] = None
    """Text files, directories or globs to recalibrate on, as data.files; null: another data group,
    such as data=stdlib_docs."""
    to: OptionalText = None
    """Directory of the export, new or empty; null: export in the run directory."""


ROOT = "recalibrate"


@dataclass(frozen=True)
class Request:
    """A recalibration of ``model``: the run and its evaluation, the chosen keys, and the export."""

    config: RunConfig
    values: dict[str, Any]
    model: str
    to: Path


def completed(composed: Composed) -> tuple[str, dict[str, Any], list[str]]:
    """Return the model, the keys that are chosen for it, and all words of the run.

    Raises:
        UserError: the model or the text is missing, or the minutes do not suffice.
    """
    keys, problems, _ = composed.split(RecalibrateKeys)
    raise_all([*composed.problems, *problems])
    if len(composed.verbatim) != 1:
        raise UserError(f"MODEL: expected one model, got {len(composed.verbatim)}")
    (model,) = composed.verbatim
    if keys.text is None and composed.choices["data"] == "files":
        raise UserError("text: expected files to recalibrate on, or data=stdlib_docs, got null")
    from trainer.workflows.recalibrate import chosen, source_of

    stem = re.sub(r"[^\w.+-]", "-", Path(model).absolute().name).lstrip("-.+")
    words: dict[str, Any] = {"name": f"{stem}-drope", f"model.{source_of(model)}": model}
    if keys.text:
        words["data.files"] = [keys.text] if isinstance(keys.text, str) else keys.text
    given = {key: composed.value(key) for key in composed.named_keys}
    run_dir = composed.values["run_dir"]
    if not {"name", "run_dir"} & given.keys():
        run_dir = f"runs/{words['name']}"
    overwrite = composed.values["overwrite"] is True
    values = chosen(model, keys.minutes, given, Path(run_dir), overwrite)
    words |= values
    own = [f"{key}={override_value(value)}" for key, value in words.items() if key not in given]
    return model, values, [*own, *composed.words]


def read(composed: Composed) -> Request:
    """Return the checked recalibration, with everything chosen that the words leave open."""
    model, values, words = completed(composed)
    from trainer.commands.hydra.composing import compose_words

    keys, _, run = compose_words(words, ROOT, composed.files).split(RecalibrateKeys)
    config = read_run(run)
    return Request(config, values, model, Path(keys.to or Path(config.run_dir, "export")))


def words_of(composed: Composed) -> list[str]:
    """Return all words of the run, for ``--cfg job``."""
    return completed(composed)[2]


def execute(request: Request) -> None:
    """Show the chosen keys, then recalibrate, evaluate and export."""
    from trainer.commands.console import print_report
    from trainer.workflows.recalibrate import recalibrate

    for key, value in request.values.items():
        print(f"{key}={override_value(value)}")
    report, place = recalibrate(request.config, request.values, request.model, request.to)
    print_report(report, str(place), existing=False)
    print(f"For transformers: {request.to}")


HELP = """
python -m trainer recalibrate MODEL text=FILES [minutes=20] [name=NAME] [KEY=VALUE ...]

Drops the positional encoding of a trained model and recalibrates it on the text, in the minutes
given. MODEL is a directory or hub id of published weights, or a run of this program.
Length, batch, steps, learning rate, warm-up and QK-norm follow from the model, the measured speed
and the time (docs/pretrained.md); a word for any key of a run overrides one. Then the model is
measured beside what it was, and exported for transformers. Interrupted, the same command resumes.
"""
COMMAND = Command(
    ROOT,
    HELP,
    read,
    execute,
    single="run it for each model.",
    bare=True,
    completed=words_of,
    alone=True,
)
