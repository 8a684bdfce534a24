"""Nothing of an earlier use is left in an object, and a resumed run is in the state of the whole.

Every object that keeps something between two calls is listed here with what tests that.
"""

from __future__ import annotations

import ast
import shutil
from dataclasses import fields, replace
from pathlib import Path

import lightning as L
import pytest
import torch

from tests.program import ROOT
from trainer.data.corpus import prepare_corpus
from trainer.positional.layout import Layout
from trainer.runs.checkpoints import read_state
from trainer.runs.config import RunConfig
from trainer.runs.parsing import merged, parse
from trainer.runs.saved_state import RunState, read_run_state
from trainer.training.run import train

RESUMED = "a run that resumes is compared with the whole one, below"
REUSED = "used for one thing and then for another, below"
ONCE = "made for a single use"
IN_ITS_ROOM = "its room's tests use it twice"
STATEFUL = {
    **dict.fromkeys(
        ("Metrics", "Monitors", "Saving", "Transitions", "Rewind", "LanguageModule"), RESUMED
    ),
    **dict.fromkeys(("Spikes", "Tally", "StepTimer", "Certificate"), f"{REUSED}; {RESUMED}"),
    **dict.fromkeys(
        ("KVCache", "LayerCache", "Vote", "LanguageModel", "Decoder", "_Characters", "TextStream"),
        REUSED,
    ),
    **dict.fromkeys(
        (
            *("Clusters", "FrequencyEntropyStudy", "OffsetFeatureSearch", "AngleStability"),
            *("ClustersStudy", "OffsetFeaturesStudy", "SinksStudy"),
        ),
        "a study of one page; tests/analysis makes each for one text",
    ),
    **dict.fromkeys(
        (
            *("Progress", "FlatWriter", "_Worker", "_Counter", "_Reader", "Outcomes", "_Trial"),
            *("Claims", "StandIn", "RunLock", "Notice", "Stopping", "_Tracker"),
            *("SendSignal", "Profiling", "CollectiveTimeouts", "Watchdog", "CheckpointClock"),
        ),
        ONCE,
    ),
    **dict.fromkeys(("AdaptedModel", "UnropeModel", "LogFile", "Uncopied"), IN_ITS_ROOM),
}
"""Classes that change an attribute after they were made, and what tests that."""


def stateful_classes():
    """Return the classes whose methods assign attributes of the object."""
    classes = set()
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(map(assigns, node.body)):
                classes.add(node.name)
    return classes


def assigns(method):
    """Return whether a method that is no constructor assigns an attribute of its object."""
    if not isinstance(method, ast.FunctionDef) or method.name in ("__init__", "__post_init__"):
        return False
    for node in ast.walk(method):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            place = node.value if isinstance(node, ast.Subscript) else node
            if isinstance(place, ast.Attribute) and ast.unparse(place.value) == "self":
                return True
    return False


def test_every_class_with_a_state_is_classified():
    assert stateful_classes() == {*STATEFUL}


# A resumed run


PHASES = {
    "first": {"steps": 3},
    "long": {
        "steps": 3, "sequence_length": 64, "batch_size": 2, "rescale": {"method": "pi"},
        "until": {"every": 1, "flat": 100.0, "patience": 1},
        "schedule": {"warmup_steps": 1},
    },
    "dropped": {
        "steps": 4, "sequence_length": 64, "batch_size": 2, "drop": {"anneal_steps": 3},
        "schedule": {"warmup_steps": 1}, "log_every": 3,
    },
}  # fmt: skip
CHANGES = {
    "phases": PHASES,
    "drop": {"at": None},
    "data": {"needles": {"mentions": [2, 5]}},
    "monitor": {
        "lengths_every": 2, "lengths": [1], "trials": 4, "windows": 2, "probe_every": 2,
        "benchmarks": {"every": 3, "tasks": ["perplexity"], "lengths": [1.0], "limit": 4},
    },
    "trainer": {"checkpoint_every": 1, "log_every": 3, "keep_best": 2},
    "evaluation": {"enabled": False},
}  # fmt: skip
OF_THIS_PROCESS = {
    "start_time": "when the process began",
    "seconds": "how long the last checkpoint took",
    "last_time": "a clock",
    "last_step": "where this process began to measure speed",
    "last_saved": "a resumed run saves after its first step at the earliest",
    "_saved": "a clock",
    "_step_ends": "clocks",
    "_measuring": "a clock",
    "_part_starts": "clocks",
    "_longest": "how long measurements took",
    "_is_first_step": "a process's first step may compile",
    "_stager": "memory for a copy",
    "_in_flight": "what is being written",
    "_thread": "writes checkpoints",
    "_group": "ranks",
    "_before": "the certificate: a sum so far, or before the resume",
    "_sums": "the certificate, likewise; the tally's own are compared as its saved state",
    "_last": "likewise",
    "_batch": "held-out text that is read again",
    "_micro": "of a step that has not begun",
    "_gradient_norm": "logged with the next update",
    "timer": "clocks",
    "progress": "shows this process's steps",
    "notice": "signals of this process",
    "peak": "of this process's GPUs and the other ranks'",
}
"""Attributes in which a resumed run may differ from the whole one, with the reason."""


class Looking(L.Callback):
    """Looks at all other callbacks as each step begins; ``last``: the step after which to stop."""

    def __init__(self, only=None):
        self.seen, self.only = {}, only

    def on_train_batch_start(self, trainer, module, batch, index):
        """Look before the first micro-batch of a step."""
        if index % trainer.accumulate_grad_batches:
            return
        ours = [x for x in trainer.callbacks if type(x).__module__.startswith("trainer.")]
        values_seen = {}
        callbacks = {type(x).__name__: x for x in ours if type(x).__name__ != "Resume"}
        for name, value in callbacks.items():
            look(value, name, values_seen)
        look(module.tally.state(), "tally", values_seen)
        look(module.certificate.state(), "certificate", values_seen)
        (optimizer,) = trainer.optimizers
        for name, weight in module.model.named_parameters():
            values_seen[f"weights.{name}"] = weight.double().sum().item()
            for key, tensor in optimizer.state.get(weight, {}).items():
                values_seen[f"optimizer.{name}.{key}"] = (
                    torch.as_tensor(tensor).double().sum().item()
                )
        values_seen["layout"] = module.model.layout
        values_seen["backends"] = [block.self_attn.attend.__name__ for block in module.model.layers]
        values_seen["modes"] = [part.training for part in module.model.modules()]
        values_seen["random"] = torch.get_rng_state().sum().item()
        self.seen[trainer.global_step] = values_seen
        if trainer.global_step == self.only:
            raise StoppedError


class StoppedError(Exception):
    """Enough was seen."""


def look(value, path, values_seen, depth=0):
    """Put every plain value within an object into ``values_seen`` by its path."""
    if isinstance(value, torch.Tensor):
        values_seen[path] = value.tolist()
    elif value is None or isinstance(value, bool | int | float | str | Layout):
        values_seen[path] = value
    elif isinstance(value, dict):
        values_seen[f"{path}#"] = sorted(map(str, value))
        for key, item in value.items():
            look(item, f"{path}[{key}]", values_seen, depth)
    elif isinstance(value, list | tuple | set | frozenset):
        values_seen[f"{path}#"] = len(value)
        for index, item in enumerate(value):
            look(item, f"{path}[{index}]", values_seen, depth)
    elif type(value).__module__.startswith("trainer.") and depth < 3:
        for key, item in vars(value).items():
            if key not in OF_THIS_PROCESS:
                look(item, f"{path}.{key}", values_seen, depth + 1)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A run of three phases, and what was seen before each of its steps."""
    place, seen = tmp_path_factory.mktemp("whole") / "run", Looking()
    config = parse(RunConfig, merged({**base, "run_dir": str(place)}, CHANGES))
    place.mkdir()
    train(config, prepare_corpus(config.data, config.tokenizer), callbacks=[seen])
    return config, seen.seen


@pytest.mark.parametrize("step", [1, 3, 4, 5, 6, 8])
def test_a_resumed_run_is_in_the_state_of_the_whole_run(whole, base, tmp_path, step):
    config, seen = whole
    place, looking = tmp_path / "run", Looking(step)
    name = f"step-{step:06}"
    shutil.copytree(Path(config.run_dir) / "checkpoints" / name, place / "checkpoints" / name)
    shutil.copy(Path(config.run_dir) / "metrics.csv", place)
    again = replace(config, run_dir=str(place))
    with pytest.raises(StoppedError):
        train(again, prepare_corpus(config.data, config.tokenizer), callbacks=[looking])
    then, now = seen[step], looking.seen[step]
    differing = {key for key in then.keys() | now.keys() if then.get(key) != now.get(key)}
    differing = {key for key in differing if "run_dir" not in key and "directory" not in key}
    assert {key: (then.get(key), now.get(key)) for key in sorted(differing)[:20]} == {}


def test_a_phase_begins_without_the_losses_of_the_phase_before(whole):
    _, seen = whole
    counts = {
        step: values_seen["Transitions.held_out_losses#"] for step, values_seen in seen.items()
    }
    assert {step: counts[step] for step in (3, 4, 5)} == {3: 0, 4: 1, 5: 0}


def test_the_compared_states_hold_something_of_every_field(whole):
    """A field that is always empty would be equal, restored or not."""
    config, _ = whole
    filled = {
        "skips",
        "rewinds",
        "skipped_measures",
        "world_size",
        "user_callbacks",
        "wandb_id",
    }  # below, or of other runs
    for path in sorted((Path(config.run_dir) / "checkpoints").iterdir()):
        if (path / "state.json").exists():
            state = read_run_state(path, read_state(path))
            filled |= {f.name for f in fields(state) if getattr(state, f.name) not in EMPTY}
    assert filled == {f.name for f in fields(RunState)}


EMPTY = (None, [], {}, 0, "", 0.0)
