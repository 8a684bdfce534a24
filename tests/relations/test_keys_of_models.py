"""Keys of models, layouts and spectra."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from tests.relations.keys import (
    Key,
    all_leaves,
    changed,
    ignored_leaves,
)
from tests.relations.leaves import with_value
from trainer.common.errors import UserError
from trainer.common.fields import adapter
from trainer.evaluation.methods import _identity as layout_key
from trainer.interchange.export.plan import make_plan
from trainer.model.config import ModelConfig, QKNormConfig, SoftmaxConfig
from trainer.positional.layout import Intervention, LayerEncoding, Layout
from trainer.positional.spectrum import LongFrequencies, Spectrum, Stretch, Temperature
from trainer.runs import models
from trainer.runs.checkpoints import check_same_model
from trainer.runs.models import Candidate
from trainer.workflows.subjects import subject_of

TURNS = Stretch((0.5, 0.0), (0.25, 1.0), 0.1)
FULL = Spectrum(
    (1.0, 0.5), Temperature(0.1, 2.0, 0.9, "query", 64, False), False, 1.1,
    LongFrequencies(32, (0.5, 0.25), TURNS, 2.0, 16),
)  # fmt: skip
CHANGED = Intervention(((1.0, 0.5),), ((0.5, 1.0),), (0.1,), (0.2,), 3)
LAYER = LayerEncoding(((FULL, 1), (Spectrum(), 1)), 16, True, None)


def as_in_files(spectrum):
    """Return a spectrum's plain values, which are checked to be all of it."""
    values = json.loads(json.dumps(spectrum.to_dict()))
    assert adapter(Spectrum).validate_python(values) == spectrum
    return values


SUBJECT = Candidate(
    "reference", "name", Path("path"), Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, '
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


FULL_MODEL = ModelConfig(
    64, 96, 2, 4, 2, 16, 300, softmax=SoftmaxConfig(True, True, 50.0, 30.0), qkv_bias=True,
    qk_norm=QKNormConfig("always"),
)  # fmt: skip


def exported(model):
    """Return the configuration that an export writes."""
    return make_plan(model, Layout(32, (LAYER, LAYER))).values


BEGINNING = "the weights that it began with"
KEYS = {
    "a stored spectrum": Key(FULL, as_in_files, other={"temperature.per": "sequence"}),
    "a layer in the key of a fit": Key(
        LAYER,
        lambda layer: layout_key(Layout(32, (layer,))),
        other={"groups": ((FULL, 2),), "intervention": CHANGED},
    ),
    "a change of channels in the key of a fit": Key(
        CHANGED,
        lambda change: layout_key(Layout(32, (replace(LAYER, intervention=change),))),
        other={"query": ((2.0, 0.5),), "key": ((2.0, 0.5),)},
    ),
    "a spectrum beside a change of channels": Key(
        FULL,
        lambda full: layout_key(
            Layout(32, (LayerEncoding(((full, 1),), None, False, CHANGED),))
        ),
    ),
    "a layout": Key(
        Layout(32, (LAYER,)), layout_key, other={"layers": (replace(LAYER, window=8),)}
    ),
    "a model in float32": Key(Computed(), subject_key, CHUNK, {"dtype": "bf16", "device": "cpu"}),
    "a model in bfloat16": Key(
        Computed(dtype="bf16"),
        subject_key,
        {**CHUNK, "device": "changes the order of sums", "tf32": "multiplies no float32"},
        {"dtype": "fp32", "device": "cpu"},
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
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_changes_with_every_leaf_but_those_listed(name):
    assert ignored_leaves(KEYS[name]) == sorted(KEYS[name].without)


@pytest.mark.parametrize("path", [*all_leaves(FULL)])
def test_heads_share_tables_only_if_their_spectra_are_equal(path):
    other = with_value(FULL, path, next(changed(FULL, path)))
    layer = LayerEncoding.of_heads((FULL, other))
    assert [heads for _, heads in layer.groups] == [1, 1]
    layers = Layout(32, (LayerEncoding.of_heads((FULL,)), LayerEncoding.of_heads((other,)))).layers
    assert layers[0] is not layers[1]


def test_a_checkpoint_continues_a_model_that_differs_in_nothing_that_it_holds():
    free = {"attention_backend", "from_pretrained", "from_run"}
    model = SimpleNamespace(config=FULL_MODEL)
    refused = set()
    for path in all_leaves(FULL_MODEL):
        other = asdict(with_value(FULL_MODEL, path, next(changed(FULL_MODEL, path))))
        try:
            check_same_model({"model": other}, model, "x")
        except UserError as error:
            keys = [problem.key.removeprefix("model.") for problem in error.problems]
            refused |= {path for key in keys if path.startswith(key)}
    assert refused == {*all_leaves(FULL_MODEL)} - free


def test_a_model_is_told_apart_by_the_length_that_methods_count_from():
    lengths = (64, 96, 32, None)
    longest, longer, stored, unset = (SUBJECT.with_training_length(n) for n in lengths)
    assert len({model.fingerprint for model in (longest, longer, stored)}) == 3
    again = longest.with_training_length(32)
    assert {model.fingerprint for model in (stored, unset, again)} == {SUBJECT.fingerprint}


def test_models_are_the_same_if_their_path_and_their_program_are():
    twice = [replace(SUBJECT, reference="a"), replace(SUBJECT, reference="b", name="other")]
    with pytest.raises(UserError, match="named twice"):
        models.distinct(twice)
    by_another = [SUBJECT, replace(SUBJECT, name="other", computed_by="transformers")]
    assert len(models.distinct(by_another)) == 2
