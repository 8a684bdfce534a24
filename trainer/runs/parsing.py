"""Plain values to a checked and resolved run with its controls, and the rules between keys.

A rule is here if breaking it would waste hours of training or give wrong numbers in silence.
Everything else fails where it happens; an evaluation that fails resumes behind the finished
training.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.common.errors import UserError
from trainer.common.fields import validated
from trainer.config import MAIN, DataConfig, NeedlesConfig, RunConfig
from trainer.data.needles import NAMES
from trainer.model.config import ModelConfig, check_shape
from trainer.positional.config import build_layout
from trainer.positional.layout import Layout
from trainer.runs.directory import plain
from trainer.runs.phases import Run, layout_of_phase, phases_of

if TYPE_CHECKING:
    from trainer.interchange.pretrained import Pretrained

NAMED_BY_USERS = "controls", "callbacks", "phases"
"""Groups whose keys users choose; null stands for none."""


def parse(values: dict[str, Any]) -> Run:
    """Check plain values, complete them, and resolve them to a run with its controls.

    A run whose ``drop`` would change nothing, such as one of NoPE, has none. A run that begins with
    trained weights has their shape.

    Raises:
        UserError: unknown keys, wrong types, or a broken rule.
        ValueError: an encoding does not fit the model, or a phase asks for an impossible change.
    """
    config = checked(values)
    if config.phases:
        steps = sum(phase.steps for phase in config.phases.values())
        config = replace(config, trainer=replace(config.trainer, max_steps=steps))
    weights = None
    if config.model.is_trained:
        # Reading weights needs torch, which a wrong configuration must not wait for.
        from trainer.runs.models import encodings_in, encodings_of, starting_weights

        weights = starting_weights(config.model)
        positional = encodings_in(weights.layout, config.positional)
        if config.model.from_run is not None:
            positional = encodings_of(config.model.from_run)
        config = replace(config, model=_trained_shape(config.model, weights), positional=positional)
    check_shape(config.model)
    _check_run(config)
    first = configured_layout(config) if weights is None else weights.layout
    phases = phases_of(config)
    layout = first
    for phase in phases:
        phase.micro_batches()
        layout = layout_of_phase(config, phase, layout)
    drop_at = config.drop.at
    if _drops_nothing(config):
        config = replace(config, drop=replace(config.drop, at=None))
        phases = phases_of(config)
    run = Run(config, phases, first, weights)
    return replace(run, controls=_controls_of(run, drop_at))


def checked(values: dict[str, Any]) -> RunConfig:
    """Return plain values as a configuration; raise a UserError about unknown keys and types."""
    values = {k: x for k, x in values.items() if x is not None or k not in NAMED_BY_USERS}
    return validated(RunConfig, values)


def configured_layout(config: RunConfig) -> Layout:
    """Return the layout that a run without trained weights begins with."""
    model = config.model
    return build_layout(
        config.positional,
        num_layers=model.num_hidden_layers,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_size,
        training_length=config.data.sequence_length,
        qk_norm=model.qk_norm.when == "always",
    )


def _trained_shape(model: ModelConfig, weights: "Pretrained") -> ModelConfig:
    """Return the shape of trained weights, with the keys of ``model`` that a run may choose."""
    qk_norm = model.qk_norm
    if any(layer.qk_norm for layer in weights.layout.layers):
        qk_norm = replace(weights.config.qk_norm, when="always")
    elif qk_norm.when == "always":
        raise UserError("model.qk_norm.when: 'always', but the weights were trained without")
    return replace(
        weights.config,
        qk_norm=qk_norm,
        attention_backend=model.attention_backend,
        from_pretrained=model.from_pretrained,
        from_run=model.from_run,
    )


def _drops_nothing(config: RunConfig) -> bool:
    """Whether the run has the encoding that takes the place of the dropped one from the start."""
    drop = config.drop
    positional = config.positional
    if config.phases or config.model.from_pretrained is not None or drop.windows:
        return False
    names = {*positional.layers[: config.model.num_hidden_layers], *positional.heads}
    return names == {drop.to}


def _check_run(config: RunConfig) -> None:
    """Raise a UserError if a run breaks a rule between keys."""
    drop = config.drop
    last = config.trainer.max_steps
    config.data.texts.keys()  # a wrong text of the mixture raises
    names, mentions = config.data.needles.names, config.data.needles.mentions
    if not names[0] <= names[1] <= len(NAMES):
        raise UserError(f"data.needles.names: expected least and most <= {len(NAMES)}, got {names}")
    if mentions[0] > mentions[1]:
        raise UserError(f"data.needles.mentions: expected least and most, got {mentions}")
    every, tasks = config.benchmarks.every, config.benchmarks.tasks
    if bool(every) != bool(tasks):
        raise UserError(f"benchmarks.every: expected both or neither, got {every}, tasks={tasks}")
    if config.phases and drop.at is not None:
        raise UserError("drop: with phases it is one of them that drops; expected phases.NAME.drop")
    if MAIN in config.controls:
        raise UserError(f"controls.{MAIN}: the run itself has this name")
    step = drop.step(last)
    if step is not None and not 0 <= step < last:
        raise UserError(f"drop.at: expected a step before trainer.max_steps, {last}, got {step}")
    if config.evaluation.enabled and "none" not in config.evaluation.methods:
        raise UserError("evaluation.methods: expected 'none' among them, the run as it is")


def _controls_of(run: Run, drop_at: Any) -> dict[str, Run]:
    """Return the controls of a run by name: its values, ``drop_at``, and their changes."""
    controls = {}
    values = merged(plain(run.config), {"drop": {"at": drop_at}})
    for name, changes in values.pop("controls").items():
        base = values | {"run_dir": f"{run.config.run_dir}/controls/{name}"}
        branch = changes.pop("branch", None)
        try:
            control = parse(merged(base, changes))
        except UserError as error:
            lines = str(error).splitlines()
            raise UserError("\n".join(f"controls.{name}.{line}" for line in lines)) from error
        _check_control(run, control, f"controls.{name}", branch)
        controls[name] = replace(control, branch=branch, is_control=True)
    return controls


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` applied: mappings merged, everything else replaced."""
    result = base | changes
    for key in base.keys() & changes.keys():
        if isinstance(base[key], dict) and isinstance(changes[key], dict):
            result[key] = merged(base[key], changes[key])
    return result


def _check_control(run: Run, control: Run, key: str, branch: Any) -> None:
    """Check that a control has the processes, the text and the last length of its run."""
    length = control.phases[-1].length
    expected = run.phases[-1].length
    if length != expected:
        raise UserError(f"{key}: trains on {length} tokens, the run on {expected}")
    may_differ: dict[str, Any] = {"sequence_length": 2, "document_mask": False}
    may_differ |= {"needles": NeedlesConfig(), "weight": 1.0}
    read = texts_read(control.config.data, **may_differ)
    known = texts_read(run.config.data, **may_differ)
    if not read.items() <= known.items() or control.config.tokenizer != run.config.tokenizer:
        raise UserError(f"{key}.data: a control reads the texts and tokens of its run")
    strategies = {control.config.strategy.name, run.config.strategy.name}
    if "single" in strategies and len(strategies) > 1:
        raise UserError(f"{key}.strategy: a control trains in the processes of its run")
    if branch is None:
        return
    step = run.phases.drop_step if branch == "drop" else branch
    if step is None:
        raise UserError(f"{key}.branch: 'drop', but the run has none")
    first = 0 if branch == "drop" else 1  # no other checkpoint is of step 0
    if not isinstance(step, int) or not first <= step <= run.steps or step >= control.steps:
        choices = "'drop' or a step of the run before the control's end"
        raise UserError(f"{key}.branch: expected {choices}, got {branch!r}")
    if _before(run, step) != _before(control, step):
        different = "model, encoding, optimizer, seed or samples"
        raise UserError(f"{key}.branch: {different} differ from the run's before step {step}")


def texts_read(data: DataConfig, **same: Any) -> dict[str, DataConfig]:
    """Return the texts by name. All have the values ``same``, and one way of reading."""
    same |= {"num_workers": 0, "cache_dir": None}
    return {name: replace(text, **same) for name, text in data.texts.items()}


def _before(run: Run, step: int) -> tuple[object, ...]:
    """Return what determines the state of a run after ``step`` steps, except learning rates."""
    phases = []
    for phase in run.phases:
        if phase.start < step:
            changes = phase.drop, phase.rescale, phase.optimizer_state
            phases.append((phase.start, changes, phase.batch_size, texts_read(phase.data)))
    config = run.config
    model = replace(config.model, attention_backend="auto")
    optimizer = replace(config.optimizer, lr=1.0, muon_lr=1.0)
    clip = config.trainer.gradient_clip
    return model, config.positional, optimizer, clip, config.seed, phases
