"""Export of a checkpoint to a directory that transformers loads."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.common.processes import usual_threads
from trainer.data.tokenizer import end_of_text
from trainer.interchange.export.directory import Exported, check_destination, export_model
from trainer.interchange.pretrained import read_pretrained
from trainer.model.decoder import Decoder
from trainer.positional.layout import LayerEncoding
from trainer.positional.spectrum import Temperature
from trainer.runs.checkpoints import find_checkpoint, load_decoder, read_state
from trainer.runs.directory import check_writable, saved_config
from trainer.runs.fitted_temperature import with_fitted_temperature
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
    stored = model.layout.training_length
    if state["step"]:
        length = training_length_at(config, state["step"])
        model.layout = model.layout.with_training_length(length)
    if (factor := request.temperature_at) is not None:
        model = _tempered(model, path, factor, stored)
    return export_model(
        model,
        tokenizer,
        end_of_text(tokenizer),
        to,
        card=lambda plan, difference: model_card(
            path, state, model, plan, difference, request.temperature_at
        ),
        tolerance=request.tolerance,
        dtype=request.dtype,
    )


def _factor(temperature: Temperature, length: float, training_length: int) -> float:
    """Return the factor of logits in sequences of ``length`` tokens."""
    times = length / (temperature.reference or training_length)
    return 1 + temperature.coefficient * math.log(max(1.0, times))


def _tempered(model: Decoder, path: Path, factor: float, stored_length: int) -> Decoder:
    """Return the decoder with the temperature that was fitted for the checkpoint, as it is at
    ``factor`` times the training length, at all lengths.

    That is a constant temperature, or if heads differ, a scale of the softmax for each (HeadScale,
    arXiv 2404.12224).

    Raises:
        UserError: none was fitted.
    """
    layout, fitted = with_fitted_temperature(model.layout, path, stored_length)
    if not fitted:
        raise UserError.at(
            "temperature_at",
            f"no temperature is kept with {str(path)!r}; evaluate it with "
            "evaluation.methods=[temperature] or [temperature_per_head] first.",
        )
    heads, before = model.config.num_attention_heads, model.layout
    length = factor * before.training_length
    scales = []
    for old, new in zip(before.layers, layout.layers, strict=True):
        factors = [
            1.0 if new is old else _factor(s.temperature, length, before.training_length)
            for s in new.spectra
        ]
        scales.append([f for f in factors for _ in range(heads // len(factors))])
    if all(len({*row}) == 1 for row in scales):
        model.layout = replace(before, layers=tuple(map(_scaled, before.layers, scales)))
        return model
    softmax = replace(model.config.softmax, learned_scale=True)
    scaled = Decoder(replace(model.config, softmax=softmax), before)
    scaled.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for block, row in zip(scaled.layers, scales, strict=True):
            assert block.self_attn.softmax_scale is not None
            block.self_attn.softmax_scale.mul_(torch.tensor(row))
    return scaled.eval()


def _scaled(layer: LayerEncoding, scales: list[float]) -> LayerEncoding:
    """Multiply the logits of all heads by the first of ``scales``, which are equal."""
    return layer.map(lambda s: s.with_temperature(scale=s.temperature.scale * scales[0]))


def _export_again(request: ExportRequest, to: Path) -> Exported:
    """Export a published model or an earlier export again, in the form that most engines read."""
    assert request.checkpoint is not None
    if request.temperature_at is not None:
        raise UserError.at("temperature_at", "is for a run whose evaluation fitted a temperature.")
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
