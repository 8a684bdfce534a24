"""Every key contains every field of what it is made of, or the field is listed with a reason.

A key names a stored result or decides whether two things are the same. For each leaf of its input
the leaf alone is changed: the key must change too, or the leaf must be in ``without``.
"""

from __future__ import annotations

import ast
import json
import os
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.program import ROOT
from tests.relations import test_controls as controls
from tests.relations.leaves import get, hints, leaves, others, with_value
from trainer.common.errors import UserError
from trainer.data.config import DataConfig, SourceConfig, TokenizerConfig
from trainer.data.corpus import Corpus, Part
from trainer.data.files import File
from trainer.data.needles import Trials
from trainer.data.plan import directory_name, request_of
from trainer.data.prepared import Prepared
from trainer.data.sources import Listing
from trainer.evaluation import methods
from trainer.evaluation import plan as cells
from trainer.evaluation.config import EvaluationConfig, KeyTokenSettings
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.key_tokens import Chooser, ChosenTokens, Contexts, KeyTokens
from trainer.evaluation.loss import AnsweredTexts
from trainer.evaluation.measurements import Perplexity, Prompted, Statements
from trainer.evaluation.method_config import (
    BY_LAYER,
    PARTS,
    LongRopeSettings,
)
from trainer.evaluation.methods import Recipe, recipe
from trainer.evaluation.methods import _identity as of_layout
from trainer.evaluation.methods import _plain as plain_settings
from trainer.evaluation.plan import Subject, choice_key, plan_cells, plan_jobs
from trainer.evaluation.results import Report
from trainer.evaluation.scoring import Prompt
from trainer.evaluation.store import Claims, Share, Store, pack
from trainer.interchange.export.plan import make_plan
from trainer.model.config import ModelConfig, QKNormConfig, SoftmaxConfig
from trainer.positional.config import PositionalConfig, build_layout
from trainer.positional.layout import Intervention, LayerEncoding, Layout
from trainer.positional.spectrum import LongFrequencies, Spectrum, Stretch, Temperature
from trainer.runs import directory, models
from trainer.runs.checkpoints import check_same_model
from trainer.runs.config import RunConfig
from trainer.runs.directory import check_run_directory, open_run_directory
from trainer.runs.models import Candidate
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import branch_problems, phases_of, reading
from trainer.runs.starting_point import data_fingerprints
from trainer.workflows import benchmarks, compare, evaluate, remarks, watch
from trainer.workflows.evaluate import STATED
from trainer.workflows.recalibrate import Asked, recipe_for, write_record
from trainer.workflows.recipe import Choice
from trainer.workflows.recipe import Recipe as Chosen
from trainer.workflows.subjects import subject_of
from trainer.workflows.training_text import text_problems


@dataclass
class Key:
    """A key, made by ``of`` from ``value``, and the leaves it leaves out, with the reason.

    ``other``: other values of leaves whose types do not give any. ``files``: leaves that name
    files, whose content is read instead of their names.
    """

    value: Any
    of: Any
    without: dict[str, str] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()


def all_leaves(value, path=""):
    """Yield the dotted path of every leaf, also of fields that hold arrays or objects."""
    for one in fields(value):
        item = getattr(value, one.name)
        if is_dataclass(item):
            yield from all_leaves(item, f"{path}{one.name}.")
        else:
            yield f"{path}{one.name}"


def changed(value, path):
    """Yield another value of a leaf, made from its present value."""
    now = get(value, path)
    if isinstance(now, np.ndarray):
        yield now + 1
    elif isinstance(now, dict) and now and all(isinstance(x, np.ndarray) for x in now.values()):
        yield {key: array + 1 for key, array in now.items()}
    elif isinstance(now, bool):
        yield not now
    elif isinstance(now, int | float):
        yield now + 1
    elif isinstance(now, str):
        yield f"{now}x"
    elif isinstance(now, tuple) and now and isinstance(now[0], int | float):
        yield (*now[:-1], now[-1] / 2 + 1)
    else:
        *group, name = path.split(".")
        holder = get(value, ".".join(group)) if group else value
        yield from others(hints(type(holder))[name], now)


def depends_on(key):
    """Return the leaves with which a key changes, and those with which it does not."""
    before, with_it, without = key.of(key.value), set(), set()
    assert key.of(key.value) == before
    for path in {*all_leaves(key.value)} - {*key.files}:
        other = key.other[path] if path in key.other else next(changed(key.value, path))
        after = key.of(with_value(key.value, path, other))
        (with_it if after != before else without).add(path)
    return with_it, without


@dataclass(frozen=True)
class Text:
    """What decides on prepared text."""

    source: SourceConfig
    tokenizer: TokenizerConfig


def request(text):
    return request_of(text.source, text.tokenizer, None)


PLACES = ("hub_name", "hub_config", "hub_split", "hub_files")
NOT_READ = {
    "source.about": "words for a reader",
    "source.bad_rows": "malformed rows are left out all the same",
}
OF_HUB = dict.fromkeys([f"source.{key}" for key in PLACES], "of the hub alone")
OF_FILES = dict.fromkeys(["source.files", "source.allow_patterns"], "of files alone")
OF_PLUGIN = {"source.arguments": "of a plugin's source alone"}
NO_FIELD = {"source.text_field": "its documents have no fields"}
NO_LIST = {"source.allow_patterns": "they choose from a list"}
OF_HUB_TOO = {"tokenizer.path": "a/b"}
TRAINED = {
    "tokenizer.vocab_size": "of a tokenizer that is trained",
    "tokenizer.sample_megabytes": "of a tokenizer that is trained",
}
HUB = SourceConfig(source="hub", hub_name="a/b", hub_files=["*"], revision="1")
FILES = SourceConfig(source="files", files=["@a"], allow_patterns=["*"])
TURNS = Stretch((0.5, 0.0), (0.25, 1.0), 0.1)
FULL = Spectrum(
    (1.0, 0.5), Temperature(0.1, 2.0, 0.9, "query", 64, False), False, 1.1,
    LongFrequencies(32, (0.5, 0.25), TURNS, 2.0, 16),
)  # fmt: skip
CHANGED = Intervention(((1.0, 0.5),), ((0.5, 1.0),), (0.1,), (0.2,), 3)
LAYER = LayerEncoding(((FULL, 1), (Spectrum(), 1)), 16, True, None)
TRIALS = Trials(np.arange(8).reshape(2, 4), np.arange(2), np.arange(2) + 1)
WINDOWS = {4: np.arange(8).reshape(2, 4)}
MASK = np.array([[True, False], [False, True]])
ASKED = {4: AnsweredTexts(np.arange(8).reshape(2, 4), np.arange(2))}
FIT_TEXT = FitText(WINDOWS, 0, "text", ASKED, WINDOWS)
REASONS = {
    "windows": "their sizes stand for them: the text decides where they end",
    "needles": "made by the settings of the search, which its key has",
    "choice": "read by choices alone",
}
"""Of fields of a text for fits."""
NO_NEEDLES = {"needles": {}}
FEWER = {4: WINDOWS[4][:1]}


def prompted(prompt):
    """Return the fingerprint of a task with one prompt."""
    task = SimpleNamespace(name="t", stop=None, score=None, prompts=lambda length: [prompt])
    return Prompted(task, None).fingerprint(4)


def as_in_files(spectrum):
    """Return a spectrum's plain values, which are checked to be all of it."""
    values = json.loads(json.dumps(spectrum.to_dict()))
    assert Spectrum.from_dict(values) == spectrum
    return values


@dataclass(frozen=True)
class Mixed:
    """A phase of a run that reads text."""

    data: DataConfig
    seed: int
    text: str
    weight: float


def order_of(mixed):
    """Return what is compared when a run resumes."""
    text = SimpleNamespace(fingerprint=mixed.text)
    corpus = Corpus(None, 0, (Part("text", mixed.weight, text),))
    config = SimpleNamespace(data=mixed.data)
    return data_fingerprints(corpus, SimpleNamespace(config=config, seed=mixed.seed))


OF_TEXT = "the text's own fingerprint contains it, or its configuration is compared"
OF_READERS = "how batches are made or read; the run's configuration is compared"
DATA = [*(f.name for f in fields(SourceConfig)), "prepared", "mixture", "cache_dir"]
READERS = ("document_mask", "restart_positions", "first_token_loss", "num_workers")
SUBJECT = Candidate(
    "given", "name", Path("path"), Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, '
    '"merges": []}}'), ModelConfig(), Layout(32, (LAYER,)), "weights", None, print,
)  # fmt: skip


@dataclass(frozen=True)
class Computed:
    """A model and how it is computed."""

    candidate: str = "weights"
    dtype: str | None = "fp32"
    device: str = "cuda"
    chunk: int | None = 64
    tf32: bool = True


CHUNK = {"chunk": "how much is read at once changes rounding alone"}


def subject_key(computed):
    candidate = replace(SUBJECT, fingerprint=computed.candidate)
    how = {"chunk": computed.chunk, "tf32": computed.tf32}
    return subject_of(candidate, computed.dtype, computed.device, **how).fingerprint


@dataclass(frozen=True)
class Fit:
    """What a stored fit depends on."""

    model: str
    text: FitText
    kind: str
    settings: dict[str, Any]


class Paths(Store):
    """A store that returns where a value would be."""

    def get(self, kind, key, make):
        """Return the path."""
        return self.path(kind, key)


def fit_key(fit):
    model = SimpleNamespace(layout=None)
    fitting = Fitting(model, fit.model, fit.text, Paths(Path("/")), 1)
    return fitting.stored(fit.kind, fit.settings, print)


def tried_key(fit):
    """Return the keys under which processes share losses."""
    paths = []

    class Tried(Paths):
        def get(self, kind, key, make):
            paths.append(self.path(kind, key))
            return 0.0

        def has(self, kind, key):
            return True

    claims = Claims(Path("/tmp"), Share())
    claims.share = Share(0, 2)
    claims.take = lambda *job: True
    model = SimpleNamespace(layout=None)
    fitting = Fitting(model, fit.model, fit.text, Tried(Path("/")), 1, claims=claims)
    fitting.losses(fit.settings, [1.0, 2.0], float)
    assert len({*paths}) == 2
    return paths


@dataclass(frozen=True)
class ChoiceOfTokens:
    """What the choice of key tokens depends on."""

    model: str
    windows: np.ndarray
    end_of_text: int
    last: int
    settings: KeyTokenSettings


def choice_of_tokens_key(choice):
    """Return the key under which a choice of key tokens is stored."""
    paths = []

    class Choices(Paths):
        def get(self, kind, key, make):
            paths.append(self.path(kind, key))
            return pack(np.zeros((1, 1), np.uint8))

    layout = SimpleNamespace(training_length=4)
    subject = SimpleNamespace(fingerprint=choice.model, layout=layout, name="a")
    chooser = Chooser(subject, choice.settings, Choices(Path("/")), 1)
    chooser.choose(choice.windows, choice.end_of_text, choice.last)
    return paths


SCALE = build_layout(
    PositionalConfig(), num_layers=2, num_key_value_heads=2, head_dim=8, training_length=32
)


def evaluated(evaluation):
    """Return what tables of runs are compared by, for a report of this evaluation."""
    asked = {k: v for k, v in asdict(evaluation).items() if k not in STATED}
    return compare._measured_on(report_of({"evaluation": asked}))


def report_of(config, **more):
    environment = {"corpus": "text", "models": {"a": "weights"}, "precision": "fp32"}
    values = {"cells": (), "methods": {"none": "as is"}, "tasks": {"a": "A"}, "notes": ()}
    values |= {"name": "n", "training_length": 64, "environment": environment, "config": config}
    return Report(**values | more)


OF_REPORT = {
    "name": "a heading",
    **dict.fromkeys(("cells", "notes", "observations", "temperature", "timing"), "results"),
    "key_tokens": "how many there are, and settings of the configuration",
    **dict.fromkeys(("arms", "drop", "reach", "milestones"), "of training"),
    "environment": "versions; text and models are taken from it",
    "made": "date and command; the inputs are taken from it",
}
OF_TRIALS = {
    "methods": "every method is asked the same trials",
    "dtype": "the precision is a key of its own",
    "prefill_chunk": "how much is read at once",
    "training_length": "a field of the report",
    "tokens": "stated as lengths",
    "lengths": "each length is compared by itself; the longest and shortest are in the key",
    **dict.fromkeys(
        (f"key_tokens.{item.name}" for item in fields(KeyTokenSettings)),
        "of a task that tables of several runs do not show",
    ),
}
FULL_MODEL = ModelConfig(
    64, 96, 2, 4, 2, 16, 300, softmax=SoftmaxConfig(True, True, 50.0, 30.0), qkv_bias=True,
    qk_norm=QKNormConfig("always"),
)  # fmt: skip


def exported(model):
    """Return the configuration that an export writes."""
    return make_plan(model, Layout(32, (LAYER, LAYER))).values


BEGINNING = "the weights that it began with"
KEYS = {
    "prepared text of the hub": Key(
        Text(HUB, TokenizerConfig()),
        request,
        {**NOT_READ, **OF_FILES, **OF_PLUGIN}, other=OF_HUB_TOO,
    ),
    "prepared text of files": Key(
        Text(FILES, TokenizerConfig()),
        request,
        {**NOT_READ, **OF_HUB, **OF_PLUGIN},
        other=OF_HUB_TOO,
    ),
    "prepared text of Python": Key(
        Text(SourceConfig(), TokenizerConfig()),
        request,
        {**NOT_READ, **OF_HUB, **OF_FILES, **OF_PLUGIN, **NO_FIELD}, other=OF_HUB_TOO,
    ),
    "prepared text of a plugin": Key(
        Text(SourceConfig(source="mine"), TokenizerConfig()),
        request,
        {**NOT_READ, **OF_HUB, **OF_FILES, **NO_FIELD}, other=OF_HUB_TOO,
    ),
    "prepared text with a tokenizer of the hub": Key(
        Text(SourceConfig(), TokenizerConfig("a/b")),
        request,
        {**NOT_READ, **OF_HUB, **OF_FILES, **OF_PLUGIN, **NO_FIELD, **TRAINED},
    ),
    "a listed file": Key(
        File("place/a.txt", "a.txt", 3),
        lambda file: directory_name({"source": "files", "files": [1]}, Listing((file,), "1")),
        {"path": "the same file elsewhere is the same text"},
    ),
    "a listing": Key(
        Listing((File("a", "a", 1),), "1"),
        lambda listing: listing.identity,
        other={"files": (File("b", "b", 1),)},
    ),
    "the order of samples": Key(
        Mixed(DataConfig(needles=replace(DataConfig().needles, share=0.5)), 3, "text", 1.0),
        order_of,
        {
            **{f"data.{name}": OF_TEXT for name in DATA},
            **{f"data.{name}": OF_READERS for name in READERS},
            "weight": "a single text is all of it",
        },
        {"data.mixture": {"text": {"weight": 2.0}}},
    ),
    "a text for fits": Key(FIT_TEXT, lambda text: text.key, REASONS, NO_NEEDLES),
    "the size of a text for fits": Key(
        FIT_TEXT, lambda text: text.key, {k: v for k, v in REASONS.items() if k != "windows"},
        {"windows": FEWER, **NO_NEEDLES},
    ),
    "a text for choices": Key(
        FIT_TEXT,
        lambda text: text.choice_key,
        {k: v for k, v in REASONS.items() if k != "choice"},
        NO_NEEDLES,
    ),
    "a fit": Key(
        Fit("model", FIT_TEXT, "kind", {"a": 1}),
        fit_key,
        {f"text.{name}": why for name, why in REASONS.items()},
        {"settings": {"a": 2}, "text.needles": {}},
    ),
    "a shared loss": Key(
        Fit("model", FIT_TEXT, "kind", {"a": 1}),
        tried_key,
        {**{f"text.{name}": why for name, why in REASONS.items()}, "kind": "of a fit"},
        {"settings": {"a": 2}, "text.needles": {}},
    ),
    "perplexity": Key(
        Perplexity(WINDOWS, 0, 4, 2),
        lambda task: task.fingerprint(4),
        {"key": "names the task in the key of a cell", "title": "a heading"},
    ),
    "key tokens": Key(
        KeyTokens(WINDOWS, 0, ChosenTokens(MASK, Contexts(4, 2, 2.0, -2.0), "a")),
        lambda task: task.fingerprint(4),
        {
            "key": "names the task in the key of a cell",
            "title": "a heading",
            "chosen.by": "the mask says which tokens were chosen",
            **dict.fromkeys(
                (f"chosen.contexts.{item.name}" for item in fields(Contexts)),
                "the mask says which tokens were chosen",
            ),
        },
    ),
    "a choice of key tokens": Key(
        ChoiceOfTokens("model", WINDOWS[4], 0, 2, KeyTokenSettings(short=2)),
        choice_of_tokens_key,
        {"settings.model": "its weights are in the key"},
    ),
    "statements": Key(
        Statements({4: TRIALS}, 0),
        lambda task: task.fingerprint(4),
        {"key": "names the task in the key of a cell", "title": "a heading"},
        {"trials": {4: replace(TRIALS, depths=TRIALS.depths + 1)}},
    ),
    "trials": Key(TRIALS, lambda trials: Statements({4: trials}, 0).fingerprint(4)),
    "a prompt": Key(
        Prompt((1, 2), ("a",), 4, 0.5, 1, "x", (7,)),
        prompted,
        {"group": "a shared forward pass saves time"},
        {"answers": ("b",), "tokens": (1, 3), "never_first": (8,)},
    ),
    "a stored spectrum": Key(FULL, as_in_files),
    "a layer in the key of a fit": Key(
        LAYER,
        lambda layer: of_layout(Layout(32, (layer,))),
        other={"groups": ((FULL, 2),), "intervention": CHANGED},
    ),
    "a change of channels in the key of a fit": Key(
        CHANGED,
        lambda change: of_layout(Layout(32, (replace(LAYER, intervention=change),))),
        other={"query": ((2.0, 0.5),), "key": ((2.0, 0.5),)},
    ),
    "a spectrum beside a change of channels": Key(
        FULL, lambda one: of_layout(Layout(32, (LayerEncoding(((one, 1),), None, False, CHANGED),)))
    ),
    "a layout": Key(
        Layout(32, (LAYER,)), of_layout, other={"layers": (replace(LAYER, window=8),)}
    ),
    "a model in float32": Key(Computed(), subject_key, CHUNK, {"dtype": "bf16", "device": "cpu"}),
    "a model in bfloat16": Key(
        Computed(dtype="bf16"),
        subject_key,
        {**CHUNK, "device": "changes the order of sums", "tf32": "multiplies no float32"},
        {"dtype": "fp32", "device": "cpu"},
    ),
    "how runs are compared": Key(EvaluationConfig(), evaluated, OF_TRIALS),
    "how an evaluation is found again": Key(
        report_of({"evaluation": {"a": 1}}),
        evaluate._asked,
        OF_REPORT,
        {
            "methods": {"pi": "PI"}, "tasks": {"b": "B"}, "config": {"evaluation": {"a": 2}},
            "task": {"needles": 3}, "cells": (), "arms": (), "drop": None, "observations": (),
            "reach": {}, "milestones": {},
        },
    ),
    "an exported configuration": Key(
        FULL_MODEL,
        exported,
        {
            **dict.fromkeys(
                ("initializer", "initializer_range", "initializer_by_depth"),
                "of the first weights",
            ),
            "attention_backend": "another kernel computes the same",
            "from_pretrained": BEGINNING,
            "from_run": BEGINNING,
            "qk_norm.when": "the layout says where it is on",
        },
    ),
    "longrope's search": Key(
        LongRopeSettings(), plain_settings, files=("factors",)
    ),
    "data read in one order": Key(DataConfig(), reading, other={"mixture": {"a": {}}}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_changes_with_every_leaf_but_those_listed(name):
    key = KEYS[name]
    with_it, without = depends_on(key)
    assert sorted(without) == sorted(key.without)
    assert not with_it & {*key.without}


def test_text_and_models_of_a_report_are_taken():
    report = report_of({})
    for key, other in (("corpus", "b"), ("models", {"a": "other"})):
        changed_ = replace(report, environment={**report.environment, key: other})
        assert evaluate._asked(changed_) != evaluate._asked(report)
    assert evaluate._asked(replace(report, made={"Of": "b"})) != evaluate._asked(report)
    for key in ("corpus", "precision"):
        changed_ = replace(report, environment={**report.environment, key: "b"})
        assert compare._measured_on(changed_) != compare._measured_on(report)
    for lengths in ([1.0, 2.0], [0.5, 8.0]):  # the longest, and the shortest
        asked, before = (EvaluationConfig(lengths=n) for n in (lengths, [1.0, 8.0]))
        assert evaluated(asked) != evaluated(before)


@dataclass(frozen=True)
class Record:
    """A stored benchmark."""

    kind: str = "a"
    config: Any = "a"
    text: Any = "a"
    weights: Any = "a"
    models: Any = "a"
    notes: Any = "a"
    versions: Any = "a"


def test_a_benchmark_is_the_same_if_all_but_its_results_are(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(asdict(Record())))
    results = {"models", "notes", "versions"}
    for one in fields(Record):
        other = asdict(replace(Record(), **{one.name: "b"}))
        assert benchmarks._is_same(other, path) == (one.name in results), one.name


READS = {
    **dict.fromkeys(("crop", "none", "window", "drop", "drop_channels"), ()),
    **dict.fromkeys(PARTS, ()),
    "dynamic_ntk_alpha": ("dynamic_ntk",),
    "longrope": ("longrope",),
    "temperature": ("temperature",),
    "temperature_rope_id": ("temperature",),
    "temperature_per_head": ("temperature",),
    "dope": ("dope", "choice"),
    "weighted_rope": ("weighted_rope", "choice"),
}
"""Groups of settings that each part of a method reads."""
NO_SETTING = {
    "temperature.models": "chooses the models that have the method, and changes none of them",
    "longrope.factors": "a file that would be read",
}


@pytest.mark.parametrize("name", PARTS)
def test_a_method_is_stored_with_every_setting_that_it_reads(name):
    free = {"layers": ["nope"]} if name.startswith("temperature") else {}
    layout = build_layout(
        PositionalConfig(**free),
        num_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        training_length=32,
    )
    config, found = (
        EvaluationConfig(temperature=replace(EvaluationConfig().temperature, models="all")),
        set(),
    )

    def settings(of):
        made = recipe(name, layout, of)
        assert isinstance(made, Recipe), made
        return json.dumps([made.key, made.settings], default=str)

    groups = {group for read in READS.values() for group in read}
    for path in all_leaves(config):
        if path.split(".")[0] in groups and path != "longrope.factors":
            other = with_value(config, path, next(changed(config, path)))
            found |= {path} if settings(other) != settings(config) else set()
    read = {path for path in all_leaves(config) if path.split(".")[0] in READS[name]}
    assert found == read - NO_SETTING.keys()
    by_layer = settings(replace(config, layers=[0])) != settings(config)
    assert by_layer == (name in BY_LAYER)


def test_remarks_know_the_same_readers_of_settings():
    for group in {group for read in READS.values() for group in read}:
        assert {*remarks.OF_METHODS[group]} == {
            name for name, read in READS.items() if group in read
        }


@dataclass(frozen=True)
class CellOf:
    """What a stored cell depends on."""

    model: str = "weights"
    method: str = "temperature"
    settings: int = 1
    task: str = "task"
    asked: str = "prompts"
    length: int = 64
    text: str = "text"
    batch_tokens: int = 1000
    device: str = "cpu"


def job_keys(of):
    """Return the keys of all jobs of a cell, which is large enough to be divided."""
    text = replace(FIT_TEXT, fingerprint=of.text)
    subject = Subject("name", of.model, ModelConfig(vocab_size=300), SCALE, print, True, of.device)
    made = Recipe(of.method, "T", {"a": of.settings}, lambda factor: {2.0: 3}, print)
    task = SimpleNamespace(
        key=of.task, fingerprint=lambda length: of.asked, sequences=lambda length: 3
    )
    plans = plan_cells([subject], {"name": [made]}, [task], [of.length], text)
    assert choice_key(plans) == {"cells": [plan.key for plan in plans]}
    return [[job.kind, job.key] for job in plan_jobs(plans, of.batch_tokens)]


def test_every_job_of_an_evaluation_is_stored_with_all_that_it_depends_on(monkeypatch):
    monkeypatch.setattr(cells, "PART", {"cpu": 1.0, "cuda": 1.0})
    before = job_keys(CellOf())
    assert {kind for kind, _ in before} == {"choice", "part"}
    of_parts = {"batch_tokens", "device"}
    for one in fields(CellOf):
        after = job_keys(replace(CellOf(), **{one.name: next(changed(CellOf(), one.name))}))
        assert {json.dumps(key) for key in after if key[0] == "part"}.isdisjoint(
            {json.dumps(key) for key in before if key[0] == "part"}
        ), one.name
        same_choice = [key for key in after if key[0] == "choice"] == before[:1]
        assert same_choice == (one.name in of_parts), one.name


def test_a_checkpoint_continues_a_model_that_differs_in_nothing_that_it_holds():
    free = {"attention_backend", "from_pretrained", "from_run"}
    model = SimpleNamespace(config=FULL_MODEL)
    refused = set()
    for path in all_leaves(FULL_MODEL):
        other = asdict(with_value(FULL_MODEL, path, next(changed(FULL_MODEL, path))))
        try:
            check_same_model({"model": other}, model, "x")
        except UserError as error:
            refused |= {path for one in error.problems if path.startswith(one.key[6:])}
    assert refused == {*all_leaves(FULL_MODEL)} - free


RESUMED_WITH_OTHERS = {
    "name", "run_dir", "overwrite", "label", "data.num_workers", "data.cache_dir",
    "data.prepared", "data.about", "trainer.micro_batch_size", "trainer.deterministic",
    "trainer.accelerator", "trainer.threads", "trainer.log_every", "trainer.checkpoint_every",
    "trainer.checkpoint_minutes", "trainer.keep_checkpoints", "trainer.keep_every",
    "trainer.keep_best", "trainer.async_checkpoint", "trainer.max_time", "trainer.step_timeout",
    "trainer.rewind_after", "trainer.gc_every", "trainer.profile_steps",
}  # fmt: skip
"""Leaves that a resumed run may have other values of: they change nothing of what is trained. So
may all leaves of these groups:"""
GROUPS = {"logger", "evaluation", "monitor", "callbacks", "strategy"}


def test_a_run_resumes_with_all_leaves_that_decide_on_what_is_trained(tmp_path, monkeypatch):
    values = {"run_dir": str(tmp_path / "run"), "model": {"vocab_size": 300}, "drop": {"at": 5}}
    config = parse(RunConfig, values)
    open_run_directory(config)
    monkeypatch.setattr(directory, "saved_run", lambda place: config)
    accepted = set()
    for path, kind, value in leaves(config):
        if path == "run_dir":
            continue
        other = with_value(config, path, next(others(kind, value)))
        try:
            check_run_directory(other)
        except UserError as error:
            keys = [problem.key for problem in error.problems if problem.key]
            assert len(keys) == 1, path
            assert keys[0].startswith(path), path
        else:
            accepted.add(path)
    assert {one for one in accepted if one.split(".")[0] not in GROUPS} == RESUMED_WITH_OTHERS - {
        "run_dir"
    }
    assert {path.split(".")[0] for path, *_ in leaves(config) if path not in accepted}.isdisjoint(
        GROUPS
    )


def test_a_control_reads_the_text_and_the_tokens_of_its_run():
    run = parse(RunConfig, {"model": {"vocab_size": 300}})
    found = set()
    for path, kind, value in leaves(run):
        if path.startswith(("data.", "tokenizer.")) and path != "data.mixture":
            other = with_value(run, path, next(others(kind, value)))
            found |= {path} if text_problems({"main": run, "x": other}) else set()
    source = {f"data.{one.name}" for one in fields(SourceConfig)} | {"data.prepared"}
    tokens = {f"tokenizer.{one.name}" for one in fields(TokenizerConfig)}
    assert found == (source | tokens) - {"data.about", "data.bad_rows"}


CHOSEN = Chosen((Choice("optimizer.lr", 0.1, "why"),), 4, 5, 6.0, 7.0)


def test_a_recalibration_that_was_begun_goes_on_for_the_same_request_alone(tmp_path):
    asked = Asked("model", 3.0, ("a.txt",))
    chosen = SimpleNamespace(config=SimpleNamespace(run_dir=str(tmp_path)), asked=asked, to="x")
    chosen.recipe = CHOSEN
    write_record(chosen, exported=False)
    assert recipe_for(asked, tmp_path, {}, overwrite=False) == CHOSEN
    for one in fields(Asked):
        value = {"model": "other", "minutes": 4.0, "text": ("b.txt",)}[one.name]
        with pytest.raises(UserError, match=one.name if one.name != "model" else "MODEL"):
            recipe_for(replace(asked, **{one.name: value}), tmp_path, {}, overwrite=False)


def phased(**changes):
    values = {"steps": 4, "batch_size": 4, "micro_batch_size": 4, "log_every": 4}
    phases = {"a": values, "b": {**values, **changes}}
    data = {"mixture": {"x": {}, "y": {}}}
    return phases_of(parse(RunConfig, {"phases": phases, "data": data, "drop": {"at": None}}))


APART = {
    "batch_size": 8, "micro_batch_size": 2, "log_every": 2, "sequence_length": 32,
    "weights": {"x": 1.0}, "until": {"flat": 0.1, "every": 2},
}  # fmt: skip
TOGETHER = {
    "steps": 5, "tokens": 4096, "schedule": {"peak": 0.5}, "drop": {}, "rescale": {"factor": 2.0},
    "optimizer_state": "reset",
}  # fmt: skip


@pytest.mark.parametrize("key", [*APART, *TOGETHER])
def test_phases_are_one_stretch_unless_they_differ_in_their_batches(key):
    first, second = phased(**{key: (APART | TOGETHER)[key]})
    assert (first.stretch == second.stretch) == (key in TOGETHER)
    assert (second.change != ()) == (key in ("drop", "rescale", "optimizer_state"))


CONTENT = "hashes the whole content of text or files"
CHECKSUM = "a checksum of what is written or read"
TESTED = "above"
HASHED = {
    **dict.fromkeys(
        ("sbatch.snapshot", "encoding.document_hash", "sources.stdlib_docs", "sweep._note"), CONTENT
    ),
    **dict.fromkeys(
        (
            *("packing._pack", "prepared.open_prepared", "shards.__init__", "shards.finish"),
            *("units.write_manifest", "store._checksum"),
            "files.checksum",
        ),
        CHECKSUM,
    ),
    **dict.fromkeys(
        (
            "plan.digest",
            "store.fingerprint",
            "store._pieces",
            "directory.differences",
            "plan.request_digest",
        ),
        "the hash or the comparison itself",
    ),
    **dict.fromkeys(
        (
            *("plan.directory_name", "tokenizer.tokenizer_identity", "corpus.fingerprint"),
            *("prepared.fingerprint", "fitting.key", "fitting.choice_key"),
            *("measurements.fingerprint", "measurements._summarise", "methods._identity"),
            *("plan.plan_cells", "plan.key", "store.path", "store.take"),
            *("directory.check_run_directory", "starting_point.data_fingerprints"),
            *("benchmarks._is_same", "compare._measured_on", "evaluate._asked"),
            *("key_tokens.choose", "key_tokens.fingerprint", "subjects.subject_of"),
        ),
        TESTED,
    ),
    **dict.fromkeys(
        ("preparing._any_prepared", "preparing._states", "preparing.without_tokenizer"),
        "look for prepared text by the whole request",
    ),
    **dict.fromkeys(
        (
            *("methods._longrope", "methods.layout_at", "methods._fitted_temperature"),
            "methods._temperature_per_head",
        ),
        "each fits on a layout that it tells apart, with settings that its method is stored with",
    ),
    "training_text.text_problems": "tests/relations/test_controls.py compares all arms",
    "tasks.check_prompts": "asks for a fingerprint to find prompts that do not fit",
    "decoder.initial_value": "a seed for each parameter's name",
    "benchmarks.run_benchmarks": "writes all fields of the request",
    "compare._settings": "names the settings in which runs differ",
    "evaluate.evaluate_lengths": "writes the fingerprints of all models",
    "evaluate.measure_models": "writes all settings but those that the report states",
}
"""Functions that hash, fingerprint or compare, and where their keys are tested."""


def test_every_function_that_makes_a_key_is_classified():
    assert functions_that_hash() == {*HASHED}


def test_a_corpus_is_told_apart_by_texts_weights_and_their_order():
    texts = [SimpleNamespace(fingerprint=name) for name in "abc"]

    def of(*pairs):
        return Corpus(None, 0, tuple(Part(str(i), w, texts[i]) for i, w in pairs)).fingerprint

    found = [of((0, 1.0), (1, 1.0)), of((0, 1.0), (2, 1.0)), of((2, 1.0), (1, 1.0))]
    found += [of((0, 2.0), (1, 1.0)), of((0, 1.0), (1, 2.0)), of((1, 1.0), (0, 1.0)), of((0, 1.0))]
    assert len({*found}) == len(found)


@pytest.mark.parametrize("request_", [request(Text(HUB, TokenizerConfig())), {"source": "files"}])
def test_a_prepared_text_is_told_apart_by_its_request_and_its_source(request_):
    def of(asked, source):
        manifest = SimpleNamespace(request=asked, source=source)
        return Prepared(None, None, 0, None, None, None, manifest).fingerprint

    before = of(request_, {"revision": "1"})
    assert of(request_, {"revision": "2"}) != before
    assert of(request_ | {"files": ["elsewhere"]}, {"revision": "1"}) == before
    for key in request_:
        assert of(request_ | {key: "other"}, {"revision": "1"}) != before, key


def test_a_claim_and_a_stored_value_are_named_by_all_of_their_key(tmp_path):
    store = Store(tmp_path)
    keys = [("a", {"x": 1}), ("b", {"x": 1}), ("a", {"x": 2}), ("a", {"y": 1}), ("a", {"x": [1]})]
    assert len({store.path(*key) for key in keys}) == len(keys)
    claims = Claims(tmp_path, Share(0, 2))
    assert [claims.take(*key) for key in keys] == [True] * len(keys)
    assert [claims.take(*key) for key in keys] == [False] * len(keys)


def functions_that_hash():
    """Return the functions that hash, fingerprint or compare what they are given."""
    found = set()
    calls = {"sha256", "fingerprint", "digest", "request_digest", "all_fields", "differences"}
    calls |= {"stored", "file_digest"}
    for path in (ROOT / "trainer").rglob("*.py"):
        text = path.read_text()
        if not any(f"{name}(" in text for name in calls):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                names = {
                    getattr(call.func, "attr", getattr(call.func, "id", ""))
                    for call in ast.walk(node)
                    if isinstance(call, ast.Call)
                }
                found |= {f"{path.stem}.{node.name}"} if names & calls else set()
    return found


@pytest.mark.parametrize("path", [*all_leaves(FULL)])
def test_heads_share_tables_only_if_their_spectra_are_equal(path):
    other = with_value(FULL, path, next(changed(FULL, path)))
    layer = LayerEncoding.of_heads((FULL, other))
    assert [heads for _, heads in layer.groups] == [1, 1]
    layers = Layout(32, (LayerEncoding.of_heads((FULL,)), LayerEncoding.of_heads((other,)))).layers
    assert layers[0] is not layers[1]


def test_a_file_that_is_watched_is_read_again_if_its_size_or_its_time_changes(tmp_path):
    path, stamps = tmp_path / "metrics.csv", set()
    for text, time in (("a", 1), ("ab", 1), ("b", 2)):
        path.write_text(text)
        os.utime(path, ns=(time, time))
        stamps.add(watch._stamp(path))
    assert len(stamps) == 3


def test_a_model_is_told_apart_by_the_length_that_methods_count_from():
    lengths = (64, 96, 32, None)
    found = [SUBJECT.with_training_length(length) for length in lengths]
    assert len({one.fingerprint for one in found}) == 3
    again = found[0].with_training_length(32)
    assert [one.fingerprint for one in (found[2], found[3], again)] == [SUBJECT.fingerprint] * 3


def test_models_are_the_same_if_their_path_and_their_program_are():
    twice = [replace(SUBJECT, reference="a"), replace(SUBJECT, reference="b", name="other")]
    with pytest.raises(UserError, match="named twice"):
        models.distinct(twice)
    by_another = [SUBJECT, replace(SUBJECT, name="other", computed_by="transformers")]
    assert len(models.distinct(by_another)) == 2


FITTED = {
    "temperature": {
        "kept": {"temperature.grid", "temperature.per", "temperature.lengths", "temperature.fit"},
        "tried": {"temperature.per", "temperature.lengths"},
    },
    "temperature_per_head": {
        "kept": {"temperature.grid", "temperature.lengths"},
        "tried": {"temperature.lengths"},
    },
    "longrope": {
        "kept": {
            *("longrope.search", "longrope.evaluations", "longrope.windows", "longrope.seed"),
        },
        "tried": set(),
    },
}
"""Settings with which a stored fit, or a loss that processes share, must change. The grid is no
part of a loss, which is of one of its values."""


class Recording(Fitting):
    """A fit that records what it would be stored under, and finds nothing."""

    def stored(self, kind, settings, make):
        """Record a fit, and make it."""
        self.keys["kept"].append(json.dumps([kind, settings], default=str))
        return make()

    def losses(self, settings, values, loss):
        """Record shared losses."""
        self.keys["tried"].append(json.dumps(settings, default=str))
        return [0.0] * len(values)


def keys_of_fits(name, config, layout):
    """Return what the fits of a method at twice and four times the length are stored under."""
    windows = {length: np.zeros((1, length), np.int64) for length in (32, 48, 64, 96, 128)}
    fitting = Recording(SimpleNamespace(layout=layout), "model", FitText(windows, 0, "t"), None, 1)
    fitting.keys = {"kept": [], "tried": []}
    method = recipe(name, layout, config).make(fitting)
    for factor in (2.0, 4.0):
        method.layout_at(factor)
    return fitting.keys


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_is_stored_under_all_settings_that_decide_on_it(name, monkeypatch):
    monkeypatch.setattr(methods, "fit_heads", lambda *of: [[0.1] * 2 for _ in of[3]])
    monkeypatch.setattr(
        methods, "fitted_factors", lambda *of: [[1.0] * 4 for _ in of[3].of_layers(of[4]).spectra]
    )
    plain = EvaluationConfig(lengths=[2.0, 4.0])
    config = replace(plain, temperature=replace(plain.temperature, models="all"))
    before = keys_of_fits(name, config, SCALE)
    ours = {"temperature.lengths": [3.0], "temperature.grid": [0.1, 0.2]}
    for kind, paths in FITTED[name].items():
        assert bool(before[kind]) == bool(paths)
        for path in paths:
            value = ours.get(path) or next(changed(config, path))
            after = keys_of_fits(name, with_value(config, path, value), SCALE)
            assert {*after[kind]}.isdisjoint(before[kind]), path
        of_some = keys_of_fits(name, replace(config, layers=[0]), SCALE)
        assert {*of_some[kind]}.isdisjoint(before[kind])
        if name != "longrope":
            behind = [keys_of_fits(f"{one}+{name}", config, SCALE)[kind] for one in ("pi", "yarn")]
            assert {*behind[0]}.isdisjoint(behind[1])
        longer = replace(SCALE, training_length=16)
        assert {*keys_of_fits(name, config, longer)[kind]}.isdisjoint(before[kind]), "layout"


BEFORE = {
    "model": {"attention_backend"},
    "positional": set(),
    "data": {"mixture", "allow_patterns"},
    "seed": set(),
}
"""Groups that a control which branches off has from its run, and what it may change in them."""


@pytest.mark.parametrize("name", [*controls.CHANGES])
def test_a_control_that_branches_off_has_read_and_been_changed_like_its_run(name):
    run = parse(RunConfig, controls.RUN)
    control = parse(RunConfig, merged(controls.RUN, controls.CHANGES[name]))
    before_drop = branch_problems(run, control, 6)
    group, _, key = name.partition(".")
    refused = group in BEFORE and (group == "data" or key not in BEFORE[group])
    refused = refused or name in ("trainer.batch_size", "optimizer.name", "drop.at_tokens")
    refused = refused or (name == "phases" and bool(before_drop))
    assert bool(before_drop) == refused
