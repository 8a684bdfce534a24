"""A published ``tokenizer.json``."""

from __future__ import annotations

from tokenizers import Tokenizer


def tokenizer_from_file(path: str) -> Tokenizer:
    """It, without the cutting and filling of texts that some files ask for: who reads a text here
    wants all of it."""
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
