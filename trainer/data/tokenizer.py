"""Byte-level BPE trained on the training text, or a published tokenizer; and special tokens."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.common.errors import UserError
from trainer.config import TokenizerConfig
from trainer.interchange.published import (
    CONFIG,
    GENERATION_CONFIG,
    TOKEN_FILES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    own_first_token,
    read_token_files,
    settings,
    tokenizer_from_file,
)

END_OF_TEXT = "<|endoftext|>"
"""Separates documents, and begins every sequence if the tokenizer puts no token before texts."""
TEXT_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")
"""Tokens that separate documents, in the order of preference."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Tokens with which instruct models (Qwen and SmolLM2, Llama 3, Gemma, Phi) end an answer."""
SAMPLE_MEGABYTES = 64
"""Megabytes of the training text that a tokenizer is trained on."""


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


@dataclass(frozen=True)
class SpecialTokens:
    """A tokenizer, and the ids of its tokens that are no text.

    ``first``: begins every text (None: nothing does). ``named_bos``: the ``bos_token_id`` of a
    published configuration, which the tokenizer may not add by itself. ``end``: separates
    documents. ``stops``: end an answer.
    """

    tokenizer: Tokenizer
    first: int | None
    named_bos: int | None
    end: int
    stops: frozenset[int]


TokenizerChoice = TokenizerConfig | SpecialTokens
"""Tokenizer of a text: a published one by its path, one to be trained, or that of a model."""


def special_tokens(
    tokenizer: Tokenizer, files: Mapping[str, str] | None = None, end: int | None = None
) -> SpecialTokens:
    """Find special tokens by a published model's settings, or else by their names.

    An instruct model's settings may call only the ends of turns the end of a text; a token that is
    named after the end of a text then separates documents.

    Args:
        files: as :func:`~trainer.interchange.published.read_token_files` returns them.
        end: separated the documents that the model was trained on, and began its sequences if
            the tokenizer begins no text (None: it was trained elsewhere).

    Raises:
        UserError: the tokenizer has no known end-of-text token.
    """
    files = files or {}
    config = settings(files, CONFIG)
    word = settings(files, TOKENIZER_CONFIG).get("eos_token")
    word = word["content"] if isinstance(word, dict) else word
    of_config = _ids(tokenizer, config.get("eos_token_id"))
    of_generation = _ids(tokenizer, settings(files, GENERATION_CONFIG).get("eos_token_id"))
    eos = [*_ids(tokenizer, word), *of_config, *of_generation]
    named = _ids(tokenizer, TEXT_ENDS)
    turns = _ids(tokenizer, TURN_ENDS)
    ends = [i for i in named if i in eos]  # in the order of preference
    ends += [i for i in eos if i not in turns]
    ends += named + eos
    first = own_first_token(tokenizer)
    if end is not None:
        ends = [end]
        if first is None:
            first = end
    if not ends:
        raise UserError("tokenizer.path: expected an end-of-text token such as <|endoftext|>")
    bos = next(iter(_ids(tokenizer, config.get("bos_token_id"))), None)
    stops = of_generation or of_config or turns
    return SpecialTokens(tokenizer, first, bos, ends[0], frozenset([*stops, ends[0]]))


def _ids(tokenizer: Tokenizer, tokens: Any) -> list[int]:
    """Return the ids of a token or of several, names or ids, that the tokenizer has."""
    tokens = tokens if isinstance(tokens, list | tuple) else [tokens]
    ids = [tokenizer.token_to_id(token) if isinstance(token, str) else token for token in tokens]
    numbers = (i for i in ids if isinstance(i, int) and i >= 0)
    return [i for i in numbers if tokenizer.id_to_token(i) is not None]


def load_tokenizer(path: str) -> SpecialTokens:
    """Load a ``tokenizer.json``, or that of a model on the hub; see :func:`special_tokens`.

    Files with the settings of a published model count if they lie beside its ``tokenizer.json``.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file /= TOKENIZER
    if not is_tokenizer_file(path):
        from huggingface_hub import snapshot_download

        file = Path(snapshot_download(path, allow_patterns=[TOKENIZER, *TOKEN_FILES]), TOKENIZER)
    if not file.is_file():
        raise UserError(f"tokenizer.path: expected {TOKENIZER} or OWNER/NAME (hub), got {path!r}")
    files = read_token_files(file.parent) if file.name == TOKENIZER else {}
    return special_tokens(tokenizer_from_file(file), files)


def is_tokenizer_file(path: str) -> bool:
    """Whether ``tokenizer.path`` names a file here, not a model on the hub."""
    return Path(path).exists() or path.count("/") != 1 or path[0] == "~" or path.endswith(".json")


def tokenizer_identity(tokenizer: TokenizerChoice, words: Sequence[str]) -> dict[str, Any]:
    """Identify a tokenizer by its content, its name on the hub, or the request to train it."""
    if isinstance(tokenizer, TokenizerConfig):
        if not tokenizer.path:
            return {
                "vocab_size": tokenizer.vocab_size,
                "sample_megabytes": SAMPLE_MEGABYTES,
                "words": hashlib.sha256("\0".join(words).encode()).hexdigest(),
            }
        if not is_tokenizer_file(tokenizer.path):
            return {"hub": tokenizer.path}
        tokenizer = load_tokenizer(tokenizer.path)
    content = tokenizer.tokenizer.to_str()
    return {"sha256": hashlib.sha256(content.encode()).hexdigest(), "end_of_text": tokenizer.end}


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers give the same ids.

    Truncation, padding and what they put around texts may differ: nothing here uses them.
    """
    contents = [json.loads(tokenizer.to_str()) for tokenizer in (first, second)]
    for content in contents:
        for unused in ("post_processor", "truncation", "padding"):
            content.pop(unused, None)
    return contents[0] == contents[1]


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one; a published vocabulary may have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
