"""Questions of a LongBench task, truncated in the middle if they are too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.data.tokenizer import end_of_text
from trainer.evaluation.longbench.kinds import Kind
from trainer.evaluation.longbench.labels import label
from trainer.evaluation.longbench.metrics import classification
from trainer.evaluation.longbench.rows import Row
from trainer.evaluation.prompts import Prompt


@dataclass(frozen=True)
class LongBenchTask:
    """One LongBench task, a :class:`~trainer.evaluation.prompts.Task`.

    ``bos`` begins every prompt unless it is None. ``training_length``: C in tokens. The same
    questions are asked at every length: a length is what the model may read, and shorter texts are
    not filled up.
    """

    name: str
    kind: Kind
    rows: Sequence[Row]
    tokenizer: Tokenizer
    bos: int | None
    training_length: int

    def prompts(self, length: int) -> list[Prompt]:
        """Return one prompt per question; with its answer it has at most ``length`` tokens.

        Of a longer prompt the first and the last half stay. They are joined as tokens. The
        benchmark joins them as text and encodes it again, which can give another token at the join;
        its limit applies to the prompt alone.

        Raises:
            UserError: the length leaves no room for a question.
        """
        kind = self.kind
        room = length - kind.new_tokens
        if room < 2:
            raise UserError.at(
                "evaluation.lengths",
                f"{self.name} answers with up to {kind.new_tokens} tokens and so needs lengths of "
                f"{kind.new_tokens + 2} or more, got {length}.",
            )
        return [
            Prompt(
                tuple(middle_out(ids, room).tolist()),
                tuple(row.answers),
                kind.new_tokens,
                label=label(kind.category, row.length, len(ids), self.training_length),
                never_first=self._never_first,
            )
            for row, ids in zip(self.rows, self._encoded, strict=True)
        ]

    @cached_property
    def _encoded(self) -> list[NDArray[np.int32]]:
        before = () if self.bos is None else (self.bos,)
        texts = (self.kind.template.format(**vars(row)) for row in self.rows)
        encoded = (self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
        return [np.array([*before, *ids], dtype=np.int32) for ids in encoded]

    @property
    def _never_first(self) -> tuple[int, ...]:
        if not self.kind.one_line:
            return ()
        line_break = self.tokenizer.encode("\n", add_special_tokens=False).ids[-1:]
        return (*line_break, end_of_text(self.tokenizer))

    def score(self, text: str, answers: Iterable[str]) -> float:
        """Return the score for the answer that agrees best."""
        said = self.kind.counted(text)
        more = (self.rows[0].all_classes or (),) if self.kind.metric is classification else ()
        return max(self.kind.metric(said, answer, *more) for answer in answers)

    def stop(self, text: str, answers: Sequence[str]) -> bool:
        """Whether further text cannot change the score."""
        return self.kind.stop(text, answers)


def middle_out(ids: NDArray[np.int32], room: int) -> NDArray[np.int32]:
    """Return the tokens, or only the first and last ``room`` / 2 of them if there are more.

    The first half is rounded down.
    """
    if len(ids) <= room:
        return ids
    return np.concatenate([ids[: room // 2], ids[-(room // 2) :]])
