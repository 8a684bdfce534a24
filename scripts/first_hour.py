#!/usr/bin/env python
"""Check the GPUs of a new machine: their numbers, their speed, and how runs survive faults.

    python scripts/first_hour.py                  all GPUs of this machine: first one, then all
    sbatch --nodes=2 --gpus-per-node=8 --exclusive --wrap 'python scripts/first_hour.py --nodes=2'
                                                  all GPUs of two nodes
    python scripts/first_hour.py --only speed     one of its checks

Most checks run one or two commands of the program, as a user would; their output is logged next to
the report. A check that needs hardware the machine lacks is listed as not made. The report,
`first_hour/report.md`, lists expected and found results and is rewritten after every check. The
exit code is 0 if all checks that were made passed, else 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package may not be installed

from trainer import __version__  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.commands.train import read_config
from trainer.model.backend_choice import Needs, backend_problem, trial_problem
from trainer.model.backends import BACKENDS, cudnn_attention, prepared
from trainer.model.masks import Mask
from trainer.model.softmax import PLAIN, Softmax, eager
from trainer.runs.metrics_file import read_metrics
from trainer.workflows.drill import first_difference

ROOT = Path(__file__).resolve().parents[1]
Rows = list[dict[str, Any]]
NUMBERS = ["model=nano", "tokenizer.vocab_size=512", "trainer.batch_size=16", "trainer.log_every=1"]
"""Small float32 model with every step logged, to compare numbers."""
SPEED = ["tokenizer.vocab_size=512", "trainer.precision=bf16", "trainer.log_every=5"]
"""Words of all timed runs."""
LARGE = ["model.vocab_size=49152", "data.sequence_length=2048"]
SHARE_OF_PEAK = {
    "llama_135m": {"A100": 0.32, "H100": 0.22, "H200": 0.27},
    "smollm_360m": {"A100": 0.42, "H100": 0.31, "H200": 0.37},
}
"""Expected share of the dense peak of a compiled bfloat16 step, by shape and GPU.

The estimate adds matrix products at 70% of the peak and all other memory traffic, as counted for
H100s, at each GPU's bandwidth.
"""
ALWAYS = ["evaluation.enabled=false", "schedule.warmup_steps=5", "trainer.checkpoint_every=10000"]
STEPS = 24
SHARDED = ("ddp", "fsdp2", "hsdp")


class Failed(Exception):  # noqa: N818
    """A command of a check did not end as expected."""


@dataclass(frozen=True)
class Place:
    """Where the checks run: ``ranks`` on ``nodes``, on GPUs or this CPU; files go to ``out``."""

    out: Path
    ranks: int
    nodes: int
    quick: bool

    @property
    def on_gpu(self) -> bool:
        """Whether torch sees a GPU."""
        return torch.cuda.is_available()

    def python(self, ranks: int) -> list[str]:
        """Return the command that starts Python on ``ranks`` ranks."""
        if ranks == 1:
            return [sys.executable]
        if self.nodes > 1:
            spread = [f"--nodes={self.nodes}", f"--ntasks={ranks}"]
            spread += [f"--ntasks-per-node={-(-ranks // self.nodes)}", "--kill-on-bad-exit=1"]
            return ["srun", *spread, sys.executable]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc-per-node={ranks}"]

    def run(self, name: str, *words: str, ranks: int = 1, env: dict[str, str] | None = None) -> int:
        """Run a command of the program, log its output to NAME.log and return its exit code."""
        checkout_paths = [str(ROOT / "scripts"), str(ROOT)]
        path = os.pathsep.join([*checkout_paths, os.environ.get("PYTHONPATH", "")])
        with (self.out / f"{name}.log").open("a") as file:
            return subprocess.run(
                [*self.python(ranks), "-m", "trainer", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": path} | (env or {}),
                check=False,
            ).returncode

    def struck(self, name: str, *words: str, step: int, number: int, ranks: int) -> int:
        """Run a command whose last rank sends itself signal ``number`` at ``step``."""
        mark = self.out.absolute() / f"{name}.mark"
        strike = f"_target_: first_hour.Strike, step: {step}, number: {int(number)}, mark: {mark}"
        code = self.run(name, *words, f"+callbacks.strike={{{strike}}}", ranks=ranks)
        if not mark.exists():
            raise Failed(f"ended with {code} before the signal, see {name}.log")
        return code

    def words(self, name: str, *words: str) -> list[str]:
        """Return the words of a run in the report's directory."""
        return [*ALWAYS, f"run_dir={self.out}/{name}", f"name={name}", *words]

    def train(
        self, name: str, *words: str, ranks: int = 1, env: dict[str, str] | None = None
    ) -> Rows:
        """Train, and return the rows of its metrics."""
        words = tuple(self.words(name, *words))
        if ranks > 1:  # prepare the text first: a run of several ranks refuses to
            self.must(self.run(name, "prepare", *words), name)
        self.must(self.run(name, *words, ranks=ranks, env=env), name)
        return read_metrics(self.out / name / "metrics.csv")

    def must(self, code: int, name: str) -> None:
        """Raise an error with the last line of the log unless ``code`` is 0."""
        if code != 0:
            lines = (self.out / f"{name}.log").read_text().splitlines()
            raise Failed(f"exit code {code}, see {name}.log: {' '.join(lines[-1:])[:150]}")

    def speed(self, *words: str, shape: str = "llama_135m") -> list[str]:
        """Return the words of a timed run: of full size, or small with ``quick``."""
        small = ["model=nano", "trainer.micro_batch_size=8"]
        large = [f"model={shape}", *LARGE, "trainer.micro_batch_size=16", "trainer.compile=true"]
        return [*SPEED, *(small if self.quick else large), *words]


@dataclass(frozen=True)
class Check:
    """A check: ``measure`` returns the result as text and whether it is as ``expected``.

    ``needs``: a GPU ("gpu"), several ranks ("ranks"), or nothing.
    """

    name: str
    needs: tuple[str, ...]
    expected: str
    measure: Callable[[Place], tuple[str, bool]]


CHECKS: list[Check] = []


def check(expected: str, *needs: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a check."""

    def enter(measure: Callable[[Place], tuple[str, bool]]) -> Callable[..., Any]:
        CHECKS.append(Check(measure.__name__, needs, expected, measure))
        return measure

    return enter


# One GPU -------------------------------------------------------------------------------------

ERRORS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Tolerances of attention and its gradients, relative to the largest value."""

LENGTHS = 320, 384, 576
"""Lengths of 64 modulo 128, where cuDNN had wrong gradients with masks, and one of whole blocks."""


def _masks(rows: int, length: int, heads: int, device: str) -> Iterator[tuple[str, Mask]]:
    documents = (torch.arange(length, device=device) // 100).expand(rows, length)
    slopes = torch.linspace(0.01, 0.5, heads, device=device)
    yield "causal", Mask()
    yield "window", Mask(window=64)
    yield "documents", Mask(documents=documents.contiguous(), longest=100)
    yield "ALiBi", Mask(slopes=slopes)


def _cases(name: str, length: int, device: str) -> Iterator[tuple[str, Mask, Softmax]]:
    """Yield the cases that a backend can compute at a length."""
    if name == "cudnn":
        if length % 128 == 0:
            yield "causal", Mask(), PLAIN
        return
    for title, mask in _masks(2, length, 8, device):
        if (name, title) != ("varlen", "ALiBi"):
            yield title, mask, PLAIN
    if name != "varlen":
        yield "soft-cap", Mask(window=64), Softmax(softcap=2.0)
    if name not in ("varlen", "flash", "flex_flash"):
        sinks = torch.linspace(-1, 3, 8, device=device, requires_grad=True)
        yield "sinks", Mask(), Softmax(sinks)


def _difference(
    name: str, mask: Mask, softmax: Softmax, kv: int, dtype: torch.dtype, shape: tuple[int, str]
) -> float:
    """Return the largest relative error of outputs and gradients against the definition.

    ``shape``: the length and the device.
    """
    (length, device), rows, heads, size = shape, 2, 8, 64
    torch.manual_seed(0)
    inputs = [
        torch.randn(rows, count, length, size, device=device, dtype=dtype, requires_grad=True)
        for count in (heads, kv, kv)
    ]
    weight = torch.randn(rows, heads, length, size, device=device, dtype=dtype)
    leaves = inputs if softmax.sinks is None else [*inputs, softmax.sinks]
    results = []
    for kernel in (BACKENDS["sdpa" if name == "cudnn" else name], eager):
        ready = prepared(kernel, mask, (rows, length), length, torch.device(device))
        with cudnn_attention(name == "cudnn"):
            out = kernel(*inputs, ready, softmax)
        results.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    pairs = zip(*results, strict=True)  # torch's max propagates NaN, Python's may not
    return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max())


def _compared(
    names: tuple[str, ...], kinds: list[torch.dtype], lengths: tuple[int, ...], place: Place
) -> tuple[str, bool]:
    """Compare outputs and gradients of backends with the definition, in all cases."""
    device = "cuda" if place.on_gpu else "cpu"
    torch.set_float32_matmul_precision("highest")
    worst: dict[str, float] = {}
    wrong, missing = [], []
    for name in names:
        if problem := _missing_backend(name, device):
            missing.append(problem)
            continue
        for dtype in kinds:
            if dtype == torch.float32 and name not in ("sdpa", "flex"):
                continue
            for length in lengths:
                for title, mask, softmax in _cases(name, length, device):
                    for kv in (8, 2):
                        error = _difference(name, mask, softmax, kv, dtype, (length, device))
                        key = f"{name} {'fp32' if dtype == torch.float32 else 'bf16'}"
                        worst[key] = max(worst.get(key, 0.0), error)
                        if not error <= ERRORS[dtype]:
                            wrong.append(f"{key} {title} {length} {kv} heads of keys {error:.1e}")
    notes = [f"{key} {error:.0e}" for key, error in worst.items()]
    notes += [f"not available: {', '.join(missing)}"] if missing else []
    return "; ".join(wrong or notes), not wrong


def _missing_backend(name: str, device: str) -> str | None:
    """Return the backend's name, with the reason if known, if it does not work here; else None."""
    if name == "cudnn":
        return name if device == "cpu" else None
    if backend_problem("flex" if name == "flex_flash" else name, device):
        return name
    problem = trial_problem(name, Needs(windows=True)) if name == "flex_flash" else None
    return f"{name} ({problem})" if problem else None


@check("every backend within 1e-4 (float32) and 3e-2 (bfloat16) of the definition, backward too")
def attention(place: Place) -> tuple[str, bool]:
    """Compare all backends except FlexAttention, which compiles a kernel for every case."""
    return _compared(("sdpa", "cudnn", "flash", "varlen"), [*ERRORS], LENGTHS, place)


@check("FlexAttention in bfloat16 within 3e-2 of the definition, backward too", "gpu")
def flex(place: Place) -> tuple[str, bool]:
    """Compile and compare 12 kernels, and 10 more where FlashAttention-4 works."""
    return _compared(("flex", "flex_flash"), [torch.bfloat16], LENGTHS[:1], place)


@check("FlexAttention in float32 within 1e-4 of the definition, backward too", "gpu")
def flex_fp32(place: Place) -> tuple[str, bool]:
    """Compile and compare 12 kernels."""
    return _compared(("flex",), [torch.float32], LENGTHS[:1], place)


@check("sdpa never uses the kernel that stores all scores", "gpu")
def kernels(place: Place) -> tuple[str, bool]:
    """Call the backend with only the fused kernels allowed."""
    refused, cases = [], 0
    for dtype in ERRORS:
        for title, mask in _masks(2, 512, 8, "cuda"):
            for kv in (8, 2):
                for new in (512, 100):
                    q = torch.randn(2, 8, new, 64, device="cuda", dtype=dtype)
                    k = torch.randn(2, kv, 512, 64, device="cuda", dtype=dtype)
                    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
                    cases += 1
                    try:
                        with sdpa_kernel(fused):
                            BACKENDS["sdpa"](q, k, k, mask)
                    except RuntimeError:
                        refused.append(f"{title}, {dtype}, {kv} heads of keys, {new} queries")
    return "; ".join(refused) or f"{cases} cases", not refused


class NoWaiting(L.Callback):
    """Callback that makes torch raise on host syncs between two logged rows."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Raise on host syncs from step 6 to step 11."""
        torch.cuda.set_sync_debug_mode("error" if 6 <= trainer.global_step < 12 else "default")


@check("six steps without a host sync", "gpu")
def waiting(place: Place) -> tuple[str, bool]:
    """Train in torch's debug mode for host syncs."""
    annealed = ["drop=late", "drop.at=4", "drop.anneal_steps=12"]
    kinds = {"adamw": [], "muon": ["optimizer=muon"], "annealed": annealed}
    for name, more in kinds.items():
        place.train(
            f"waiting_{name}",
            *place.speed("trainer.max_steps=16", "trainer.batch_size=32", *more),
            "trainer.log_every=100",
            "+callbacks.waits={_target_: first_hour.NoWaiting}",
        )
    return "AdamW, Muon, an annealed drop", True


def _dealt(ranks: int) -> str:
    """Return the word for a batch size of at least 16 that the ranks divide evenly."""
    return f"trainer.batch_size={ranks * -(-16 // ranks)}"


def _apart(a: Rows, b: Rows) -> float:
    """Return the largest relative difference between two runs' losses."""
    return max(abs(x["loss"] - y["loss"]) / abs(x["loss"]) for x, y in zip(a, b, strict=True))


@check(f"losses of {STEPS} steps in float32 within 1e-3 of the CPU's", "gpu")
def same_as_cpu(place: Place) -> tuple[str, bool]:
    """Compare the same run on GPU and CPU."""
    words = [*NUMBERS, f"trainer.max_steps={STEPS}", "trainer.tf32=false"]
    gpu = place.train("numbers_gpu", *words)
    cpu = place.train("numbers_cpu", *words, "trainer.accelerator=cpu")
    return f"{(apart := _apart(cpu, gpu)):.1e}", apart <= 1e-3


@check("two runs with trainer.deterministic=true are bitwise identical")
def same_bits(place: Place) -> tuple[str, bool]:
    """Compare all metrics and weights of two runs."""
    return _twice(place, "bits", lambda name, words: place.train(name, *words))


def _twice(
    place: Place, name: str, again: Callable[[str, list[str]], object], ranks: int = 1
) -> tuple[str, bool]:
    """Compare a run with a second one, which ``again`` makes."""
    words = [*NUMBERS, f"trainer.max_steps={STEPS}", "trainer.deterministic=true"]
    words += ["strategy=fsdp2", _dealt(ranks)] if ranks > 1 else []
    place.train(f"{name}_1", *words, ranks=ranks)
    again(f"{name}_2", words)
    first, second = (read_config(place.words(f"{name}_{i}", *words)) for i in (1, 2))
    difference = first_difference(first, second, exactly=True)
    return difference or "metrics and weights identical", not difference


class Strike(L.Callback):
    """Callback that sends its process a signal at a step, once per run.

    Args:
        step: the step.
        number: the number of the signal.
        mark: file that is created when the signal is sent.
    """

    def __init__(self, step: int, number: int, mark: str) -> None:
        self.step, self.number, self.mark = step, number, Path(mark)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Send the signal, on the last rank."""
        last = trainer.global_rank == trainer.world_size - 1
        if last and trainer.global_step == self.step and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), self.number)


def _killed(place: Place, number: int, ranks: int) -> tuple[str, bool]:
    name = f"killed_{signal.Signals(number).name}_{ranks}"

    def again(second: str, words: list[str]) -> None:
        # Synchronous: five of these steps may be quicker than an asynchronous write.
        every = "trainer.checkpoint_every=10", "trainer.async_checkpoint=false"
        words = place.words(second, *words, *every)
        if place.struck(second, *words, step=15, number=number, ranks=ranks) == 0:
            raise Failed("the signal did not end the run")
        if not list((place.out / second / "checkpoints").glob("step-*")):
            raise Failed(f"there is no checkpoint to resume from, see {second}.log")
        place.must(place.run(second, *words, ranks=ranks), second)

    return _twice(place, name, again, ranks)


@check("a killed run and a stopped one, resumed, end like an uninterrupted one")
def resumed(place: Place) -> tuple[str, bool]:
    """Send SIGKILL and SIGTERM to a run of one process, and resume it."""
    outcomes = [_killed(place, number, 1) for number in (signal.SIGKILL, signal.SIGTERM)]
    return "; ".join(text for text, _ in outcomes), all(good for _, good in outcomes)


def _rate(rows: Rows) -> float:
    """Return the tokens per second in the second half of the rows."""
    return median(row["tokens_per_second"] for row in rows[len(rows) // 2 :])


def _share_of_peak(shape: str) -> float | None:
    """Return the expected share of the peak on this GPU; None if there is no estimate for it."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().replace("-", " ").split()
    shares = SHARE_OF_PEAK[shape]
    return next((shares[word] for word in words if word in shares), None)


@check("compiled bfloat16 at the share of the peak estimated for the shape and the GPU")
def speed(place: Place) -> tuple[str, bool]:
    """Measure tokens/s, model FLOPs utilisation and memory for each kind of checkpointing."""
    notes, good = [], True
    for shape, kinds in (("llama_135m", ("none", "selective", "full")), ("smollm_360m", ("none",))):
        best, expected = 0.0, _share_of_peak(shape)
        for kind in kinds:
            words = place.speed("trainer.max_steps=40", "trainer.batch_size=16", shape=shape)
            words.append(f"strategy.activation_checkpointing={kind}")
            rows = place.train(f"speed_{shape}_{kind}", *words)
            mfu = rows[-1].get("mfu", 0.0)
            best = max(best, mfu)
            memory = f", {rows[-1]['memory']:.1f} GiB" if "memory" in rows[-1] else ""
            notes.append(f"{shape}, checkpointing {kind}: {_rate(rows):,.0f} tokens/s, {mfu:.0%}")
            notes[-1] += memory
        if expected is not None and not place.quick:
            notes.append(f"expected {expected:.0%}")
            good &= best >= expected
    return "; ".join(notes), good


@check("a step after the drop takes at most as long as one before it")
def drop(place: Place) -> tuple[str, bool]:
    """Compare the speed of both phases of one run."""
    steps = ["trainer.max_steps=80", "drop=late", "drop.at=40", "trainer.batch_size=16"]
    rows = place.train("dropped", *place.speed(*steps))
    before, after = (_rate([r for r in rows if r["phase"] == phase]) for phase in (0, 1))
    # Timings on a shared CPU vary more.
    limit = 1.02 if place.on_gpu else 1.25
    return f"x {before / after:.3f}", before / after <= limit


@check("held-out loss on the GPU within 0.01 nats of the CPU's", "gpu")
def evaluated(place: Place) -> tuple[str, bool]:
    """Evaluate one checkpoint on GPU and CPU."""
    place.train("evaluated", *NUMBERS, "trainer.max_steps=100")
    losses = []
    for name, env in (("gpu", {}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})):
        output = place.out / f"evaluated_{name}"
        words = [
            f"checkpoint={place.out}/evaluated",
            f"output={output}",
            "evaluation.tasks=[perplexity]",
        ]
        place.must(place.run(f"evaluated_{name}", "evaluate", *words, env=env), f"evaluated_{name}")
        losses.append(_losses(output))
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return f"{apart:.1e} nats", apart <= 0.01


def _losses(output: Path) -> list[float]:
    """Return all held-out losses of a report."""
    losses: list[float] = []

    def collect(value: Any, key: str = "") -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                collect(part, name)
        elif isinstance(value, list):
            for part in value:
                collect(part, key)
        elif isinstance(value, float) and key == "loss":
            losses.append(value)

    collect(json.loads((output / "report.json").read_text()))
    if not losses:
        raise Failed(f"no losses in {output}/report.json")
    return losses


# All GPUs ------------------------------------------------------------------------------------


@check(f"losses of {STEPS} steps in float32 within 1e-3 of one rank's", "ranks")
def strategies(place: Place) -> tuple[str, bool]:
    """Compare every strategy with a single device."""
    words = [*NUMBERS, _dealt(place.ranks), f"trainer.max_steps={STEPS}", "trainer.tf32=false"]
    alone = place.train("numbers_single", *words)
    apart = {}
    for strategy in SHARDED:
        more = _shards(place, strategy)
        rows = place.train(f"numbers_{strategy}", *words, *more, ranks=place.ranks)
        apart[strategy] = _apart(alone, rows)
    return ", ".join(f"{k} {v:.1e}" for k, v in apart.items()), max(apart.values()) <= 1e-3


def _shards(place: Place, strategy: str) -> list[str]:
    """Return a strategy's words; HSDP shards within a node, or within half of a single node."""
    local = place.ranks // place.nodes
    size = local if place.nodes > 1 else max(place.ranks // 2, 1)
    return [
        f"strategy={strategy}",
        *([f"strategy.shard_size={size}"] if strategy == "hsdp" else []),
    ]


@check("each rank reaches at least 85% of the speed of one alone", "ranks")
def scaling(place: Place) -> tuple[str, bool]:
    """Measure tokens per second and rank with every strategy."""
    alone = _rate(place.train("scaling_1", *place.speed("trainer.max_steps=40", *_batch(place, 1))))
    notes, best = [f"alone {alone:,.0f} tokens/s"], 0.0
    for strategy in SHARDED:
        words = place.speed("trainer.max_steps=40", *_batch(place, place.ranks))
        more = _shards(place, strategy)
        rows = place.train(f"scaling_{strategy}", *words, *more, ranks=place.ranks)
        share = _rate(rows) / place.ranks / alone
        best = max(best, share)
        memory = f" {rows[-1]['memory']:.1f} GiB" if "memory" in rows[-1] else ""
        notes.append(f"{strategy} {share:.0%}{memory}")
    return ", ".join(notes), best >= 0.85 or not place.on_gpu


def _batch(place: Place, ranks: int) -> list[str]:
    return [f"trainer.batch_size={(8 if place.quick else 16) * ranks}"]


@check("a run whose last rank is killed ends, and resumes to the same result", "ranks")
def lost_rank(place: Place) -> tuple[str, bool]:
    """Send SIGKILL to the last rank, and resume the run."""
    return _killed(place, signal.SIGKILL, place.ranks)


@check("a run of all ranks resumes with half of them, with the same losses up to rounding", "ranks")
def fewer_ranks(place: Place) -> tuple[str, bool]:
    """Stop a run in the middle and resume it with half of the ranks."""
    words = [*NUMBERS, _dealt(place.ranks), "trainer.tf32=false", f"trainer.max_steps={STEPS}"]
    all_ranks = [*words, "strategy=fsdp2"]
    whole = place.train("ranks_whole", *all_ranks, ranks=place.ranks)
    begun = place.words("ranks_changed", *all_ranks)
    place.struck("ranks_changed", *begun, step=12, number=signal.SIGTERM, ranks=place.ranks)
    half = f"strategy={'single' if place.ranks == 2 else 'fsdp2'}"
    rows = place.train("ranks_changed", *words, half, ranks=place.ranks // 2)
    return f"{(apart := _apart(whole, rows)):.1e}", apart <= 1e-3


@check("if a rank hangs, all end within minutes and NCCL's flight recorder writes", "gpu", "ranks")
def stuck_rank(place: Place) -> tuple[str, bool]:
    """Send SIGSTOP to one rank; the others wait for 30 s at most."""
    words = [*NUMBERS, "strategy=fsdp2", f"trainer.max_steps={STEPS}", _dealt(place.ranks)]
    words += ["strategy.timeouts.collective=30", "trainer.step_timeout=60"]
    words, began = place.words("stuck", *words), time.monotonic()
    code = place.struck("stuck", *words, step=12, number=signal.SIGSTOP, ranks=place.ranks)
    took = time.monotonic() - began
    files = len(list((place.out / "stuck" / "flight_recorder").glob("rank_*")))
    return f"exit code {code} after {took:.0f} s, {files} records", code != 0 and files > 0


# The report ----------------------------------------------------------------------------------


@cache
def machine() -> list[tuple[str, str]]:
    """Return the hardware and software versions."""

    def installed_version(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    entries = [("Python", platform.python_version()), ("torch", torch.__version__)]
    entries += [
        (name, installed_version(name)) for name in ("lightning", "triton", "flash-attn", "unrope")
    ]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        memory = gpu.total_memory / 2**30
        entries += [
            ("GPUs of a node", f"{torch.cuda.device_count()} x {gpu.name}, {memory:.0f} GiB"),
            ("CUDA", str(torch.version.cuda or torch.version.hip)),
            ("NCCL", ".".join(map(str, torch.cuda.nccl.version()))),
        ]
    entries.append(("CPU cores", str(len(os.sched_getaffinity(0)))))
    return entries


@dataclass
class Report:
    """The report in Markdown, with a row for each check made so far."""

    place: Place
    rows: list[tuple[str, str, str, str, str]] = field(default_factory=list)

    def add(self, check: Check, outcome: str, verdict: str, seconds: float) -> None:
        """Add a row and rewrite the file."""
        self.rows.append((check.name, check.expected, outcome, verdict, f"{seconds:.0f}"))
        header = ("check", "expected", "found", "", "seconds")
        lines = ["# The first hour", "", f"{self.place.ranks} ranks on {self.place.nodes} nodes"]
        lines[-1] += ", small shapes: speeds are meaningless." if self.place.quick else "."
        lines += ["", *_markdown(("", ""), machine()), "", *_markdown(header, self.rows)]
        (self.place.out / "report.md").write_text("\n".join(lines) + "\n")


def _markdown(header: tuple[str, ...], rows: list[Any]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def missing(check: Check, place: Place) -> str:
    """Return which need of a check this place does not meet, or an empty string."""
    if "gpu" in check.needs and not place.on_gpu:
        return "needs a GPU"
    return "needs several ranks" if "ranks" in check.needs and place.ranks < 2 else ""


def main() -> None:
    """Make the checks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CHECK")
    parser.add_argument(
        "--nodes", type=int, default=1, help="number of nodes of this SLURM allocation"
    )
    parser.add_argument("--ranks", type=int, help="total number of ranks; by default one per GPU")
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, whose speeds are meaningless"
    )
    parser.add_argument("--out", type=Path, default=Path("first_hour"), help="a new directory")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"--out: {str(options.out)!r} exists; remove it or name another directory.")
    if options.nodes > 1 and not torch.cuda.is_available():
        parser.error("--nodes: torch sees no GPU; run this on the first node of the allocation.")
    ranks = options.ranks or max(torch.cuda.device_count(), 1) * options.nodes
    options.out.mkdir(parents=True)
    place = Place(options.out, ranks, options.nodes, options.quick or not torch.cuda.is_available())
    report, out, failed = Report(place), Console(width=100), False
    table = Table("check", "found", "", "s", width=100)
    for number, check in enumerate((c for c in CHECKS if c.name in options.only), 1):
        out.print(
            f"{number} of {len(options.only)}  {check.name}: {check.expected}", highlight=False
        )
        began = time.monotonic()
        if absent := missing(check, place):
            outcome, verdict = absent, "not made"
        else:
            try:
                outcome, good = check.measure(place)
            except Failed as error:
                outcome, good = str(error), False
            except Exception as error:  # a kernel may raise anything; continue with the next check
                outcome, good = f"{type(error).__name__}: {error}"[:300], False
            verdict = "good" if good else "FAILED"
            failed |= not good
        report.add(check, outcome, verdict, seconds := time.monotonic() - began)
        table.add_row(check.name, outcome, verdict, f"{seconds:.0f}")
    out.print(table)
    out.print(f"{options.out}/report.md")
    sys.exit(failed)


if __name__ == "__main__":
    main()
