"""Labels that reports average questions by: category (RoPE-ID, Table 7) and length of the text
(DroPE, Tables 9 and 10)."""

from __future__ import annotations

from bisect import bisect_right

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
