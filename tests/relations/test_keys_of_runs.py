"""Each key of a run changes what it is said to change in training, and nothing else.

The keys are walked in the schema: a new one needs a line here, its effect or why it has none.
"""

from __future__ import annotations

import hashlib

import pytest

from tests.relations.leaves import leaves, nested, other_value
from tests.training.rehearsal import rehearse
from trainer.common.fields import validated
from trainer.config import ChangeConfig, PhaseConfig, RescaleConfig, RunConfig, ScheduleConfig
from trainer.runs.parsing import merged

SAMPLES = "samples weighing"
STEPS = "phases factors benchmarks rows saves tokens"
SHAPE = "shapes weights"
OF_TEMPERATURE = "layout last-layout"
EFFECTS = {
    "run_dir": "directory",
    "seed": f"{SAMPLES} weights",
    "controls": "controls kept-steps saves",
    "model.hidden_size": f"{SHAPE} heads layout gains",
    "model.intermediate_size": SHAPE,
    "model.num_hidden_layers": f"{SHAPE} layout last-layout gains states",
    "model.num_attention_heads": f"{SHAPE} heads layout gains",
    "model.num_key_value_heads": f"{SHAPE} layout last-layout",
    "model.head_dim": f"{SHAPE} heads layout gains",
    "model.vocab_size": SHAPE,
    "model.rms_norm_eps": "eps",
    "model.tie_word_embeddings": f"{SHAPE} tied states",
    "model.qkv_bias": "shapes states",
    "model.qk_norm.when": "shapes last-layout gains states eps",
    "model.qk_norm.kind": "shapes full-norms gains",
    "model.qk_norm.targets": "shapes gains states",
    "model.initializer": "weights",
    "model.initializer_by_depth": "weights",
    "model.attention_backend": "backend",
    "positional.layers": "layout",
    "positional.windows": "layout last-layout",
    "positional.heads": "layout",
    "positional.encodings": "layout",
    "positional.temperature.coefficient": OF_TEMPERATURE,
    "positional.temperature.exponent": OF_TEMPERATURE,
    "positional.temperature.scale": OF_TEMPERATURE,
    "positional.temperature.per": OF_TEMPERATURE,
    "positional.temperature.reference": OF_TEMPERATURE,
    "positional.temperature.steps": OF_TEMPERATURE,
    "positional.temperature.heads": "layout",
    "data.sequence_length": f"{SAMPLES} layout last-layout lengths tasks tokens",
    "data.document_mask": "documents weighing",
    "data.needles.share": SAMPLES,
    "data.needles.names": SAMPLES,
    "data.needles.mentions": SAMPLES,
    "data.needles.weight": "weighing",
    "data.needles.changes": SAMPLES,
    "data.num_workers": "workers",
    "tokenizer.vocab_size": f"{SHAPE} samples",
    "optimizer.name": "optimizer lr betas",
    "optimizer.lr": "lr",
    "optimizer.betas": "betas",
    "optimizer.weight_decay": "decay",
    "optimizer.decay_embeddings": "decay",
    "optimizer.muon_lr": "lr",
    **{
        f"{prefix}schedule.{key}": "factors"
        for prefix in ("", "drop.", "phases.b.")
        for key in ("name", "peak", "warmup_steps", "final", "decay_fraction")
    },
    "drop.at": STEPS,
    "drop.layers": "last-layout",
    "drop.heads": "last-layout",
    "drop.to": "last-layout",
    "drop.windows": "last-layout",
    "drop.qk_norm_gain": "gains",
    "drop.optimizer_state": "states",
    "drop.effect_sequences": "probe",
    "phases": f"{SAMPLES} {STEPS} kept-steps lengths states batches micro-batches",
    "phases.b.steps": f"{SAMPLES} {STEPS} kept-steps",
    "phases.b.sequence_length": f"{SAMPLES} last-layout lengths tasks tokens probe benchmarks",
    "phases.b.batch_size": f"{SAMPLES} micro-batches tokens",
    "phases.b.micro_batch_size": "batches micro-batches",
    "phases.b.weights": SAMPLES,
    "phases.b.drop.layers": "last-layout",
    "phases.b.drop.heads": "last-layout",
    "phases.b.drop.to": "last-layout",
    "phases.b.drop.windows": "last-layout",
    "phases.b.drop.qk_norm_gain": "gains",
    "phases.b.rescale.method": "last-layout",
    "phases.b.rescale.factor": "last-layout",
    "phases.b.rescale.base": "last-layout",
    "phases.b.rescale.layers": "last-layout",
    "phases.b.optimizer_state": "states probe benchmarks",
    "trainer.max_steps": f"{SAMPLES} {STEPS}",
    "trainer.batch_size": f"{SAMPLES} batches tokens",
    "trainer.micro_batch_size": "batches micro-batches",
    "trainer.precision": "half",
    "trainer.deterministic": "deterministic",
    "trainer.gradient_clip": "clip",
    "trainer.compile": "compiled",
    "trainer.log_every": "rows tokens",
    "trainer.checkpoint_every": "saves",
    "trainer.checkpoint_minutes": "saves",
    "trainer.keep_checkpoints": "kept",
    "trainer.keep_every": "kept-too",
    "strategy.name": "strategy",
    "strategy.shard_size": "shard-size",
    "strategy.activation_checkpointing": "recomputed",
    "logger.wandb": "loggers",
    "logger.offline": "loggers",
    "benchmarks.every": "benchmarks",
    "benchmarks.tasks": "tasks",
    "benchmarks.lengths": "tasks",
    "benchmarks.limit": "tasks",
    "callbacks": "callbacks",
}
"""What each key changes of :func:`observed`."""
OF_TEXT = "of prepared text: test_stored_values.py"
NO_EFFECT = {
    "name": "of reports and dashboards",
    "overwrite": "of directories: tests/runs/test_directory.py",
    "plugins": "run before the keys are read: tests/end_to_end/test_plugin.py",
    "model.from_pretrained": "tests/training/test_pretrained.py",
    "model.from_run": "tests/training/test_phases.py",
    **dict.fromkeys(
        (
            *("data.source", "data.files", "data.allow_patterns", "data.hub_name"),
            *("data.hub_config", "data.hub_split", "data.revision", "data.text_field"),
            *("data.validation", "data.test", "data.arguments", "data.prepared"),
            *("data.cache_dir", "data.weight", "data.mixture", "tokenizer.path"),
        ),
        OF_TEXT,
    ),
    "optimizer.arguments": "of a plugin's optimizer: tests/training/test_plugin_optimizer.py",
    "trainer.accelerator": "there is no GPU here",
    "trainer.threads": "of the whole process",
    "trainer.max_time": "ends the run: tests/training/test_callbacks.py",
    "logger.tensorboard": "of an extra: tests/training/test_run.py",
}
OTHER = {
    "controls": {"c": {"branch": 4, "seed": 0}},
    "model.hidden_size": 64,
    "model.num_attention_heads": 4,
    "model.head_dim": 8,
    "model.vocab_size": 500,
    "positional.layers": ["rope", "nope"],
    "positional.heads": {"nope": 1.0},
    "positional.encodings": {"rope": {"base": 500.0}},
    "optimizer.name": "muon",
    "drop.heads": [],
    "drop.to": "alibi",
    "phases.b.drop.heads": [],
    "phases.b.drop.to": "alibi",
    "phases": {"c": {"steps": 3}},
    "phases.b.weights": {"x": 3.0, "y": 1.0},
    "phases.b.rescale.method": "pi",
    "phases.b.batch_size": 8,
    "phases.b.micro_batch_size": 4,
    "phases.b.rescale.layers": [0],
    "strategy.shard_size": 2,
    "trainer.precision": "bf16",
    "trainer.compile": True,
    "benchmarks.tasks": ["perplexity", "statements"],
    "benchmarks.lengths": [1.0, 3.0],
    "callbacks": {"mine": {"_target_": "lightning.pytorch.callbacks.Callback"}},
}
"""Other values of keys whose types do not give one that the base can have."""
NEVER = {"drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}}
WSD = {"name": "wsd", "warmup_steps": 1, "decay_fraction": 0.5}
PHASE = {
    "steps": 4,
    "sequence_length": 32,
    "batch_size": 4,
    "micro_batch_size": 2,
    "weights": {"x": 1.0, "y": 1.0},
    "schedule": WSD,
    "optimizer_state": "keep",
}
MIXED = {"data": {"mixture": {"x": {}, "y": {}}}}
CONTEXTS = {
    "positional.temperature.": {"positional": {"temperature": {"coefficient": 0.5}}},
    "optimizer.muon_lr": {"optimizer": {"name": "muon"}},
    "schedule.": merged(NEVER, {"schedule": WSD}),
    "drop.schedule.": {"drop": {"schedule": WSD}},
    "phases.b.drop.": merged(
        NEVER,
        {
            "model": {"qk_norm": {"when": "after_drop"}},
            "phases": {"a": {"steps": 4}, "b": PHASE | {"weights": None, "drop": {}}},
        },
    ),
    "phases.b.rescale.": merged(
        NEVER, {"phases": {"a": {"steps": 4}, "b": {"steps": 4, "rescale": {"factor": 2.0}}}}
    ),
    "phases.b": merged(merged(NEVER, MIXED), {"phases": {"a": {"steps": 4}, "b": PHASE}}),
    "phases": merged(NEVER, {"phases": {"a": {"steps": 12}}}),
    "trainer.checkpoint_minutes": {"trainer": {"checkpoint_every": 100}},
    "logger.offline": {"logger": {"wandb": True}},
}
"""Changes to the base without which keys of a beginning have no effect; the first one counts."""
SETTINGS = {
    "trainer": {"checkpoint_minutes": 4, "keep_every": 4, "max_time": "1:00:00", "log_every": 4},
    "benchmarks": {"every": 5, "tasks": ["perplexity"], "lengths": [1, 2], "limit": 3},
    "evaluation": {"windows": 2},  # fewer than the benchmarks'
}


def digest(tensors):
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()


def observed(stage):
    """Everything of a rehearsed run that some key decides, by a name."""
    module, run, weights = stage.module, stage.run, stage.weights
    attention, groups = module.model.layers[0].self_attn, stage.optimizers[0].param_groups
    measurements = stage.callbacks[-1].measurements
    batches, last_rates = [], {}
    for step, batch, rates, _ in stage.batches:
        batches.append((step, batch))
        last_rates[step] = rates[-1]
    firsts = [next(b for step, b in batches if step == phase.start) for phase in run.phases]
    return {
        "directory": run.directory,
        "controls": {name: (r.branch, r.config.seed) for name, r in run.controls.items()},
        "shapes": {name: weight.shape for name, weight in weights.items()},
        "heads": (attention.head_dim, attention.q_proj.out_features),
        "full-norms": not attention.per_head_norm,
        "tied": module.model.lm_head is None,
        "eps": (module.model.norm.eps, attention.q_norm and attention.q_norm.eps),
        "weights": {name: digest([x]) for name, x in weights.items() if x.ndim > 1},
        "gains": digest(x for name, x in stage.last_weights.items() if "_norm." in name),
        "backend": module.attention,
        "layout": stage.batches[0][-1],
        "last-layout": stage.batches[-1][-1],
        "phases": [(phase.start, phase.end) for phase in run.phases],
        "lengths": [batch["labels"].shape[1] for batch in firsts],
        "batches": [len(batch["labels"]) for batch in firsts],
        "micro-batches": [[s for s, _ in batches].count(phase.start) for phase in run.phases],
        "samples": digest(batch["input_ids"] for _, batch in batches),
        "weighing": digest(batch["weights"] for _, batch in batches),
        "documents": "documents" in firsts[0],
        "workers": stage.loader.num_workers,
        "tokens": [row["tokens"] for row in stage.rows],
        "optimizer": type(stage.optimizers[0]),
        "lr": [group["initial_lr"] for group in groups],
        "betas": [group.get("betas") for group in groups],
        "decay": [group["weight_decay"] for group in groups],
        "factors": {s: round(rate / groups[-1]["initial_lr"], 9) for s, rate in last_rates.items()},
        "clip": module.gradient_clip,
        "states": stage.states,
        "probe": [len(x["sequences"]["before"]) for x in measurements.effects.values()],
        "half": stage.parallelize["half"],
        "compiled": stage.parallelize["compile"],
        "recomputed": stage.parallelize["activation_checkpointing"],
        "shard-size": stage.parallelize["shard_size"],
        "strategy": type(stage.strategy),
        "deterministic": stage.is_deterministic,
        "rows": [row["step"] for row in stage.rows],
        "saves": [(step, event) for step, event in stage.events if event.startswith("save")],
        "benchmarks": [step for step, event in stage.events if event == "benchmarks"],
        "kept": stage.writer.keep,
        "kept-too": stage.writer.every,
        "kept-steps": stage.writer.permanent,
        "tasks": [(*task.titles, task.length, len(task.trials)) for task in measurements.tasks],
        "loggers": [logger.settings for logger in stage.loggers],
        "callbacks": [type(callback) for callback in stage.callbacks],
    }


def walked():
    """Keys of a run, and those of a phase."""
    yield from leaves(RunConfig())
    every = {"schedule": ScheduleConfig(), "drop": ChangeConfig(), "rescale": RescaleConfig()}
    for key in leaves(PhaseConfig(1, **every)):
        yield f"phases.b.{key}"


def test_every_key_has_a_line():
    """Evaluations have their own table, and figures are of reports."""
    every = {key for key in walked() if not key.startswith(("evaluation.", "plots."))}
    assert every == {*EFFECTS, *NO_EFFECT}


@pytest.fixture(scope="module")
def values_in(base, tmp_path_factory):
    """A function that returns the plain values of the base in a context."""
    directory = tmp_path_factory.mktemp("rehearsed") / "run"

    def values(context):
        changes = merged({"run_dir": str(directory), **SETTINGS}, CONTEXTS.get(context, {}))
        return merged(base, changes)

    return values


@pytest.fixture(scope="module")
def known():
    """What was observed of the base, by context."""
    return {}


@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_changes_what_it_is_said_to_change_and_nothing_else(
    values_in, known, monkeypatch, key
):
    context = next((each for each in CONTEXTS if key.startswith(each)), "")
    values = values_in(context)
    if context not in known:
        known[context] = observed(rehearse(values, monkeypatch))
    before, other = known[context], OTHER.get(key)
    if other is None:
        other = another_value(values, key)
    after = observed(rehearse(merged(values, nested(key, other)), monkeypatch))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {*EFFECTS[key].split()}, other


def another_value(values, key):
    if key.startswith("phases.b."):
        phase = validated(PhaseConfig, values["phases"]["b"])
        return other_value(phase, key.removeprefix("phases.b."))
    return other_value(validated(RunConfig, values), key)
