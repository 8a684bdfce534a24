"""Shared by all tests: one thread, the same hypothesis examples every time, a tiny decoder."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of commands: processes are as many as cores

from trainer import __version__  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import logging

import pytest
import torch
from hypothesis import settings
from lightning.pytorch.utilities import rank_zero_only

from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig, build_layout

pytest_plugins = ["tests.ordering", "tests.small_runs", "tests.done_once"]

settings.register_profile("tests", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def first_rank():
    """As Lightning knows it, which keeps that of the last trainer made in this process."""
    rank_zero_only.rank = 0


@pytest.fixture(autouse=True)
def one_thread():
    """Also after a command with ``threads``: beside other processes, two threads take three times
    as long as one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def plain_log():
    """The program's log as it is before a command, called in this process, shows it to a person."""
    logger = logging.getLogger("trainer")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def tiny_decoder():
    """A function that builds a small decoder with random weights everywhere and logits of O(1).

    Its arguments are those of :class:`PositionalConfig` by keyword, ``training_length``, and under
    ``model`` what differs from the tiny shape.
    """

    def build(*, training_length=32, model=None, **positional):
        torch.manual_seed(0)
        shape = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 50,
            "initializer": "fan_in",
        }
        config = ModelConfig(**shape | (model or {}))
        layout = build_layout(
            PositionalConfig(**positional),
            num_layers=config.num_hidden_layers,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_size,
            training_length=training_length,
            qk_norm=config.qk_norm.when == "always",
        )
        decoder = Decoder(config, layout)
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.dim() == 1:  # norms and biases: not 1 and 0, so that they matter
                    parameter.add_(0.3 * torch.randn_like(parameter))
            if not config.tie_word_embeddings:
                decoder.head.mul_(10)  # drawn with a tenth
        return decoder

    return build
