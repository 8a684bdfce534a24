"""A control is the same as a run of its own, whatever the run beside it looks like.

Every check, remark and estimate is made of two experiments: one is a run A with a control B, the
other a run B with a control A. What is said of A and of B must be the same in both.
"""

from __future__ import annotations

import ast
import logging
import re
from collections import Counter
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data.streams import held_out
from tests.program import ROOT
from tests.relations.leaves import leaves, nested, others
from tests.small_runs import SHAPE
from trainer.common.errors import Problem, UserError
from trainer.runs import memory
from trainer.runs.arms import arms_of, gpus_that_fit
from trainer.runs.checkpoints import read_state
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import label
from trainer.runs.directory import plain
from trainer.runs.metrics_file import read_metrics
from trainer.runs.models import find_candidate
from trainer.runs.parsing import merged, parse
from trainer.runs.ranks import Ranks
from trainer.runs.sweep import Swept
from trainer.workflows import compare, experiment, export, remarks, training_text, watch
from trainer.workflows import plan as plans
from trainer.workflows.plan import PlanRequest
from trainer.workflows.training_text import readings

RUN = {
    "name": "same",
    "run_dir": "runs/same",
    "model": {**SHAPE, "vocab_size": 512},
    "drop": {"at": 6},
    "data": {"source": "files", "files": ["a.jsonl"]},
    "tokenizer": {"vocab_size": 300},
    "trainer": {"max_steps": 12, "batch_size": 8, "micro_batch_size": 4},
}
TEXTS = {"a": {"weight": 1.0}, "b": {"weight": 2.0, "files": ["b.jsonl"]}}
PHASES = {"short": {"steps": 8}, "long": {"steps": 4, "sequence_length": 128}}
NONE = {"drop": {"at": None}}
LEGAL = {
    "positional.layers": {"positional": {"layers": ["rope", "nope"]}},
    "positional.heads": {"positional": {"heads": {"nope": 0.5}}},
    "positional.encodings": {"positional": {"encodings": {"rope": {"base": 5e5}}}},
    "data.allow_patterns": {"data": {"files": ["@list"], "allow_patterns": ["*"]}},
    "data.mixture": {"data": {"mixture": TEXTS}},
    "data.restart_positions": {"data": {"restart_positions": True, "document_mask": True}},
    "drop.faster_than": {"drop": {"faster_than": 50.0}},
    "drop.to": {"drop": {"to": "half_rope"}},
    "drop.at_tokens": {"drop": {"at": None, "at_tokens": 2000}},
    "phases": {**NONE, "phases": PHASES},
    "trainer.max_tokens": {"trainer": {"max_tokens": 8000}},
    "trainer.fp8": {"trainer": {"fp8": True, "precision": "bf16"}},
    "trainer.max_time": {"trainer": {"max_time": "1:00:00"}},
    "trainer.profile_steps": {"trainer": {"profile_steps": [2, 3]}},
    "strategy.shard_size": {"strategy": {"shard_size": 2, "name": "hsdp"}},
    "strategy.cpu_offload": {"strategy": {"cpu_offload": True, "name": "fsdp2"}},
    "monitor.benchmarks.every": {"monitor": {"benchmarks": {"every": 3, "tasks": ["standard"]}}},
    "monitor.benchmarks.every_tokens": {
        "monitor": {"benchmarks": {"every_tokens": 3000, "tasks": ["standard"]}}
    },
    "monitor.benchmarks.tasks": {"monitor": {"benchmarks": {"every": 2, "tasks": ["noisy"]}}},
    "monitor.benchmarks.multiple_choice": {
        "monitor": {"benchmarks": {"every": 2, "multiple_choice": ["piqa"]}}
    },
    "monitor.benchmarks.harness": {"monitor": {"benchmarks": {"every": 2, "harness": ["x"]}}},
}  # fmt: skip
"""Changes of leaves whose other values have conditions."""
NOT_CHANGED = {
    "run_dir": "a control lies in its run's directory",
    "label": "a control has one of its own, or none",
    "controls": "a control has none",
    "plugins": "they register something in the whole process",
    "model.from_pretrained": "the weights would have to be on this machine",
    "model.from_run": "the run would have to be on this machine",
}
"""Leaves that a control does not change here, with the reason; and all of ``evaluation``."""


def change_of(path, kind, value):
    """Return the plain values that change one leaf of :data:`RUN`."""
    if path in LEGAL:
        return LEGAL[path]
    for other in others(kind, value):
        change = nested(path, asdict(other) if is_dataclass(other) else other)
        try:
            parse(RunConfig, merged(RUN, change))
        except UserError:
            continue
        return change
    raise AssertionError(f"{path}: add a legal change to LEGAL, or a reason to NOT_CHANGED")


CHANGES = {
    path: change_of(path, kind, value)
    for path, kind, value in leaves(parse(RunConfig, RUN))
    if path not in NOT_CHANGED and not path.startswith("evaluation.")
}
LATE = {"drop": {"at": 9, "schedule": {"warmup_steps": 50}}, "schedule": {"warmup_steps": 100}}
MANY = {
    "large": {"model": {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 8}},
    "small vocabulary": {"model": {"vocab_size": 258}},
    "unread embeddings": {"model": {"vocab_size": 30_000}},
    "long warm-ups": LATE,
    "unreached": {"positional": {"layers": ["rope", "rope", "nope"]}},
    "idle": {
        **NONE,
        "positional": {"layers": ["nope"]},
        "phases": {"a": {"steps": 2}, "b": {"steps": 2, "sequence_length": 128, "rescale": {}}},
    },
    "odd batches": {"trainer": {"batch_size": 9, "micro_batch_size": 3}},
    "odd batches of a phase": {
        **NONE,
        "phases": {"a": {"steps": 2}, "b": {"steps": 2, "batch_size": 10, "micro_batch_size": 5}},
    },
    "odd shards": {"strategy": {"name": "hsdp", "shard_size": 4}},
    "packed": {"data": {"packing": "best_fit", "sequence_length": 96}},
    "much kept": {"trainer": {"keep_checkpoints": 7, "keep_best": 3, "keep_every": 2}},
    "monitored": {"monitor": {"lengths_every": 1, "windows": 1000, "lengths": [1, 8]}},
    "for a GPU": {"trainer": {"accelerator": "gpu"}},
    "everything": {
        "seed": 5,
        "model": {"hidden_size": 64, "num_hidden_layers": 3, "qk_norm": {"when": "always"}},
        "positional": {"layers": ["nope", "rope"], "windows": [16, None]},
        "data": {"sequence_length": 96, "packing": "best_fit"},
        "optimizer": {"name": "muon"},
        **LATE,
        "trainer": {
            "max_steps": 30, "batch_size": 6, "micro_batch_size": 3, "precision": "bf16",
            "keep_checkpoints": 5, "log_every": 3,
        },
        "strategy": {"name": "fsdp2", "activation_checkpointing": "full"},
    },
}  # fmt: skip
"""Configurations that checks and remarks have something to say about."""
ALL = CHANGES | MANY


def back(change, values):
    """Return the change that makes ``values`` of what ``change`` made of them."""
    old = {key: values.get(key) for key in change}
    return {
        key: back(item, old[key]) if isinstance(item, dict) and old[key] else old[key]
        for key, item in change.items()
    }


NAMED = "data.mixture", "data.arguments", "positional.heads", "positional.encodings", "callbacks"
"""Groups from which a control can take no entry away."""


def both_ways(name):
    """Return two runs, and the experiment of each with the other as its control."""
    run, other = parse(RunConfig, RUN), parse(RunConfig, merged(RUN, ALL[name]))
    first = parse(RunConfig, merged(RUN, {"controls": {"x": ALL[name]}}))
    if name in NAMED:
        return run, other, first, None
    returned = back(ALL[name], plain(run))
    if "phases" in returned:
        returned["phases"] = None
    steps = {"trainer": {"max_steps": run.trainer.max_steps}}  # tokens and phases decide on them
    returned = merged(returned, steps)
    second = parse(RunConfig, merged(merged(RUN, ALL[name]), {"controls": {"x": returned}}))
    return run, other, first, second


def as_alone(config):
    return replace(config, run_dir="", label=None, controls={})


@pytest.mark.parametrize("name", ALL)
def test_a_control_has_the_configuration_of_a_run_with_its_changes(name):
    run, other, first, second = both_ways(name)
    for whole, main, control in ((first, run, other), (second, other, run)):
        if whole is not None:
            arms = arms_of(whole)
            assert as_alone(arms["main"]) == as_alone(main)
            assert as_alone(arms["x"]) == as_alone(control)


def functions_of_arms():
    """Return the functions that take the configurations of all arms, as ``module.name``."""
    functions = set()
    for path in (ROOT / "trainer").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "[str, RunConfig]" in text else ():
            if not isinstance(node, ast.FunctionDef):
                continue
            kinds = [ast.unparse(x.annotation) for x in node.args.args if x.annotation]
            if any("[str, RunConfig]" in kind for kind in kinds):
                functions.add(f"{path.stem}.{node.name}")
    return functions


REMARKS = ("say_unusual_settings",)
CHECKED = {
    **dict.fromkeys((f"remarks.{name}" for name in REMARKS), "below"),
    "remarks._other_budgets": "in say_unusual_settings",
    "remarks.say_short_documents": "tests/workflows/test_experiment.py",
    "remarks.short_documents": "tests/workflows/test_experiment.py",
    **dict.fromkeys(
        (
            "costs.evaluation_operations",
            "costs.remarks_on_costs",
            "costs.say_costs",
            "costs.training_operations",
        ),
        "tests/workflows/test_costs.py",
    ),
    "arms.arm_problems": "in all checks",
    "arms.control_problems": "in experiment_problems",
    "arms.phase_configs": "in all checks",
    "experiment.corpus_problems": "below",
    "experiment.experiment_problems": "below",
    "experiment.machine_problems": "below",
    "experiment.make_all_callbacks": "below",
    "experiment.problems_elsewhere": "below",
    "experiment.start_problems": "below",
    "training_text.check_evaluated_text": "below",
    "training_text.check_vocabularies": "below",
    "plan._disk": "in the plan, below",
    "plan._memory": "tests/workflows/test_plan.py",
    "experiment._open": "in the trained experiment, below",
    "experiment_report.make_report": "in the trained experiment, below",
}
"""Functions of all arms, and what tests them here."""


def test_every_function_of_all_arms_is_tested_here():
    assert functions_of_arms() == {*CHECKED}


def words(message):
    """Return a message without its place, and without the order in which it names two runs."""
    text = str(message).replace("controls.x.", "").replace("controls.x:", "")
    return tuple(sorted(re.findall(r"[\w.=-]+", text)))


def refused(check, *arguments):
    """Return the problems that a check raises."""
    try:
        check(*arguments)
    except UserError as error:
        return error.problems
    return ()


@pytest.fixture
def messages_of(monkeypatch, caplog):
    """A function from arms to the messages of each check and remark.

    The machine has little memory, nothing is read, and weights to start from are of 4,096 tokens.
    """
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 20)
    start = SimpleNamespace(layout=SimpleNamespace(training_length=4096))
    monkeypatch.setattr(
        remarks, "starting_weights", lambda model: start if model.qkv_bias else None
    )
    monkeypatch.setattr(experiment, "check_writable", lambda place: None)
    monkeypatch.setattr(experiment, "all_gather", lambda mine: [mine, *(OTHERS[type(mine)])])
    monkeypatch.setattr(training_text, "vocabulary_size", lambda tokenizer: 600)
    monkeypatch.setattr(training_text, "tokenizer_of_weights", lambda config: None)
    subjects = []
    monkeypatch.setattr(
        training_text, "applicable", lambda models, few: (subjects.extend(models), ({}, ()))[1]
    )
    monkeypatch.setattr(training_text, "make_tasks", lambda *_: ([], []))
    monkeypatch.setattr(training_text, "fit_text", lambda *_: None)
    text = SimpleNamespace(tokenizer=None, first_token=0, test=None)

    def of_arms(arms):
        subjects.clear()
        training_text.check_evaluated_text(arms, text)
        messages = {
            "subjects": [(s.config, replace(s.layout, training_length=1)) for s in subjects],
            "machine": experiment.machine_problems(arms, 1),
            "experiment on 1": experiment.experiment_problems(arms, 1, 1),
            "experiment on 6": experiment.experiment_problems(arms, 6, 3),
            "elsewhere": experiment.problems_elsewhere(arms, Ranks()),
            "start": experiment.start_problems(arms, Ranks()),
            "embeddings": refused(training_text.check_vocabularies, arms, text),
            "callbacks": refused(experiment.make_all_callbacks, arms),
        }
        for name in REMARKS:
            caplog.clear()
            getattr(remarks, name)(arms)
            messages[name] = caplog.messages
        return {name: Counter(map(words, lines)) for name, lines in messages.items()}

    return of_arms


OTHERS = {list: [], tuple: [("b", 3, [Problem("trainer.precision", "expected a GPU")])]}
"""What other nodes report, by the type of what this one does."""


ONE_WAY = {"data.mixture": "a control may leave out a text of its run, which has them all"}
"""Changes of which checks say something else of a control than of a run, with the reason."""


def test_checks_and_remarks_say_the_same_of_a_run_and_of_a_control(messages_of):
    silent, messages_of_run = set(), messages_of({"main": parse(RunConfig, RUN)})
    for name in ALL.keys() - ONE_WAY.keys():
        run, other, *_ = both_ways(name)
        controls = {
            c: replace(config, label=None, run_dir="runs/same/controls/x")
            for c, config in (("run", run), ("other", other))
        }
        forth = messages_of({"main": run, "x": controls["other"]})
        assert forth == messages_of({"main": other, "x": controls["run"]}), name
        alone = messages_of({"main": other})
        silent |= {
            kind for kind in forth if alone[kind] - messages_of_run[kind] and not forth[kind]
        }
        assert not silent, (name, silent)


def of_experiment(config):
    """Return what is said of all runs of an experiment together, whichever of them is the run."""
    several = replace(config, strategy=replace(config.strategy, name="ddp", shard_size=None))
    values = plain(several)
    for changes in values["controls"].values():
        changes.pop("strategy", None)
    several = parse(RunConfig, values)
    request = PlanRequest(config, 1, 1, "h100", 0.4)
    rows = {row for section in plans.plan(request) for row in section.rows}
    counts = {name: text.partition(",")[0].partition(":")[0] for name, text in rows}
    return {
        "gpus": [gpus_that_fit(several, nodes) for nodes in (1, 2, 3)],
        "packed": {data.sequence_length for data in readings(config) if data.packing != "stream"},
        "longest": max(data.sequence_length for data in readings(config)),
        "operations": Counter(text for name, text in rows if name.startswith("operations of")),
        "checkpoints": {counts["checkpoints kept"], counts.get("those of controls")},
    }


COMPUTED = (
    *("trainer.batch_size", "trainer.micro_batch_size", "trainer.max_steps", "data.packing"),
    *("trainer.keep_checkpoints", "trainer.keep_best", "trainer.keep_every", "trainer.max_tokens"),
    *("data.sequence_length", "model.hidden_size", "model.num_hidden_layers", "drop.at", "phases"),
    *("odd batches", "odd batches of a phase", "packed", "much kept", "everything"),
)
"""Changes that an experiment's sizes depend on."""


@pytest.mark.parametrize("name", COMPUTED)
def test_sizes_of_an_experiment_are_those_of_both_runs(name, monkeypatch):
    monkeypatch.setattr(plans, "step_memory", lambda *_: {"parameters": 1})
    _, _, first, second = both_ways(name)
    assert of_experiment(first) == of_experiment(second)


SMALL = {
    "evaluation": {"lengths": [1.0], "methods": ["none"], "tasks": ["perplexity"], "windows": 4},
    "data": {"needles": {"share": 0.0}},
    "trainer": {"checkpoint_every": 4},
}
ANOTHER = {
    "seed": 5,
    "model": {"intermediate_size": 64, "qk_norm": {"when": "never"}},
    "positional": {"layers": ["nope", "rope"]},
    "optimizer": {"lr": 0.01},
    "schedule": {"warmup_steps": 1, "peak": 0.5},
    "drop": {"at": None},
    "monitor": {"lengths_every": 3, "lengths": [1]},
    "trainer": {"max_steps": 9, "batch_size": 2, "micro_batch_size": 1, "log_every": 3},
}
CLOCKS = "tokens_per_second", "time/", "memory"


def of_arm(place, report, name):
    """Return all that is known of a finished run or control, but for places and clocks."""
    checkpoint = max((place / "checkpoints").glob("step-*"))
    state = read_state(checkpoint)
    config = state.pop("config")
    for key in ("name", "run_dir", "label", "controls"):
        config.pop(key)
    rows = [
        {key: value for key, value in row.items() if not key.startswith(CLOCKS)}
        for row in read_metrics(place / "metrics.csv")
    ]
    arm = next(arm for arm in report.arms if arm.name == name)
    cells = [replace(cell, seconds=0.0) for cell in report.cells if cell.model == name]
    (watched,) = [arm for arm in watch._read_run(place).arms if arm.name == name]
    steps = watched.step, watched.steps, watched.tokens_left, watched.is_trained
    phases = [(phase.name, phase.start, phase.end) for phase in watched.phases]
    (row,) = compare._beside_each_other([Swept(str(place))], place).runs
    known = replace(row, place="", settings={})
    rates = [row["tokens_per_second"] for row in read_metrics(place / "metrics.csv")]
    assert report.timing["tokens_per_second"][name] == round(sorted(rates)[len(rates) // 2], 0)
    model = find_candidate(str(checkpoint)).load()
    facts = export._facts(parse(RunConfig, {}), state, model, None)
    more = [report.reach[name], report.milestones[name], steps, phases, known, facts]
    return [config, state, rows, arm, cells, *more]


def test_a_control_is_trained_and_reported_like_a_run_of_its_own(base, tmp_path):
    run = merged(base, SMALL)
    returned = back(ANOTHER, plain(parse(RunConfig, run)))
    experiments = {
        "first": merged(run, {"controls": {"x": ANOTHER}}),
        "second": merged(merged(run, ANOTHER), {"controls": {"x": returned}}),
    }
    arms_by_label = {}
    for name, values in experiments.items():
        config = parse(RunConfig, {**values, "run_dir": str(tmp_path / name)})
        report, _ = experiment.run_experiment(config)
        arms = arms_of(config)
        arms_by_label[name] = {
            label(arm): of_arm(Path(arm.run_dir), report, label(arm)) for arm in arms.values()
        }
    assert len(arms_by_label["first"]) == 2
    for name, arm in arms_by_label["first"].items():
        for ours, theirs in zip(arm, arms_by_label["second"][name], strict=True):
            assert ours == theirs, name


def test_monitored_text_is_checked_of_every_arm(monkeypatch):
    for name in ("check_vocabularies", "check_evaluated_text"):
        monkeypatch.setattr(experiment, name, lambda arms, corpus: None)
    corpus, keys = SimpleNamespace(validation=held_out(range(100))), []
    longer = {"monitor": {"lengths_every": 2, "lengths": [50]}}
    for change in (longer, {"controls": {"x": {"label": "x", **longer}}}):
        arms = arms_of(parse(RunConfig, merged(RUN, change)))
        keys.append([problem.key for problem in experiment.corpus_problems(arms, corpus)])
    assert keys == [["monitor.lengths"]] * 2
