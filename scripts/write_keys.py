#!/usr/bin/env python
"""Write docs/keys.md: every key of every command, and the names that keys take.

python scripts/write_keys.py
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from trainer import config as schema
from trainer.commands import COMMANDS, CONF, compose_words
from trainer.data.sources import TEXT_SOURCES
from trainer.evaluation.methods import known_methods
from trainer.evaluation.tasks import TASKS
from trainer.positional.encodings import ENCODINGS
from trainer.runs.directory import FREE_TO_CHANGE
from trainer.workflows.analyze import kinds

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "keys.md"
INTRODUCTION = """# Keys

```sh
python -m trainer +experiment=drope_demo --cfg job
```

prints the values of one command; here are all keys with their types, defaults and meanings.
Defaults are those of a command without further words, so of `python -m trainer` with the options
that [`conf/train.yaml`](../conf/train.yaml) chooses (`model=nano`, `schedule=cosine` and so on).

- `null` is "not set"; `N` stands for a name of your own, or a place in a list.
- ↻ marks keys of a run that may have another value when it resumes. Another value of any other key
  is refused; controls may be added and left out.

The page is written by `scripts/write_keys.py` from the schema, `conf/` and what is registered."""
PARTS = {
    "A run": "",
    "Model": "model",
    "Positional encoding": "positional",
    "Text": "data",
    "Tokenizer": "tokenizer",
    "Optimizer": "optimizer",
    "Learning rate": "schedule",
    "The drop": "drop",
    "Phases": "phases",
    "Training": "trainer",
    "Devices": "strategy",
    "Dashboards": "logger",
    "Evaluation": "evaluation",
    "Tasks during training": "benchmarks",
    "Figures": "plots",
}
"""Groups of keys of a run by their headings."""
REQUESTS: dict[str, tuple[type, list[str]]] = {
    "evaluate": (schema.EvaluationRequest, ["PATH"]),
    "analyze": (schema.AnalysisRequest, ["PATH", "+analysis=all"]),
    "generate": (schema.GenerationRequest, ["PATH"]),
    "export": (schema.ExportRequest, ["PATH", "to=DIRECTORY"]),
    "plan": (schema.PlanKeys, []),
    "recalibrate": (schema.RecalibrateKeys, ["PATH"]),
}
"""Class of the own keys of each command, and words that it cannot do without."""
PLACES = {
    schema.ScheduleConfig: "schedule",
    schema.ChangeConfig: "drop",
    schema.DataConfig: "data",
    schema.EvaluationConfig: "evaluation",
    schema.PlotsConfig: "plots",
}
"""Groups whose keys other places have as well, and which the page shows once."""
HEADS = ("key", "type", "default", "meaning")


class Key(NamedTuple):
    """A key as the page shows it."""

    name: str
    kind: str
    default: str
    meaning: str

    @property
    def is_free(self) -> bool:
        """Whether it may have another value when a run resumes."""
        return any(self.name == key or self.name.startswith(f"{key}.") for key in FREE_TO_CHANGE)


@cache
def meanings(cls: type) -> dict[str, str]:
    """Return the strings below the fields of a class and of its parents, by field."""
    found: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        definition = ast.parse(inspect.getsource(base)).body[0]
        for key, text in pairwise(typing.cast(ast.ClassDef, definition).body):
            if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                words = ast.literal_eval(text.value).replace("``", "`").split()
                found[ast.unparse(key.target)] = " ".join(words)
    return found


def in_words(kind: dict[str, Any]) -> str:
    """Return the type that a JSON schema describes."""
    if "anyOf" in kind:
        return " or ".join(dict.fromkeys(in_words(option) for option in kind["anyOf"]))
    if "const" in kind or "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind.get("enum", [kind.get("const")]))
    if "$ref" in kind:
        return "mapping"
    if "prefixItems" in kind:
        return f"[{', '.join(in_words(item) for item in kind['prefixItems'])}]"
    if kind.get("type") == "array":
        item = in_words(kind["items"])
        return f"list of ({item})" if " or " in item else f"list of {item}"
    names = {"string": "text", "boolean": "true or false", "object": "mapping"}
    name = str(kind.get("type", "any"))
    return names.get(name, name) + bounds(kind)


def bounds(kind: dict[str, Any]) -> str:
    """Return the bounds of a number, such as `` from 0 to 1`` or `` > 0``."""
    if "minimum" in kind and "maximum" in kind:
        return f" from {kind['minimum']:g} to {kind['maximum']:g}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    return ",".join(f" {sign} {kind[key]:g}" for key, sign in signs.items() if key in kind)


def default_of(field: Field[Any]) -> Any:
    """Return the plain default of a field of a dataclass; ``MISSING`` if it has none."""
    if field.default_factory is not MISSING:
        return to_jsonable_python(field.default_factory())
    return field.default


def shown(value: Any) -> str:
    """Return a default as a command line has it."""
    if value in (MISSING, schema.MISSING):
        return "needed"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "`" + text.replace('"', "") + "`"


def configurations_in(hint: Any) -> list[type]:
    """Return the configurations that a type is made of."""
    if is_dataclass(hint):
        return [typing.cast(type, hint)]
    return [part for inner in typing.get_args(hint) for part in configurations_in(inner)]


def keys_of(
    cls: type, values: dict[str, Any], prefix: str = "", elsewhere: Collection[type] = ()
) -> Iterator[Key]:
    """Yield the keys of a configuration and of those in it.

    ``values``: effective defaults; others are those of the class. ``elsewhere``: configurations
    whose keys stand at another place.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint = hints[field.name]
        name = f"{prefix}{field.name}"
        value = values.get(field.name, default_of(field))
        meaning = meanings(cls).get(field.name, "")
        inner = next(iter(configurations_in(hint)), None)
        if inner is hint and inner not in elsewhere:
            yield from keys_of(inner, value, f"{name}.", elsewhere)
            continue
        if inner in PLACES:
            default = "" if inner is hint else shown(value)
            yield Key(name, f"as `{PLACES[inner]}`", default, meaning)
            continue
        yield Key(name, in_words(TypeAdapter(hint).json_schema()), shown(value), meaning)
        if inner is schema.PhaseConfig or name == "evaluation.weighted_rope":
            yield from keys_of(inner, {}, f"{name}.N.")
        elif inner is schema.RescaleConfig:
            yield from keys_of(inner, {}, f"{name}.")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_sections() -> Iterator[str]:
    """Yield the keys of a run, group by group."""
    values = compose_words([]).values | {"run_dir": "runs/${name}"}
    keys = [*keys_of(schema.RunConfig, values)]
    others = {*PARTS.values()}
    for heading, group in PARTS.items():
        rows = []
        for key in keys:
            first = key.name.partition(".")[0]
            if first == group or (not group and first not in others):
                marked = f"`{key.name}` ↻" if key.is_free else f"`{key.name}`"
                rows.append([marked, *key[1:]])
        yield f"## {heading}\n\n{table(HEADS, rows)}"


def command_sections() -> Iterator[str]:
    """Yield the keys that commands have beside, or in place of, those of a run."""
    for name, (cls, words) in REQUESTS.items():
        values = compose_words(words, name).values
        if "PATH" in words:
            values["checkpoint"] = schema.MISSING
        if name == "export":
            values["to"] = schema.MISSING
        rows = [[f"`{key[0]}`", *key[1:]] for key in keys_of(cls, values, elsewhere=PLACES)]
        about = (inspect.getdoc(COMMANDS[name]) or "").partition("\n")[0]
        yield f"## `{name}`\n\n{about}\n\n{table(HEADS, rows)}"


def parameters(encoding: Callable[..., Any]) -> str:
    """Return the keys of an encoding with their defaults."""
    keys = [p for p in inspect.signature(encoding).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return ", ".join(f"`{key.name}={json.dumps(key.default)}`" for key in keys)


def summary(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring without Sphinx's roles."""
    text = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("``", "`")
    return re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", " ".join(text.split()))


def names(values: Iterable[str]) -> str:
    """Return names with commas between them."""
    return ", ".join(f"`{value}`" for value in values)


def name_sections() -> Iterator[str]:
    """Yield the names that keys take: of encodings, methods, tasks, options and extras."""
    encodings = [[f"`{name}`", parameters(f), summary(f)] for name, f in ENCODINGS.items()]
    yield f"## Encodings\n\n{table(('name', 'keys', 'frequencies'), encodings)}"
    methods = []
    for name, method in sorted(known_methods().items()):
        methods.append([f"`{name}`", method.title, "yes" if method.is_fitted else ""])
    heads = ("name", "in tables", "fitted on text")
    yield f"## Methods\n\n[What they do](evaluation.md#methods).\n\n{table(heads, methods)}"
    rows = [
        [
            "`evaluation.tasks`",
            names(sorted(TASKS)),
            "[evaluation](evaluation.md#tasks)",
        ],
        ["`analysis.kind`", names(kinds()), "[geometry](geometry.md)"],
        ["`data.source`", names(TEXT_SOURCES), "[data](data.md#prepare)"],
    ]
    yield f"## Tasks, analyses, sources\n\n{table(('key', 'names', 'page'), rows)}"
    options = []
    for group in sorted(path for path in CONF.iterdir() if path.is_dir()):
        options.append([f"`{group.name}`", names(sorted(file.stem for file in group.iterdir()))])
    yield f"## Options of groups\n\n{table(('group', 'options'), options)}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [[f"`{e}`", names(p)] for e, p in project["optional-dependencies"].items()]
    yield f"## Extras\n\n{table(('name', 'packages'), extras)}"


def page() -> str:
    """Return the whole page."""
    sections = [INTRODUCTION, *run_sections(), *command_sections(), *name_sections()]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
