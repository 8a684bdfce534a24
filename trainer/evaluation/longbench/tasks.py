"""LongBench's English tasks: their questions, as prompts truncated in the middle, and settings.

Reports average questions by label: the category (RoPE-ID, Table 7) and the length of the text
(DroPE, Tables 9 and 10).
"""

from __future__ import annotations

import zipfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources.abc import Traversable
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from tokenizers import Tokenizer

from trainer.common.errors import Problem, UserError, first_line
from trainer.common.fields import Count, Natural, OptionalText, configuration
from trainer.data.tokenizer import end_of_text
from trainer.evaluation.longbench.kinds import FOURTEEN, KINDS, LongBenchKind, classification
from trainer.evaluation.scoring import Prompt, Task, list_problems
from trainer.interchange.hub import cached_or_downloaded

HUB_NAME = "THUDM/LongBench"
HUB_FILE = "data.zip"
"""Holds ``data/TASK.jsonl``. The data set's loading script would be code of others."""

KEY = "evaluation.longbench.directory"
T = TypeVar("T")


@dataclass(frozen=True)
class LongBenchRow:
    """One question as the benchmark distributes it.

    ``length``: number of words in total; ``all_classes``: classes of a classification task.
    """

    input: str
    context: str
    answers: Annotated[list[str], Field(min_length=1)]
    length: int
    all_classes: list[str] | None = None


def read_rows(file: Traversable, row: type[T], key: str) -> list[T]:
    """Read and validate the lines of a ``.jsonl`` file, without empty lines and unknown keys.

    Args:
        file: on disk or in an archive.
        row: a dataclass, whose fields are the keys of a line.
        key: configuration key for error messages.

    Raises:
        UserError: the file cannot be read, is empty, or has a malformed line; names the first.
    """
    adapter, rows = TypeAdapter(row), []
    try:
        with file.open("r", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(adapter, line, f"{key}: {str(file)!r} line {number}"))
    except UnicodeDecodeError:
        raise UserError.at(key, f"{str(file)!r} is not UTF-8 text.") from None
    except OSError as error:
        raise UserError.at(key, f"{str(file)!r} cannot be read ({error.strerror}).") from error
    if not rows:
        raise UserError.at(key, f"{str(file)!r} is empty.")
    return rows


def _row(adapter: TypeAdapter[T], line: str, where: str) -> T:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first: Any = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError.at(where, f"{f'{place}: ' if place else ''}{first['msg']}.") from None


def root(directory: str | None) -> Traversable:
    """Return what contains ``TASK.jsonl``: the directory, or the archive on the hub or in its
    cache.

    Raises:
        UserError: the archive is unavailable.
    """
    if directory is not None:
        return Path(directory)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        path = cached_or_downloaded(hf_hub_download, HUB_NAME, HUB_FILE, repo_type="dataset")
        return zipfile.Path(path, "data/")
    except (OSError, ValueError, HfHubHTTPError, zipfile.BadZipFile) as error:
        raise UserError.at(
            KEY,
            f"{HUB_NAME} is not on this machine and could not be loaded from the hub "
            f"({first_line(error)}); give a directory with TASK.jsonl files.",
        ) from error


@dataclass(frozen=True)
class LongBenchTask:
    """One LongBench task, a :class:`~trainer.evaluation.scoring.Task`.

    ``bos`` begins every prompt unless it is None. ``training_length``: C in tokens. The same
    questions are asked at every length: a length is what the model may read, and shorter texts are
    not filled up.
    """

    name: str
    kind: LongBenchKind
    rows: Sequence[LongBenchRow]
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


EDGES = (4, 8, 16, 32)
"""Thousands of words; of tokens, in units of 1,024."""
CONTEXTS = (2, 4, 8, 16)
"""Training lengths."""


def label(category: str, words: int, tokens: int, training_length: int) -> str:
    """Return a question's label ``category|words|tokens|contexts``.

    DroPE heads its columns "0-4K (0-2x ctx)" for models with a context of 2,048 tokens, so these
    are tokens. LongBench-E uses words, the benchmark's own ``length``, by which a text stays in its
    bucket whatever the tokenizer.

    Args:
        category: category of the task.
        words: length of the text in words, as given by the benchmark.
        tokens: length of the whole prompt before truncation.
        training_length: C in tokens.
    """
    contexts = tokens / training_length
    return "|".join(
        (
            category,
            _bucket(words / 1000, EDGES, "K", "words"),
            _bucket(tokens / 1024, EDGES, "K", "tokens"),
            _bucket(contexts, CONTEXTS, "×", "ctx"),
        )
    )


def _bucket(value: float, edges: tuple[int, ...], times: str, unit: str) -> str:
    """Name the bucket of a value, from one edge (inclusive) to the next."""
    place = bisect_right(edges, value)
    if place == len(edges):
        return f"{edges[-1]}{times}+ {unit}"
    return f"{(0, *edges)[place]}–{edges[place]}{times} {unit}"


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
        found = list_problems("evaluation.longbench.tasks", self.tasks, KINDS)
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
        rows = read_rows(file, LongBenchRow, KEY)
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


def _chosen(
    rows: Sequence[LongBenchRow], settings: LongBenchSettings, task: str
) -> Sequence[LongBenchRow]:
    """Return a random sample in the file's order."""
    if settings.limit is None or settings.limit >= len(rows):
        return rows
    drawn = Random(f"{settings.seed} {task}").sample(range(len(rows)), settings.limit)
    return [rows[index] for index in sorted(drawn)]
