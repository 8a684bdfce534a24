"""Text of a run in the tokens of its model."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from trainer.checkpoint import BEFORE_DROP, read_state, regular_checkpoints
from trainer.common.errors import UserError
from trainer.common.processes import current_ranks
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.prepared import Manifest, prepare, shared_tokenizer
from trainer.data.sources import cache_directory, source_of
from trainer.data.tokenizer import SpecialTokens, same_tokens, special_tokens, vocabulary_size
from trainer.model.config import check_vocabulary
from trainer.runs.models import check_embeddings
from trainer.runs.phases import Run


def tokens_of_weights(run: Run) -> SpecialTokens | None:
    """Return the tokens of the weights that the run begins with, unless another is configured."""
    weights = run.weights
    if run.config.tokenizer.path is not None or weights is None:
        return None
    return special_tokens(weights.require_tokenizer(), weights.token_files, weights.end_of_text)


def prepare_texts(run: Run) -> Iterator[str]:
    """Prepare every text of a run; yield a line for each that is complete."""
    tokenizer = tokens_of_weights(run) or run.config.tokenizer
    for text in run.config.data.texts.values():
        directory = prepare(text, tokenizer)
        tokenizer = shared_tokenizer(tokenizer, directory, cache_directory(text))
        manifest = Manifest.load(directory)
        counts = ", ".join(f"{split} {count:,}" for split, count in manifest.tokens.items())
        title = source_of(text).title(text)
        yield f"{title}: {manifest.read:,} documents, tokens {counts}; in {directory}"


def open_corpus(run: Run) -> Corpus:
    """Open the run's text, which holds the longest sequences of the run and its controls, with the
    tokenizer of its pretrained model, if it has one.

    A resumed run gets the text that it has read so far, even if its source has changed since. Of
    several processes none prepares text.
    """
    config = run.config
    wanted = None
    if not config.overwrite:
        directory = run.directory / "checkpoints"
        for path in [*directory.glob(BEFORE_DROP), *regular_checkpoints(directory)]:
            with suppress(ValueError, OSError, LookupError):  # damaged, or of another format
                wanted = read_state(path)["texts"]
    longest = max(phase.length for each in run.runs.values() for phase in each.phases)
    data = replace(config.data, sequence_length=longest)
    tokenizer = tokens_of_weights(run) or config.tokenizer
    return prepare_corpus(data, tokenizer, alone=current_ranks().world_size == 1, wanted=wanted)


def check_vocabularies(runs: Mapping[str, Run], corpus: Corpus) -> None:
    """Raise a UserError if a run's model has too few embeddings for the text, or other tokens."""
    for name, run in runs.items():
        tokens = tokens_of_weights(run)
        if tokens is None:
            check_vocabulary(run.config.model, vocabulary_size(corpus.tokenizer))
        elif same_tokens(tokens.tokenizer, corpus.tokenizer):
            check_embeddings(run.config.model, tokens)
        else:
            raise UserError(f"model: the weights of {name} have another tokenizer than the text")
