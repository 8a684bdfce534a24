"""What is kept under a key is found by equal inputs alone.

Every leaf of the inputs is changed by itself: the key must change too, or the leaf must be listed
with the reason why it does not matter.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.comparing import checkpoint_of
from tests.program import ROOT
from tests.relations.leaves import leaves, other_value, with_value
from trainer.common.errors import UserError
from trainer.config import (
    AnalysisRequest,
    ChoiceSettings,
    DataConfig,
    EvaluationConfig,
    EvaluationRequest,
    RunConfig,
    TokenizerConfig,
)
from trainer.data.prepared import directory_of, request_of
from trainer.data.sources import TEXT_SOURCES, TextSource, cache_directory
from trainer.data.tokenizer import special_tokens
from trainer.evaluation.engine import Setup, _cells, _fits
from trainer.evaluation.fitting import FitText
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.store import Store, fingerprint
from trainer.evaluation.task import Task
from trainer.positional.layout import Intervention, LayerEncoding, Layout
from trainer.positional.spectrum import LongFrequencies, Spectrum, Step, Stretch, Temperature
from trainer.runs import directory as runs
from trainer.runs import models
from trainer.runs.directory import check_run_directory, open_run_directory, plain
from trainer.runs.models import find_model
from trainer.workflows.evaluate import plain_request


def without_effect(whole, key, other=None):
    """The leaves of ``whole`` with which ``key(whole)`` does not change."""
    before, other = key(whole), other or {}
    assert key(whole) == before
    ignored = set()
    for path in leaves(whole):
        value = other[path] if path in other else other_value(whole, path)
        if key(with_value(whole, path, value)) == before:
            ignored.add(path)
    return ignored


# Layouts and cells of an evaluation


FULL = Spectrum(
    (1.0, 0.5),
    Temperature(0.1, 2.0, 0.9, "query", 64, False),
    False,
    1.1,
    LongFrequencies(32, (0.5, 0.25), Stretch((0.5, 0.0), (0.25, 1.0), 0.1), 2.0, 16),
    (Step("rope", {"base": 10.0}),),
)
CHANGE = Intervention(((1.0, 0.5),), ((0.5, 1.0),), (0.1,), (0.2,), 3)
LAYOUT = Layout(32, (LayerEncoding((FULL, Spectrum()), 16, True, CHANGE),), 48)


def layout_of(spectrum=FULL, layer=LAYOUT.layers[0]):
    return replace(LAYOUT, layers=(replace(layer, spectra=(spectrum, Spectrum())),))


@pytest.mark.parametrize(
    ("whole", "layout"),
    [
        (FULL, layout_of),
        (CHANGE, lambda change: layout_of(layer=replace(LAYOUT.layers[0], intervention=change))),
        (LAYOUT.layers[0], lambda layer: replace(LAYOUT, layers=(layer,))),
        (LAYOUT, lambda layout: layout),
    ],
    ids=["spectrum", "intervention", "layer", "layout"],
)
def test_a_layout_is_known_by_everything_but_its_origin(whole, layout):
    """By its key, by comparison, and, interventions excepted, in a checkpoint."""
    other = {
        "origin": (),
        "spectra": (FULL, FULL),
        "layers": (LAYOUT.layers[0],) * 2,
        **dict.fromkeys(("query", "key"), ((0.25, 1.0),)),
    }
    assert without_effect(whole, lambda x: fingerprint(layout(x)), other) <= {"origin"}
    assert without_effect(whole, layout, other) <= {"origin"}

    def stored(x):
        return Layout.from_dict(layout(x).to_dict())

    interventions = set() if whole is not CHANGE else {*leaves(CHANGE)}
    in_layer = {f"intervention.{name}" for name in leaves(CHANGE)}
    assert without_effect(whole, stored, other) <= {"origin", *interventions, *in_layer}


MODEL = SimpleNamespace(name="model", fingerprint="a", layout=LAYOUT, training_length=32)
CORPUS = SimpleNamespace(fingerprint="text")
TASK = Task({"a": "A"}, 64, "prompts", pd.DataFrame(index=range(2)), print)


@dataclass
class Evaluated:
    """Inputs of a cell and of its layout."""

    config: EvaluationConfig
    model: str = "weights"
    training_length: int = 32
    text: str = "text"
    bos: tuple[int, ...] = (1,)
    windows: int = 2
    device: str = "cpu"
    method: str = "yarn"
    layout: Layout = LAYOUT
    length: int = 64
    fingerprint: str = "prompts"
    title: str = "a"

    @property
    def keys(self) -> tuple[str, str]:
        """Of the layout of its method, and of its cell."""
        held_out = HeldOut(SimpleNamespace(fingerprint=self.text), None, self.bos, None)
        store = Store(Path("/nowhere"))
        text = FitText(held_out, self.windows)
        setup = Setup(self.config, text, store, self.device, self.config.dtype)
        layout = replace(self.layout, training_length=self.training_length)
        model = SimpleNamespace(fingerprint=self.model, layout=layout)
        task = replace(TASK, length=self.length, fingerprint=self.fingerprint)
        task = replace(task, titles={self.title: "A"})
        (fit,) = _fits(model, [self.method], [task], setup)
        (cell,) = _cells(model, fit, [self.layout], [task], setup)
        return fit.key, cell.key


PROMPTS = {f"config.{name}" for name in ("needles.", "many_shot.")}
OF_TASKS = {
    *(f"config.{group}." for group in ("ruler", "longbench", "multiple_choice", "harness")),
    "config.settings",
    *(f"config.{key}" for key in ("enabled", "tasks", "windows", "limit", "tokens", "methods")),
    "config.fit_windows",  # the number of windows of the text says it
    "config.training_length",  # the model's fingerprint says it
}
OF_CELLS = {"fingerprint", "title"}


def key_without(evaluated, which):
    other = {
        "config.settings": {"a": {"b": 1}},
        "config.many_shot.file": __file__,
        "config.dtype": "bf16",
        "method": "crop",
        "layout.layers": (LAYOUT.layers[0],) * 2,
        "layout.layers.spectra": (FULL, FULL),
    }
    return without_effect(evaluated, lambda x: x.keys[which], other)


OF_METHODS = {"dynamic_ntk_alpha", "temperature", "longrope", "choice", "dope", "weighted_rope"}
READ = {
    "yarn": set(),
    "temperature": {"temperature"},
    "dope": {"dope", "choice"},
    "longrope+dope": {"longrope", "dope", "choice"},
}
"""Settings of methods that a method reads."""


@pytest.mark.parametrize("text", ["validation", "standard"])
@pytest.mark.parametrize("method", READ)
def test_a_fit_is_kept_under_all_that_it_reads(method, text):
    """The model's own layout is its fingerprint's."""
    config = EvaluationConfig(choice=ChoiceSettings(text=text))
    ignored = key_without(Evaluated(config, method=method), 0)
    expected = OF_TASKS | OF_CELLS | {"layout.", "training_length"}
    if method != "temperature":  # which is fitted at all lengths together
        expected |= {"config.lengths"}
    expected |= {f"config.{key}" for key in OF_METHODS - READ[method]}
    if method == "yarn":
        expected |= {"text", "bos", "windows"}
    if text == "validation" or "choice" not in READ[method]:
        expected |= PROMPTS
    assert {path for path in ignored if not path.startswith(tuple(expected))} == set()
    missing = {each for each in expected if not any(path.startswith(each) for path in ignored)}
    assert missing == set()


def test_a_cell_is_kept_under_its_layout_and_all_that_is_read():
    ignored = key_without(Evaluated(EvaluationConfig()), 1)
    in_config = {path for path in ignored if path.startswith("config.")}
    every = {f"config.{path}" for path in leaves(EvaluationConfig())}
    assert in_config == every - {"config.batch_tokens", "config.dtype"}
    # What was fitted is in the layout.
    assert ignored - in_config == {"training_length", "text", "bos", "windows"}


def test_a_model_is_known_by_its_files_its_length_and_what_ends_its_answers(finished, monkeypatch):
    directory = finished[0].run_dir
    earlier = str(checkpoint_of(finished[0], 9))
    found = [find_model(directory), find_model(earlier)]
    found += [find_model(directory, length) for length in (16, 64)]

    def with_other_stops(*given):
        return replace(special_tokens(*given), stops=frozenset({1, 2}))

    monkeypatch.setattr(models, "special_tokens", with_other_stops)
    found.append(find_model(directory))
    assert len({model.fingerprint for model in found}) == len(found)
    assert find_model(directory, 32).fingerprint == found[-1].fingerprint  # its own length


# Text


HUB = DataConfig(source="hub", hub_name="a/b", hub_config="c", revision="1")
FILES = DataConfig(source="files", files=["@a"], allow_patterns=["*"])
OF_SAMPLES = {
    *("prepared", "weight", "sequence_length", "mixture", "document_mask", "num_workers"),
    *("needles.share", "needles.names", "needles.mentions", "needles.weight", "needles.changes"),
    "cache_dir",
}
OF_HUB = {"hub_name", "hub_config", "hub_split"}
OF_FILES = {"files", "allow_patterns"}


@pytest.mark.parametrize(
    ("config", "ignored"),
    [
        (HUB, OF_FILES),
        (FILES, OF_HUB),
        (DataConfig(), OF_HUB | OF_FILES | {"text_field"}),
        (DataConfig(source="mine"), OF_HUB | OF_FILES | {"text_field"}),
    ],
    ids=["hub", "files", "python", "plugin"],
)
def test_prepared_text_is_kept_under_all_that_its_tokens_depend_on(config, ignored, monkeypatch):
    mine = TextSource(print, lambda _: "code")
    files = replace(TEXT_SOURCES["files"], state=lambda data: str(data.files))
    for name, source in {"mine": mine, "other": mine, "files": files}.items():
        monkeypatch.setitem(TEXT_SOURCES, name, source)

    def key(data):
        try:
            return request_of(data, TokenizerConfig())
        except UserError as refused:  # a key that the source does not take
            return str(refused)

    assert without_effect(config, key, {"source": "other"}) == OF_SAMPLES | ignored


def test_a_dataset_of_the_hub_is_read_by_the_keys_that_it_is_kept_under(monkeypatch):
    read = []

    class Rows:
        def select_columns(self, columns):
            read.append(columns)
            return self

        def with_format(self, name):
            return self

        def iter(self, rows):
            return iter([{read[-1][0]: SimpleNamespace(to_pylist=lambda: ["a text"])}])

    def load_dataset(*names, **options):
        read[:] = [names, options]
        return Rows()

    hub = SimpleNamespace(config=SimpleNamespace(), load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", hub)

    def key(config):
        assert [*TEXT_SOURCES["hub"].documents(config)] == ["a text"]
        return str(read)

    ignored = without_effect(HUB, key)
    assert {*leaves(HUB)} - ignored == {*TEXT_SOURCES["hub"].keys, "revision", "cache_dir"}
    assert key(HUB) == str(
        [
            ("a/b", "c"),
            {
                "revision": "1",
                "split": "train",
                "streaming": True,
                "cache_dir": str(cache_directory(HUB) / "datasets"),
            },
            ["text"],
        ]
    )


def test_prepared_text_is_kept_under_its_tokenizer():
    def key(tokenizer):
        return directory_of(DataConfig(), tokenizer)

    other = {"path": "owner/name"}  # of the hub
    assert without_effect(TokenizerConfig(), key, other) == set()
    assert without_effect(TokenizerConfig("owner/other"), key, other) == {"vocab_size"}


# Runs and reports


def test_a_run_resumes_with_other_values_of_the_marked_keys_alone(tmp_path, monkeypatch):
    """docs/keys.md marks them."""
    page = (ROOT / "docs" / "keys.md").read_text("utf-8").partition("\n## evaluate")[0]
    marked = {*re.findall(r"^\| `([a-z_.]+)` ↻ \|", page, re.MULTILINE)}
    config = RunConfig(run_dir=str(tmp_path / "run"))
    directory = open_run_directory(config)
    (directory / "checkpoints" / "step-000001").mkdir(parents=True)
    saved = plain(config)
    monkeypatch.setattr(runs, "read_record", lambda _: saved)
    free = set()
    for path in {*leaves(config)} - {"run_dir"}:
        try:
            check_run_directory(with_value(config, path, other_value(config, path)))
        except UserError:
            continue
        free.add(path)
    assert free | {"run_dir"} == marked | {"controls"}  # whole controls, which have no row of keys


@pytest.mark.parametrize(
    "asked",
    [
        EvaluationRequest(checkpoint="a", compare=["b"], text=DataConfig()),
        AnalysisRequest(checkpoint="a", compare="b", text=DataConfig()),
    ],
)
def test_a_request_is_known_by_all_that_it_measures(asked):
    unmeasured = {"output", "name", "plugins"}
    plots = {f"plots.{name}" for name in ("width", "font", "size")}
    assert without_effect(asked, plain_request) == unmeasured | plots
