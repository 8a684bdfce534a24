"""A small report with every part filled, and cells from counts."""

from __future__ import annotations

from trainer.report.results import (
    Arm,
    Cell,
    Drop,
    LossByPosition,
    Observation,
    Report,
    wilson_interval,
)

TRIALS = 256
LENGTHS = (64, 128, 256, 512)


def cells(method, rates, losses=(4.0, 4.0, 4.0, 4.0), trials=TRIALS):
    """Cells at 1, 2, 4 and 8 times a training length of 64; rates in %, None for not measured."""
    made = []
    for length, rate, loss in zip(LENGTHS, rates, losses, strict=True):
        hits = None if rate is None else round(rate * trials / 100)
        retrieval = None if hits is None else hits / trials
        interval = None if hits is None else wilson_interval(hits, trials)
        made.append(Cell(method, length, length / 64, retrieval, interval, loss))
    return made


def example(methods=("RoPE", "RoPE + YaRN", "DroPE"), name="example"):
    """A report over the given methods."""
    table = [
        cell
        for i, method in enumerate(methods)
        for cell in cells(method, (100, 90 - i, 50, 10 + i), (4.0, 4.1, 4.2 + i / 100, 10.5))
    ]
    edges = tuple(range(0, 513, 64))
    return Report(
        name=name,
        config={"model": {"width": 64}, "seed": 0},
        environment={"torch": "2.13"},
        arms=(
            Arm("RoPE", "rope", 1000, 100, 6400, 4.0, tuple((s, 9 - s / 20) for s in range(100))),
            Arm("DroPE", "rope, dropped", 1000, 100, 6400, 4.2, ((1, 9.0), (50, None), (99, 4.5))),
        ),
        drop=Drop(80, 4.1, 6.0, 4.2),
        table=tuple(table),
        loss_by_position=tuple(
            LossByPosition(m, 512, edges, (*(4.0 + i for i in range(7)), None)) for m in methods
        ),
        observations=(
            Observation("first claim", "a paper", True, "100%"),
            Observation("second claim", "a paper", False, "0%"),
            Observation("third claim", "a paper", None, "Not judged: why."),
        ),
        task={
            "n_trials": TRIALS,
            "needles": 4,
            "chance": 0.01,
            "chance_listed": 0.25,
            "training_needles": True,
            "training_share": 0.5,
        },
        temperature={"DroPE": 0.2},
        timing={"tokens_per_second": {"RoPE": 51000.0}, "seconds": 12.5},
    )
