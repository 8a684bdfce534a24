#!/usr/bin/env python
"""Count the operations, traffic and memory of a training step on GPUs, without a GPU.

    python scripts/rehearse.py launches        operators and traffic of a micro-batch
    python scripts/rehearse.py loss            traffic of the loss outside its products
    python scripts/rehearse.py collectives     collectives of a rank in a step
    python scripts/rehearse.py muon            operators that the host calls in a step of Muon
    python scripts/rehearse.py memory          peak memory of a step by part

Tensors are fake: they have shapes and dtypes but no values, so models of any size fit. Operators
are those of an uncompiled step, without views and empty tensors. Traffic is the bytes that they
read and write. Our decoder is compared with transformers' Llama and its loss, with weights in
bfloat16 (as FSDP2 gathers them) and in float32 (ours casts in its products, theirs runs under
autocast).
"""

from __future__ import annotations

from trainer import __version__  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.data.config import DataConfig
from trainer.model import loss
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.linear import product_for
from trainer.runs.config import OptimizerConfig, RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.layouts import configured_layout
from trainer.runs.ranks import Ranks
from trainer.training.module import LanguageModule
from trainer.training.rehearsal import PARTS as MEMORY_PARTS
from trainer.training.rehearsal import fake_tensors, simulated_rank, step_memory, train_step

Rows = Iterator[tuple[str, ...]]
"""Rows of a table, the header first."""

NO_LAUNCH = ("empty", "detach", "device", "lift_fresh", "_unsafe_view", "alias")


@dataclass(frozen=True)
class Shape:
    """A model and a GPU's micro-batch ``[rows, length]``."""

    model: ModelConfig
    rows: int
    length: int


SHAPES = {
    "SmolLM-360M": Shape(ModelConfig(960, 2560, 32, 15, 5, None, 49_152), 16, 2_048),
    "Llama-2-7B": Shape(
        ModelConfig(4_096, 11_008, 32, 32, 32, None, 32_000, tie_word_embeddings=False), 4, 4_096
    ),
}


class Launches(TorchDispatchMode):
    """Dispatch mode that counts operators that compute, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and count it."""
        out = operator(*args, **(kwargs or {}))
        name = operator.name().partition("::")[2].partition(".")[0]
        if operator.is_view or any(part in name for part in NO_LAUNCH):
            return out
        read = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        tensors = [x for x in tree_leaves((args, read, out)) if isinstance(x, torch.Tensor)]
        if name == "replace_by_gradient":  # reads the logits twice and writes them
            tensors += 2 * [args[0]]
        self.operators[name] += 1
        self.traffic[name] += sum(x.numel() * x.itemsize for x in tensors)
        return out


def ours(shape: Shape, weights: torch.dtype, chunks: loss.Chunks | None = None) -> Launches:
    """Count forward and backward of our decoder; ``chunks``: of the loss, None: as on a GPU."""
    with fake_tensors(weights):
        if chunks is not None:
            loss.CHUNKS["cpu"] = chunks
        data = DataConfig(sequence_length=shape.length)
        layout = configured_layout(RunConfig(model=shape.model, data=data))
        model = Decoder(shape.model, layout)
        model.choose_products("cpu", torch.bfloat16)
        return _counted(shape, lambda ids: model.loss(ids, ids))


def theirs(shape: Shape, weights: torch.dtype) -> Launches:
    """Count forward and backward of transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = shape.model
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        max_position_embeddings=shape.length,
        tie_word_embeddings=c.tie_word_embeddings,
        attn_implementation="sdpa",
    )
    with fake_tensors(weights):
        model: nn.Module = LlamaForCausalLM(config)

        def step(ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
                return model(input_ids=ids, labels=ids, use_cache=False).loss

        return _counted(shape, step)


def _counted(shape: Shape, step: Callable[[torch.Tensor], torch.Tensor]) -> Launches:
    ids = torch.zeros(shape.rows, shape.length, dtype=torch.long)
    with Launches() as counted:
        step(ids).backward()
    return counted


def launches() -> Rows:
    """Compare our decoder with theirs, and the loss in chunks with the loss in one piece."""
    yield "shape", "weights", "", "operators", "of theirs", "traffic, GB", "of theirs"
    whole = loss.Chunks(logits=2**62, tokens=1, rows=2**31)
    for name, shape in SHAPES.items():
        for weights in (torch.bfloat16, torch.float32):
            other = theirs(shape, weights)
            rows = {
                "transformers": other,
                "ours": ours(shape, weights),
                "ours, loss in one": ours(shape, weights, whole),
            }
            for title, counted in rows.items():
                yield name, str(weights)[6:], title, *_figures(counted, other)


def _figures(counted: Launches, other: Launches) -> tuple[str, str, str, str]:
    count, traffic = counted.operators.total(), counted.traffic.total()
    return (
        f"{count:,}",
        f"{count / other.operators.total():.2f}",
        f"{traffic / 1e9:,.0f}",
        f"{traffic / other.traffic.total():.2f}",
    )


PRODUCTS = ("mm", "add_product")


def loss_traffic() -> Rows:
    """Count the traffic of the loss alone: in separate passes, as on a CPU, and fused."""
    yield "shape", "head", "", "chunks", "operators", "bytes a logit outside products"
    fused = loss.CHUNKS["cuda"]
    for name, shape in SHAPES.items():
        for head in (torch.bfloat16, torch.float32):
            for title, chunks in (("passes", replace(fused, fused=False)), ("fused", fused)):
                counted, count = of_loss(shape, head, chunks)
                traffic = sum(v for k, v in counted.traffic.items() if k not in PRODUCTS)
                logits = shape.rows * shape.length * shape.model.vocab_size
                figures = str(count), str(counted.operators.total()), f"{traffic / logits:.1f}"
                yield name, str(head)[6:], title, *figures


def of_loss(shape: Shape, head: torch.dtype, chunks: loss.Chunks) -> tuple[Launches, int]:
    """Count forward and backward of the loss on bfloat16 states; return that and its chunks."""
    width, vocab, tokens = (
        shape.model.hidden_size,
        shape.model.vocab_size,
        shape.rows * shape.length,
    )
    with fake_tensors():
        loss.CHUNKS["cpu"] = chunks
        states = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab, width, dtype=head, requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.long)
        product = product_for("cuda", head, torch.bfloat16)
        with Launches() as counted:
            loss.linear_cross_entropy(states, weight, targets, product=product).backward()
        most = loss.chunk_size(vocab, states.device)
    return counted, -(-tokens // (loss.equal_chunk_size(tokens, most) if chunks.fused else most))


class Collectives(TorchDispatchMode):
    """Dispatch mode that records each collective's name and a rank's bytes of the larger side."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and record it if it is a collective."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs it on its shards, which come here again
        space, name = operator.name().split("::")
        out = operator(*args, **(kwargs or {}))
        if "c10d" in space and "wrap" not in name and "wait" not in name:
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            self.calls.append((name.strip("_"), max(x.numel() * x.itemsize for x in tensors)))
        return out


def sent(
    module: LanguageModule,
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, int],
    factor: float = 1.0,
) -> list[tuple[str, int]]:
    """Return the collectives of one update; ``shape``: a micro-batch, ``factor``: on gradients."""
    with Collectives() as seen:
        train_step(module, optimizer, shape, factor)
    return seen.calls


def collectives() -> Rows:
    """List the collectives of a step of 32 ranks, sized by a rank's part of the larger side."""
    cases = [(name, case, 2) for name in SHAPES for case in REDUCED]
    # The recipe drope_llama2_7b has 16 sequences per rank.
    seven = ("fsdp2", "adamw", "micro_batch"), ("hsdp", "adamw", "micro_batch")
    cases += [("Llama-2-7B", seven[0], 16), *(("Llama-2-7B", case, 4) for case in seven)]
    yield "shape", "strategy", "optimizer", "reduced", "micro-batches", "collective", "number", "GB"
    for name, case, times in cases:
        sizes_by_collective: dict[str, list[int]] = {}
        for collective, size in _of_a_step(SHAPES[name], *case, times):
            sizes_by_collective.setdefault(collective, []).append(size)
        for collective, sizes in sizes_by_collective.items():
            size = f"{sum(sizes) / 1e9:,.3f}"
            yield name, *case, str(times), collective, str(len(sizes)), size


REDUCED = (
    ("fsdp2", "adamw", "step"),
    ("hsdp", "adamw", "step"),
    ("fsdp2", "muon", "step"),
)
"""Strategy, optimizer, and whether gradients are reduced once a step or after a micro-batch."""


def _of_a_step(
    shape: Shape, strategy: Any, optimizer: Any, reduced: Any, times: int
) -> list[tuple[str, int]]:
    rows, ranks = 1, 32  # rows change no collective
    config = RunConfig(
        model=shape.model,
        strategy=StrategyConfig(
            name=strategy,
            shard_size=8 if strategy == "hsdp" else None,
            reduce_gradients=reduced,
        ),
        optimizer=OptimizerConfig(name=optimizer),
        trainer=TrainerConfig(
            batch_size=times * rows * ranks, micro_batch_size=rows, precision="bf16"
        ),
    )
    with simulated_rank(config, Ranks(0, ranks, 0, 8)) as module, fake_tensors():
        module.configure_model()
        return sent(module, module.configure_optimizers(), (rows, 128))


class HostOperations(TorchDispatchMode):
    """Dispatch mode that counts operators on plain tensors and on sharded ones."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = self.sharded = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operator and run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            self.sharded += 1
            return NotImplemented
        self.plain += 1
        return operator(*args, **(kwargs or {}))


def muon() -> Rows:
    """Count host operations of an optimizer step with Muon, on small matrices in 32 layers.

    The size of the matrices does not matter. Tensors are real, since torch decomposes its fused
    operators on fake ones.
    """
    yield "ranks", "strategy", "matrices", "operators", "of them on sharded tensors"
    for ranks, strategy in ((1, "single"), (2, "fsdp2"), (8, "fsdp2"), (8, "hsdp")):
        matrices, counted = host_operations(ranks, strategy)
        count = f"{counted.plain + counted.sharded:,}"
        yield str(ranks), strategy, str(matrices), count, f"{counted.sharded:,}"


def host_operations(ranks: int, strategy: Any) -> tuple[int, HostOperations]:
    """Return the number of Muon's matrices, and the operators of a rank's second step."""
    config = RunConfig(
        model=ModelConfig(64, 96, 32, 4, 2, None, 256),
        strategy=StrategyConfig(name=strategy, shard_size=2 if strategy == "hsdp" else None),
        optimizer=OptimizerConfig(name="muon"),
        trainer=TrainerConfig(batch_size=ranks, micro_batch_size=1),
    )
    with simulated_rank(config, Ranks(0, ranks, 0, ranks)) as module:
        module.configure_model()
        optimizer = module.configure_optimizers()
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        with HostOperations() as counted:
            optimizer.step()
    return len(optimizer.param_groups[0]["params"]), counted


def memory() -> Rows:
    """List the peak memory of a step of one micro-batch by part."""
    yield "shape", "ranks", "strategy", "recomputed", "sequences", *MEMORY_PARTS, "GiB"
    for name, ranks, strategy, recomputed, rows in (
        ("SmolLM-360M", 1, "single", "none", 4),
        ("SmolLM-360M", 8, "fsdp2", "none", 16),
        ("SmolLM-360M", 8, "fsdp2", "selective", 16),
        ("SmolLM-360M", 8, "fsdp2", "full", 16),
        ("Llama-2-7B", 32, "fsdp2", "none", 1),
        ("Llama-2-7B", 32, "fsdp2", "selective", 2),
        ("Llama-2-7B", 32, "fsdp2", "full", 4),
    ):
        shape = replace(SHAPES[name], rows=rows)
        parts = _memory_of(shape, ranks, strategy, recomputed)
        sizes = (f"{size / 2**30:.1f}" for size in (*parts.values(), sum(parts.values())))
        yield name, str(ranks), strategy, recomputed, str(rows), *sizes


def _memory_of(shape: Shape, ranks: int, strategy: Any, recomputed: Any) -> dict[str, int]:
    config = RunConfig(
        model=shape.model,
        strategy=StrategyConfig(name=strategy, activation_checkpointing=recomputed),
        trainer=TrainerConfig(
            batch_size=shape.rows * ranks, micro_batch_size=shape.rows, precision="bf16"
        ),
        data=DataConfig(sequence_length=shape.length),
    )
    return step_memory(config, Ranks(0, ranks, 0, 8))


PARTS: dict[str, Callable[[], Rows]] = {
    "launches": launches,
    "loss": loss_traffic,
    "collectives": collectives,
    "muon": muon,
    "memory": memory,
}


def main() -> None:
    """Read the command line, count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--layers", type=int, help="layers of each model, instead of all")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: expected {' or '.join(PARTS)}.")
    if options.layers:
        for name, shape in SHAPES.items():
            SHAPES[name] = replace(
                shape, model=replace(shape.model, num_hidden_layers=options.layers)
            )
    for part in options.parts or PARTS:
        header, *rows = PARTS[part]()
        if options.markdown:
            lines = [header, ("---",) * len(header), *rows]
            print(*(f"| {' | '.join(line)} |" for line in lines), sep="\n", end="\n\n")
        else:
            table = Table(*header)
            for row in rows:
                table.add_row(*row)
            Console(width=100).print(table)


if __name__ == "__main__":
    main()
