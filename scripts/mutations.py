"""Small changes that ``mutate.py`` makes to a file."""

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
"""Names that are easily confused, each with the other."""

LOOKS = {
    "alpha", "aspect", "capsize", "capthick", "dpi", "elinewidth", "fontsize", "fraction",
    "frameon", "handlelength", "handletextpad", "labelsize", "linewidth", "linewidths",
    "markeredgewidth", "markersize", "pad", "s", "titlesize", "zorder",
}  # fmt: skip
"""Keywords of figures that set sizes, spacing, opacity or stacking order: a matter of taste."""
KEYED = {"asked", "digest", "fingerprint", "fingerprints", "identity", "key", "request", "same"}
"""Words in names of functions and variables whose values are hashed or compared."""
HASHED = {"digest", "fingerprint", "hash", "md5", "sha1", "sha256"}
"""Functions that compute a key from their arguments."""
PARTS_OF_A_RUN = {"arm", "control", "phase", "run"}
"""Variables that are a configuration other than the run's, or have one."""

KINDS = "local", "field", "phase", "reset"
"""``local``: an operator, number, name, condition, keyword or statement changes. ``field``: one is
left out of a key. ``phase``: the run's configuration takes its place. ``reset``: a variable keeps
its value."""


@dataclass(frozen=True)
class Mutant:
    """A change to ``file``: ``text`` replaces the bytes from ``begin`` to ``end``.

    ``change`` describes it. ``function``: the line of the enclosing function, or None. ``kind``:
    one of :data:`KINDS`.
    """

    file: str
    line: int
    begin: int
    end: int
    text: str
    change: str
    function: int | None
    kind: str

    def applied(self, source: bytes) -> bytes:
        """Return the file with this change."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def mutants(source: bytes, file: str) -> list[Mutant]:
    """Return every change to try in a file.

    Comparisons and arithmetic get another operator, ``and`` and ``or`` are exchanged, conditions
    are negated, numbers and booleans change, keyword arguments are left out, statements with an
    effect are skipped, and names are exchanged by :data:`SWAPPED` if the file has the other one. A
    field is left out of hashed or compared values (:data:`KEYED`, :data:`HASHED`), the run's
    configuration replaces that of a phase or a control, and variables are not reset.

    Annotations, decorators, docstrings and messages (f-strings, raised or logged text) do not
    change. Neither do numbers that a module or class names: defaults, and chunk sizes, which affect
    only speed. ``strict`` of ``zip``, which only checks, and :data:`LOOKS` also stay, as keywords
    and as keys of dictionaries.
    """
    tree, starts = ast.parse(source), [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    words |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | set(dir(builtins))
    collected = []
    for node, new, function, kind in _changes(tree):
        if isinstance(new, ast.Name | ast.Attribute) and _word(new) not in words:
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
        change = f"{_short(ast.unparse(node))}  ->  {_short(ast.unparse(new))}"
        collected.append(Mutant(file, node.lineno, begin, end, text, change, function, kind))
    return collected


def _word(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _short(text: str) -> str:
    return text if len(text) <= 90 else f"{text[:87]}..."


def _changes(
    node: ast.AST, inside: int | None = None, above: tuple[ast.AST, ...] = ()
) -> Iterator[tuple[Any, ast.AST, int | None, str]]:
    """Yield nodes, their replacements, the line of the enclosing function, and the kind.

    ``above``: the enclosing nodes, innermost last.
    """
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.pattern) or _is_message(node):
        return
    if isinstance(node, ast.keyword) and not _matters(node.arg):
        return
    skipped = [ast.Pass()] if _skipped(node) else []
    resets = _resets(node)
    by_kind = {
        "local": [*_replacements(node), *([] if resets else skipped)],
        "field": _without_fields(node, above),
        "phase": _with_run_config(node, above),
        "reset": [*_not_reset(node, above), *(skipped if resets else [])],
    }
    for kind, replacements in by_kind.items():
        yield from ((node, new, inside, kind) for new in replacements)
    tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
    for test in tests:
        if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield test, ast.UnaryOp(ast.Not(), test), inside, "local"
    path = (*above, node)
    if isinstance(node, ast.Dict):
        pairs = [pair for pair in zip(node.keys, node.values, strict=True) if _matters(pair[0])]
        node = ast.Dict([key for key, _ in pairs], [value for _, value in pairs])
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
    """Whether the value of a keyword or dictionary key may change."""
    if isinstance(name, ast.Constant):
        name = str(name.value)
    return not isinstance(name, str) or name.rpartition(".")[2] not in {"strict", *LOOKS}


def _is_message(node: ast.AST) -> bool:
    """Whether a node is a docstring, or logs or prints."""
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
    return called.split(".")[0] in ("log", "logging", "warnings", "print", "console")


def _is_size(value: Any) -> bool:
    """Whether a value is a number or an expression of numbers alone."""
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
                    remaining = [keyword for keyword in node.keywords if keyword is not left_out]
                    yield ast.Call(node.func, node.args, remaining)


def _function(above: tuple[ast.AST, ...]) -> ast.FunctionDef | None:
    """Return the innermost enclosing function."""
    return next((node for node in reversed(above) if isinstance(node, ast.FunctionDef)), None)


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _hashes(node: ast.AST) -> bool:
    """Whether a node is a call that computes a key from its arguments."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in HASHED


def _is_key(above: tuple[ast.AST, ...]) -> bool:
    """Whether a value inside these nodes becomes part of a key or a comparison."""
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
                targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
                names |= {word for name in targets for word in _words(name)}
                if function is not None and targets & _hashed_in(function):
                    return True
            return isinstance(node, ast.Assign | ast.Return) and bool(names & KEYED)
    return False


def _compares(node: ast.AST) -> bool:
    """Whether a node tests several elements for equality."""
    return isinstance(node, ast.GeneratorExp | ast.ListComp) and any(
        isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.Eq | ast.NotEq)
        for part in ast.walk(node.elt)
    )


def _hashed_in(function: ast.FunctionDef) -> set[str]:
    """Return the variables that a function computes keys from."""
    calls = [call for call in ast.walk(function) if _hashes(call)]
    return {n.id for call in calls for n in ast.walk(call) if isinstance(n, ast.Name)}


def _without(values: list[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]


def _without_fields(node: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    """Yield a hashed or compared value without each of its fields in turn."""
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
        case ast.BinOp(op=ast.Add() | ast.BitOr()) if any(_hashes(outer) for outer in above):
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


def _with_run_config(node: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    """Yield ``config`` in place of a phase's or a control's configuration."""
    match node:
        case ast.Attribute(value=ast.Name(id=part), attr="config", ctx=ast.Load()):
            pass
        case ast.Name(id="arm" | "control" as part, ctx=ast.Load()):
            pass
        case _:
            return
    functions = [function for function in above if isinstance(function, ast.FunctionDef)]
    named = {
        n.arg for function in functions for n in ast.walk(function.args) if isinstance(n, ast.arg)
    }
    named |= {
        n.id
        for function in functions
        for n in ast.walk(function)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    if part in PARTS_OF_A_RUN and "config" in named:
        yield ast.Name("config", ast.Load())


def _is_initial(value: ast.AST | None) -> bool:
    """Whether a value is the initial one of a counter or collection."""
    match value:
        case ast.Constant(value=None | bool() | int() | float() | ""):
            return True
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=ast.Name(id="set" | "dict" | "list"), args=[], keywords=[]):
            return True
    return False


def _not_reset(node: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[ast.AST]:
    """Yield an assignment of an initial value that skips one of its targets.

    A variable that is assigned once, in a loop, gets the value only the first time. Assignments to
    attributes and elements, and ``clear()``, are skipped by :func:`_skipped`.
    """
    if not isinstance(node, ast.Assign):
        return
    if len(node.targets) > 1 and _is_initial(node.value):
        for i, target in enumerate(node.targets):
            if isinstance(target, ast.Name):
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
    in_a_loop = any(isinstance(outer, ast.For | ast.While) for outer in inner)
    for i, (name, value) in enumerate(pairs):
        if not isinstance(name, ast.Name) or not _is_initial(value):
            continue
        again = any(
            isinstance(earlier, ast.Name)
            and isinstance(earlier.ctx, ast.Store)
            and earlier.id == name.id
            and earlier.lineno < node.lineno
            for earlier in ast.walk(function)
        )
        if again and len(pairs) == 1:
            yield ast.Pass()
        elif again:
            remaining = _without(pairs, i)
            sides = [ast.Tuple([pair[side] for pair in remaining], ast.Load()) for side in (0, 1)]
            yield ast.Assign([sides[0]], sides[1], lineno=node.lineno)
        elif in_a_loop and len(pairs) == 1:
            first = ast.parse(f"locals().get({name.id!r}, {ast.unparse(value)})", mode="eval").body
            yield ast.Assign([name], first, lineno=node.lineno)


def _skipped(node: ast.AST) -> bool:
    """Whether a node is a statement with an effect that defines no name."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return False


def _resets(node: ast.AST) -> bool:
    """Whether a statement gives an attribute or element its initial value, or clears a
    collection."""
    match node:
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return _is_initial(node.value)
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="clear"))):
            return True
    return False


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


SEEN = "unrope_seen"
"""Module whose ``see`` marked functions call when they begin."""
SEEN_TO = "UNROPE_SEEN"
"""Environment variable that names the file in which ``see`` records them."""
SOURCE_OF_SEEN = f'''"""Record which functions are called, once per process and file."""

import os

recorded = set()


def see(place):
    to = os.environ.get({SEEN_TO!r})
    if to and (seen := (os.getpid(), to, place)) not in recorded:
        recorded.add(seen)
        with open(to, "a") as file:
            file.write(place + "\\n")
'''


def marked(source: bytes, file: str) -> str:
    """Return a file whose functions report their file and line when they are called."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            call = ast.parse(f"__import__({SEEN!r}).see({f'{file}:{node.lineno}'!r})").body
            node.body[1 if ast.get_docstring(node) else 0 : 0] = call
    return ast.unparse(ast.fix_missing_locations(tree))
