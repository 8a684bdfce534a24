"""Export of a checkpoint to a directory that transformers loads."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer

from trainer.cores import usual_threads
from trainer.data.tokenizer import end_of_text
from trainer.interchange.export.directory import Exported, check_destination, export_model
from trainer.interchange.pretrained import read_pretrained
from trainer.runs.checkpoints import find_checkpoint, load_decoder, read_state
from trainer.runs.directory import check_writable, saved_config
from trainer.runs.phases import training_length_at
from trainer.workflows.model_card import model_card, renewed_card
from trainer.workflows.requests import ExportRequest

log = logging.getLogger(__name__)


def export_checkpoint(request: ExportRequest) -> Exported:
    """Write ``request.to`` and compare what transformers loads from it; leave nothing on failure.

    Raises:
        UserError: the checkpoint cannot be read, the directory not be written, or logits differ.
    """
    assert request.checkpoint is not None
    assert request.to is not None
    torch.set_num_threads(request.threads or usual_threads())
    to = Path(request.to)
    check_destination(to)
    check_writable(str(to), "to")
    if (Path(request.checkpoint) / "config.json").is_file():
        return _export_again(request, to)
    path = find_checkpoint(request.checkpoint)
    state = read_state(path)
    log.info("Exporting %s, step %d", path, state["step"])
    config = saved_config(state["config"], "checkpoint", f"the configuration in {str(path)!r}")
    tokenizer = Tokenizer.from_str(state["tokenizer"])
    model = load_decoder(path, state)
    if state["step"]:
        length = training_length_at(config, state["step"])
        model.layout = model.layout.with_training_length(length)
    return export_model(
        model,
        tokenizer,
        end_of_text(tokenizer),
        to,
        card=lambda plan, difference: model_card(path, state, model, plan, difference),
        tolerance=request.tolerance,
        dtype=request.dtype,
    )


def _export_again(request: ExportRequest, to: Path) -> Exported:
    """Export a published model or an earlier export again, in the form that most engines read."""
    assert request.checkpoint is not None
    published = read_pretrained(request.checkpoint)
    tokenizer = published.require_tokenizer()
    path = Path(request.checkpoint)
    card = path / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    log.info("Exporting %s again", request.checkpoint)
    return export_model(
        published.decoder(),
        tokenizer,
        published.bos_token or 0,  # published tokens replace those written
        to,
        card=lambda plan, _: renewed_card(text, path.resolve().name, plan),
        tolerance=request.tolerance,
        dtype=request.dtype,
        like=path,
    )
