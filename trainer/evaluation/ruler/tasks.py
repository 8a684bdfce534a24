"""The thirteen tasks with the benchmark's settings (its ``synthetic.yaml``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated

from pydantic import Field
from tokenizers import Tokenizer

from trainer.common.errors import Problem, did_you_mean
from trainer.common.fields import Count, Natural, OptionalText, configuration
from trainer.evaluation.prompts import Task
from trainer.evaluation.ruler.essay import Essay
from trainer.evaluation.ruler.niah import Needles
from trainer.evaluation.ruler.question import Kind
from trainer.evaluation.ruler.question_answering import read_hotpotqa, read_squad
from trainer.evaluation.ruler.task import RulerTask
from trainer.evaluation.ruler.variable_tracking import VariableTracking
from trainer.evaluation.ruler.word_extraction import CommonWords, FrequentWords
from trainer.evaluation.scoring import after_all, after_any, string_match_all, string_match_part

KINDS: dict[str, Callable[[Tokenizer, Essay], Kind]] = {
    "niah_single_1": lambda _, essay: Needles(),
    "niah_single_2": lambda _, essay: Needles(essay),
    "niah_single_3": lambda _, essay: Needles(essay, value="uuid"),
    "niah_multikey_1": lambda _, essay: Needles(essay, keys=4),
    "niah_multikey_2": lambda _, essay: Needles(distractors=True),
    "niah_multikey_3": lambda _, essay: Needles(distractors=True, key="uuid", value="uuid"),
    "niah_multivalue": lambda _, essay: Needles(essay, values=4),
    "niah_multiquery": lambda _, essay: Needles(essay, keys=4, queries=4),
    "vt": lambda tokenizer, _: VariableTracking(tokenizer),
    "cwe": lambda *_: CommonWords(),
    "fwe": lambda *_: FrequentWords(),
}
READERS = {
    "qa_1": ("squad_file", "SQuAD's dev-v2.0.json", read_squad),
    "qa_2": ("hotpotqa_file", "HotpotQA's hotpot_dev_distractor_v1.json", read_hotpotqa),
}
"""Tasks that need a file: under which key, what file, and how it is read."""

TASKS = (*KINDS, *READERS)


@configuration
class RulerSettings:
    """Settings of ruler."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    """Tasks of RULER to ask."""
    trials: Annotated[Count, Field(le=1_000_000)] = 500
    """Prompts of a task and length."""
    seed: Natural = 42
    """Seed of the trials."""
    published: bool = False
    """Share sizes of haystacks and orders over all trials, as the benchmark's programs do;
    false: each trial has its own."""
    squad_file: OptionalText = None
    """SQuAD's dev-v2.0.json, for qa_1; null: leave it out."""
    hotpotqa_file: OptionalText = None
    """HotpotQA's hotpot_dev_distractor_v1.json, for qa_2; null: leave it out."""

    def problems(self) -> list[Problem]:
        """What is impossible, one sentence each."""
        found = [
            Problem("evaluation.ruler.tasks", f"unknown task {name!r}.", did_you_mean(name, TASKS))
            for name in self.tasks
            if name not in TASKS
        ]
        for key, _, _ in READERS.values():
            file = getattr(self, key)
            if file is not None and not Path(file).is_file():
                found.append(Problem(f"evaluation.ruler.{key}", f"there is no file {file!r}."))
        return found


def ruler_tasks(
    settings: RulerSettings, tokenizer: Tokenizer, documents: Sequence[str], bos: int | None
) -> tuple[list[Task], list[str]]:
    """Return the available tasks, and a sentence for each that is unavailable or incomplete.

    Args:
        settings: valid settings.
        tokenizer: the model's; lengths are counted in its tokens.
        documents: English text for the haystacks, read from the beginning in every trial,
            repeatedly if it is shorter than the length.
        bos: first token of every prompt, or None.

    Raises:
        UserError: the documents contain no text, or a file is of the wrong kind.
    """
    essay = Essay(documents)
    tasks: list[Task] = []
    notes: list[str] = []
    for name in settings.tasks:
        trials = settings.trials
        kind: Kind
        if name in KINDS:
            kind, score, stop = KINDS[name](tokenizer, essay), string_match_all, after_all
        else:
            key, what, read = READERS[name]
            file = getattr(settings, key)
            if file is None:
                notes.append(f"{name} was not run: it needs evaluation.ruler.{key}, {what}.")
                continue
            questions = read(file)
            kind, score, stop = questions, string_match_part, after_any
            if len(questions.items) < trials:
                trials = len(questions.items)
                notes.append(
                    f"{name} has {trials} questions only: evaluation.ruler.{key} holds no more."
                )
        common = tokenizer, bos, trials, settings.seed, settings.published
        tasks.append(RulerTask(name, kind, score, stop, *common))
    return tasks, notes
