"""Preparation of a run's text: every text of its mixture."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import RunConfig
from trainer.data.prepared import Manifest, open_prepared, prepare
from trainer.data.sources import describe
from trainer.workflows.training_text import tokenizer_of_weights


def prepare_texts(config: RunConfig) -> Iterator[str]:
    """Prepare the text; yield a line for each text that is complete."""
    tokenizer = tokenizer_of_weights(config)
    for text, _ in config.data.texts.values():
        directory = prepare(text, config.tokenizer, tokenizer)
        tokenizer = tokenizer or open_prepared(directory).text_tokenizer  # one for all texts
        manifest = Manifest.load(directory)
        counts = ", ".join(f"{split} {count:,}" for split, count in manifest.tokens.items())
        yield f"{describe(text)}: {manifest.read:,} documents, tokens {counts}; in {directory}"
