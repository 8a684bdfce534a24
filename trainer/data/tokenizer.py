"""Byte-level BPE trained on the training text, or a published tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.common.errors import UserError, first_line
from trainer.data.config import TokenizerConfig
from trainer.interchange.hub import cached_or_downloaded, tokenizer_from_file

END_OF_TEXT = "<|endoftext|>"
"""Separates documents, and begins every sequence if the tokenizer puts no token before texts."""
TEXT_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")
"""Tokens that separate documents, in the order in which they are looked for."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Tokens with which instruct models (Qwen and SmolLM2, Llama 3, Gemma, Phi) end an answer."""
SMALLEST_VOCABULARY = 257
"""Every byte, and the end of a text."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, words: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE of ``vocab_size`` entries, bytes and end-of-text token included.

    ``words``: tokens added after training, matched wherever they occur, leading space included.
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
    """Load a ``tokenizer.json``, the tokenizer of a ``.gguf`` file, or one from the hub.

    Raises:
        UserError: the file is missing or malformed, or has no end-of-text token.
    """
    if is_tokenizer_file(path):
        tokenizer = _read(path)
    elif os.path.isdir(path):  # noqa: PTH112
        raise UserError.at(
            "tokenizer.path",
            f"{path!r} is a directory; name the file in it, such as "
            f"{str(Path(path) / 'tokenizer.json')!r}.",
        )
    elif path.endswith((".json", ".gguf")) or path.count("/") != 1 or path.startswith((".", "~")):
        raise UserError.at("tokenizer.path", f"there is no file {path!r}.")
    else:
        try:
            from huggingface_hub import hf_hub_download

            file = cached_or_downloaded(hf_hub_download, path, "tokenizer.json")
            tokenizer = tokenizer_from_file(file)
        except Exception as error:  # whatever transports raise, and tokenizers' bare Exception
            raise UserError.at(
                "tokenizer.path",
                f"there is no file {path!r}, and no such model could be had from the hub: "
                f"{first_line(error)}",
            ) from error
    end_of_text(tokenizer)
    return tokenizer


def is_tokenizer_file(path: str) -> bool:
    """Whether ``tokenizer.path`` names a file here, not a model on the hub."""
    return os.path.isfile(path)  # noqa: PTH113  also False for a name that is too long


def _read(path: str) -> Tokenizer:
    try:
        if path.endswith(".gguf"):
            from trainer.interchange.gguf import read_gguf

            return read_gguf(Path(path))[2]
        return tokenizer_from_file(path)
    except UserError as error:
        key = f"tokenizer.path: {path!r}"
        raise UserError(*(problem.in_file(key) for problem in error.problems)) from error
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError.at(
            "tokenizer.path", f"{path!r} is not a tokenizer.json ({error})."
        ) from error


def tokenizer_identity(
    config: TokenizerConfig, tokenizer: Tokenizer | None, words: Sequence[str]
) -> dict[str, Any]:
    """Identify a tokenizer by its content, its name on the hub, or the request to train it."""
    if config.path and not is_tokenizer_file(config.path) and config.path.count("/") == 1:
        return {"hub": config.path}
    if config.path:
        tokenizer = load_tokenizer(config.path)
    if tokenizer is not None:
        return {"sha256": hashlib.sha256(tokenizer.to_str().encode()).hexdigest()}
    return {
        "vocab_size": config.vocab_size,
        "sample_megabytes": config.sample_megabytes,
        "words": hashlib.sha256("\0".join(words).encode()).hexdigest(),
    }


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers give the same ids.

    Truncation, padding and added special tokens may differ: nothing here uses them.
    """
    contents = [json.loads(tokenizer.to_str()) for tokenizer in (first, second)]
    for content in contents:
        for unused in ("post_processor", "truncation", "padding"):
            content.pop(unused, None)
    return contents[0] == contents[1]


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one; a published vocabulary may have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def own_first_token(tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that the tokenizer puts before every text, such as ``<s>``, or
    None."""
    return next(iter(tokenizer.encode("").ids), None)


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the id of the token that separates documents.

    Raises:
        UserError: the tokenizer has no known end-of-text token.
    """
    for token in TEXT_ENDS:
        if (number := tokenizer.token_to_id(token)) is not None:
            return number
    raise UserError.at(
        "tokenizer.path", "the tokenizer has no end-of-text token such as <|endoftext|>."
    )


def end_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the tokens that end an answer: end-of-text, and ends of turns.

    Raises:
        UserError: the tokenizer has no known end-of-text token.
    """
    turns = map(tokenizer.token_to_id, TURN_ENDS)
    return frozenset({end_of_text(tokenizer), *(token for token in turns if token is not None)})
