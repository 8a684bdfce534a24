"""The ``evaluation`` configuration group: methods, tasks and lengths; imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import field, replace
from typing import Literal, Self

from trainer.common.errors import Problem
from trainer.common.fields import Count, Multiple, configuration
from trainer.data.config import MOST_NAMES
from trainer.evaluation.longbench import KINDS as LONGBENCH_TASKS
from trainer.evaluation.longbench import LongBenchSettings
from trainer.evaluation.many_shot import TASKS as MANY_SHOT_TASKS
from trainer.evaluation.many_shot import ManyShotSettings
from trainer.evaluation.method_config import Length, MethodsConfig
from trainer.evaluation.needles import ALL_AT_ONCE, NEEDLE_TASKS, NeedleTaskSettings
from trainer.evaluation.results import PERPLEXITY, STATEMENTS
from trainer.evaluation.ruler import TASKS as RULER_TASKS
from trainer.evaluation.ruler import RulerSettings
from trainer.evaluation.scoring import list_problems

RULER, LONGBENCH, MANY_SHOT = "ruler", "longbench", "many_shot"


def task_names() -> tuple[str, ...]:
    """Return the names for ``evaluation.tasks``, including those of plugins."""
    return (PERPLEXITY, STATEMENTS, *NEEDLE_TASKS, RULER, LONGBENCH, MANY_SHOT)


@configuration
class EvaluationConfig(MethodsConfig):
    """Methods, tasks and lengths; the defaults are for the evaluation at the end of a run."""

    enabled: bool = True
    """Evaluate a training run at its end."""
    lengths: list[Multiple] = field(default_factory=lambda: [1.0, 2.0, 4.0, 8.0])
    """Lengths in multiples of the training length."""
    tokens: list[Length] | None = None
    """Lengths in tokens, in place of lengths; null: lengths."""
    methods: list[str] | None = field(
        default_factory=lambda: ["none", "pi", "ntk", "yarn", "temperature"]
    )
    tasks: list[str] = field(default_factory=lambda: [PERPLEXITY, STATEMENTS])
    """perplexity, statements (for runs trained with data.needles), standard, noisy,
    multi_key, multi_query, multi_value, sentence, ruler, longbench, many_shot."""
    windows: Count = 96
    """Held-out windows of the task perplexity at each length."""
    last: Count | None = None
    """Tokens of each window that are reported; null: the training length, or the shortest length
    if that is less."""
    batch_tokens: Count = 16384
    """Tokens in a forward pass."""
    prefill_chunk: Count | None = None
    """Tokens of a sequence read at once; null: 32,768 on a GPU, all on a CPU."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Data type of the weights: fp32, bf16; null: bf16 on a GPU, fp32 on a CPU. On a GPU fp32
    multiplies in TF32."""
    needles: NeedleTaskSettings = field(default_factory=NeedleTaskSettings)
    """Settings of statements and of every task with needles."""
    ruler: RulerSettings = field(default_factory=RulerSettings)
    """Settings of ruler."""
    longbench: LongBenchSettings = field(default_factory=LongBenchSettings)
    """Settings of longbench."""
    many_shot: ManyShotSettings = field(default_factory=ManyShotSettings)
    """Settings of many_shot."""

    @property
    def factors(self) -> list[float]:
        """Evaluated lengths, as multiples of the training length; see :meth:`in_multiples`."""
        return self.lengths

    @property
    def lengths_key(self) -> str:
        """The key that the lengths come from."""
        return "evaluation.lengths" if self.tokens is None else "evaluation.tokens"

    def in_tokens(self, training_length: int) -> list[int]:
        """Return the evaluated lengths of models with this training length."""
        C = self.training_length or training_length
        return self.tokens or [round(C * factor) for factor in self.lengths]

    def in_multiples(self, training_length: int) -> EvaluationConfig:
        """Return the configuration with C of the models, and ``lengths`` in place of ``tokens``."""
        C = self.training_length or training_length
        lengths = self.lengths if self.tokens is None else [n / C for n in self.tokens]
        return replace(self, training_length=C, lengths=lengths, tokens=None)

    @property
    def sequences(self) -> int:
        """About how many sequences all tasks together read at each length.

        LongBench without a limit counts 200 questions a task, which most of its tasks have.
        """
        needles, many_shot = self.needles, self.many_shot
        counts = {
            PERPLEXITY: self.windows,
            STATEMENTS: needles.trials,
            **dict.fromkeys(NEEDLE_TASKS, needles.trials * len(needles.depths)),
            **dict.fromkeys(ALL_AT_ONCE, needles.trials),
            RULER: self.ruler.trials * len(self.ruler.tasks),
            LONGBENCH: (self.longbench.limit or 200) * len(self.longbench.tasks),
            MANY_SHOT: many_shot.trials * len(many_shot.depths),
        }
        return sum(counts[task] for task in self.tasks)

    def limited(self, trials: int, questions: int) -> Self:
        """Return the configuration with at most so many trials, and questions of longbench."""
        limit = min(self.longbench.limit or questions, questions)
        return replace(
            self,
            needles=replace(self.needles, trials=min(self.needles.trials, trials)),
            ruler=replace(self.ruler, trials=min(self.ruler.trials, trials)),
            many_shot=replace(self.many_shot, trials=min(self.many_shot.trials, trials)),
            longbench=replace(self.longbench, limit=limit),
        )

    def problems(self, training_length: int | None = None) -> list[Problem]:
        """Check the values for models of this training length."""
        problems = list_problems("evaluation.tasks", self.tasks, task_names())
        training_length = self.training_length or training_length
        if not (self.lengths if self.tokens is None else self.tokens):
            problems.append(Problem(self.lengths_key, "expected one or more, got none."))
        problems += self.method_problems()
        known = {"ruler": RULER_TASKS, "longbench": LONGBENCH_TASKS, "many_shot": MANY_SHOT_TASKS}
        for group, tasks in known.items():
            asked = getattr(self, group).tasks
            problems += list_problems(f"evaluation.{group}.tasks", asked, tasks)
        if (changes := self.needles.changes) >= self.needles.needles:
            key = "evaluation.needles.changes"
            problems.append(Problem(key, f"expected fewer than the needles, got {changes}."))
        if problems or training_length is None:
            return problems
        keys = {"evaluation.lengths": self.lengths_key}
        return [problem.renamed(keys) for problem in self._length_problems(training_length)]

    def _length_problems(self, training_length: int) -> Iterator[Problem]:
        """Check that the lengths fit each other and the tasks."""
        C, multiples = training_length, self.in_multiples(training_length)
        lengths = multiples.lengths
        shortest, longest = round(C * min(lengths)), C * max(lengths)
        if shortest < 2 or longest >= 1 << 31:
            yield Problem(
                "evaluation.lengths",
                "expected multiples of the training length that make 2 to 2^31 - 1 tokens, got "
                f"{lengths} of {C}.",
            )
            return
        if repeated := [n for n, times in Counter(self.in_tokens(C)).items() if times > 1]:
            got = f"{self.tokens}"
            if self.tokens is None:
                got = f"{lengths} times the training length of {C} tokens, more than one of which "
                got += f"is {repeated[0]} tokens"
            yield Problem("evaluation.lengths", f"expected each length once, got {got}.")
        if STATEMENTS in self.tasks:
            yield from multiples._statement_problems(C, shortest)
        yield from multiples.choice_problems(C, self.methods or ())
        if PERPLEXITY in self.tasks and self.last is not None and self.last > shortest:
            yield Problem(
                "evaluation.last",
                f"{self.last} tokens are more than the shortest length of {shortest} has; "
                "give that or less, or null.",
            )

    def _statement_problems(self, training_length: int, shortest: int) -> Iterator[Problem]:
        """Check that the statements fit the shortest length."""
        needles, least = self.needles.needles, 3 * self.needles.needles + 2
        key, statements = "evaluation.needles.needles", f"{needles} statements of 3 tokens"
        if needles > MOST_NAMES:
            yield Problem(key, f"statements have {MOST_NAMES} different names, got {needles}.")
        elif least > training_length and least > shortest:
            yield Problem(key, f"{statements} do not fit {shortest} tokens.")
        elif least > shortest:
            yield Problem(
                "evaluation.lengths",
                f"{min(self.lengths):g} of {training_length} tokens is {shortest}, too few for "
                f"{statements}; expected {least} tokens or more, or fewer {key}.",
            )
