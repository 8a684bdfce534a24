"""Decoded samples of a run's step, with their origin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainer.common.errors import UserError
from trainer.data.order import as_text, sample_hashes
from trainer.runs.models import find_candidate
from trainer.runs.phases import phase_before, phases_of
from trainer.runs.starting_point import data_fingerprints, samples_of
from trainer.workflows.requests import InspectionRequest
from trainer.workflows.subjects import held_out_corpus

BORDER = " ¶ "
"""Mark of the end of a document."""


def inspect_step(request: InspectionRequest) -> Iterator[str]:
    """Yield lines about the step, then about each of its samples.

    Raises:
        UserError: the checkpoint is of no run, the run has no such step, or its text is missing.
    """
    candidate = find_candidate(str(request.checkpoint))
    if (run := candidate.run) is None:
        raise UserError.at(
            "checkpoint", "published weights; no run here knows what they have read."
        )
    if request.step > run.trainer.max_steps:
        raise UserError.at(
            "step", f"the run has {run.trainer.max_steps} steps, got {request.step}."
        )
    corpus = held_out_corpus(None, candidate)
    phase = phase_before(phases_of(run), request.step)
    last = phase_before(phases_of(run), candidate.state["step"])
    if candidate.state.get("data") != data_fingerprints(corpus, last):
        raise UserError.at(
            "checkpoint",
            "it was trained on other text, or in another order, than is read here (an earlier "
            "version of this program, changed files, another version of Python).",
        )
    samples = samples_of(corpus, phase)
    size = phase.config.trainer.batch_size
    first = phase.first_sample(request.step - 1, candidate.state.get("skips", []))
    total = as_text(int(samples.hashes(range(first, first + size)).sum()))
    yield (
        f"Step {request.step} of {candidate.reference}: samples {first:,} to "
        f"{first + size - 1:,} of {phase.config.data.sequence_length:,} tokens, certificate {total}"
    )
    numbers = np.arange(first, first + min(request.samples, size))
    parts, blocks = samples.where(numbers)
    targets, weights = samples.targets(numbers)
    for number, part, block, row, weight, digest in zip(
        numbers, parts, blocks, targets, weights, sample_hashes(targets), strict=True
    ):
        source = samples.corpus.parts[part]
        ends = int((row == corpus.end_of_text).sum())
        yield ""
        yield (
            f"Sample {number:,}: block {block:,} of {source.name} "
            f"({source.text.directory.name}), {ends} document ends, {int((weight > 0).sum()):,} "
            f"tokens in the loss, hash {as_text(int(digest))}"
        )
        documents = np.split(row, np.flatnonzero(row == corpus.end_of_text) + 1)
        text = BORDER.join(corpus.tokenizer.decode(tokens.tolist()) for tokens in documents)
        more = "..." if len(text) > request.characters else ""
        yield text[: request.characters] + more
