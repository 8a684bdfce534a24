"""What pages say of a model without rotation."""

import re

import torch

from trainer.analysis.studies.catalogue import STUDIES
from trainer.analysis.studies.study import Target, run

KINDS = ("clusters", "sinks", "frequency_entropy", "matrix_entropy")
"""The others compare with encodings that rotate."""


def test_captions_speak_of_no_rotation_where_there_is_none(tiny_decoder):
    ids = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(1))
    target = Target("tiny", tiny_decoder(layers=["nope"]).eval(), ids)
    for section in run([STUDIES[kind](target) for kind in KINDS], target):
        for picture in section.pictures:
            assert not re.search("(?<!without )rotat|rotary|fastest|encoding", picture.caption), (
                picture.caption
            )
            labels = [text.get_text() for axes in picture.figure.axes for text in axes.texts]
            labels += [axes.get_title() for axes in picture.figure.axes]
            assert not re.search("before the|rotary|fast", " ".join(labels)), picture.name
