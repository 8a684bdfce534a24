"""Export of a checkpoint to a directory that transformers loads."""

import logging
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.processes import use_cores
from trainer.config import ExportRequest
from trainer.interchange.export import Tokens, export_model
from trainer.model.decoder import Decoder
from trainer.runs.models import find_model
from trainer.runs.phases import phases_of

log = logging.getLogger(__name__)


def export_checkpoint(request: ExportRequest) -> str:
    """Write ``request.to`` and compare what transformers loads from it; leave nothing on failure.

    Returns the architecture.

    Raises:
        UserError: the checkpoint cannot be read, the directory is not empty, or logits differ.
    """
    use_cores()
    # The comparison reads beyond the written context on purpose.
    logging.getLogger("transformers.generation.stopping_criteria").setLevel(logging.ERROR)
    saved = find_model(request.checkpoint)
    config = saved.run
    state = saved.state
    layout = saved.layout
    if config is None:
        raise UserError(f"checkpoint: expected a run or its checkpoint, got {saved.reference!r}")
    step = state["step"]
    log.info("Exporting %s, step %d", saved.path, step)
    # After a drop or rescaling, longer sequences of earlier phases no longer count as trained.
    changes = [phase.drop or phase.rescale for phase in phases_of(config) if phase.start < step]
    is_changed = config.model.from_run is not None or any(changes)
    has_positions = layout.rotates or any(s.alibi for s in layout.spectra) or layout.follows_length
    longest = layout.training_length if is_changed and has_positions else saved.longest_context
    scaled = layout.map(
        lambda s: s.with_temperature(scale=request.logit_scale * s.temperature.scale), layers=None
    )
    model = saved.load()
    assert isinstance(model, Decoder)
    model.layout = scaled.with_training_length(longest)
    encoding = "kept"
    if saved.is_dropped:
        encoding = "changed" if has_positions else "dropped"
    began_with = config.model.from_pretrained or config.model.from_run
    card = {
        "title": config.name,
        "parameters": saved.parameters,
        "steps": step,
        "encoding": encoding,
        "logit_scale": request.logit_scale,
        "training_length": layout.training_length,
        "began_with": Path(began_with).name if began_with else None,
    }
    return export_model(
        model,
        Tokens(saved.tokens.tokenizer, state["end_of_text"], state["token_files"]),
        Path(request.to),
        card=card,
        context=request.context,
        tolerance=request.tolerance,
    )
