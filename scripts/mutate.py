#!/usr/bin/env python
"""Measure how many small faults in a room of the package its tests notice (mutation testing).

    python scripts/mutate.py data evaluation --count 20 --seed 0

Each fault is one change of one node of the syntax tree: another comparison or operator, a number
one higher, a condition negated, a statement left out. It is made in a copy of the checkout, where
the room's tests run until one fails. Prints the faults that no test noticed, for a person to judge.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult},
}
REMOVABLE = ast.Assign, ast.AugAssign, ast.Raise


def mutated(node: ast.AST) -> ast.AST | None:
    """Return the faulty version of a node, or None if the node has none."""
    faulty = copy.deepcopy(node)
    match faulty:
        case ast.Compare() if type(faulty.ops[0]) in COMPARED:
            faulty.ops[0] = COMPARED[type(faulty.ops[0])]()
        case ast.BinOp() if type(faulty.op) in OPERATORS:
            faulty.op = OPERATORS[type(faulty.op)]()
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            return faulty.operand
        case ast.BoolOp():
            faulty.op = ast.Or() if isinstance(faulty.op, ast.And) else ast.And()
        case ast.Constant(value=bool()):
            faulty.value = not faulty.value
        case ast.Constant(value=int() | float()):
            faulty.value += 1
        case ast.If() | ast.IfExp():
            faulty.test = ast.UnaryOp(ast.Not(), faulty.test)
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
        case _ if isinstance(faulty, REMOVABLE):
            return ast.Pass()
        case _:
            return None
    return faulty


class Replace(ast.NodeTransformer):
    """Replaces one node by another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old = old
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def bodies(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes within functions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from ast.walk(statement)


def faults(room: str, count: int, seed: int) -> list[tuple[Path, int]]:
    """Return files and indices of nodes, drawn evenly from all nodes that have a faulty version."""
    places = [
        (path.relative_to(ROOT), index)
        for path in sorted((ROOT / "trainer" / room).rglob("*.py"))
        for index, node in enumerate(bodies(ast.parse(path.read_text())))
        if mutated(node) is not None
    ]
    return random.Random(f"{seed} {room}").sample(places, min(count, len(places)))


def copy_checkout(target: Path) -> None:
    """Copy all files that git knows, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def passes(pytest: list[str], checkout: Path) -> bool:
    """Whether tests of the checkout pass."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}  # not of an installed package
    ended = subprocess.run(pytest, cwd=checkout, env=environment, capture_output=True, check=False)
    return ended.returncode == 0


def notices(pytest: list[str], checkout: Path, place: Path, index: int) -> bool:
    """Whether a test fails with the fault of one node; if none does, print the fault."""
    path = checkout / place
    before = path.read_text()
    tree = ast.parse(before)
    node = list(bodies(tree))[index]
    faulty = mutated(node)
    assert faulty is not None
    old = " ".join(ast.unparse(node).split())
    new = " ".join(ast.unparse(faulty).split())
    line = getattr(node, "lineno", 0)
    path.write_text(ast.unparse(Replace(node, faulty).visit(tree)))
    is_missed = passes(pytest, checkout)
    path.write_text(before)
    if is_missed:
        print(f"missed  {place}:{line}: {old[:60]}  ->  {new[:60]}", flush=True)
    return not is_missed


def main() -> None:
    """Make faults in each room, run its tests, and print how many they notice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="+", help="folders of trainer/, such as data")
    parser.add_argument("--count", type=int, default=20, help="faults of a room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", help="pytest's words; default: tests/ROOM")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkout = Path(directory, "checkout")
        copy_checkout(checkout)
        for room in options.rooms:
            tests = options.tests or [f"tests/{room}"]
            pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", *tests]
            if not passes(pytest, checkout):
                sys.exit(f"{' '.join(tests)}: fail without a fault")
            chosen = faults(room, options.count, options.seed)
            noticed = sum(notices(pytest, checkout, place, index) for place, index in chosen)
            print(f"{room}: {noticed} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
