"""What reports average questions by: their category (RoPE-ID, Table 7) and the length of their text
(DroPE, Tables 9 and 10)."""

from __future__ import annotations

from bisect import bisect_right

EDGES = (4, 8, 16, 32)
"""Thousands of words; of tokens, in units of 1,024."""
CONTEXTS = (2, 4, 8, 16)
"""Training lengths."""


def label(category: str, words: int, tokens: int, training_length: int) -> str:
    """``category|words|tokens|contexts`` of a question.

    DroPE heads its columns "0-4K (0-2x ctx)" for models of a context of 2,048 tokens, which makes
    them tokens. LongBench-E has words, the benchmark's own ``length``, by which a text stays in its
    bucket whatever the tokenizer.

    Args:
        category: of the task.
        words: of the text, as the benchmark says.
        tokens: of the whole prompt before it is cut.
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
    """From an edge on up to the next."""
    place = bisect_right(edges, value)
    if place == len(edges):
        return f"{edges[-1]}{times}+ {unit}"
    return f"{(0, *edges)[place]}–{edges[place]}{times} {unit}"
