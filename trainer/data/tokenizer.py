"""A byte-level BPE, trained on the training text or loaded from ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.errors import UserError

END_OF_TEXT = "<|endoftext|>"
"""Separates documents and begins every sequence."""


def train_tokenizer(texts: Sequence[str], vocab_size: int, words: Sequence[str]) -> Tokenizer:
    """A byte-level BPE of ``vocab_size`` entries, plus ``words`` as whole tokens.

    Args:
        texts: what to learn merges from.
        vocab_size: entries, with the 256 bytes and the end-of-text token.
        words: added after training, matched wherever they occur; a leading space belongs to them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(words))
    return tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """Read a ``tokenizer.json``.

    Raises:
        UserError: it is missing, malformed or has no end-of-text token.
    """
    if not Path(path).is_file():
        raise UserError(f"tokenizer.path: there is no file {path!r}.")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"tokenizer.path: {path!r} is not a tokenizer.json ({error}).") from error
    end_of_text(tokenizer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token that separates documents.

    Raises:
        UserError: the tokenizer has none of the usual ones.
    """
    for token in (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>"):
        if (found := tokenizer.token_to_id(token)) is not None:
            return found
    raise UserError("tokenizer.path: the tokenizer has no end-of-text token such as <|endoftext|>.")
