"""Shared by all tests: which of them run, one thread, the same hypothesis examples, a decoder.

Quick tests run, with ``--all`` also those marked ``slow``, with ``--weekly`` also ``weekly``. A
test named on the command line (``file::test``) always runs. ``-m gpu`` and ``-m "gpu and not
slow"`` run those of GPUs; all others see no GPU.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of commands: processes are as many as cores

from trainer.common import spinning  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import logging
import re

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from lightning.pytorch.utilities import rank_zero_only

from tests.program import blank
from trainer import plotting
from trainer.common.processes import RECEIVED
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig, build_layout

pytest_plugins = ["tests.small_runs"]

settings.register_profile("tests", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("tests")
# Otherwise examples hold constants of the modules that other tests have imported by then, and a
# test that fails alone may pass among others.
providers.is_local_module_file = lambda _: False


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also tests marked slow (CI)")
    parser.addoption("--weekly", action="store_true", help="also tests marked slow or weekly")


@pytest.hookimpl(optionalhook=True)  # scripts/mutate.py runs without pytest-xdist
def pytest_xdist_auto_num_workers(config):
    return len(os.sched_getaffinity(0))


def wants_gpu(markexpr):
    """Whether ``-m`` asks for tests of GPUs."""
    return re.search(r"(?<!not )\bgpu\b", markexpr) is not None


def pytest_configure(config):
    if not wants_gpu(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Commands switch TF32 on, and tests compare with the CPU. cuBLAS may read this when it loads:
    # the processes that tests start load it later.
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


def pytest_collection_modifyitems(config, items):
    if any("::" in word for word in config.args):
        return
    weekly = config.getoption("--weekly")
    left_out = set() if weekly else {"weekly"}
    if not (config.getoption("--all") or weekly):
        left_out.add("slow")

    def runs(item):
        if item.get_closest_marker("gpu"):
            return wants_gpu(config.option.markexpr)
        return not any(item.get_closest_marker(name) for name in left_out)

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


@pytest.fixture(autouse=True)
def first_rank():
    """As Lightning knows it, which keeps that of the last trainer made in this process."""
    rank_zero_only.rank = 0


@pytest.fixture(autouse=True)
def no_signals():
    """Forget signals of a test, which would stop the next training, also one of a module's."""
    yield
    RECEIVED.clear()


@pytest.fixture(autouse=True)
def one_thread():
    """Also after a command with ``threads``: beside other processes, two threads take three times
    as long as one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def blank_figures(request, monkeypatch):
    """Blank figures, but in tests of reports: to render them takes most of a report's time."""
    if not {"report", "test_plotting.py"} & {*request.path.parts}:
        monkeypatch.setattr(plotting, "_rendered", blank)


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
