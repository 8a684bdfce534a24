"""The positional layouts that a run passes through, from its first step to its last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainer.common.errors import UserError
from trainer.config import ChangeConfig, RunConfig
from trainer.model.config import ModelConfig
from trainer.positional.config import PositionalConfig, build_layout, spectrum_of
from trainer.positional.drop import drop
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS
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


def dropped_layout(
    layout: Layout,
    positional: PositionalConfig,
    change: ChangeConfig,
    head_dim: int,
    qk_norm: bool = False,
) -> Layout:
    """Return the layout after the drop that the configuration asks for.

    ``qk_norm``: also enable the query and key norms of these layers.

    Raises:
        UserError: the new encoding is impossible for this model.
    """
    to = spectrum_of(positional, change.to, head_dim, layout.training_length)
    return drop(
        layout,
        to,
        layers=change.layers,
        heads=change.heads,
        windows=change.windows,
        qk_norm=qk_norm,
    )


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
            raise UserError(f"phases.{phase.name}.rescale.base: {error!s}") from error
    reach = phase.config.data.sequence_length / layout.training_length
    factor = phase.rescale.factor or max(reach, 1.0)
    return layout.rescaled(RESCALINGS[phase.rescale.method], factor, phase.rescale.layers)


def check_layouts(config: RunConfig) -> None:
    """Check that the layouts of a run can be made, and that those of phases change one.

    Published weights bring their layout, which is known only once they are read: the phases of such
    a run are not checked.

    Raises:
        UserError: a layout is impossible, or a change changes nothing.
    """
    first = configured_layout(config)
    if config.model.from_pretrained is not None:
        return
    layouts, phases = [*layouts_of_phases(config, first)], phases_of(config)
    for phase, before, after in zip(phases, layouts[:-1], layouts[1:], strict=True):
        key = f"phases.{phase.name}" if config.phases else "drop"
        longer = phase.config.data.sequence_length > before.training_length
        by_length = phase.rescale and phase.rescale.factor is None and phase.rescale.base is None
        if by_length and not longer:
            raise UserError(f"{key}.rescale: its sequences are no longer than those before")
        if config.phases and phase.drop and _changes_nothing(before, after):
            raise UserError(f"{key}: the layers to drop have {phase.drop.to!r} already")


def drops_nothing(config: RunConfig) -> bool:
    """Whether the drop of a run without named phases would change no encoding and no window."""
    if config.phases or config.drop_step is None or config.model.from_pretrained is not None:
        return False
    layout = configured_layout(config)
    after = dropped_layout(layout, config.positional, config.drop, config.model.head_size)
    return _changes_nothing(layout, after)


def _changes_nothing(before: Layout, after: Layout) -> bool:
    return replace(before, training_length=1) == replace(after, training_length=1)
