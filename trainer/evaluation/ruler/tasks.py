"""RULER's thirteen tasks with the benchmark's settings (its ``synthetic.yaml``).

Each trial has the largest haystack that fits a number of tokens. Sizes of haystacks and orders of
their parts can follow the benchmark's own programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

from pydantic import Field
from tokenizers import Tokenizer

from trainer.common.errors import Problem, UserError
from trainer.common.fields import Count, Natural, OptionalText, configuration
from trainer.evaluation.ruler.kinds import (
    LONG,
    CommonWords,
    Essay,
    FrequentWords,
    Needles,
    RulerKind,
    VariableTracking,
    read_hotpotqa,
    read_squad,
)
from trainer.evaluation.scoring import (
    Prompt,
    Score,
    Stop,
    Task,
    after_all,
    after_any,
    list_problems,
    string_match_all,
    string_match_part,
)

PROBE = 64
"""Units of the prompts that measure the tokens per unit."""

ENOUGH = 1 / 256
"""Share of the length that may stay empty, or one unit if that has more tokens: filling it would
take another round of tokenization."""

TOKENS_AT_ONCE = 2**20


@dataclass
class _Trial:
    """A trial whose prompt fits with ``low`` units and is too long with ``high``."""

    number: int
    units: int
    low: int
    high: float = math.inf
    prompt: Prompt | None = None
    empty: int = 0
    done: bool = False

    def learn(self, prompt: Prompt, empty: int, per_unit: float, enough: float) -> None:
        """Update the bounds; ``empty``: unused tokens, negative if the prompt is too long."""
        if empty >= 0:
            self.low, self.empty, self.prompt = self.units, empty, prompt
        else:
            self.high = self.units
        self.done = self.high - self.low == 1 or 0 <= empty <= enough
        step = self.units + math.floor(empty / per_unit)
        self.units = int(max(self.low + 1, min(step, self.high - 1)))


@dataclass(frozen=True)
class RulerTask:
    """One of the thirteen tasks, as a :class:`~trainer.evaluation.scoring.Task`.

    ``bos`` begins every prompt unless it is None. A trial depends on ``seed``, the task, the length
    and its own number. ``published``: use the benchmark's sizes and orders, see
    :mod:`trainer.evaluation.ruler.tasks`.
    """

    name: str
    kind: RulerKind
    score: Score
    stop: Stop
    tokenizer: Tokenizer
    bos: int | None
    trials: int
    seed: int
    published: bool = False

    def prompts(self, length: int) -> list[Prompt]:
        """Return trials whose prompt and answer have ``length`` tokens or slightly fewer.

        The first trial determines the number of units. The others start with it and are adjusted if
        they are too long or leave much room; with ``published`` only if they are too long, by the
        benchmark's steps.

        Raises:
            UserError: the length is too short for the task.
        """
        least = self.kind.least
        small, larger = self._read(length, [(0, least), (0, least + PROBE)])
        per_unit = (len(larger.tokens) - len(small.tokens)) / PROBE
        units = least + math.floor(self._empty(length, small) / per_unit)
        if self.published:
            (first,) = self._fitted(length, [0], units, per_unit, 0)
            return self._shrunk(length, size(self.kind, first.low, length))
        enough = max(per_unit, ENOUGH * length)
        (first,) = self._fitted(length, [0], units, per_unit, enough)
        # Half of the allowed gap is the middle of the acceptable range.
        units = first.low + round((first.empty - ENOUGH * length / 2) / per_unit)
        others = self._fitted(length, range(1, self.trials), units, per_unit, enough)
        return [trial.prompt for trial in (first, *others) if trial.prompt]

    def _shrunk(self, length: int, units: int) -> list[Prompt]:
        """Return all trials with this many units, reduced stepwise if they are too long."""
        sizes = dict.fromkeys(range(self.trials), units)
        fitting: dict[int, Prompt] = {}
        while missing := [number for number in sizes if number not in fitting]:
            prompts = self._read(length, [(number, sizes[number]) for number in missing])
            for number, prompt in zip(missing, prompts, strict=True):
                if self._empty(length, prompt) >= 0:
                    fitting[number] = prompt
                    continue
                sizes[number] -= step(self.kind, length)
                if sizes[number] < self.kind.least:
                    raise self._too_short(length)
        return [fitting[number] for number in sizes]

    def _fitted(
        self, length: int, numbers: Sequence[int], units: int, per_unit: float, enough: float
    ) -> list[_Trial]:
        least = self.kind.least
        trials = [_Trial(number, max(least, units), least - 1) for number in numbers]
        while unfinished := [trial for trial in trials if not trial.done]:
            prompts = self._read(length, [(trial.number, trial.units) for trial in unfinished])
            for trial, prompt in zip(unfinished, prompts, strict=True):
                trial.learn(prompt, self._empty(length, prompt), per_unit, enough)
        if any(trial.prompt is None for trial in trials):
            raise self._too_short(length)
        return trials

    def _too_short(self, length: int) -> UserError:
        return UserError.at(
            "evaluation.lengths",
            f"expected at least {self._least_length(length)} tokens for RULER's {self.name} with "
            f"this tokenizer, got {length}.",
        )

    def _draws(self, length: int, trial: int) -> Random:
        seed = f"{self.seed} {self.name} {length} {trial}"
        if not self.published:
            return Random(seed)
        draws = OneOrder(seed)
        draws.order = self.seed
        return draws

    def _empty(self, length: int, prompt: Prompt) -> int:
        return length - prompt.new_tokens - len(prompt.tokens)

    def _least_length(self, length: int) -> int:
        """Return the smallest sufficient length; texts depend on it, so it is checked again."""
        every = [(trial, self.kind.least) for trial in range(self.trials)]
        while (lack := min(self._empty(length, p) for p in self._read(length, every))) < 0:
            length -= lack
        return length

    def _read(self, length: int, wanted: Sequence[tuple[int, int]]) -> Iterator[Prompt]:
        """Yield trials by number and units, in batches that keep memory small."""
        before = () if self.bos is None else (self.bos,)
        size = max(1, TOKENS_AT_ONCE // length)
        for start in range(0, len(wanted), size):
            questions = [
                self.kind.question(self._draws(length, trial), trial, units, length)
                for trial, units in wanted[start : start + size]
            ]
            encoded = self.tokenizer.encode_batch_fast(
                [question.text for question in questions], add_special_tokens=False
            )
            for question, encoding in zip(questions, encoded, strict=True):
                tokens = (*before, *encoding.ids)
                yield Prompt(tokens, question.answers, self.kind.new_tokens, question.depth)


class OneOrder(Random):
    """Random draws of each trial, but shuffles that depend on ``order`` alone.

    Needles, words and documents thus have the same places in all trials of a size, as in the
    benchmark's programs, which reseed for each trial.
    """

    order: object = 0

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """Shuffle ``x`` in place."""
        Random(str(self.order)).shuffle(x)


def step(kind: RulerKind, length: int) -> int:
    """Return the units by which a haystack shrinks if its prompt is longer than ``length``."""
    if isinstance(kind, Needles) and kind.essay:
        return 500
    if isinstance(kind, Needles):
        return 25 if length >= LONG else 5
    if isinstance(kind, VariableTracking):
        return 10 if length >= LONG else 5
    if isinstance(kind, FrequentWords):
        return max(1, (length - kind.new_tokens) // 32)
    return 10


def size(kind: RulerKind, most: int, length: int) -> int:
    """Return the initial number of units of all trials, if ``most`` fit the first one.

    It is ``most``, except for frequent words, which grow by :func:`step` from a sixth of the
    length.
    """
    if not isinstance(kind, FrequentWords):
        return most
    start = (length - kind.new_tokens) // 6
    return most - (most - start) % step(kind, length)


KINDS: dict[str, Callable[[Tokenizer, Essay], RulerKind]] = {
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
"""Tasks that need a file: its key, its name and its reader."""

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
        """Check the tasks and their files."""
        problems = list_problems("evaluation.ruler.tasks", self.tasks, TASKS)
        for key, _, _ in READERS.values():
            file = getattr(self, key)
            if file is not None and not Path(file).is_file():
                problems.append(Problem(f"evaluation.ruler.{key}", f"there is no file {file!r}."))
        return problems


def ruler_tasks(
    settings: RulerSettings, tokenizer: Tokenizer, documents: Sequence[str], bos: int | None
) -> tuple[list[Task], list[str]]:
    """Return the available tasks, and a sentence for each unavailable or incomplete one.

    ``documents``: English text for the haystacks, read from the beginning in every trial,
    repeatedly if it is shorter than the length.

    Raises:
        UserError: the documents contain no text, or a file is of the wrong kind.
    """
    essay = Essay(documents)
    tasks: list[Task] = []
    notes: list[str] = []
    for name in settings.tasks:
        trials = settings.trials
        kind: RulerKind
        if name in KINDS:
            kind, score, stop = KINDS[name](tokenizer, essay), string_match_all, after_all
        else:
            key, title, read = READERS[name]
            file = getattr(settings, key)
            if file is None:
                notes.append(f"{name} was not run: it needs evaluation.ruler.{key}, {title}.")
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
