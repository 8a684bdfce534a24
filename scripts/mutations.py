"""The small changes that ``mutate.py`` makes to a file."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}  # fmt: skip
PAIRS = (
    ("train", "validation"), ("validation", "test"), ("test", "validation"), ("query", "key"),
    ("min", "max"), ("floor", "ceil"), ("any", "all"), ("cos", "sin"), ("q", "k"), ("low", "high"),
    ("before", "after"), ("first", "last"), ("argmin", "argmax"), ("amin", "amax"),
    ("rows", "columns"), ("better", "worse"), ("short", "long"), ("start", "end"),
)  # fmt: skip
SWAPPED = {name: other for a, b in reversed(PAIRS) for name, other in ((b, a), (a, b))}
"""Names of what is easily taken for each other."""


LOOKS = {
    "alpha", "aspect", "capsize", "capthick", "dpi", "elinewidth", "fontsize", "fraction",
    "frameon", "handlelength", "handletextpad", "labelsize", "linewidth", "linewidths",
    "markeredgewidth", "markersize", "pad", "s", "titlesize", "zorder",
}  # fmt: skip
"""Keywords of figures that say how large, how far apart, how opaque or on top of what something is
drawn: a matter of taste."""


@dataclass(frozen=True)
class Mutant:
    """``file`` with the bytes from ``begin`` to ``end`` replaced; ``change``: said in words;
    ``function``: the line of the one around it, None where there is none."""

    file: str
    line: int
    begin: int
    end: int
    text: str
    change: str
    function: int | None

    def applied(self, source: bytes) -> bytes:
        """The file as it is with this change."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def mutants(source: bytes, file: str) -> list[Mutant]:
    """Every change to a file that is tried.

    Comparisons and arithmetic get another operator, ``and`` becomes ``or``, conditions are negated,
    numbers change, truth values too, keyword arguments are left out, statements that do something
    are skipped, and names become those of :data:`SWAPPED` where the file has them. Left alone are
    annotations, decorators, docstrings, messages (f-strings, what is raised or logged), and numbers
    that a module or a class gives a name: sizes of chunks, which change nothing but the time, and
    defaults. ``strict`` of ``zip`` stays too, which only watches, and so do :data:`LOOKS`, as
    keywords and as keys of dictionaries.
    """
    tree, starts = ast.parse(source), [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    words |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | set(dir(builtins))
    found = []
    for node, new, function in _changes(tree):
        if isinstance(new, ast.Name | ast.Attribute) and _word(new) not in words:
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
        said = f"{_short(ast.unparse(node))}  ->  {_short(ast.unparse(new))}"
        found.append(Mutant(file, node.lineno, begin, end, text, said, function))
    return found


def _word(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _short(text: str) -> str:
    return text if len(text) <= 90 else f"{text[:87]}..."


def _changes(node: ast.AST, inside: int | None = None) -> Iterator[tuple[Any, ast.AST, int | None]]:
    """A node, what takes its place, and the line of the function around it."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.pattern) or _is_said(node):
        return
    if isinstance(node, ast.keyword) and not _matters(node.arg):
        return
    for new in [*_replacements(node), *([ast.Pass()] if _skipped(node) else [])]:
        yield node, new, inside
    tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
    for test in tests:
        if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield test, ast.UnaryOp(ast.Not(), test), inside
    if isinstance(node, ast.Dict):
        kept = [pair for pair in zip(node.keys, node.values, strict=True) if _matters(pair[0])]
        node = ast.Dict([key for key, _ in kept], [value for _, value in kept])
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or (
            isinstance(node, ast.Raise) and name == "exc"
        ):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) and inside is None and _is_size(value):
            continue
        within = node.lineno if name == "body" and isinstance(node, ast.FunctionDef) else inside
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child, within)


def _matters(name: str | ast.expr | None) -> bool:
    """Whether a keyword, or a dictionary's key, is one whose value is changed."""
    if isinstance(name, ast.Constant):
        name = str(name.value)
    return not isinstance(name, str) or name.rpartition(".")[2] not in {"strict", *LOOKS}


def _is_said(node: ast.AST) -> bool:
    """Whether it is a docstring, or logs or prints something."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
    return called.split(".")[0] in ("log", "logging", "warnings", "print", "console")


def _is_size(value: Any) -> bool:
    """Whether it is a number alone, or computed of numbers alone."""
    if isinstance(value, ast.BinOp):
        return _is_size(value.left) and _is_size(value.right)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARED:
            yield ast.Compare(node.left, [COMPARED[type(operator)]()], node.comparators)
        case ast.BinOp() if type(node.op) in COMPUTED and not _is_text(node):
            yield ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
        case ast.Constant(value=float()):
            yield ast.Constant(node.value * 1.5 if node.value else 1.0)
        case ast.Name(ctx=ast.Load()) if node.id in SWAPPED:
            yield ast.Name(SWAPPED[node.id], ast.Load())
        case ast.Attribute(ctx=ast.Load()) if node.attr in SWAPPED:
            yield ast.Attribute(node.value, SWAPPED[node.attr], ast.Load())
        case ast.Call():
            for left_out in node.keywords:
                if left_out.arg is not None and _matters(left_out.arg):
                    kept = [keyword for keyword in node.keywords if keyword is not left_out]
                    yield ast.Call(node.func, node.args, kept)


def _skipped(node: ast.AST) -> bool:
    """Whether it is a statement that does something, and names nothing that is read later."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return False


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


SEEN = "unrope_seen"
"""The module of which marked functions call ``see`` when they begin."""
SEEN_TO = "UNROPE_SEEN"
"""The environment variable that names the file where it notes them."""
SOURCE_OF_SEEN = f'''"""Notes once for each process and file which functions are called."""

import os

told = set()


def see(place):
    to = os.environ.get({SEEN_TO!r})
    if to and (seen := (os.getpid(), to, place)) not in told:
        told.add(seen)
        with open(to, "a") as file:
            file.write(place + "\\n")
'''


def marked(source: bytes, file: str) -> str:
    """A file whose functions tell, when they are called, of which file and line they are."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            told = ast.parse(f"__import__({SEEN!r}).see({f'{file}:{node.lineno}'!r})").body
            node.body[1 if ast.get_docstring(node) else 0 : 0] = told
    return ast.unparse(ast.fix_missing_locations(tree))
