"""A published ``tokenizer.json``."""

from __future__ import annotations

from tokenizers import Tokenizer


def tokenizer_from_file(path: str) -> Tokenizer:
    """Load the tokenizer with truncation and padding disabled."""
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
