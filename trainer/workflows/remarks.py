"""Remarks of a run or an evaluation before it begins."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainer.data.corpus import Corpus
from trainer.evaluation.config import LONGBENCH, MANY_SHOT, RULER, EvaluationConfig
from trainer.evaluation.many_shot import LONG_TASKS
from trainer.evaluation.method_config import BY_LAYER, ON_TEXT, MethodsConfig
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.results import KEY_TOKENS, PERPLEXITY, STATEMENTS
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import label
from trainer.runs.phases import Phase, phases_of, tokens_at
from trainer.runs.starting_point import epochs_read
from trainer.runs.starting_weights import starting_weights
from trainer.runs.trained_shape import own_checkpoint
from trainer.runs.training_config import MonitorConfig
from trainer.workflows.training_text import idle_rescalings

log = logging.getLogger(__name__)


MANY_EPOCHS = 16
"""Readings of a text after which another teaches little (Muennighoff et al. 2023, arXiv
2305.16264)."""
LARGE, FEW_TOKENS = 50_000_000, 8192
"""Weights of a model's blocks from which on a vocabulary of fewer tokens is small for it."""
MUCH_SHORTER = 16
"""How many times shorter than before sequences are that leave most of a context untrained."""


def say_epochs(config: RunConfig, corpus: Corpus) -> None:
    """Log how much text there is, and how often the run reads it; warn of many times."""
    read = epochs_read(corpus, phases_of(config), [])(config.trainer.max_steps)
    for part in corpus.parts:
        times = read[part.name]
        name = "The training part of the text"
        name += "" if len(corpus.parts) == 1 else f" {part.name!r}"
        tokens = f"{len(part.text.train):,}"
        if times <= MANY_EPOCHS:
            log.info("%s holds %s tokens: this run reads it %.3g times", name, tokens, times)
            continue
        few = max(int(config.trainer.max_steps * MANY_EPOCHS / times), 1)
        log.warning(
            "%s holds %s tokens: this run reads it %.3g times, and learns it by heart; give more "
            "text, or fewer steps (trainer.max_steps=%d reads it %d times)",
            *(name, tokens, times, few, MANY_EPOCHS),
        )


def say_small_vocabularies(configs: dict[str, RunConfig]) -> None:
    """Log which models are large for the vocabulary that is trained for them."""
    for arm in configs.values():
        tokens, given = arm.tokenizer.vocab_size, arm.tokenizer.path or arm.model.is_trained
        weights = arm.model.block_weights
        if not given and tokens < FEW_TOKENS and weights > LARGE:
            log.warning(
                "tokenizer.vocab_size: %s tokens are few for %s with %s weights in its blocks; "
                "tokenizer.vocab_size=32000 or tokenizer.path=FILE packs more text into a sequence",
                *(f"{tokens:,}", label(arm), f"{weights:,}"),
            )
            return  # controls share the tokenizer


def say_short_sequences(configs: dict[str, RunConfig]) -> None:
    """Log which trained weights go on with sequences much shorter than before."""
    for arm in configs.values():
        start = starting_weights(arm.model) if own_checkpoint(arm) is None else None
        if start is None:
            continue
        before, now = start.layout.training_length, arm.training_length
        if now * MUCH_SHORTER <= before:
            log.warning(
                "data.sequence_length: %s trains on sequences of %s tokens, and its weights were "
                "trained on %s; data.sequence_length=%d keeps that length",
                *(label(arm), f"{now:,}", f"{before:,}", before),
            )


def say_long_warmups(configs: dict[str, RunConfig]) -> None:
    """Log which learning rates never reach their peak."""
    for arm in configs.values():
        for key, phase in schedules(arm).items():
            warmup, steps = phase.schedule.warmup_steps, phase.end - phase.origin
            if warmup > steps > 0:
                log.warning(
                    "%s.warmup_steps: %d steps, but %s has %d in this phase: its learning rate "
                    "does not reach its peak; %s.warmup_steps=%d is a tenth of them",
                    *(key, warmup, label(arm), steps, key, max(steps // 10, 1)),
                )


def say_unreached_encodings(configs: dict[str, RunConfig]) -> None:
    """Log which encodings of a pattern are unused because the model has too few layers."""
    for arm in configs.values():
        layers, count = arm.positional.layers, arm.model.num_hidden_layers
        if not arm.model.is_trained and (unused := {*layers} - {*layers[:count]}):
            log.warning(
                "positional.layers: of a pattern of %d layers %s has %d, none with %s; "
                "model.num_hidden_layers=%d has all of its encodings",
                *(len(layers), label(arm), count, ", ".join(sorted(unused))),
                1 + max(map(layers.index, unused)),
            )


def say_idle_rescalings(configs: dict[str, RunConfig]) -> None:
    """Log which phases rescale nothing."""
    for arm in configs.values():
        for phase, rotates in idle_rescalings(arm).items():
            if not rotates:
                log.warning(
                    "phases.%s.rescale: nothing of %s rotates by then, so that nothing is rescaled",
                    *(phase, label(arm)),
                )
                continue
            log.warning(
                "phases.%s.rescale: no layer of %s that is rescaled rotates by then; "
                "phases.%s.rescale.layers=all rescales every layer, also those whose window is "
                "no longer than the training length",
                *(phase, label(arm), phase),
            )


def say_other_budgets(configs: dict[str, RunConfig]) -> None:
    """Log which controls train on more or fewer tokens than the run."""
    tokens = {name: tokens_at(arm, arm.trainer.max_steps) for name, arm in configs.items()}
    for name, count in tokens.items():
        if count != tokens["main"]:
            log.warning(
                "controls.%s: %s trains on %s tokens, and %s on %s",
                *(name, label(configs[name]), f"{count:,}"),
                *(label(configs["main"]), f"{tokens['main']:,}"),
            )


OF_METHODS = {
    "fit_windows": ON_TEXT,
    "layers": BY_LAYER,
    "temperature": ("temperature", "temperature_rope_id", "temperature_per_head"),
    "dynamic_ntk": ("dynamic_ntk_alpha",),
    "longrope": ("longrope",),
    "choice": ("dope", "weighted_rope"),
    "dope": ("dope",),
    "weighted_rope": ("weighted_rope",),
}
"""Settings of ``evaluation``, and the parts of methods that read them."""


def say_idle_settings(
    config: MethodsConfig, words: Sequence[str], monitor: MonitorConfig | None = None
) -> None:
    """Log which given settings of an evaluation no method and no task uses.

    For a run, the settings of ``monitor`` count, too. ``words``: the overrides of the command line.
    Settings that an option of a group implies are not reported.
    """
    readers = {key: ("method", parts) for key, parts in OF_METHODS.items()}
    read = {*config.parts}
    if isinstance(config, EvaluationConfig):
        readers |= {key: ("task", (key,)) for key in (KEY_TOKENS, RULER, LONGBENCH, MANY_SHOT)}
        readers |= dict.fromkeys(("windows", "last"), ("task", (PERPLEXITY, KEY_TOKENS)))
        readers["needles"] = "task", (STATEMENTS, *NEEDLE_TASKS)
        read |= {*config.tasks}
        if read & {*OF_METHODS["choice"]} and config.choice.text in (*NEEDLE_TASKS, *LONG_TASKS):
            read.add(config.choice.text if config.choice.text in NEEDLE_TASKS else MANY_SHOT)
        if monitor is not None and monitor.lengths_every is not None:
            read.add(STATEMENTS)
        if monitor is not None and monitor.benchmarks.enabled:
            read |= {*monitor.benchmarks.tasks}
    for word in words:
        place = word.lstrip("+").partition("=")[0]
        group, _, rest = place.partition(".")
        kind, names = readers.get(rest.partition(".")[0], ("", ()))
        if group == "evaluation" and names and read.isdisjoint(names):
            log.warning(
                "%s: without effect; no %s of evaluation.%ss reads it (%s)",
                *(place, kind, kind, ", ".join(names)),
            )


def schedules(config: RunConfig) -> dict[str, Phase]:
    """Return the configuration keys of a run's schedules, each with its last phase."""
    phases = phases_of(config)
    if not config.phases:
        return dict(zip(("schedule", "drop.schedule"), phases, strict=False))
    own = {phase.name: config.phases[phase.name].schedule for phase in phases}
    return {f"phases.{p.name}.schedule" if own[p.name] else "schedule": p for p in phases}
