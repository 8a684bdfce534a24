"""RULER (Hsieh et al. 2024, arXiv 2404.06654): thirteen generated tasks.

Wording (``ruler.yaml``), and numbers of needles, hops and words are those of the benchmark's own
programs (github.com/NVIDIA/RULER, template ``base``, its ``synthetic.yaml``). The trials are not
the benchmark's: each has its own order, every prompt is as long as fits, and essay haystacks
consist of the caller's documents instead of Paul Graham's.
"""

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from itertools import chain, cycle, islice, pairwise
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Literal, NamedTuple
from uuid import UUID

import yaml
from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.common.files import expecting
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.needles import listed, word_list
from trainer.evaluation.scoring import Prompt, once_right, string_match_all, string_match_part
from trainer.evaluation.task import PromptTask, TaskInputs, task

WORDING: dict[str, str] = yaml.safe_load(
    resources.files(__package__).joinpath("ruler.yaml").read_text("utf-8")
)
"""Templates of needles and questions."""

Question = tuple[str, tuple[str, ...]]
"""A question as text, and its answers."""

Ask = Callable[[Random, int, int, int], Question]
"""Makes a question from random numbers, the number of the trial, the units of the haystack, and the
length of the prompt in tokens, about."""


def distinct(rng: Random, draw: Callable[[Random], str], count: int) -> list[str]:
    """Return ``count`` distinct draws."""
    draws: dict[str, None] = {}
    while len(draws) < count:
        draws[draw(rng)] = None
    return list(draws)


@cache
def vocabulary() -> tuple[str, ...]:
    """Return all nouns, adjectives and verbs, sorted."""
    return tuple(sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")}))


def compound(rng: Random) -> str:
    """Return a hyphenated adjective and noun, one of six million."""
    return f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"


SENTENCE_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["')”’])\s+""")


@cache
def sentences(document: str) -> list[list[str]]:
    """Return the words of every sentence."""
    texts = [text.split() for text in SENTENCE_END.split(document)]
    return [words for words in texts if words]


def essay(documents: Sequence[str], count: int) -> list[str]:
    """Return the first ``count`` words of the documents, repeated as in RULER, as sentences."""
    text: list[str] = []
    for words in chain.from_iterable(map(sentences, cycle(documents))):
        text.append(" ".join(words[:count]))
        count -= len(words)
        if count <= 0:
            break
    return text


DEPTHS = [round(step / 39 * 100) / 100 for step in range(40)]
"""Depths of needles in an essay."""

DRAWS: dict[str, Callable[[Random], str]] = {
    "word": compound,
    "number": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuid": lambda rng: str(UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class Search:
    """A search for the values of ``queries`` of ``keys`` keys with ``values`` values each.

    ``haystack``: an essay, or lines of noise or of needles with other keys. ``key`` and ``value``
    are kinds of :data:`DRAWS`.
    """

    haystack: Literal["noise", "essay", "needles"] = "noise"
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def ask(
        self, rng: Random, trial: int, units: int, length: int, documents: Sequence[str]
    ) -> Question:
        """Return a question; an essay consists of the ``documents``, counted in words."""
        others = units if self.haystack == "needles" else 0
        names = distinct(rng, DRAWS[self.key], self.keys + others)
        values = iter(distinct(rng, DRAWS[self.value], len(names) * self.values))
        stated = {name: [*islice(values, self.values)] for name in names}
        needle = partial(WORDING["needle"].format, values=f"{self.value}s")
        needles: list[str] = []
        for name, of_name in stated.items():
            needles += [needle(key=name, value=value) for value in of_name]
        first_other = self.keys * self.values
        hidden = needles[:first_other]
        lines = needles[first_other:]
        rng.shuffle(hidden)
        separator = "\n"
        if self.haystack == "essay":
            separator = " "
            lines = essay(documents, units)
            depths = sorted(rng.sample(DEPTHS, len(hidden)))
            places = [int(len(lines) * depth) for depth in depths]
        else:
            lines = lines or [WORDING["noise"]] * units
            places = sorted(rng.sample(range(units), len(hidden)))
        for place, line in reversed(list(zip(places, hidden, strict=True))):
            lines.insert(place, line)
        queried = rng.sample(names[: self.keys], self.queries)
        answers = tuple(chain.from_iterable(stated[name] for name in queried))
        wording = "one" if len(answers) == 1 else "several"
        text = WORDING[wording].format(
            value=self.value, context=separator.join(lines), query=listed(queried)
        )
        return text, answers


HOPS = 4
EXAMPLE_TOKENS = 500
"""A solved example comes before the question, with as much noise as fits this."""


def variable_tracking(
    rng: Random, trial: int, units: int, length: int, *, example_lines: int
) -> Question:
    """Ask for the variables of one chain of assignments among lines of noise, the first one first,
    after a solved example of ``example_lines`` lines."""
    example, solution = _chain(rng, example_lines, letters=3)
    asked, answers = _chain(rng, units, letters=5)
    return f"{example} {' '.join(solution)}\n\n{asked}", answers


def lines_of_example(tokenizer: Tokenizer) -> int:
    """Return the lines of noise with which an example has :data:`EXAMPLE_TOKENS` tokens."""

    def tokens(lines: int) -> int:
        text, _ = _chain(Random(0), lines, letters=3)
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return HOPS + 1 + bisect_right(range(HOPS + 2, EXAMPLE_TOKENS), EXAMPLE_TOKENS, key=tokens)


def _chain(rng: Random, lines: int, letters: int) -> Question:
    """Return a chain of assignments among lines of noise, with names of so many letters."""
    names = distinct(rng, lambda r: "".join(r.choices(ascii_uppercase, k=letters)), HOPS + 1)
    value = rng.randrange(10_000, 99_999)
    # RULER ends every assignment but the first with a space.
    assignments = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {new} = VAR {old} " for old, new in pairwise(names)),
    ]
    text = [WORDING["noise"]] * lines
    for offset, place in enumerate(sorted(rng.sample(range(lines), len(assignments)))):
        text.insert(place + offset, assignments[offset])
    asked = WORDING["chain"].format(context="\n".join(text), value=value, count=len(names))
    return asked, tuple(names)


COMMON = 10
LONG = 4096
"""Tokens from which a list has the full number of repetitions."""


def common_words(rng: Random, trial: int, units: int, length: int) -> Question:
    """Ask, after a solved example, for ten words that a list of ``units`` words has most often."""
    if length >= LONG:
        solved, words = _word_list(rng, 40, often=10, seldom=3)
        text, answers = _word_list(rng, units, often=30, seldom=3)
    else:
        solved, words = _word_list(rng, 20, often=3, seldom=1)
        text, answers = _word_list(rng, units, often=6, seldom=1)
    return f"{solved} {_numbered(words)}\n{text}", tuple(answers)


def _word_list(rng: Random, words: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """Return the question about a list, and the words in it ``often``; others are ``seldom``."""
    # RULER takes a larger dictionary for lists of more than 100,000 tokens.
    enough = words <= len(vocabulary())
    drawn = rng.sample(vocabulary(), words) if enough else distinct(rng, compound, words)
    common = drawn[:COMMON]
    entries = common * often + drawn[COMMON:] * seldom
    rng.shuffle(entries)
    return WORDING["common"].format(context=_numbered(entries)), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


FREQUENT_TOKENS = 50
LEAST_FREQUENT = 53
"""From here on the fourth rank always has more words than the fifth."""


def frequent_words(rng: Random, trial: int, units: int, length: int) -> Question:
    """Ask for the three most frequent of made-up words after dots, the k-th of all with frequency
    k^-2 / zeta(2)."""
    kinds = max(5, (length - FREQUENT_TOKENS) // 50)
    vocabulary = distinct(rng, lambda r: "".join(r.choices(ascii_lowercase, k=6)), kinds)
    vocabulary[0] = "..."
    zeta = math.pi**2 / 6
    text = []
    for rank, word in enumerate(vocabulary, 1):
        text += [word] * int(units / rank**2 / zeta)
    rng.shuffle(text)
    return WORDING["frequent"].format(context=" ".join(text)), tuple(vocabulary[1:4])


class Item(NamedTuple):
    """A question with its answers, its own paragraphs, and ``related`` ones of the same article,
    which are the first distractors."""

    query: str
    answers: tuple[str, ...]
    paragraphs: tuple[str, ...]
    related: tuple[str, ...] = ()


def read_squad(file: str) -> list[Item]:
    """Read the questions of SQuAD's dev-v2.0.json that have an answer."""
    items = []
    for article in json.loads(Path(file).read_text(encoding="utf-8"))["data"]:
        texts = dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            related = tuple(text for text in texts if text != context)
            for row in paragraph["qas"]:
                if not row.get("is_impossible"):
                    answers = tuple(answer["text"] for answer in row["answers"])
                    items.append(Item(row["question"], answers, (context,), related))
    return items


def read_hotpotqa(file: str) -> list[Item]:
    """Read the questions of HotpotQA's hotpot_dev_distractor_v1.json, with ten paragraphs each."""
    items = []
    for row in json.loads(Path(file).read_text(encoding="utf-8")):
        texts = tuple(f"{title}\n{''.join(lines)}" for title, lines in row["context"])
        items.append(Item(row["question"], (row["answer"],), texts))
    return items


def document_questions(items: Sequence[Item]) -> Ask:
    """Return a function that asks the question of the trial's number; units are paragraphs of all
    items, repeated if there are too few."""
    texts = sorted({text for item in items for text in (*item.paragraphs, *item.related)})

    def ask(rng: Random, trial: int, units: int, length: int) -> Question:
        item = items[trial]
        chosen = list(item.paragraphs)
        wanted = max(units, len(chosen))
        chosen += rng.sample(item.related, min(wanted - len(chosen), len(item.related)))
        if len(chosen) < wanted:
            chosen += rng.sample(texts, min(wanted, len(texts)))
        chosen = list(islice(cycle(dict.fromkeys(chosen)), wanted))
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(chosen, 1))
        return WORDING["documents"].format(context=context, query=item.query), item.answers

    return ask


SEARCHES = {
    "niah_single_1": Search(),
    "niah_single_2": Search("essay"),
    "niah_single_3": Search("essay", value="uuid"),
    "niah_multikey_1": Search("essay", keys=4),
    "niah_multikey_2": Search("needles"),
    "niah_multikey_3": Search("needles", key="uuid", value="uuid"),
    "niah_multivalue": Search("essay", values=4),
    "niah_multiquery": Search("essay", keys=4, queries=4),
}
"""Searches by task."""
READERS = {"qa_1": ("squad_file", read_squad), "qa_2": ("hotpotqa_file", read_hotpotqa)}
"""Tasks that need a file: its key and its reader."""

TASKS = {
    **dict.fromkeys(SEARCHES, (128, 1)),
    "vt": (30, HOPS + 1),
    "cwe": (120, COMMON + 1),
    "fwe": (FREQUENT_TOKENS, LEAST_FREQUENT),
    **dict.fromkeys(READERS, (32, 1)),
}
"""Most tokens of an answer, and least units of a haystack, by task."""

SEED = 42
"""Seed of all trials."""
PROBE = 64
"""Units of the prompts that measure the tokens per unit."""


def ruler_prompts(name: str, ask: Ask, encoder: Encoder, trials: int, length: int) -> list[Prompt]:
    """Return trials of as many units as fit ``length`` tokens with the answer, or the least ones; a
    trial depends on the task, the length and its own number."""
    new_tokens, least = TASKS[name]

    def draw(trial: int, units: int) -> tuple[Prompt, int]:
        """Return a prompt, and by how many tokens it is too long."""
        text, answers = ask(Random(f"{SEED} {name} {length} {trial}"), trial, units, length)
        (tokens,) = encoder.tokens([text])
        return Prompt(tokens, answers, new_tokens), len(tokens) + new_tokens - length

    probed = least + PROBE
    per_unit = (draw(0, probed)[1] - draw(0, least)[1]) / PROBE

    def fitting(trial: int, start: int) -> tuple[Prompt, int]:
        """Return a prompt with as many units as fit, and their number; ``start``: a guess."""
        best = draw(trial, least)[0]
        fits = least
        exceeds: float = math.inf
        units = max(start, least + 1)
        while fits < units < exceeds:
            prompt, too_long = draw(trial, units)
            if too_long > 0:
                exceeds = units
            else:
                best = prompt
                fits = units
            surplus = math.ceil(too_long / per_unit)
            units -= surplus
            if surplus and not fits < units < exceeds:
                units = (fits + int(exceeds)) // 2
        return best, fits

    first, units = fitting(0, probed)
    with ThreadPoolExecutor() as pool:  # tokenizers let other threads run
        others = pool.map(lambda trial: fitting(trial, units)[0], range(1, trials))
        return [first, *others]


@task("ruler", settings="ruler")
def ruler_tasks(inputs: TaskInputs) -> list[PromptTask]:
    """Return the available tasks, with a note for each unavailable one; the documents of the text
    are the haystacks' English, read from the beginning in every trial."""
    encoder = inputs.text.encoder
    documents = inputs.text.documents
    asks: dict[str, Ask] = {
        **{name: partial(x.ask, documents=documents) for name, x in SEARCHES.items()},
        "vt": partial(variable_tracking, example_lines=lines_of_example(encoder.tokenizer)),
        "cwe": common_words,
        "fwe": frequent_words,
    }
    tasks: list[PromptTask] = []
    for name in inputs.settings.tasks or TASKS:
        trials = inputs.trials
        score = string_match_all
        if name in READERS:
            key, read = READERS[name]
            file = getattr(inputs.settings, key)
            if file is None:
                inputs.notes.append(f"{name} was not run: evaluation.ruler.{key} names no file.")
                continue
            with expecting(f"questions as {key} has them", Path(file)):
                items = read(file)
            if not items:
                raise UserError(f"evaluation.ruler.{key}: expected questions in {file}, got none")
            asks[name] = document_questions(items)
            trials = min(trials, len(items))
            score = string_match_part
        prompts = partial(ruler_prompts, name, asks[name], encoder, trials)
        tasks.append(PromptTask(name, encoder.tokenizer, prompts, score, once_right(score)))
    return tasks
