"""An object that was used for one thing does the next as a new one would, and leaves all as it was.

Caches, counters, files and context managers are used for A and then for B; a new object is used for
B.
"""

from __future__ import annotations

import ast
import gc
import math
import signal
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from tests.program import ROOT
from trainer.analysis.capture import capture, observing
from trainer.analysis.positional_bias import measure as positional_bias
from trainer.commands.hydra import jobs
from trainer.common.locks import locked
from trainer.common.processes import stopping_at_once
from trainer.data import sources
from trainer.evaluation import fitting
from trainer.model.backends import cudnn_attention
from trainer.model.config import QKNormConfig
from trainer.positional import rotation
from trainer.positional.layout import Intervention
from trainer.positional.rescaling import RESCALINGS
from trainer.positional.spectrum import LongFrequencies
from trainer.runs.config import RunConfig, TrainerConfig
from trainer.runs.run_lock import RunLock
from trainer.training.callbacks import stopping
from trainer.training.callbacks.guards import GarbageCollection
from trainer.training.callbacks.transitions import input_sizes
from trainer.training.devices import numerics
from trainer.training.loggers import kept_dashboards
from trainer.training.tally import WINDOW, Certificate, Spikes, StepTimer, Tally
from trainer.workflows.subjects import multiplying


class BrokenError(Exception):
    """Something within a block fails."""


def model_state(model):
    """Return what every module of a model has beside its weights, and how many hooks."""
    state = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if "hooks" in key:
                state[name, key] = len(value)
            elif key == "_parameters":
                weights = {k: v for k, v in value.items() if v is not None}
                state[name, key] = {k: (id(v), v.requires_grad) for k, v in weights.items()}
            elif value is not None and (not key.startswith("_") or key == "_layout"):
                state[name, key] = value if isinstance(value, bool | int | float) else id(value)
    return state


def process_state():
    """Return what the whole process shares."""
    cuda = torch.backends.cuda
    return {
        "signals": [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
        "garbage": gc.isenabled(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
        "kernels": [cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()],
        "notice": stopping._process_notice,
        "wakeup": wakeup_pipe(),
        "words": sys.argv,
    }


def wakeup_pipe():
    """Return the file to which the C handler writes the numbers of signals."""
    file = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(file)
    return file


CONTEXTS = {
    "capture.observing": lambda model: observing(model, print),
    "measure._graph_of_one_layer": lambda model: positional_bias._graph_of_one_layer(model, print),
    "fitting._scales": lambda model: fitting._scales(model, [0]),
    "decoder.packed": lambda model: model.packed(),
    "decoder.observed": lambda model: model.observed(print),
    "decoder.feeding": lambda model: model.feeding(print),
    "language_model.using": lambda model: model.using(replace(model.layout, training_length=7)),
    "backends.cudnn_attention": lambda model: cudnn_attention(
        not torch.backends.cuda.cudnn_sdp_enabled()
    ),
    "devices.numerics": lambda model: numerics(
        RunConfig(trainer=TrainerConfig(deterministic=True))
    ),
    "subjects.multiplying": lambda model: multiplying("cuda", True),
    "stopping.heeding_signals": lambda model: stopping.heeding_signals(),
    "stopping.acknowledging": lambda model: stopping.acknowledging(stopping.Notice()),
    "jobs._called_with": lambda model: jobs._called_with(["unrope", "seed=1"]),
    "processes.stopping_at_once": lambda model: stopping_at_once("Stopped", signal.SIGTERM),
    "loggers.kept_dashboards": lambda model: kept_dashboards(),
    "sources._without_collections": lambda model: sources._without_collections(),
}
"""Context managers that change a model or the process, each with a function that makes one."""
ELSEWHERE = {
    **dict.fromkeys(
        (
            *("exit_codes.exit_codes", "exit_codes.leaving_ranks", "errors.collecting"),
            *("errors.renaming", "units.reporting_failures"),
            *("sweep.noting_failure", "experiment.naming_longer_runs"),
            "experiment._leaving_together",
            "errors.saying_how_to_do_the_rest",
        ),
        "turns errors into others",
    ),
    **dict.fromkeys(
        ("files._opened", "units.encoders", "locks.locked", "files.partial_directory"),
        "files, processes and locks, which the tests of its room see on the disk",
    ),
    **dict.fromkeys(
        (
            *("model.observed", "model.feeding", "seam.watching", "seam.feeding", "seam._through"),
            *("ranks.process_group", "lightning_trainer.releasing", "module.evaluating"),
            *("rehearsal.fake_tensors", "rehearsal.simulated_rank", "rehearsal._in_loss"),
            *("seam._hooked", "strategy.gathered"),
        ),
        "needs a trainer, ranks or transformers; after each test tests/left_behind.py looks",
    ),
}


def context_managers():
    """Return the functions of the package under ``@contextmanager``."""
    functions = set()
    for path in (ROOT / "trainer").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "@contextmanager" in text else ():
            if isinstance(node, ast.FunctionDef):
                names = [ast.unparse(decorator) for decorator in node.decorator_list]
                functions |= {f"{path.stem}.{node.name}"} if "contextmanager" in names else set()
    return functions


def test_every_context_manager_is_classified():
    assert context_managers() == {*CONTEXTS, *ELSEWHERE}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_manager_leaves_model_and_process_as_they_were(
    name, compute_dtype, fails, tiny_decoder
):
    model = tiny_decoder()
    model.choose_products("cpu", compute_dtype)  # as training in bf16 does
    before = model_state(model), process_state()
    with pytest.raises(BrokenError) if fails else nullcontext(), CONTEXTS[name](model):
        unseen = {"loggers.kept_dashboards"}
        # Whether bf16 has products of its own depends on the CPU.
        unseen |= set() if compute_dtype is None else {"decoder.packed"}
        assert (model_state(model), process_state()) != before or name in unseen
        if fails:
            raise BrokenError
    assert (model_state(model), process_state()) == before


@pytest.mark.parametrize("read", [capture, lambda model, ids, see: input_sizes(model, [ids])])
def test_a_pass_that_fails_leaves_the_model_as_it_was(read, tiny_decoder):
    model = tiny_decoder(model={"qk_norm": QKNormConfig("always")})
    before = model_state(model)
    with pytest.raises(IndexError):
        read(model, torch.full((1, 4), 10**6), print)
    assert model_state(model) == before


@pytest.mark.parametrize("end", ["on_train_end", "on_exception"])
def test_a_guard_of_garbage_enables_it_again(end):
    guard = GarbageCollection(3)
    try:
        guard.on_train_start()
        assert not gc.isenabled()
    finally:
        getattr(guard, end)()
    assert gc.isenabled()


# Caches


LENGTHS = 8, 40


def layouts(model):
    """Return layouts that differ in one thing each, by its name."""
    plain = model.layout
    long = LongFrequencies(16, plain.layers[0].spectra[0].inv_freq[::-1])
    yarn, size = RESCALINGS["yarn"], model.config.head_size
    heads = model.config.num_attention_heads

    def noise(seed, std):
        change = Intervention(query_noise=(std,) * heads, seed=seed)
        return replace(plain, layers=tuple(replace(x, intervention=change) for x in plain.layers))

    def factors(factor):
        change = Intervention(query=((factor,) * size,) * heads)
        return replace(plain, layers=tuple(replace(x, intervention=change) for x in plain.layers))

    return {
        "plain": plain,
        "slower": plain.rescaled(yarn, 2.0),
        "slower still": plain.rescaled(yarn, 4.0),
        "dynamic": plain.dynamically_rescaled(yarn),
        "long": plain.map(lambda s: replace(s, long=long)),
        "other C": replace(plain, training_length=12).dynamically_rescaled(yarn),
        "tempered": plain.map(lambda s: s.with_temperature(coefficient=0.3)),
        "by query": plain.map(lambda s: s.with_temperature(coefficient=0.3, per="query")),
        "scaled": plain.map(lambda s: replace(s, rotary_scale=1.3)),
        "none": plain.map(lambda s: replace(s, inv_freq=())),
        "biased": plain.map(lambda s: replace(s, inv_freq=(), alibi=True)),
        "window": replace(plain, layers=tuple(replace(x, window=4) for x in plain.layers)),
        "noise": noise(1, 0.1),
        "other noise": noise(2, 0.1),
        "more noise": noise(1, 0.2),
        "factors": factors(0.5),
        "other factors": factors(0.25),
    }


def forget():
    """Empty every cache of functions in the model and its positions."""
    kind, rooms = type(rotation.frequencies), ("trainer.model", "trainer.positional")
    for cached in gc.get_objects():
        if type(cached) is kind and cached.__module__.startswith(rooms):
            cached.cache_clear()


@torch.no_grad()
def test_tables_of_one_layout_and_length_are_not_used_for_another(tiny_decoder):
    model = tiny_decoder()
    every, ids = layouts(model), torch.arange(max(LENGTHS))[None] % 50
    fresh = {}
    for name, layout in every.items():
        forget()
        model.layout = layout
        fresh[name] = [model(ids[:, :length]) for length in LENGTHS]
    distinct = {name: hash(tuple(pair[1].flatten().tolist())) for name, pair in fresh.items()}
    assert len({*distinct.values()}) == len(distinct), distinct
    for order in (LENGTHS, LENGTHS[::-1]):
        for name, layout in every.items():
            model.layout = layout
            for length in order:
                expected = fresh[name][LENGTHS.index(length)]
                assert torch.equal(model(ids[:, :length]), expected), (name, length)


# Files


@contextmanager
def run_lock(directory):
    """Hold the lock of a run."""
    lock = RunLock()
    lock.acquire(directory)
    try:
        yield
    finally:
        lock.release()


LOCKS = {
    "locked": lambda directory: locked(directory / ".lock", "data", ""),
    "RunLock": run_lock,
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_that_was_held_before_says_what_a_new_one_does(name, tmp_path):
    texts = []
    for earlier in (None, f"process 1 of {'a node that is gone ' * 20}"):
        directory = tmp_path / str(earlier is None)
        directory.mkdir()
        if earlier is not None:
            (directory / ".lock").write_text(earlier)
        with LOCKS[name](directory):
            texts.append((directory / ".lock").read_text())
    assert texts[0] == texts[1] != ""


# Counters


def steps(tally, seed, count=3, broken=()):
    """Add a few steps to a tally."""
    random = torch.Generator().manual_seed(seed)
    for step in range(count):
        losses = torch.rand(2, 8, generator=random)
        tally.add(losses, torch.ones_like(losses))
        loss, _ = tally.end_step()
        skipped = torch.tensor(step in broken)
        tally.end_update(loss if step not in broken else loss * math.nan, losses.sum(), skipped)


def same(first, second):
    """Return whether two groups of numbers are equal, where NaN equals itself."""
    return str(first) == str(second)


def test_a_row_contains_nothing_of_the_row_before():
    used, new = Tally(), Tally()
    used.spikes.seen = new.spikes.seen = WINDOW  # from where on spikes are counted
    steps(used, 1, 3)
    used.read()
    expected = set(vars(used)) - {"spikes"}
    steps(used, 2)
    steps(new, 2)
    assert expected >= {"_sums", "_loss"}
    ours, theirs = used.read(), new.read()
    of_spikes = {"loss_spikes", "gradient_spikes"}  # compared with what came before
    assert same({k: v for k, v in ours.items() if k not in of_spikes},
                {k: v for k, v in theirs.items() if k not in of_spikes})  # fmt: skip
    assert used.skipped_in_a_row() == new.skipped_in_a_row()


def test_skips_in_a_row_end_with_a_sound_step_and_all_skips_are_counted():
    tally = Tally()
    steps(tally, 1, 3, broken=(1, 2))
    assert (tally.skipped_in_a_row(), tally.read()["skipped_steps"]) == (2, 2)
    steps(tally, 2, 1)
    assert (tally.skipped_in_a_row(), tally.read()["skipped_steps"]) == (0, 2)


def test_spikes_are_counted_once():
    spikes = Spikes()
    for step in range(WINDOW + 1):
        spikes.add(torch.tensor([float(step % 2), 1000.0 if step == WINDOW else step % 3]))
    tally = Tally()
    tally.spikes = spikes
    assert tally.read()["gradient_spikes"] == 1
    assert tally.read()["gradient_spikes"] == 0


@pytest.mark.parametrize("kind", [Tally, Certificate])
def test_what_was_saved_replaces_all_that_was_there(kind):
    def use(counter, seed):
        if kind is Tally:
            steps(counter, seed, 4, broken=(3,))
        else:
            counter.add(torch.arange(seed, seed + 3), True)
            counter.add(torch.arange(seed, seed + 3), False)

    saved, used, new = kind(), kind(), kind()
    use(saved, 5)
    use(used, 9)
    device = [torch.device("cpu")] if kind is Tally else []
    for counter in (new, used):
        counter.load(saved.state(), *device)
    assert same(new.state(), saved.state())
    assert same(used.state(), saved.state())
    use(used, 3)
    use(new, 3)
    assert same(used.state(), new.state())


def test_a_timer_gives_each_second_to_one_row():
    timer = StepTimer()
    timer.enter("data")
    timer.enter("compute")
    first = timer.read()
    second = timer.read()
    assert first["data"] > 0
    assert second["data"] == 0
