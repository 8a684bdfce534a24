"""Remarks of a run or an evaluation before it begins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from trainer.data.corpus import Corpus
from trainer.data.plan import BYTES_PER_TOKEN
from trainer.evaluation.config import LONGBENCH, MANY_SHOT, RULER, EvaluationConfig
from trainer.evaluation.many_shot import LONG_TASKS
from trainer.evaluation.method_config import BY_LAYER, ON_TEXT, MethodsConfig
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.results import PERPLEXITY, STATEMENTS
from trainer.runs.arms import phase_configs
from trainer.runs.config import MAIN, RunConfig
from trainer.runs.descriptions import label
from trainer.runs.parsing import own_checkpoint
from trainer.runs.phases import Phase, phases_of, tokens_at
from trainer.runs.starting_point import epochs_read, starting_weights
from trainer.runs.training_config import MonitorConfig
from trainer.workflows.recipe import SHORTEST
from trainer.workflows.training_text import layouts

log = logging.getLogger(__name__)


MANY_EPOCHS = 16
"""Readings of a text after which another teaches little (Muennighoff et al. 2023, arXiv
2305.16264)."""
LARGE, FEW_TOKENS = 50_000_000, 8192
"""A vocabulary of fewer tokens is small for a model with more weights in its blocks."""
MUCH_SHORTER = 16
"""Sequences so many times shorter than before leave most of the context untrained."""


def say_epochs(config: RunConfig, corpus: Corpus) -> None:
    """Log how much text there is and how often the run reads it; warn of many times."""
    epochs = epochs_read(corpus, phases_of(config), [])(config.trainer.max_steps)
    for part in corpus.parts:
        times = epochs[part.name]
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


def say_short_documents(arms: Mapping[str, RunConfig], corpus: Corpus) -> None:
    """Warn of sequences that no document fills, see :func:`short_documents`."""
    for key, text in short_documents(arms, corpus).items():
        log.warning("%s: %s", key, text)


def short_documents(arms: Mapping[str, RunConfig], corpus: Corpus) -> dict[str, str]:
    """Return a key and a remark for each plain text that is cut into documents shorter than the
    sequences of a run that keeps documents apart."""
    longest = max(
        (
            phase.data.sequence_length
            for _, phase in phase_configs(arms)
            if phase.data.document_mask or phase.data.packing == "best_fit"
        ),
        default=0,
    )
    remarks = {}
    for part in corpus.parts:
        characters = part.text.piece_characters
        if characters is None or longest <= characters // BYTES_PER_TOKEN:
            continue
        group = "data" if len(corpus.parts) == 1 else f"data.mixture.{part.name}"
        remarks[f"{group}.piece_characters"] = (
            f"plain text is cut into documents of {characters:,} characters, about "
            f"{characters // BYTES_PER_TOKEN:,} tokens, so that none fills a sequence of "
            f"{longest:,}; piece_characters={longest * BYTES_PER_TOKEN} cuts it into longer "
            "ones, and piece_characters=null keeps every file whole"
        )
    return remarks


def say_unusual_settings(configs: dict[str, RunConfig], chosen: Collection[str] = ()) -> None:
    """Warn of settings of an experiment's arms that are allowed, but seldom meant.

    ``chosen``: keys whose values the caller chose and has explained.
    """

    def of_every_arm(check: Callable[[RunConfig], Iterator[str]]) -> list[str]:
        return [text for arm in configs.values() for text in check(arm)]

    warnings = [
        *of_every_arm(_small_vocabulary)[:1],  # controls share the tokenizer
        *(() if "data.sequence_length" in chosen else of_every_arm(_short_sequences)),
        *of_every_arm(_short_recalibrations),
        *_other_budgets(configs),
        *of_every_arm(_long_warmups),
        *of_every_arm(_idle_rescalings),
        *of_every_arm(_unreached_encodings),
    ]
    for text in warnings:
        log.warning("%s", text)


def _small_vocabulary(arm: RunConfig) -> Iterator[str]:
    """Warn of a model that is large for the vocabulary that is trained for it."""
    tokens, weights = arm.tokenizer.vocab_size, arm.model.block_weights
    is_trained_here = not (arm.tokenizer.path or arm.model.is_trained)
    if is_trained_here and tokens < FEW_TOKENS and weights > LARGE:
        yield (
            f"tokenizer.vocab_size: {tokens:,} tokens are few for {label(arm)} with {weights:,} "
            "weights in its blocks; tokenizer.vocab_size=32000 or tokenizer.path=FILE packs more "
            "text into a sequence"
        )


def _short_sequences(arm: RunConfig) -> Iterator[str]:
    """Warn of trained weights that continue without a drop with much shorter sequences than before,
    and with shorter ones than ``recalibrate`` chooses."""
    start = starting_weights(arm.model) if own_checkpoint(arm) is None else None
    if start is None or any(phase.drop for phase in phases_of(arm)):
        return
    before, now = start.layout.training_length, arm.training_length
    if now * MUCH_SHORTER <= before and now < SHORTEST:
        enough = (
            "" if before <= SHORTEST else f", and {SHORTEST} is the least that recalibrate takes"
        )
        yield (
            f"data.sequence_length: {label(arm)} trains on sequences of {now:,} tokens, and its "
            f"weights were trained on {before:,}; data.sequence_length={before} keeps that length"
            f"{enough}"
        )


def _short_recalibrations(arm: RunConfig) -> Iterator[str]:
    """Warn of trained weights that drop and then train on sequences shorter than before."""
    phases = phases_of(arm)
    first = next((phase.start for phase in phases if phase.drop), None)
    if first is None or own_checkpoint(arm) is not None:
        return
    if (start := starting_weights(arm.model)) is None:
        return
    before = start.layout.training_length
    now = max(phase.config.data.sequence_length for phase in phases if phase.start >= first)
    if now < before:
        yield (
            f"data.sequence_length: after its drop {label(arm)} trains on sequences of {now:,} "
            f"tokens, and its weights were trained on {before:,}: it never sees that context "
            f"without its positions, and lengths in tables count from {arm.training_length:,}, "
            f"unless evaluation.training_length={before} is given"
        )


def _other_budgets(configs: dict[str, RunConfig]) -> Iterator[str]:
    """Warn of controls that train on more or fewer tokens than the run."""
    tokens = {name: tokens_at(arm, arm.trainer.max_steps) for name, arm in configs.items()}
    for name, count in tokens.items():
        if count != tokens[MAIN]:
            yield (
                f"controls.{name}: {label(configs[name])} trains on {count:,} tokens, and "
                f"{label(configs[MAIN])} on {tokens[MAIN]:,}"
            )


def _long_warmups(arm: RunConfig) -> Iterator[str]:
    """Warn of learning rates that only rise."""
    for key, phase in schedules(arm).items():
        warmup, steps = phase.schedule.warmup_steps, phase.end - phase.origin
        if warmup >= steps > 0:
            yield (
                f"{key}.warmup_steps: {warmup} steps, but {label(arm)} has {steps} in this phase: "
                f"its learning rate only rises; {key}.warmup_steps="
                f"{max(steps // 10, 1)} is a tenth of them"
            )


def _unreached_encodings(arm: RunConfig) -> Iterator[str]:
    """Warn of encodings in a pattern of layers that is longer than the model is deep."""
    layers, count = arm.positional.layers, arm.model.num_hidden_layers
    if not arm.model.is_trained and (unused := {*layers} - {*layers[:count]}):
        yield (
            f"positional.layers: of a pattern of {len(layers)} layers {label(arm)} has {count}, "
            f"none with {', '.join(sorted(unused))}; model.num_hidden_layers="
            f"{1 + max(map(layers.index, unused))} has all of its encodings"
        )


def _idle_rescalings(arm: RunConfig) -> Iterator[str]:
    """Warn of phases that rescale nothing."""
    phases = phases_of(arm)
    if not any(phase.rescale for phase in phases):
        return
    for phase, layout in zip(phases, layouts(arm), strict=False):
        if phase.rescale is None or layout.rotating(phase.rescale.layers):
            continue
        key = f"phases.{phase.name}.rescale"
        if layout.rotates:
            yield (
                f"{key}: no layer of {label(arm)} that is rescaled rotates by then; "
                f"{key}.layers=all rescales every layer, also those whose window is no longer than "
                "the training length"
            )
        else:
            yield f"{key}: nothing of {label(arm)} rotates by then, so that nothing is rescaled"


OF_METHODS = {
    "fit_windows": ON_TEXT,
    "layers": BY_LAYER,
    "temperature": ("temperature", "temperature_rope_id"),
    "dynamic_ntk": ("dynamic_ntk_alpha",),
    "longrope": ("longrope",),
    "choice": ("dope", "weighted_rope"),
    "dope": ("dope",),
    "weighted_rope": ("weighted_rope",),
}
"""Settings of ``evaluation``, and the parts of methods that read each."""


def say_idle_settings(
    config: MethodsConfig, words: Sequence[str], monitor: MonitorConfig | None = None
) -> None:
    """Warn of overrides on the command line, ``words``, that no method and no task reads.

    ``monitor``: what a run measures while it trains, which reads some of them too.
    """
    readers = {key: ("method", parts) for key, parts in OF_METHODS.items()}
    parts_and_tasks = {*config.parts}
    if isinstance(config, EvaluationConfig):
        readers |= {key: ("task", (key,)) for key in (RULER, LONGBENCH, MANY_SHOT)}
        readers |= dict.fromkeys(("windows", "last"), ("task", (PERPLEXITY,)))
        readers["needles"] = "task", (STATEMENTS, *NEEDLE_TASKS)
        parts_and_tasks |= {*config.tasks}
        if parts_and_tasks & {*OF_METHODS["choice"]}:
            text = config.choice.text
            parts_and_tasks |= {MANY_SHOT} if text in LONG_TASKS else {text} & {*NEEDLE_TASKS}
        if monitor is not None and monitor.lengths_every is not None:
            parts_and_tasks.add(STATEMENTS)
        if monitor is not None and monitor.benchmarks.enabled:
            parts_and_tasks |= {*monitor.benchmarks.tasks}
    for word in words:
        place = word.lstrip("+").partition("=")[0]
        group, _, key = place.partition(".")
        kind, names = readers.get(key.partition(".")[0], ("", ()))
        if group == "evaluation" and names and parts_and_tasks.isdisjoint(names):
            log.warning(
                "%s: without effect; no %s of evaluation.%ss reads it (%s)",
                *(place, kind, kind, ", ".join(names)),
            )


def schedules(config: RunConfig) -> dict[str, Phase]:
    """Return the configuration keys of a run's schedules, each with its last phase."""
    phases = phases_of(config)
    if not config.phases:
        return dict(zip(("schedule", "drop.schedule"), phases, strict=False))
    return {
        f"phases.{p.name}.schedule" if config.phases[p.name].schedule else "schedule": p
        for p in phases
    }
