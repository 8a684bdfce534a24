"""Speed and memory of one training step: this package against transformers' Llama on the CPU.

    python scripts/benchmark_training.py --threads 2

A step is forward, loss, backward, clipping by the global norm 1.0, fused AdamW and zero_grad, over
the same random tokens and from the same weights. Four models: ours with RoPE and without (NoPE),
transformers' ``LlamaForCausalLM`` as it is and with cos = 1 and sin = 0, as DroPE's released code
drops RoPE. Each runs eagerly and compiled: ours block by block (``block.compile()``), transformers'
as a whole (``torch.compile(model)``).

Speed: all variants live in one process and take turns step by step, in the reverse order every
second time. A ratio is the median, with quartiles, of the ratios of neighbouring steps, so that a
machine that slows down slows both. The ceiling is the fastest 2048 x 2048 x 2048 product that torch
offers, torch.mm (MKL in float32) or oneDNN, measured between the repeats; a step's share of it
counts matrix products and causal attention, 3 times the forward pass.

Memory: each variant runs in a process of its own. After the warm-up the kernel's high-water mark of
resident memory is reset (``/proc/self/clear_refs``), two more steps run, and the mark (``VmHWM``)
is read; what the process still holds once model and optimizer are gone (torch, compiler) is taken
off. So it is weights, gradients, moments and the peak of a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.model.attention import product
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig, build_layout


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a batch."""

    vocab: int
    layers: int = 4
    width: int = 512
    mlp: int = 1376
    heads: int = 8
    batch: int = 4
    length: int = 512

    @property
    def flops(self) -> float:
        """Floating-point operations of one step: products and causal attention."""
        weights = self.layers * (4 * self.width**2 + 3 * self.width * self.mlp)
        per_token = weights + self.vocab * self.width + self.layers * self.length * self.width
        return 6 * per_token * self.batch * self.length


@dataclass(frozen=True)
class Variant:
    """One way to run the step."""

    library: str
    encoding: str
    compiled: bool

    def __str__(self) -> str:
        encoding = self.encoding
        if self.library == "transformers" and encoding == "nope":
            encoding = "cos=1, sin=0"
        return f"{self.library}, {encoding}, {'compiled' if self.compiled else 'eager'}"


def variants(compiled: bool) -> list[Variant]:
    """All of them, the eager ones first."""
    return [
        Variant(library, encoding, mode)
        for mode in ((False, True) if compiled else (False,))
        for library in ("ours", "transformers")
        for encoding in ("rope", "nope")
    ]


class Unrotated(nn.Module):
    """A rotary table that turns nothing."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines of 1 and sines of 0, ``[B, T, head_dim]``."""
        head_dim = self.head_dim
        ones = torch.ones(*position_ids.shape, head_dim, dtype=x.dtype, device=x.device)
        return ones, torch.zeros_like(ones)

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim


def our_loss(
    shape: Shape, encoding: str, compiled: bool
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """The decoder with tied embeddings, and its loss."""
    config = ModelConfig(
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocab,
    )
    layout = build_layout(
        PositionalConfig(layers=[encoding]),
        num_layers=shape.layers,
        num_key_value_heads=shape.heads,
        head_dim=config.head_size,
        training_length=shape.length,
    )
    torch.manual_seed(0)
    model = Decoder(config, layout)
    if compiled:
        for block in model.layers:
            block.compile()
    return model, model.loss


def their_loss(
    shape: Shape, encoding: str, compiled: bool
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """transformers' model with our initial weights, without a KV cache, and its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.width,
            intermediate_size=shape.mlp,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            vocab_size=shape.vocab,
            max_position_embeddings=shape.length,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
    ).train()
    weights = our_loss(shape, encoding, False)[0].state_dict()
    model.load_state_dict(
        {name if name.startswith("lm_head") else f"model.{name}": w for name, w in weights.items()}
    )
    if encoding == "nope":
        model.model.rotary_emb = Unrotated(shape.width // shape.heads)
    run = torch.compile(model) if compiled else model
    return (
        model,
        lambda ids, targets: (
            run(input_ids=ids, labels=ids, shift_labels=targets, use_cache=False).loss
        ),
    )


def training_step(variant: Variant, shape: Shape, precision: str) -> Callable[[], float]:
    """A function that trains one step and returns the loss in nats per token."""
    make = our_loss if variant.library == "ours" else their_loss
    model, loss_of = make(shape, variant.encoding, variant.compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1), generator=generator)
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def status_mib(field: str) -> float:
    """A field of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def measure_memory(variant: Variant, shape: Shape, precision: str) -> float:
    """Peak MiB of a step in this process; see the module's docstring."""
    import ctypes

    step = training_step(variant, shape, precision)
    for _ in range(2):
        step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        step()
    peak = status_mib("VmHWM")
    del step
    torch._dynamo.reset()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return peak - status_mib("VmRSS")


def memory_of(variant: Variant, shape: Shape, precision: str, threads: int) -> float:
    """:func:`measure_memory` in a process of its own."""
    job = {"variant": asdict(variant), "shape": asdict(shape), "precision": precision}
    command = [sys.executable, __file__, "--threads", str(threads), "--memory", json.dumps(job)]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return float(result.stdout.split()[-1])


@contextmanager
def doing(what: str) -> Iterator[None]:
    """A line on stderr with the time it took."""
    print(f"  {what} ...", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    yield
    print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def measure(
    chosen: list[Variant], shape: Shape, precision: str, repeats: int
) -> tuple[dict[Variant, list[float]], dict[str, list[float]], float]:
    """Seconds of every variant and repeat, FLOP/s of the products, spread of the first losses."""
    torch._dynamo.reset()
    steps = {variant: training_step(variant, shape, precision) for variant in chosen}
    first: dict[str, list[float]] = {}
    for variant, step in steps.items():
        with doing(f"warm up {variant}"):
            first.setdefault(variant.encoding, []).append(step())
            step()
    spread = max(max(losses) - min(losses) for losses in first.values())
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    x = torch.randn(2048, 2048).to(dtype)
    products = {"torch.mm": lambda: x @ x.T, "oneDNN": lambda: product(x, x)}
    times: dict[Variant, list[float]] = {variant: [] for variant in chosen}
    rates: dict[str, list[float]] = {name: [] for name in products}
    for repeat in range(repeats):
        with doing(f"repeat {repeat + 1} of {repeats}"):
            for name, multiply in products.items():
                rates[name].append(2 * 2048**3 / min(seconds(multiply) for _ in range(3)))
            for variant in chosen[:: -1 if repeat % 2 else 1]:
                times[variant].append(seconds(steps[variant]))
    return times, rates, spread


def print_table(
    times: dict[Variant, list[float]],
    rates: dict[str, list[float]],
    memory: dict[Variant, float],
    shape: Shape,
) -> None:
    """Medians, then ratios with their quartiles."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ceiling = max(medians.values())
    print("ceiling: " + ", ".join(f"{n} {r / 1e9:.0f}" for n, r in medians.items()) + " GFLOP/s")
    print(f"{'':34}{'tokens/s':>10}{'ms/step':>10}{'of ceiling':>12}{'peak MiB':>10}")
    for variant, values in times.items():
        step = statistics.median(values)
        print(
            f"{variant!s:34}{shape.batch * shape.length / step:10,.0f}{step * 1e3:10.1f}"
            f"{shape.flops / step / ceiling:12.0%}"
            + (f"{memory[variant]:10,.0f}" if variant in memory else f"{'-':>10}")
        )
    print(f"{'':64}{'speed':>7}{'quartiles':>14}{'memory':>8}")
    modes = sorted({variant.compiled for variant in times})
    ours, theirs = "ours", "transformers"
    pairs = [
        (Variant(ours, encoding, mode), Variant(theirs, encoding, mode))
        for encoding in ("rope", "nope")
        for mode in modes
    ]
    if True in modes:
        pairs.append((Variant(ours, "rope", False), Variant(theirs, "rope", True)))
    pairs += [(Variant(ours, "nope", mode), Variant(ours, "rope", mode)) for mode in modes]
    for a, b in pairs:
        low, middle, high = statistics.quantiles(
            [tb / ta for ta, tb in zip(times[a], times[b], strict=True)], n=4, method="inclusive"
        )
        share = f"{memory[a] / memory[b]:8.2f}" if {a, b} <= memory.keys() else f"{'-':>8}"
        print(f"{f'{a} / {b}':64}{middle:7.2f}{f'{low:.2f}..{high:.2f}':>14}{share}")


def main() -> None:
    """Parse the options, measure every precision and vocabulary, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--vocab", type=int, nargs="+", default=[8192, 50304])
    parser.add_argument(
        "--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"]
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, eager, 2 repeats")
    parser.add_argument("--memory", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if job := options.memory:
        print(measure_memory(Variant(**job["variant"]), Shape(**job["shape"]), job["precision"]))
        return
    chosen = variants(compiled=not options.quick)
    repeats = 2 if options.quick else options.repeats
    for vocab in options.vocab:
        shape = Shape(512, 2, 64, 160, 4, 2, 64) if options.quick else Shape(vocab)
        for precision in options.precision:
            title = f"{precision}, vocabulary {shape.vocab:,}, {options.threads} threads"
            print(f"{title}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            memory = {}
            for variant in chosen:
                if variant.encoding == "rope":
                    with doing(f"memory of {variant}"):
                        memory[variant] = memory_of(variant, shape, precision, options.threads)
            times, rates, spread = measure(chosen, shape, precision, repeats)
            print(f"\n{title}, {repeats} repeats; first losses differ by {spread:.1e}")
            print_table(times, rates, memory, shape)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
