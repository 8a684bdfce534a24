"""Feed damaged and invented checkpoint indexes to the reader.

    python scripts/fuzz_checkpoints.py --minutes 60

The index of a checkpoint is a pickle. Every round makes one: a valid index with bytes changed,
removed or repeated; its opcodes mixed with others; or a pickle program that names and calls classes
of the index and functions whose calls would be noticed. The reader must return an index or refuse
it with a one-line message. It must run nothing, open no file but the index, change no class and
take little memory. Prints the number of indexes by kind and outcome.
"""

from __future__ import annotations

from trainer import __version__  # noqa: F401 - before torch, which reads how threads wait

# isort: split
import argparse
import codecs
import pickletools
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from trainer.common.errors import UserError
from trainer.runs.index import CLASSES, DTYPES, FILE, read_index

MOST = 256 << 20
"""Largest number of bytes that reading may take."""
NAMES = (
    *sorted(CLASSES),
    *sorted(DTYPES),
    *(("os", name) for name in ("system", "mkdir", "putenv", "open")),
    *(("posix", "mkdir"), ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr")),
    *(("builtins", "setattr"), ("builtins", "__import__"), ("subprocess", "Popen")),
    *((module, "os.system") for module, _ in sorted(CLASSES)),
    *((module, f"{name}.__init__") for module, name in sorted(CLASSES)),
    *((module, f"{name}.__class__.__base__") for module, name in sorted(CLASSES)),
    *(("torch", "load"), ("torch", "Size.count"), ("torch.hub", "load"), ("pickle", "loads")),
    *(("torch.serialization", "os"), ("torch.serialization", "pickle"), ("copyreg", "_extension")),
)
"""Modules and names that a program may ask for; most do not belong in an index."""


def sound_index(directory: Path) -> bytes:
    """Write a small checkpoint with DCP and return its index."""
    tensors = {f"model.{i}.weight": torch.ones(i + 1, 2) for i in range(3)}
    dcp.save(tensors | {"rng": torch.get_rng_state()}, checkpoint_id=directory, no_dist=True)
    return (directory / FILE).read_bytes()


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Change, remove, insert or repeat a few bytes."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        at, length = draw.randrange(len(changed) or 1), draw.randint(1, 40)
        match draw.randrange(4):
            case 0 if changed:
                changed[at] = draw.randrange(256)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = draw.randbytes(length)
            case _:
                changed[at:at] = changed[at : at + length]
    return bytes(changed)


def mixed_opcodes(data: bytes, draw: random.Random) -> bytes:
    """Replace and insert opcodes: others of the index, or steps of a program."""
    places = [place for _, _, place in pickletools.genops(data)] + [len(data)]
    parts = [data[a:b] for a, b in pairwise(places)]
    for _ in range(draw.randint(1, 12)):
        at = draw.randrange(len(parts))
        match draw.randrange(4):
            case 0:
                parts[at] = draw.choice(parts)
            case 1:
                parts.insert(at, draw.choice(parts))
            case 2:
                parts[at] = step(draw)
            case _:
                parts.insert(at, step(draw))
    return b"".join(parts)


def program(data: bytes, draw: random.Random) -> bytes:
    """Make a pickle program that names many objects and calls them."""
    steps = [step(draw) for _ in range(draw.randint(1, 40))]
    return b"\x80" + bytes([draw.choice((0, 2, 3, 4, 5))]) + b"".join(steps) + b"."


def step(draw: random.Random) -> bytes:
    """Return a few opcodes that look up a name, push a value or make a call."""
    module, name = draw.choice(NAMES)
    word = draw.choice(("harm", "a", "__setstate__", "__class__", module, name)).encode()
    return draw.choice(
        (
            b"c" + module.encode() + b"\n" + name.encode() + b"\n",  # GLOBAL
            text(module.encode()) + text(name.encode()) + b"\x93",  # STACK_GLOBAL
            b"(i" + module.encode() + b"\n" + name.encode() + b"\n",  # INST
            b"(c" + module.encode() + b"\n" + name.encode() + b"\n" + text(word) + b"o",  # OBJ
            text(word) + b"\x85R",  # call with one argument
            b")R",
            b")\x81",  # NEWOBJ
            b")}\x92",  # NEWOBJ_EX
            b"}" + text(word) + text(word) + b"sb",  # BUILD from a dictionary
            b"N}" + text(word) + b"K\x01s\x86b",  # BUILD with slots, which sets attributes
            text(word),
            b"K\x01",
            *(bytes([opcode]) for opcode in b"N]})(ldt012ueasbRQ\x81\x94\x85\x86"),
            b"h\x00",
            b"\x82\x01",
            b"r" + (1 << draw.randint(0, 31)).to_bytes(4, "little"),  # LONG_BINPUT
            b"\x8a\xff" + draw.randbytes(255),  # a long number
            b"\x8e" + (1 << draw.randint(0, 62)).to_bytes(8, "little"),  # without its bytes
        )
    )


def text(word: bytes) -> bytes:
    """Return the opcode for a string."""
    return b"\x8c" + bytes([len(word)]) + word


KINDS = {"bytes": changed_bytes, "opcodes": mixed_opcodes, "programs": program}


def memory() -> int:
    """Return the peak memory of the process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Watch:
    """Record of forbidden actions: opened files, started processes, imported modules."""

    HARMLESS = frozenset({"pickle.find_class", "object.__getattr__", "compile", "code.__new__"})

    def __init__(self) -> None:
        self.on, self.seen = False, []
        for encoding in ("raw-unicode-escape", "unicode-escape", "latin-1", "ascii", "utf-8"):
            codecs.lookup(encoding)  # import it before imports are watched
        sys.addaudithook(self.look)

    def look(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record an audit event of the interpreter."""
        if not self.on or event in self.HARMLESS:
            return
        if event == "open" and str(arguments[0]).endswith(FILE):
            return
        self.seen.append((event, arguments))


def shape_of_classes() -> dict[str, tuple[str, ...]]:
    """Return the attributes of the index's classes, which no index may change."""
    from torch.distributed.checkpoint import metadata

    kinds = [value for value in vars(metadata).values() if isinstance(value, type)]
    return {f"{kind.__module__}.{kind.__qualname__}": tuple(vars(kind)) for kind in kinds}


def fuzz(seconds: float, seed: int, rounds: int | None = None) -> Counter[tuple[str, str]]:
    """Return the number of rounds by kind of index and outcome, ``read`` or ``refused``.

    Raises:
        AssertionError: the reader did something forbidden; the message holds the index.
    """
    draw, counts = random.Random(seed), Counter()
    watch = Watch()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place, "step-000001")
        data, end = sound_index(directory), time.monotonic() + seconds
        before, held = shape_of_classes(), memory()
        while sum(counts.values()) < rounds if rounds else time.monotonic() < end:
            kind = draw.choice(list(KINDS))
            made = KINDS[kind](data, draw)
            (directory / FILE).write_bytes(made)
            watch.seen.clear()
            watch.on = True
            try:
                read_index(directory)
                outcome = "read"
                message = ""
            except UserError as error:
                outcome, message = "refused", str(error)
            finally:
                watch.on = False
            assert "\n" not in message, (message, made)
            assert not watch.seen, (watch.seen, made)
            assert (more := memory() - held) < MOST, (more, made)
            counts[kind, outcome] += 1
        after = shape_of_classes()
        assert after == before, [{*after[n]} ^ {*before[n]} for n in after if after[n] != before[n]]
    return counts


def main() -> None:
    """Fuzz for the requested minutes, and print the number of indexes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = fuzz(60 * options.minutes, options.seed)
    for (kind, outcome), number in sorted(counts.items()):
        print(f"{kind:10} {outcome:8} {number:12,}")
    print(f"{'all':10} {'':8} {sum(counts.values()):12,}  nothing was run, opened or changed")


if __name__ == "__main__":
    main()
