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
KEYED = {"asked", "digest", "fingerprint", "fingerprints", "identity", "key", "request", "same"}
"""Words in names of functions and variables whose values are hashed or compared."""
HASHED = {"digest", "fingerprint", "hash", "md5", "sha1", "sha256"}
"""Functions that make a key of what they are given."""
PARTS_OF_A_RUN = {"arm", "control", "phase", "run"}
"""Names of what has a configuration that is not that of the whole run, or is one."""


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
        """Return the file with this change."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def mutants(source: bytes, file: str) -> list[Mutant]:
    """Return every change to try in a file.

    Comparisons and arithmetic get another operator, ``and`` becomes ``or``, conditions are negated,
    numbers change, truth values too, keyword arguments are left out, statements that do something
    are skipped, and names become those of :data:`SWAPPED` where the file has them. A field is left
    out of what is hashed or compared (:data:`KEYED`, :data:`HASHED`), the configuration of the run
    takes the place of a phase's or a control's, and what is reset keeps its value. Left alone are
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


def _changes(
    node: ast.AST, inside: int | None = None, above: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[Any, ast.AST, int | None]]:
    """Yield nodes, their replacements, and the line of the function around them.

    ``above``: the nodes around it, the innermost last.
    """
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.pattern) or _is_said(node):
        return
    if isinstance(node, ast.keyword) and not _matters(node.arg):
        return
    for new in (
        *_replacements(node),
        *([ast.Pass()] if _skipped(node) else []),
        *_left_out(node, above),
        *_of_the_run(node, above),
        *_not_reset(node, above),
    ):
        yield node, new, inside
    tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
    for test in tests:
        if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield test, ast.UnaryOp(ast.Not(), test), inside
    path = (*above, node)
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
                yield from _changes(child, within, path)


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


def _function(above: tuple[ast.AST, ...]) -> ast.FunctionDef | None:
    """Return the innermost function around."""
    return next((node for node in reversed(above) if isinstance(node, ast.FunctionDef)), None)


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _hashes(node: ast.AST) -> bool:
    """Whether it is a call that makes a key of its arguments."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in HASHED


def _is_key(above: tuple[ast.AST, ...]) -> bool:
    """Whether what is in these nodes becomes a key, or is held against another."""
    for index in range(len(above) - 1, -1, -1):
        node = above[index]
        if _hashes(node):
            return True
        if isinstance(node, ast.comprehension) and _compares(above[index - 1]):
            return True
        if isinstance(node, ast.Subscript | ast.Lambda):
            return False
        if isinstance(node, ast.stmt):
            function = _function(above)
            names = _words(function.name) if function is not None else set()
            if isinstance(node, ast.Assign):
                targets = {one.id for one in node.targets if isinstance(one, ast.Name)}
                names |= {word for name in targets for word in _words(name)}
                if function is not None and targets & _hashed_in(function):
                    return True
            return isinstance(node, ast.Assign | ast.Return) and bool(names & KEYED)
    return False


def _compares(node: ast.AST) -> bool:
    """Whether it asks of several elements whether they are equal."""
    return isinstance(node, ast.GeneratorExp | ast.ListComp) and any(
        isinstance(one, ast.Compare) and isinstance(one.ops[0], ast.Eq | ast.NotEq)
        for one in ast.walk(node.elt)
    )


def _hashed_in(function: ast.FunctionDef) -> set[str]:
    """Return the variables of a function that it makes a key of."""
    calls = [call for call in ast.walk(function) if _hashes(call)]
    return {n.id for call in calls for n in ast.walk(call) if isinstance(n, ast.Name)}


def _without(values: list[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]


def _left_out(node: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    """Yield what is hashed or compared without one of its fields each."""
    match node:
        case ast.Dict() if _is_key(above):
            for i in range(len(node.values)):
                yield ast.Dict(_without(node.keys, i), _without(node.values, i))
        case ast.Tuple(ctx=ast.Load()) | ast.List(ctx=ast.Load()) if len(node.elts) > 1 and _is_key(
            above
        ):
            for i in range(len(node.elts)):
                yield type(node)(_without(node.elts, i), ast.Load())
        case ast.Call() if _hashes(node) and len(node.args) > 1:
            for i in range(len(node.args)):
                yield ast.Call(node.func, _without(node.args, i), node.keywords)
        case ast.BinOp(op=ast.Add() | ast.BitOr()) if any(_hashes(one) for one in above):
            yield from (node.left, node.right)
        case ast.Compare(
            left=ast.Tuple() as left,
            ops=[ast.Eq() | ast.NotEq()],
            comparators=[ast.Tuple() as right],
        ) if len(left.elts) == len(right.elts) > 1:
            for i in range(len(left.elts)):
                pair = [ast.Tuple(_without(side.elts, i), ast.Load()) for side in (left, right)]
                yield ast.Compare(pair[0], node.ops, [pair[1]])
        case ast.BoolOp(op=ast.And()):
            for i, value in enumerate(node.values):
                if isinstance(value, ast.Compare) and isinstance(value.ops[0], ast.Eq):
                    rest = _without(node.values, i)
                    yield ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]


def _of_the_run(node: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    """Yield ``config`` in place of ``phase.config`` and of a control's, where there is one."""
    match node:
        case ast.Attribute(value=ast.Name(id=part), attr="config", ctx=ast.Load()):
            pass
        case ast.Name(id="arm" | "control" as part, ctx=ast.Load()):
            pass
        case _:
            return
    functions = [one for one in above if isinstance(one, ast.FunctionDef)]
    named = {n.arg for one in functions for n in ast.walk(one.args) if isinstance(n, ast.arg)}
    named |= {
        n.id
        for one in functions
        for n in ast.walk(one)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    if part in PARTS_OF_A_RUN and "config" in named:
        yield ast.Name("config", ast.Load())


def _is_initial(value: ast.AST | None) -> bool:
    """Whether it is what a counter or a collection begins with."""
    match value:
        case ast.Constant(value=None | bool() | int() | float() | ""):
            return True
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=ast.Name(id="set" | "dict" | "list"), args=[], keywords=[]):
            return True
    return False


def _not_reset(node: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    """Yield an assignment of an initial value that leaves one of its names as it was.

    A variable that is assigned once, in a loop, gets the value the first time alone. Attributes,
    elements and ``clear()`` are statements that are skipped anyhow.
    """
    if not isinstance(node, ast.Assign):
        return
    if len(node.targets) > 1 and _is_initial(node.value):
        for i, one in enumerate(node.targets):
            if isinstance(one, ast.Name):
                continue
            yield ast.Assign(_without(node.targets, i), node.value, lineno=node.lineno)
    (target, *others), function = node.targets, _function(above)
    if others or function is None:
        return
    match target, node.value:
        case ast.Tuple(), ast.Tuple() if len(target.elts) == len(node.value.elts):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        case _:
            pairs = [(target, node.value)]
    inner = above[above.index(function) :]
    in_a_loop = any(isinstance(one, ast.For | ast.While) for one in inner)
    for i, (name, value) in enumerate(pairs):
        if not isinstance(name, ast.Name) or not _is_initial(value):
            continue
        again = any(
            isinstance(one, ast.Name)
            and isinstance(one.ctx, ast.Store)
            and one.id == name.id
            and one.lineno < node.lineno
            for one in ast.walk(function)
        )
        if again and len(pairs) == 1:
            yield ast.Pass()
        elif again:
            kept = _without(pairs, i)
            sides = [ast.Tuple([pair[side] for pair in kept], ast.Load()) for side in (0, 1)]
            yield ast.Assign([sides[0]], sides[1], lineno=node.lineno)
        elif in_a_loop and len(pairs) == 1:
            first = ast.parse(f"locals().get({name.id!r}, {ast.unparse(value)})", mode="eval").body
            yield ast.Assign([name], first, lineno=node.lineno)


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
    """Return a file whose functions report their file and line when they are called."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            told = ast.parse(f"__import__({SEEN!r}).see({f'{file}:{node.lineno}'!r})").body
            node.body[1 if ast.get_docstring(node) else 0 : 0] = told
    return ast.unparse(ast.fix_missing_locations(tree))
