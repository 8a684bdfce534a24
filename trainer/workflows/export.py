"""Export of a checkpoint to a directory that transformers loads."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer

from trainer.checkpoint import check_sound, find_checkpoint, read_state
from trainer.common.processes import usual_threads
from trainer.config import ExportRequest
from trainer.data.tokenizer import end_of_text
from trainer.interchange.export import export_model
from trainer.runs.descriptions import is_dropped
from trainer.runs.directory import saved_config
from trainer.runs.models import read_run
from trainer.runs.phases import phases_of, training_length_at

log = logging.getLogger(__name__)


def export_checkpoint(request: ExportRequest) -> str:
    """Write ``request.to`` and compare what transformers loads from it; leave nothing on failure.

    Returns the architecture.

    Raises:
        UserError: the checkpoint cannot be read, the directory is not empty, or logits differ.
    """
    torch.set_num_threads(usual_threads())
    path = check_sound(find_checkpoint(request.checkpoint))
    state = read_state(path)
    log.info("Exporting %s, step %d", path, state["step"])
    config = saved_config(state["config"])
    tokenizer = Tokenizer.from_str(state["tokenizer"])
    model, step = read_run(path).decoder(), state["step"]
    longest = model.layout.longest
    if step:
        model.layout = model.layout.with_training_length(training_length_at(config, step))
    layout = model.layout
    if (scale := request.logit_scale) != 1:
        model.layout = layout.map(
            lambda s: s.with_temperature(scale=scale * s.temperature.scale), layout.chosen(None)
        )
    # A drop or a rescaling that leaves positions ends what longer sequences taught before.
    is_changed = config.model.from_run is not None or any(
        p.start < step and (p.settings.drop or p.settings.rescale) for p in phases_of(config)
    )
    has_positions = layout.rotates or any(s.alibi for s in layout.spectra) or layout.follows_length
    if not (is_changed and has_positions):
        model.layout = model.layout.with_training_length(longest)
    began_with = config.model.from_pretrained or config.model.from_run
    card = (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        f"# {config.name}\n\n"
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {step:,} steps, "
        f"positional encoding {'dropped' if is_dropped(config, step) else 'kept'}, "
        f"training length {layout.training_length:,} tokens.\n"
    )
    if began_with:
        card += f"Training began with {Path(began_with).name}, whose licence holds.\n"
    return export_model(
        model,
        tokenizer,
        end_of_text(tokenizer, (state["end_of_text"],)),
        Path(request.to),
        card=card,
        tolerance=request.tolerance,
        token_files=state["token_files"],
    )
