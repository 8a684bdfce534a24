"""Needles: statements ``<name> <number>.`` hidden in text, for training and evaluation.

A statement has three tokens. A tiny model cannot know the task without training, so a share of the
training sequences contains statements and questions, at the training length only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.config import NeedlesConfig, NeedleTaskSettings
from trainer.data.order import Integers, uniforms

NAMES = (
    *("Alice", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo"),
    *("Irene", "Jonas", "Karla", "Lukas", "Maria", "Nadia", "Oscar", "Petra"),
)
WORDS = [f" {name}" for name in NAMES] + [f" {number}" for number in range(10, 100)]
"""What a tokenizer must hold as single tokens: names and two-digit numbers, with their space."""

STATEMENT = 3
"""Tokens in a statement: name, number, full stop."""


@dataclass(frozen=True)
class NeedleVocabulary:
    """Token ids of the names ``[16]``, the numbers ``[90]`` and the full stop."""

    names: Integers
    numbers: Integers
    full_stop: int

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "NeedleVocabulary":
        """Look up the token ids; raise a UserError unless the tokenizer holds all words."""
        ids = [tokenizer.encode(word, add_special_tokens=False).ids for word in [*WORDS, "."]]
        whole = {tokens[0] for tokens in ids if len(tokens) == 1}
        if len(whole) < len(ids):  # some are split, or unknown words have one token
            raise UserError(
                "data.needles: expected a tokenizer with every name and two-digit number as one "
                f"token of its own, got {len(whole)} of {len(ids)}"
            )
        flat = np.array([tokens[0] for tokens in ids])
        return cls(flat[: len(NAMES)], flat[len(NAMES) : -1], int(flat[-1]))

    def statements(self, names: Integers, numbers: Integers) -> Integers:
        """Return token ids ``[..., 3]`` for indices of names and numbers."""
        stop = np.full_like(names, self.full_stop)
        return np.stack([self.names[names], self.numbers[numbers], stop], axis=-1)


def insert(text: Integers, statements: Integers, cuts: Integers) -> tuple[Integers, Integers]:
    """Insert statements into text.

    Args:
        text: ``[B, T]`` tokens.
        statements: ``[B, M, 3]`` tokens.
        cuts: ``[B, M]``, ascending; statement m precedes text token ``cuts[m]``, if there is one.

    Returns:
        Sequences ``[B, T]``, truncated to T, and the start positions ``[B, M]`` of the statements.
    """
    T = text.shape[1]
    places = np.repeat(np.minimum(cuts, T), STATEMENT, axis=1)
    sequences = np.empty_like(text)
    for row, tokens, where, stated in zip(sequences, text, places, statements, strict=True):
        row[:] = np.insert(tokens, where, stated.ravel())[:T]
    return sequences, cuts + STATEMENT * np.arange(cuts.shape[1])


def mix_needles(
    text: Integers,
    counters: Integers,
    vocabulary: NeedleVocabulary,
    config: NeedlesConfig,
    seed: int,
    end: int | None = None,
) -> tuple[Integers, NDArray[np.float32]]:
    """Return training sequences with statements, and each token's weight in the loss.

    Each sequence has its own number of names and of mentions. A name keeps its number within a
    sequence, so every mention after the first is a question that the sequence has answered. With
    ``config.changes`` a mention may state a new number, which nothing before it answers.

    Args:
        text: ``[B, T]`` tokens.
        counters: ``[B]`` sample numbers, the only source of randomness besides ``seed``.
        end: the token after each document, if attention stays within documents: only mentions in
            the same document then answer a question.

    Returns:
        ``[B, T]`` tokens and ``[B, T]`` weights.

    Raises:
        UserError: the sequences are too short for the statements.
    """
    B, T = text.shape
    most_names, M = config.names[1], config.mentions[1]
    if STATEMENT * M >= T:
        raise UserError(f"data.needles.mentions: {M} statements do not fit {T} tokens")
    u = uniforms(seed, counters, 3 + len(NAMES) + most_names + 4 * M)
    head, order, values, speakers, places, change, later = np.split(
        u, np.cumsum([3, len(NAMES), most_names, M, M, M]), axis=1
    )
    carries = head[:, 0] < config.share
    names_used = _between(head[:, 1], *config.names)
    mentions = np.where(carries, _between(head[:, 2], *config.mentions), 0)

    pool = order.argsort(axis=1)[:, :most_names]
    numbers = (values * len(vocabulary.numbers)).astype(np.int64)
    chosen = (speakers * names_used[:, None]).astype(np.int64)
    active = np.arange(M) < mentions[:, None]
    room = T - STATEMENT * mentions[:, None]
    cuts = np.where(active, (places * (room + 1)).astype(np.int64), 2 * T)
    cuts.sort(axis=1)

    same_name = (chosen[:, :, None] == chosen[:, None, :]) & np.tri(M, k=-1, dtype=bool)
    changed = same_name.any(axis=2) & (change < config.changes)
    # A name has the number of its last change; -1: still its first number.
    until_now = same_name | np.eye(M, dtype=bool)
    last_change = np.where(until_now & changed[:, None, :], np.arange(M), -1).max(axis=2)
    rows = np.arange(B)[:, None]
    new_numbers = (later * len(vocabulary.numbers)).astype(np.int64)
    stated = np.where(last_change < 0, numbers[rows, chosen], new_numbers[rows, last_change])
    tokens, begins = insert(text, vocabulary.statements(pool[rows, chosen], stated), cuts)

    answers = same_name & (np.arange(M) >= last_change[:, :, None])
    if end is not None:
        documents = (tokens == end).cumsum(axis=1)[rows, np.minimum(begins, T - 1)]
        answers &= documents[:, :, None] == documents[:, None, :]
    weights = np.ones((B, T), dtype=np.float32)
    row, mention = (answers.any(axis=2) & active).nonzero()
    weights[row, begins[row, mention] + 1] = config.weight
    return tokens, weights


def _between(u: NDArray[np.float64], low: int, high: int) -> Integers:
    """Return integers from low to high, both included."""
    return low + (u * (high - low + 1)).astype(np.int64)


@dataclass(frozen=True)
class Trials:
    """Retrieval trials: ``prompts`` ``[N, L]`` that end with the requested name, the ``answers``
    ``[N]`` last stated for it, and ``depths`` ``[N]``, the distance in tokens from the question
    back to the start of the right statement."""

    prompts: Integers
    answers: Integers
    depths: Integers


def make_trials(
    text: Integers, vocabulary: NeedleVocabulary, settings: NeedleTaskSettings
) -> Trials:
    """Make multi-key trials (DroPE, App. C.2): several needles, one of them requested.

    Their names and numbers are distinct. With changes some have the requested name and an earlier
    number: a model that does not know the order answers one of ``1 + changes`` trials.

    ``text``: ``[N, L]`` tokens, the haystacks; the first token stays first.

    Raises:
        UserError: there are more statements than names, they do not fit the length, or all of them
            would be changes.
    """
    N, L = text.shape
    rows = np.arange(N)
    needles = settings.needles
    most = min(len(NAMES), (L - 2) // STATEMENT)
    if needles > most:
        expected = f"expected at most {most} in {L} tokens"
        raise UserError(f"evaluation.needles.needles: {expected}, got {needles}")
    if settings.changes >= needles:
        expected = f"expected fewer than the {needles} of evaluation.needles.needles"
        raise UserError(f"evaluation.needles.changes: {expected}, got {settings.changes}")
    sizes = len(NAMES), len(vocabulary.numbers), 1, needles, needles
    u = uniforms(settings.seed, rows, sum(sizes))
    order, values, asked, places, shuffle = np.split(u, np.cumsum(sizes)[:-1], axis=1)
    names = order.argsort(axis=1)[:, :needles]
    numbers = values.argsort(axis=1)[:, :needles]
    question = (asked[:, 0] * needles).astype(np.int64)
    if settings.changes:
        of_name = shuffle.argsort(axis=1)[:, : settings.changes + 1]
        question = of_name.max(axis=1)
        names[rows[:, None], of_name] = names[rows, question][:, None]
    room = L - 1 - STATEMENT * needles  # the last token is the question
    cuts = 1 + (places * room).astype(np.int64)
    cuts.sort(axis=1)
    prompts, begins = insert(text, vocabulary.statements(names, numbers), cuts)
    prompts[:, -1] = vocabulary.names[names[rows, question]]
    answers = vocabulary.numbers[numbers[rows, question]]
    return Trials(prompts, answers, L - 1 - begins[rows, question])
