"""All studies of a target share one forward pass."""

import torch

from trainer.analysis.studies.catalogue import STUDIES
from trainer.analysis.studies.section import Section
from trainer.analysis.studies.study import Study, Target, run


class Noting(Study):
    key, title = "noting", "Noting"

    def __init__(self, target, log, name):
        super().__init__(target)
        self.log, self.name = log, name

    def on_layer(self, heads):
        self.log.append((self.name, heads.layer, tuple(heads.rotated_q.shape)))

    def section(self):
        self.log.append((self.name, "section", torch.is_grad_enabled()))
        return Section(self.name, self.title, "", (), "")


def test_every_study_sees_every_layer_of_one_pass_and_then_writes(tiny_decoder, monkeypatch):
    model = tiny_decoder()
    target = Target("tiny", model, torch.randint(0, 50, (2, 12)))
    log, passes = [], []
    forward = model.hidden_states
    monkeypatch.setattr(model, "hidden_states", lambda ids: passes.append(ids) or forward(ids))
    sections = run([Noting(target, log, "a"), Noting(target, log, "b")], target)
    shape = (2, 4, 12, 8)
    assert log == [
        *(("a", 0, shape), ("b", 0, shape), ("a", 1, shape), ("b", 1, shape)),
        *(("a", "section", False), ("b", "section", False)),
    ]
    assert [section.key for section in sections] == ["a", "b"]
    assert len(passes) == 1
    assert not Noting.problems(target)


def test_the_catalogue_names_every_study_by_its_key():
    assert list(STUDIES) == [
        *("clusters", "sinks", "synthetic", "frequency_entropy", "offset_features"),
        *("matrix_entropy", "positional_bias"),
    ]
    assert all(study.key == key and study.title for key, study in STUDIES.items())
