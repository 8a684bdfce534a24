"""The positional layouts that a run passes through, from its first step to its last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.common.errors import Problem, UserError
from trainer.model.config import ModelConfig
from trainer.positional.config import build_layout
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS
from trainer.recalibration.config import ChangeConfig
from trainer.recalibration.drop import dropped_layout
from trainer.runs.config import RunConfig
from trainer.runs.phases import Phase, phases_of


def configured_layout(config: RunConfig) -> Layout:
    """Return the layout that a run without trained weights begins with.

    Raises:
        UserError: the configured encodings do not fit the model; lists all problems.
    """
    model = config.model
    return build_layout(
        config.positional,
        num_layers=model.num_hidden_layers,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_size,
        training_length=config.data.sequence_length,
        qk_norm=model.qk_norm.when == "always",
    )


def layouts_of_phases(config: RunConfig, first: Layout) -> Iterator[Layout]:
    """Yield the layouts just before each phase, and the last one; the run begins with ``first``.

    Raises:
        UserError: a phase asks for an impossible change.
    """
    layout = first
    for phase in phases_of(config):
        yield layout
        layout = layout_of_phase(layout, phase, config.model)
    yield layout


def layout_of_phase(layout: Layout, phase: Phase, model: ModelConfig) -> Layout:
    """Return the layout that a phase begins with: the previous one, dropped or rescaled, and
    extended.

    A new encoding is written for the length that it is
    trained on; a rescaling starts from the length before.

    Raises:
        UserError: the change is impossible for this layout.
    """
    longest = max(layout.training_length, phase.config.data.sequence_length)
    if phase.drop is None and phase.rescale is not None:
        layout = rescaled_layout(layout, phase)
    layout = replace(layout, training_length=longest)
    if phase.drop is not None:
        norms_on = model.qk_norm.when == "after_drop"
        positional = phase.config.positional
        layout = dropped_layout(layout, positional, phase.drop, model.head_size, norms_on)
    return layout


def rescaled_layout(layout: Layout, phase: Phase) -> Layout:
    """Return the layout of a run whose phase rescales its frequencies.

    Raises:
        UserError: they are not geometric, so that they have no base to replace.
    """
    assert phase.rescale is not None
    if (base := phase.rescale.base) is not None:
        try:
            return layout.rebased(base, phase.rescale.layers)
        except ValueError as error:
            raise UserError.at(f"phases.{phase.name}.rescale.base", str(error)) from error
    reach = phase.config.data.sequence_length / layout.training_length
    factor = phase.rescale.factor or max(reach, 1.0)
    return layout.rescaled(RESCALINGS[phase.rescale.method], factor, phase.rescale.layers)


def layout_problems(config: RunConfig) -> list[Problem]:
    """Check that the layouts of an otherwise valid run can be made and that each drop changes one.

    Published weights bring their layout, which is known only once they are read: the phases of such
    a run are not checked.
    """
    try:
        first = configured_layout(config)
        if config.model.from_pretrained is not None:
            return []
        layouts = [*layouts_of_phases(config, first)]
        for phase, before in zip(phases_of(config), layouts, strict=False):
            key = f"phases.{phase.name}.drop" if config.phases else "drop"
            if phase.drop is not None and (problem := _idle_drop(key, phase.drop, before, config)):
                return [problem]
    except UserError as error:
        return list(error.problems)
    return []


def _idle_drop(key: str, drop: ChangeConfig, layout: Layout, config: RunConfig) -> Problem | None:
    """Return why the drop would change nothing in ``layout``, if so.

    Raises:
        UserError: the new encoding is impossible for this model.
    """
    if layout != dropped_layout(layout, config.positional, drop, config.model.head_size):
        return None
    return Problem(
        f"{key}.to",
        f"{drop.to!r} is what the layers to drop have already, so that nothing would be dropped; "
        "choose another encoding, or no drop.",
    )
