"""An optimizer is one function and one option, also in a file of one's own."""

from __future__ import annotations

import pytest
import torch

from tests.comparing import checkpoint_of, contents_of
from tests.small_runs import SMALLEST
from trainer.commands import compose_words, run_of
from trainer.common.errors import UserError
from trainer.common.registry import Registry
from trainer.config import OptimizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.tokenizer import vocabulary_size
from trainer.lightning import optimizers
from trainer.model.decoder import initial_value
from trainer.training import setup
from trainer.training.fit import train
from trainer.training.setup import make_decoder, optimizer_settings

PLUGIN = """
import torch
from trainer.lightning.optimizers import optimizer


class Signs(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure):
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * group["size"] * parameter.grad.sign()
        return loss


@optimizer
def signs(groups, *, lr, size=1.0):
    return Signs(groups, {"lr": lr, "size": size})
"""


@pytest.fixture
def words(base, tmp_path):
    """Words of a run of two steps with the optimizer of a plugin."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "signs.yaml").write_text("name: signs\nlr: 0.25\n")
    data = base["data"]
    yield [
        f"hydra.searchpath=[{tmp_path}]", f"plugins=[{tmp_path / 'plugin.py'}]", "optimizer=signs",
        f"run_dir={tmp_path / 'run'}", "schedule=constant", "schedule.warmup_steps=0",
        "trainer.max_steps=2",
        "data=files", f"data.files={data['files']}", f"data.cache_dir={data['cache_dir']}",
        "data.sequence_length=32", "tokenizer.vocab_size=300", "trainer.batch_size=4",
        *(f"model.{key}={value}" for key, value in SMALLEST.items()),
    ]  # fmt: skip
    optimizers.OPTIMIZERS.pop("signs", None)


def test_two_steps_with_an_optimizer_of_a_plugin(words):
    """Each step of signs moves a weight by lr times size, or not at all."""
    run = run_of(compose_words([*words, "+optimizer.arguments.size=0.5"]))
    config = run.config
    run.directory.mkdir()
    corpus = prepare_corpus(config.data, config.tokenizer)
    train(run, corpus)
    trained = contents_of(checkpoint_of(config))
    model = make_decoder(run, vocabulary_size(corpus.tokenizer))
    moved = []
    for name, parameter in model.named_parameters():
        if name.startswith("layers"):
            value = initial_value(model.config, name, parameter.shape, config.seed)
            moved.append((trained[f"model.{name}"] - value).abs().flatten() / 0.125)
    steps = torch.cat(moved)
    torch.testing.assert_close(steps, steps.round(), atol=1e-5, rtol=0)
    assert set(steps.round().int().tolist()) == {0, 2}


def test_settings_that_an_optimizer_does_not_have_are_refused():
    with pytest.raises(UserError, match=r"^optimizer\.arguments: muon: .*'size'"):
        optimizer_settings(OptimizerConfig("muon", arguments={"size": 1}))
    with pytest.raises(UserError, match=r"^optimizer\.name: expected one of adamw, muon.*'lion'"):
        optimizer_settings(OptimizerConfig("lion"))


def test_an_optimizer_may_take_any_setting_or_need_one(monkeypatch):
    monkeypatch.setattr(optimizers, "OPTIMIZERS", Registry("optimizer"))
    monkeypatch.setattr(setup, "OPTIMIZERS", optimizers.OPTIMIZERS)

    @optimizers.optimizer
    def open_one(groups, *, lr, size, **others):
        """Not called."""

    arguments = {"size": 2, "power": 3}
    settings = optimizer_settings(OptimizerConfig("open_one", lr=0.5, arguments=arguments))
    kept = {"weight_decay": 0.1, "decay_embeddings": False}
    assert settings == kept | {"lr": 0.5, "size": 2, "power": 3}
    with pytest.raises(UserError, match=r"^optimizer\.arguments: open_one: .*'size'"):
        optimizer_settings(OptimizerConfig("open_one", arguments={"power": 3}))
