#!/usr/bin/env python
"""Measure speed and memory of a training step, ours and transformers' in one run.

    python scripts/benchmark_training.py --precision fp32 bf16 --vocab 8192 50304

A step is forward, backward, clipping by global norm and fused AdamW, for a model of 4 layers, width
512, MLP 1,376, 8 heads and 4 sequences of 512 tokens. The variants are ours with RoPE and NoPE, and
``transformers.LlamaForCausalLM`` unchanged and with cos = 1, sin = 0 (how DroPE's released code
drops RoPE), each eager and compiled (ours block by block). They take turns, step by step, so that a
drift of the machine's speed affects all of them. A ratio is the median over the rounds, with its
quartiles. ``--variants`` selects others; without ``hf``, ratios refer to the first. ``--length``
sets another sequence length with as many tokens in a step:

    python scripts/benchmark_training.py --variants ours "ours NoPE" --length 2048

The ceiling is the best rate of products of square matrices of size 512 to 2,048 in the same run.
The share of it counts 6 operations per token and parameter (without the input embedding) and
ignores attention. Memory is the growth of the peak resident size during the steps of a process that
runs one variant alone.
"""

from __future__ import annotations

from trainer.common import spinning  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from benchmarks import random_decoder, ratio, seconds, table_of, take_turns
from rich.console import Console
from rich.table import Table

from trainer.model.config import ModelConfig

BATCH, LENGTH, WIDTH, MLP, LAYERS, HEADS = 4, 512, 512, 1376, 4, 8
VARIANTS = ("ours", "ours NoPE", "hf", "hf cos=1")
Step = Callable[[], None]


def ours(
    vocab: int, variant: str, compiled: bool, length: int
) -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    """Build our decoder; return it with its loss."""
    shape = WIDTH, MLP, LAYERS, HEADS, HEADS, None, vocab
    config = ModelConfig(*shape, tie_word_embeddings=False)
    encoding = "nope" if "NoPE" in variant else "rope"
    model = random_decoder(config, length, encoding)
    if compiled:
        for block in model.layers:
            block.compile()
    return model, model.loss


def transformers_model(
    vocab: int, constant: bool, compiled: bool
) -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    """Build Hugging Face's Llama (``constant``: cos = 1, sin = 0); return it with its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=WIDTH,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            use_cache=False,
        )
    )
    if constant:

        def unrotated(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            shape = (*position_ids.shape, WIDTH // HEADS)
            return x.new_ones(shape), x.new_zeros(shape)

        model.model.rotary_emb.forward = unrotated
    forward = torch.compile(model) if compiled else model
    # Pass ids as labels: transformers shifts them itself, ours are shifted already.
    return model, lambda ids, labels: forward(input_ids=ids, labels=ids).loss


def make_step(
    variant: str, compiled: bool, vocab: int, precision: str, length: int
) -> tuple[Step, int]:
    """Return a variant's training step, and its number of parameters without input embedding."""
    torch.manual_seed(0)
    if variant.startswith("ours"):
        model, loss_of = ours(vocab, variant, compiled, length)
        model.compute_dtype = torch.bfloat16 if precision == "bf16" else None
    else:
        model, loss_of = transformers_model(vocab, "cos" in variant, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    rows = max(1, BATCH * LENGTH // length)
    tokens = torch.randint(0, vocab, (rows, length + 1), generator=generator)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        cast = precision == "bf16" and not variant.startswith("ours")
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = loss_of(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    counted = sum(p.numel() for p in model.parameters()) - vocab * WIDTH
    return step, counted


def ceiling(precision: str) -> float:
    """Return the best measured rate of matrix products, in operations per second."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    best = 0.0
    for size in (512, 1024, 2048):
        a = torch.randn(size, size, dtype=dtype)
        b = torch.randn(size, size, dtype=dtype)
        best = max(best, *(2 * size**3 / seconds(partial(torch.matmul, a, b)) for _ in range(8)))
    return best


def peak_memory(
    variant: str, compiled: bool, vocab: int, precision: str, length: int, threads: int
) -> float:
    """Return the peak memory, in MiB, that a variant adds to a new process."""
    words = [
        "--alone",
        json.dumps([variant, compiled, vocab, precision, length]),
        "--threads",
        str(threads),
    ]
    result = subprocess.run([sys.executable, __file__, *words], capture_output=True, check=True)
    return float(result.stdout.split()[-1])


def run_alone(variant: str, compiled: bool, vocab: int, precision: str, length: int) -> None:
    """Print the growth of this process's peak size over three steps, in MiB."""
    step, _ = make_step(variant, compiled, vocab, precision, length)
    before = peak_kib()
    for _ in range(3):
        step()
    print((peak_kib() - before) / 1024)


def peak_kib() -> int:
    """Return the peak resident size of this process; getrusage begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)


def compare(precision: str, vocab: int, options: argparse.Namespace) -> Table:
    """Measure all variants in turns and return a table."""
    kinds = (False, True) if options.compiled else (False,)
    names = [(variant, kind) for kind in kinds for variant in options.variants]
    titles = {
        (variant, kind): f"{variant} compiled" if kind else variant for variant, kind in names
    }
    reference = "hf" if "hf" in options.variants else options.variants[0]
    steps = {}
    for name in names:
        print(f"warming up {titles[name]}", file=sys.stderr)
        steps[name], parameters = make_step(*name, vocab, precision, options.length)
        for _ in range(options.warmup):
            steps[name]()
    times: dict[tuple[str, bool], list[float]] = {name: [] for name in names}
    take_turns(names, options.repeats, lambda name: times[name].append(seconds(steps[name])))
    top = ceiling(precision)
    tokens = max(1, BATCH * LENGTH // options.length) * options.length
    ratios_to = f"x {reference} eager", f"x {reference} compiled"
    table = table_of(
        f"{precision}, vocabulary {vocab:,}, {options.threads} threads; "
        f"matrix ceiling {top / 1e12:.2f} TFLOP/s",
        *("variant", "tokens/s", "of ceiling", *ratios_to, "peak MiB"),
    )
    for name in names:
        ratios = []
        for kind in (False, True):
            reference_times = times.get((reference, kind))
            ratios.append(ratio(reference_times, times[name]) if reference_times else "")
        rate = tokens / median(times[name])
        memory = ""
        if options.memory:
            run = *name, vocab, precision, options.length
            memory = f"{peak_memory(*run, threads=options.threads):,.0f}"
        table.add_row(
            titles[name],
            f"{rate:,.0f}",
            f"{100 * 6 * parameters * rate / top:.0f}%",
            *ratios,
            memory,
        )
    return table


def main() -> None:
    """Run the comparison and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"]
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--vocab", nargs="+", type=int, default=[8192, 50304])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--no-compiled", dest="compiled", action="store_false")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.alone:
        run_alone(*json.loads(options.alone))
        return
    console = Console(width=100)
    for precision in options.precision:
        for vocab in options.vocab:
            console.print(compare(precision, vocab, options))


if __name__ == "__main__":
    main()
