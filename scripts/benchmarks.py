"""Parts that the benchmark scripts share: models, turns, ratios and tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Sequence
from statistics import median, quantiles
from typing import Any, TypeVar

from rich.table import Table

from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.positional.config import PositionalConfig, build_layout

Name = TypeVar("Name", bound=Hashable)


def random_decoder(config: ModelConfig, training_length: int, encoding: str = "rope") -> Decoder:
    """Build a decoder with random weights and one encoding in all layers."""
    layout = build_layout(
        PositionalConfig(layers=[encoding]),
        num_layers=config.num_hidden_layers,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_size,
        training_length=training_length,
    )
    return Decoder(config, layout)


def seconds(function: Callable[..., object], *arguments: Any) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def take_turns(names: Sequence[Name], rounds: int, measure: Callable[[Name], None]) -> None:
    """Measure each of ``names`` once a round, in alternating order.

    Otherwise one would always follow the same neighbour.
    """
    for number in range(rounds):
        in_order = names if number % 2 == 0 else reversed(names)
        for name in in_order:
            measure(name)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)


def ratio(reference: Sequence[float], times: Sequence[float]) -> str:
    """Return the median of the rounds' speed ratios, with quartiles."""
    ratios = [a / b for a, b in zip(reference, times, strict=True)]
    low = high = ratios[0]
    if len(ratios) > 1:
        low, _, high = quantiles(ratios, n=4)
    return f"{median(ratios):.2f} ({low:.2f}-{high:.2f})"


def table_of(title: str, first: str, *others: str) -> Table:
    """Return an empty table with numbers in all columns but the first."""
    table = Table(title=title, width=100)
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table
