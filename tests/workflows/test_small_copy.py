"""The small copy of a run that a drill breaks: all that is otherwise in it, and nothing more."""

from __future__ import annotations

import pytest

from trainer.runs.config import RunConfig
from trainer.runs.directory import plain
from trainer.runs.parsing import parse
from trainer.workflows.small_copy import shrink

MODEL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
MODEL |= {"num_key_value_heads": 2, "vocab_size": 1024, "attention_backend": "sdpa"}
ALWAYS = {
    "data.num_workers": 1,
    "evaluation.enabled": False,
    "model.attention_backend": "auto",
    "model.hidden_size": 64,
    "model.intermediate_size": 96,
    "model.vocab_size": None,
    "drop.effect_sequences": 4,
    "run_dir": "copy",
    "tokenizer.vocab_size": 512,
    "trainer.accelerator": "cpu",
    "trainer.batch_size": 8,
    "trainer.checkpoint_every": 4,
    "trainer.keep_checkpoints": 3,
    "trainer.log_every": 1,
    "trainer.max_steps": 24,
    "trainer.micro_batch_size": 2,
    "trainer.threads": 1,
}


def flat(values, path=""):
    """Values by their keys, with dots."""
    found = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        found |= flat(value, where) if isinstance(value, dict) and value else {where: value}
    return found


def changes(values, tmp_path):
    """What is otherwise in the copy of a run."""
    config = parse(RunConfig, {"run_dir": "runs/big", **values})
    before, after = flat(plain(config)), flat(plain(shrink(config, tmp_path / "copy")))
    found = {
        key: value for key, value in after.items() if key not in before or before[key] != value
    }
    assert found.pop("run_dir") == str(tmp_path / "copy")
    return found | {"run_dir": "copy"}


def test_a_large_run_gets_small_and_keeps_its_kinds(tmp_path):
    values = {
        "overwrite": True,
        "model": MODEL | {"num_hidden_layers": 6},
        "positional": {"layers": ["rope", "rope", "nope"], "windows": [None, 256, 64]},
        "data": {"sequence_length": 512, "num_workers": 4, "document_mask": True}
        | {"cache_dir": "somewhere", "needles": {"share": 0.2}},
        "tokenizer": {"vocab_size": 1024},
        "schedule": {"name": "wsd", "warmup_steps": 100},
        "drop": {"at": 500, "layers": [0, 4, 5], "anneal_steps": 50, "effect_sequences": 64}
        | {"schedule": {"warmup_steps": 3}},
        "trainer": {"max_steps": 1000, "batch_size": 64, "gradient_clip": 0.5, "z_loss": 1e-4}
        | {"precision": "bf16", "keep_every": 100},
        "strategy": {"name": "hsdp", "shard_size": 2, "cpu_offload": True},
        "controls": {"other": {"seed": 1}},
        "logger": {"wandb": True},
    }
    assert changes(values, tmp_path) == ALWAYS | {
        "controls": {},
        "data.sequence_length": 128,
        "drop.anneal_steps": 6,
        "drop.at": 12,
        "drop.layers": [0, 2],
        "drop.schedule.warmup_steps": 2,
        "logger.wandb": False,
        "model.head_dim": 32,
        "model.num_hidden_layers": 3,
        "overwrite": False,
        "positional.windows": [None, 128, 64],
        "schedule.warmup_steps": 2,
        "strategy.cpu_offload": False,
        "strategy.shard_size": None,
        "trainer.keep_every": None,
    }


def test_phases_share_the_steps_and_keep_how_they_differ(tmp_path):
    """24 steps of five phases; lengths stay multiples, up to four; batches are as many, twice as
    many or half as many as the others'."""
    quick = {"warmup_steps": 1}
    phases = {
        "short": {"steps": 100, "sequence_length": 32, "batch_size": 64, "micro_batch_size": 4}
        | {"schedule": {"warmup_steps": 10}, "log_every": 5},
        "long": {"tokens": 1 << 20, "sequence_length": 1024, "batch_size": 16}
        | {"drop": {"layers": [-9, 1, -1], "anneal_steps": 10}, "until": {"every": 9, "flat": 0.1}},
        "same": {"steps": 5, "sequence_length": 128, "batch_size": 32, "schedule": quick},
        "least": {"steps": 5, "sequence_length": 2},
        "last": {"steps": 5},
    }
    values = {
        "model": MODEL | {"num_hidden_layers": 12, "hidden_size": 64},
        "positional": {"layers": ["rope"]},
        "data": {"sequence_length": 64, "num_workers": 0},
        "trainer": {"batch_size": 32},
        "phases": phases,
    }
    found = changes(values, tmp_path)
    of_phases = {key.removeprefix("phases."): v for key, v in found.items() if "phases" in key}
    assert of_phases == {
        "short.steps": 5,
        "short.batch_size": 16,
        "short.micro_batch_size": None,
        "short.schedule.warmup_steps": 2,
        "short.log_every": None,
        "long.steps": 5,
        "long.tokens": None,
        "long.sequence_length": 256,
        "long.batch_size": 4,
        "long.drop.layers": [-2, -1, 1],
        "long.drop.anneal_steps": 2,
        "long.until": None,
        "same.batch_size": 8,
        "last.steps": 4,
    }
    assert "data.sequence_length" not in found
    assert (found["model.num_hidden_layers"], found["model.head_dim"]) == (2, 16)


def test_a_single_phase_has_all_the_steps(tmp_path):
    found = changes({"phases": {"only": {"steps": 100}}}, tmp_path)
    assert found["phases.only.steps"] == found["trainer.max_steps"] == 24


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"phases": {"a": {"steps": 5}, "b": {"steps": 5, "drop": {"layers": [0]}}}},
    ],
    ids=["without a drop", "with one that a phase has"],
)
def test_a_copy_drops_only_where_its_run_does(tmp_path, values):
    config = parse(RunConfig, {"run_dir": "runs/big", **values})
    copy = shrink(config, tmp_path / "copy")
    assert (copy.drop.at, copy.drop.at_tokens) == (None, None)
    assert copy.drop_step == (12 if values else None)
