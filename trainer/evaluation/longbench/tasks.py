"""LongBench's English tasks: selection and source of the questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from trainer.common.errors import Problem, UserError, did_you_mean
from trainer.common.fields import Count, Natural, OptionalText, configuration
from trainer.evaluation.longbench.kinds import FOURTEEN, KINDS
from trainer.evaluation.longbench.metrics import classification
from trainer.evaluation.longbench.rows import KEY, Row, read_rows, root
from trainer.evaluation.longbench.task import LongBenchTask
from trainer.evaluation.prompts import Task


@configuration
class LongBenchSettings:
    """Settings of longbench."""

    directory: OptionalText = None
    """Directory of TASK.jsonl; null: the archive that the hub distributes."""
    tasks: list[str] = field(default_factory=lambda: list(FOURTEEN))
    """Tasks of LongBench to ask."""
    limit: Count | None = None
    """Questions of a task; null: all, 150 to 500."""
    seed: Natural = 42
    """Seed of the choice of questions."""

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = [
            Problem(
                "evaluation.longbench.tasks", f"unknown task {name!r}.", did_you_mean(name, KINDS)
            )
            for name in self.tasks
            if name not in KINDS
        ]
        if not self.tasks:
            found.append(
                Problem(
                    "evaluation.longbench.tasks", "expected one or more, for instance [qasper,lcc]."
                )
            )
        if self.directory is not None and not Path(self.directory).is_dir():
            found.append(Problem(KEY, f"there is no directory {self.directory!r}."))
        return found


def longbench_tasks(
    settings: LongBenchSettings, tokenizer: Tokenizer, bos: int | None, training_length: int
) -> tuple[list[Task], list[str]]:
    """Return the tasks whose files exist, and a sentence for each other one.

    Args:
        settings: valid settings.
        tokenizer: the model's; lengths are counted in its tokens.
        bos: first token of every prompt, or None.
        training_length: C in tokens, the unit of text lengths in reports.

    Raises:
        UserError: no file exists, the archive is unavailable, or a line is malformed.
    """
    tasks: list[Task] = []
    notes: list[str] = []
    files = root(settings.directory)
    for name in settings.tasks:
        file = files / f"{name}.jsonl"
        if not file.is_file():
            notes.append(f"LongBench's {name} was not run: there is no file {str(file)!r}.")
            continue
        rows = read_rows(file, Row, KEY)
        if KINDS[name].metric is classification and not rows[0].all_classes:
            raise UserError.at(
                KEY, f"{str(file)!r} line 1: all_classes: expected names of classes."
            )
        chosen = _chosen(rows, settings, name)
        of_model = tokenizer, bos, training_length
        tasks.append(LongBenchTask(f"longbench_{name}", KINDS[name], chosen, *of_model))
    if not tasks:
        raise UserError.at(
            KEY, f"{str(files)!r} holds none of the tasks' files, such as {name}.jsonl."
        )
    return tasks, notes


def _chosen(rows: Sequence[Row], settings: LongBenchSettings, task: str) -> Sequence[Row]:
    """Return a random sample in the file's order."""
    if settings.limit is None or settings.limit >= len(rows):
        return rows
    drawn = Random(f"{settings.seed} {task}").sample(range(len(rows)), settings.limit)
    return [rows[index] for index in sorted(drawn)]
