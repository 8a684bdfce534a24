"""What a run says of itself before its first step."""

from __future__ import annotations

import logging

from trainer.data.corpus import Corpus
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import label
from trainer.runs.phases import Phase, phases_of
from trainer.runs.starting_point import epochs_read

log = logging.getLogger(__name__)


def say_epochs(config: RunConfig, corpus: Corpus) -> None:
    """Tell how much text there is, and how often the run reads it."""
    read = epochs_read(corpus, phases_of(config), [])(config.trainer.max_steps)
    for part in corpus.parts:
        times = read[part.name]
        name = "The text" if len(corpus.parts) == 1 else f"The text {part.name!r}"
        tokens = f"{len(part.text.train):,}"
        log.info("%s holds %s tokens: this run reads it %.3g times", name, tokens, times)


def say_long_warmups(configs: dict[str, RunConfig]) -> None:
    """Tell which learning rates never reach their peak."""
    for arm in configs.values():
        for key, phase in schedules(arm).items():
            warmup, steps = phase.schedule.warmup_steps, phase.end - phase.origin
            if warmup > steps > 0:
                log.warning(
                    "%s.warmup_steps: %d steps, but %s has %d in this phase: its learning rate "
                    "does not reach its peak",
                    *(key, warmup, label(arm), steps),
                )


def say_unreached_encodings(configs: dict[str, RunConfig]) -> None:
    """Tell which encodings of a pattern a model has too few layers for."""
    for arm in configs.values():
        layers, count = arm.positional.layers, arm.model.num_hidden_layers
        if not arm.model.is_trained and (unused := {*layers} - {*layers[:count]}):
            log.warning(
                "positional.layers: of a pattern of %d layers %s has %d, none with %s",
                *(len(layers), label(arm), count, ", ".join(sorted(unused))),
            )


def schedules(config: RunConfig) -> dict[str, Phase]:
    """Where the schedules of a run stand, and the last phase that each is of."""
    phases = phases_of(config)
    if not config.phases:
        return dict(zip(("schedule", "drop.schedule"), phases, strict=False))
    own = {phase.name: config.phases[phase.name].schedule for phase in phases}
    return {f"phases.{p.name}.schedule" if own[p.name] else "schedule": p for p in phases}
