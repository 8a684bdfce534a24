#!/usr/bin/env python
"""Measure the speed of generation, ours and transformers' in one run.

    python scripts/benchmark_generation.py --precision fp32 bf16 --batch 1 8

The model has SmolLM2-135M's shape (30 layers, width 576, MLP 1,536, 9 heads, 3 key-value heads,
vocabulary 49,152, tied). Both sides have the same random weights and prompts. Prefill is the time
to the first token of greedy generation; decode is the time of all further tokens. The two sides
take turns, so that a drift of the machine's speed affects both. A ratio is the median over the
rounds, with its quartiles. ``--quick`` measures a tiny model.
"""

from __future__ import annotations

from trainer.common import spinning  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
from collections.abc import Callable
from statistics import median

import torch
import transformers
from benchmarks import random_decoder, ratio, seconds, table_of, take_turns
from rich.console import Console
from rich.table import Table

from trainer.interchange.hf_config import SHAPE
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.generate import generate

SMOLLM2_135M = ModelConfig(576, 1536, 30, 9, 3, vocab_size=49_152)
TINY = ModelConfig(64, 128, 2, 4, 2, vocab_size=512)
Generate = Callable[[int], object]
Times = dict[str, list[float]]


def theirs(model: Decoder, dtype: torch.dtype) -> torch.nn.Module:
    """Build Hugging Face's Llama with the weights of ``model``."""
    config = model.config
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{key: getattr(config, key) for key in SHAPE},
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    hf.model.load_state_dict(model.state_dict())
    return hf.to(dtype).eval()


def contestants(config: ModelConfig, dtype: torch.dtype, ids: torch.Tensor) -> dict[str, Generate]:
    """Return functions, ours and theirs, that generate ``count`` tokens after ``[B, T]`` ids."""
    model = random_decoder(config, 2048).to(dtype)
    hf = theirs(model, dtype)
    mask = torch.ones_like(ids)
    prompts = ids.tolist()

    def hf_generate(count: int) -> object:
        return hf.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)

    return {"ours": lambda count: generate(model, prompts, count), "transformers": hf_generate}


def measure(functions: dict[str, Generate], options: argparse.Namespace) -> tuple[Times, Times]:
    """Return the seconds of prefill and of decoding ``new - 1`` tokens in each round."""
    prefill: Times = {name: [] for name in functions}
    decode: Times = {name: [] for name in functions}
    for function in functions.values():
        function(3)

    def turn(name: str) -> None:
        first = seconds(functions[name], 1)
        prefill[name].append(first)
        decode[name].append(seconds(functions[name], options.new) - first)

    take_turns(list(functions), options.repeats, turn)
    return prefill, decode


def compare(precision: str, batch: int, options: argparse.Namespace) -> Table:
    """Measure both in turns and return a table."""
    config = TINY if options.quick else SMOLLM2_135M
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size or 0, (batch, options.prompt), generator=generator)
    times = measure(contestants(config, dtype, ids), options)
    table = table_of(
        f"{precision}, batch {batch}, prompts of {options.prompt} tokens, {options.new} new, "
        f"{options.threads} threads",
        *("", "ours tokens/s", "transformers tokens/s", "ratio (quartiles)"),
    )
    for part, part_times, count in zip(
        ("prefill", "decode"), times, (options.prompt, options.new - 1), strict=True
    ):
        rates = [f"{batch * count / median(part_times[name]):,.1f}" for name in part_times]
        table.add_row(part, *rates, ratio(part_times["transformers"], part_times["ours"]))
    return table


def main() -> None:
    """Run the comparison and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"]
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens, at least 2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="measure a tiny model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=100)
    for precision in options.precision:
        for batch in options.batch:
            console.print(compare(precision, batch, options))


if __name__ == "__main__":
    main()
