"""Shape of the trained model that a run begins with, which its configuration omits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from trainer.common.errors import Problem, UserError
from trainer.runs.config import RunConfig
from trainer.runs.directory import saved_run

CHOSEN = "qk_norm", "attention_backend", "from_pretrained", "from_run"
"""Of a model that begins with weights: what its run chooses; all else is theirs."""


def ignored_keys(keys: Iterable[str], source: str) -> list[Problem]:
    """Report the dotted ``keys`` that the trained weights of ``source`` determine.

    Published weights determine their encodings as well, but a drop may replace them.
    """
    keeps = ", which a run keeps that begins with it" if source == "from_run" else ""
    found = []
    for key in keys:
        group, _, rest = key.partition(".")
        of_shape = group == "model" and rest and rest.partition(".")[0] not in CHOSEN
        of_tokens = group == "tokenizer" and rest != "path"  # the tokenizer file may have moved
        if of_shape or of_tokens or (group == "positional" and source == "from_run"):
            found.append(
                Problem(
                    key, f"the model that model.{source} names has its own{keeps}; leave it out."
                )
            )
    return found


def with_trained_shape(config: RunConfig) -> RunConfig:
    """Return the configuration with the shape of the trained model that the run begins with.

    Encodings and label also come from the run that trained the weights.

    Raises:
        UserError: there is no such model, its files are damaged, or it conflicts with the request.
    """
    given = config.model
    if not given.is_trained:
        return config
    if own_checkpoint(config) is not None:
        return _as_it_began(config)
    from trainer.runs.starting_weights import encodings_of, normalizes, starting_weights

    start = starting_weights(given)
    assert start is not None
    shape, normed = start.config, normalizes(start.layout)
    if not normed and given.qk_norm.when == "always":
        raise UserError.at(
            "model.qk_norm.when",
            "'always', but the weights were trained without; choose 'never' or 'after_drop'.",
        )
    shape = replace(
        shape,
        qk_norm=replace(shape.qk_norm, when="always") if normed else given.qk_norm,
        attention_backend=given.attention_backend,
        from_pretrained=given.from_pretrained,
        from_run=given.from_run,
    )
    if given.from_run is not None:
        positional, called = encodings_of(given.from_run)
        config = replace(config, positional=positional, label=config.label or called)
    return replace(config, model=shape)


def own_checkpoint(config: RunConfig) -> Path | None:
    """Return a run's own newest checkpoint if the model of its ``model.from_run`` has disappeared.

    The run resumes from its checkpoint and no longer needs the other model. None if the model
    exists or there is no checkpoint.

    Raises:
        UserError: the configuration that the run was started with is damaged.
    """
    given, run = config.model.from_run, Path(config.run_dir)
    if not given or config.overwrite or Path(given).exists() or not (run / "config.yaml").is_file():
        return None
    from trainer.runs.checkpoints import regular_checkpoints

    found = regular_checkpoints(run / "checkpoints")
    return found[-1] if found and saved_run(run).model.from_run == given else None


def _as_it_began(config: RunConfig) -> RunConfig:
    """Return the configuration with what the run took from the missing model at its start."""
    given, saved = config.model, saved_run(Path(config.run_dir))
    normed = saved.model.qk_norm.when == "always"
    shape = replace(
        saved.model,
        qk_norm=saved.model.qk_norm if normed else given.qk_norm,
        attention_backend=given.attention_backend,
    )
    label = config.label or saved.label
    return replace(config, model=shape, positional=saved.positional, label=label)
