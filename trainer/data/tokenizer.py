"""Byte-level BPE trained on the training text, or a published tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.common.errors import UserError
from trainer.config import TokenizerConfig
from trainer.interchange.published import eos_ids, read_token_files, tokenizer_from_file

END_OF_TEXT = "<|endoftext|>"
"""Separates documents, and begins every sequence if the tokenizer puts no token before texts."""
TEXT_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")
"""Tokens that separate documents, in the order of preference."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Tokens with which instruct models (Qwen and SmolLM2, Llama 3, Gemma, Phi) end an answer."""
SAMPLE_MEGABYTES = 64
"""Megabytes of the training text that a tokenizer is trained on."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer for text, and the id of the token after each document."""

    tokenizer: Tokenizer
    end_of_text: int


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


def load_tokenizer(path: str) -> TextTokenizer:
    """Load a ``tokenizer.json``, or that of a model on the hub.

    Files with the settings of a published model count if they lie beside its ``tokenizer.json``.

    Raises:
        UserError: it has no end-of-text token.
    """
    eos: tuple[int, ...] = ()
    if is_tokenizer_file(path):
        tokenizer = tokenizer_from_file(path)
        if Path(path).name == "tokenizer.json":
            eos = eos_ids(read_token_files(Path(path).parent), tokenizer)
    else:
        from huggingface_hub import hf_hub_download

        tokenizer = tokenizer_from_file(hf_hub_download(path, "tokenizer.json"))
    return TextTokenizer(tokenizer, end_of_text(tokenizer, eos))


def is_tokenizer_file(path: str) -> bool:
    """Whether ``tokenizer.path`` names a file here, not a model on the hub."""
    return Path(path).is_file() or path.count("/") != 1 or path.endswith(".json")


def tokenizer_identity(
    config: TokenizerConfig, tokenizer: TextTokenizer | None, words: Sequence[str]
) -> dict[str, Any]:
    """Identify a tokenizer by its content, its name on the hub, or the request to train it."""
    if config.path and not is_tokenizer_file(config.path):
        return {"hub": config.path}
    if config.path:
        tokenizer = load_tokenizer(config.path)
    if tokenizer is not None:
        content = tokenizer.tokenizer.to_str()
        sha256 = hashlib.sha256(content.encode()).hexdigest()
        return {"sha256": sha256, "end_of_text": tokenizer.end_of_text}
    return {
        "vocab_size": config.vocab_size,
        "sample_megabytes": SAMPLE_MEGABYTES,
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


def end_of_text(tokenizer: Tokenizer, eos: Collection[int] = ()) -> int:
    """Return the id of the token that separates documents.

    ``eos``: ids that a published model's settings call the end of a text. An instruct model's may
    end turns alone; a token that is named after the end of a text then separates documents.

    Raises:
        UserError: the tokenizer has no known end-of-text token.
    """
    named, turns = _ids(tokenizer, TEXT_ENDS), _ids(tokenizer, TURN_ENDS)
    by_name_too = [token for token in named if token in eos]
    ends = (*by_name_too, *(token for token in eos if token not in turns), *named, *eos)
    if not ends:
        raise UserError(
            "tokenizer.path: expected an end-of-text token such as <|endoftext|>, got none"
        )
    return ends[0]


def end_tokens(tokenizer: Tokenizer, eos: Collection[int] = ()) -> frozenset[int]:
    """Return the ids of the tokens whose names end an answer: end-of-text, and ends of turns.

    ``eos``: see :func:`end_of_text`.

    Raises:
        UserError: the tokenizer has no known end-of-text token.
    """
    return frozenset({end_of_text(tokenizer, eos), *_ids(tokenizer, TURN_ENDS)})


def _ids(tokenizer: Tokenizer, names: Iterable[str]) -> list[int]:
    """Return the ids of the tokens that the tokenizer has."""
    ids = map(tokenizer.token_to_id, names)
    return [number for number in ids if number is not None]
