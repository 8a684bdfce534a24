"""Variable tracking: which variables share a value? RULER, Sec. 3.2."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from tokenizers import Tokenizer

from trainer.evaluation.ruler.question import NOISE, Question, distinct

HOPS = 4
EXAMPLE_TOKENS = 500
"""A solved example comes before the question, with as much noise as fits this."""

# RULER has this space at the end.
TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
    "above. Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: "
)


class VariableTracking:
    """One chain of assignments among lines of noise, the units of the haystack."""

    new_tokens = 30
    least = HOPS + 1

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def question(self, rng: Random, trial: int, units: int, length: int) -> Question:
        """Make a question; the answers are the variables, beginning with the one that got the
        number."""
        example = _chain(rng, self._example_lines, letters=3)
        asked = _chain(rng, units, letters=5)
        solved = f"{example.text} {' '.join(example.answers)}\n"
        return Question(f"{solved}\n{asked.text}", asked.answers, asked.depth)

    @cached_property
    def _example_lines(self) -> int:
        lines = self.least
        while self._tokens(lines + 1) <= EXAMPLE_TOKENS:
            lines += 1
        return lines

    def _tokens(self, lines: int) -> int:
        text = _chain(Random(0), lines, letters=3).text
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _chain(rng: Random, lines: int, letters: int) -> Question:
    names = distinct(rng, lambda r: "".join(r.choices(ascii_uppercase, k=letters)), HOPS + 1)
    value = rng.randrange(10_000, 99_999)
    first = f"VAR {names[0]} = {value}"
    # As in RULER, every assignment but the first ends with a space.
    chain = [
        first,
        *(f"VAR {new} = VAR {old} " for old, new in pairwise(names)),
    ]
    text = [NOISE] * lines
    for offset, place in enumerate(sorted(rng.sample(range(lines), len(chain)))):
        text.insert(place + offset, chain[offset])
    context = "\n".join(text)
    return Question(
        TEMPLATE.format(context=context, value=value, count=len(names)),
        tuple(names),
        context.index(first) / len(context),
    )
