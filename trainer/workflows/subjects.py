"""Finished models as subjects of an evaluation: held-out text, and the methods that apply."""

from __future__ import annotations

import logging

import torch

from trainer.common.errors import UserError
from trainer.config import DataConfig, TokenizerConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.tokenizer import same_tokens
from trainer.evaluation.engine import Subject
from trainer.evaluation.passes import Dtype, precision_of
from trainer.evaluation.store import fingerprint
from trainer.model.language_model import LanguageModel
from trainer.runs.models import DTYPES, Candidate

log = logging.getLogger(__name__)


def held_out_corpus(text: DataConfig | None, candidate: Candidate) -> Corpus:
    """Open the prepared splits of ``text`` in the model's tokens.

    ``text``: None for the text of the model's run, or, if it was trained elsewhere, the text that
    comes with Python.

    Raises:
        UserError: the text cannot be read, is too short, or differs from the run's.
    """
    run = candidate.run
    source = text or (DataConfig() if run is None else run.data)
    if text is None and run is not None and not run.model.is_trained:
        texts = (candidate.state.get("data") or {}).get("texts")
        corpus = prepare_corpus(source, run.tokenizer, wanted=texts)
        if not same_tokens(corpus.tokenizer, candidate.tokenizer):
            raise UserError("text: the run's text has changed, and its tokenizer with it")
        return corpus
    return prepare_corpus(source, TokenizerConfig(), candidate.text_tokenizer)


def subject_of(
    candidate: Candidate,
    dtype: Dtype | None,
    device: str,
    *,
    chunk: int | None = None,
) -> Subject:
    """Return a subject that loads the model onto a device ("cpu", "cuda") and computes there.

    ``dtype``: as configured (None: bf16 on a GPU, else fp32). ``chunk``: tokens of a sequence read
    at once; see ``LanguageModel.prefill_chunk``. A GPU multiplies float32 matrices in TF32.
    """
    weights = precision_of(dtype, device)
    precision = multiplied_in(weights, device)

    def load() -> LanguageModel:
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
        model = candidate.load(device, DTYPES[weights])
        model.prefill_chunk = chunk
        half = weights == "bf16"
        try:
            backend = model.use_backend(model.config.attention_backend, device, half=half)
        except UserError:  # the run's backend needs a GPU or 16 bits
            backend = model.use_backend("auto", device, half=half)
        kind = f"{precision} on {device}"
        log.info("%s: %s, attention %s (%s)", candidate.name, kind, backend.name, backend.why)
        return model

    # The key holds the precision, but not the device, which changes only the order of sums.
    key = fingerprint(candidate.fingerprint, precision)
    is_ours = candidate.computed_by is None
    return Subject(candidate.name, key, candidate.config, candidate.layout, load, is_ours, device)


def multiplied_in(weights: Dtype, device: str) -> str:
    """Return the precision of matrix products with such weights: fp32, tf32 or bf16."""
    return "tf32" if (weights, device) == ("fp32", "cuda") else weights
