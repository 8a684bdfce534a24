"""Sums of every section, of small models with random weights.

Tests of each study compare its numbers with references; this one notices any other change.
"""

from __future__ import annotations

import pytest
import torch

from tests.analysis.studies.sums import check_sections
from trainer.analysis.capture import NeedlePrompt
from trainer.analysis.drop import DropStudy
from trainer.analysis.offset_features.changes import OffsetChanges
from trainer.analysis.settings import AttenuationSettings, NeedleSettings, ShortTime
from trainer.analysis.studies.catalogue import STUDIES
from trainer.analysis.studies.study import Target, run

C, T = 32, 80
IDS = torch.randint(0, 50, (2, T), generator=torch.Generator().manual_seed(1))
CURVE = [
    *((step, 2.0 - step / 1000) for step in range(10, 110, 10)),
    *((step, 1.9 + 40 / (step - 90)) for step in range(110, 310, 10)),
]


def prompt(length):
    return NeedlePrompt(IDS[:, :length], slice(9, 12), 4)


@pytest.fixture
def target(tiny_decoder):
    def build(name, *, training_length=C, model=None, layers=("rope",), encodings=None, **more):
        decoder = tiny_decoder(
            training_length=training_length,
            model=model,
            layers=list(layers),
            encodings=encodings or {},
        )
        return Target(name, decoder.eval(), IDS, **more)

    return build


def rotating(target):
    return target("rotates", prompt=prompt(C))


def bare(target):
    return target("bare", layers=["nope"], prompt=prompt(C), chosen=((1, 2), (0, 1)))


def mixed(target):
    return target(
        "mixed",
        model={"num_hidden_layers": 3, "head_dim": 16, "num_key_value_heads": 4},
        layers=["half_rope", "nope", "rope"],
        chosen=((2, 3),),
        pairs=(1, 3),
        prefixes=(20, 40),
        prompt=prompt(C),
        question=prompt(T),
        choice=IDS.flip(0, 1),
        frames=ShortTime("hamming", 16, 4),
        attenuation=AttenuationSettings(
            alphas=[0.0, 0.25, 1.0],
            gates=["spectrum>0.4+sequence<0.9", "sequence>0.1"],
            tokens=[30, 70],
            texts=2,
        ),
        needle=NeedleSettings(kind="question", by="key", ranked_on="prompt"),
    )


def peaked(target):
    """Heads of sharp attention, on a text that is no longer than the training length."""
    sharp = target("peaked", training_length=T, layers=["rope", "p_rope"], prompt=prompt(64))
    with torch.no_grad():
        for block in sharp.model.layers:
            block.self_attn.k_proj.weight.mul_(30)
            block.self_attn.k_proj.weight[:, 0] += 20
    return sharp


@pytest.mark.parametrize("build", [rotating, bare, mixed, peaked], ids=lambda build: build.__name__)
def test_sections_of_one_model(build, target):
    model = build(target)
    possible = [study for study in STUDIES.values() if not study.problems(model)]
    check_sections(run([study(model) for study in possible], model), build.__name__)


def test_sections_of_two_models(target):
    before, after = target("RoPE"), target("DroPE", layers=["nope"])
    other = target(
        "longer",
        training_length=64,
        layers=["slow"],
        encodings={"slow": {"type": "rope", "base": 500.0}},
    )
    wider = target("wider", training_length=64)
    check_sections(
        [DropStudy(before, after, CURVE, 100).run(), OffsetChanges(before, other).run()],
        "two_models",
    )
    check_sections(
        [DropStudy(wider, other).run(), OffsetChanges(other, peaked(target)).run()],
        "two_others",
    )
