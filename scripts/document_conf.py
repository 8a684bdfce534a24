"""Write the comments of ``conf/`` from the docstrings of the configuration's fields.

python scripts/document_conf.py rewrites the files; --check only lists those that differ.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args, get_type_hints

from trainer.commands.plan import PlanKeys
from trainer.commands.prepare import PrepareKeys
from trainer.commands.recalibrate import RecalibrateKeys
from trainer.commands.slurm import Slurm
from trainer.runs.config import RunConfig
from trainer.workflows.requests import (
    AnalysisRequest,
    CompareRequest,
    EvaluationRequest,
    ExportRequest,
    GenerationRequest,
    HarnessRequest,
    InspectionRequest,
    MultipleChoiceRequest,
    WatchRequest,
)

CONF = Path(__file__).resolve().parent.parent / "conf"
WIDTH, COLUMN = 100, 34
KEY = re.compile(r"( *)([a-z]\w*):(?: |$)")
FILES: dict[str, tuple[type[Any], str]] = {
    "config": (RunConfig, ""),
    "model/nano": (RunConfig, "model."),
    "positional/rope": (RunConfig, "positional."),
    "data/stdlib_docs": (RunConfig, "data."),
    "tokenizer/bpe": (RunConfig, "tokenizer."),
    "optimizer/adamw": (RunConfig, "optimizer."),
    "schedule/cosine": (RunConfig, "schedule."),
    "drop/never": (RunConfig, "drop."),
    "trainer/default": (RunConfig, "trainer."),
    "strategy/single": (RunConfig, "strategy."),
    "logger/files": (RunConfig, "logger."),
    "monitor/default": (RunConfig, "monitor."),
    "evaluation/default": (RunConfig, "evaluation."),
    "methods/default": (RunConfig, "evaluation."),
    "evaluation/multiple_choice": (MultipleChoiceRequest, "evaluation."),
    "evaluation/harness": (HarnessRequest, "evaluation."),
    "analysis/all": (AnalysisRequest, "analysis."),
    "slurm/default": (Slurm, "slurm."),
    "prepare/default": (PrepareKeys, "prepare."),
    "evaluate": (EvaluationRequest, ""),
    "analyze": (AnalysisRequest, ""),
    "export": (ExportRequest, ""),
    "generate": (GenerationRequest, ""),
    "compare": (CompareRequest, ""),
    "watch": (WatchRequest, ""),
    "inspect": (InspectionRequest, ""),
    "prepare": (PrepareKeys, ""),
    "plan": (PlanKeys, ""),
    "recalibrate": (RecalibrateKeys, ""),
}
"""Files with commented keys: the dataclass and the group that their keys belong to."""


def field_docs(schema: type[Any]) -> dict[str, str]:
    """Return the docstring of every field of a dataclass and its base classes."""
    docs: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def all_docs(schema: type[Any], path: str = "") -> dict[str, str]:
    """Return the docstrings of fields at any depth by dotted key."""
    docs_by_key = {}
    docs = field_docs(schema)
    for name, hint in get_type_hints(schema).items():
        if name in docs:
            docs_by_key[path + name] = docs[name]
        for group in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(group) and isinstance(group, type):
                docs_by_key |= all_docs(group, f"{path}{name}.")
    return docs_by_key


def commented(text: str, docs: dict[str, str]) -> str:
    """Return a YAML file with each key's comment of ``docs`` beside it, or above a long key."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    out, parents = lines[:first], [(-1, "")]
    body = [line for line in lines[first:] if not line.lstrip().startswith("#")]
    codes = [_code(line) for line in body]
    column = max((len(code) for code in codes if len(code) + 2 <= COLUMN), default=0) + 2
    for code in codes:
        if (match := KEY.match(code)) is None:
            out.append(code)
            continue
        depth = len(match[1])
        parents = [parent for parent in parents if parent[0] < depth] + [(depth, match[2])]
        meaning = docs.get(".".join(name for _, name in parents[1:]))
        if meaning is None:
            out.append(code)
        elif len(code) + 2 <= column:
            rows = textwrap.wrap(meaning, WIDTH - column - 2, break_on_hyphens=False)
            out.append(f"{code.ljust(column)}# {rows[0]}")
            out += [f"{' ' * column}# {row}" for row in rows[1:]]
        else:
            rows = textwrap.wrap(meaning, WIDTH - depth - 2, break_on_hyphens=False)
            out += [*(f"{' ' * depth}# {row}" for row in rows), code]
    return "\n".join(out) + "\n"


def _code(line: str) -> str:
    """Return a line without its comment."""
    return re.sub(r"(^|\s+)#.*$", "", line).rstrip()


def main() -> None:
    """Rewrite the files, or list those that differ."""
    differing = []
    for name, (schema, group) in FILES.items():
        path = CONF / f"{name}.yaml"
        docs = all_docs(schema)
        group_docs = {
            key.removeprefix(group): doc for key, doc in docs.items() if key.startswith(group)
        }
        text = commented(path.read_text(), group_docs)
        if text != path.read_text():
            differing.append(str(path.relative_to(CONF.parent)))
            if "--check" not in sys.argv:
                path.write_text(text)
    print(*differing, sep="\n")
    if differing and "--check" in sys.argv:
        sys.exit("Run python scripts/document_conf.py.")


if __name__ == "__main__":
    main()
