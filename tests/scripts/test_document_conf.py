"""Each key of ``conf/`` says what the docstring of its field says, as ``--help`` reads it."""

from __future__ import annotations

import importlib.util
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from trainer.commands.hydra.help import _keys

ROOT = Path(__file__).resolve().parent.parent.parent
spec = importlib.util.spec_from_file_location("document", ROOT / "scripts" / "document_conf.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.mark.parametrize("name", script.FILES)
def test_comments_are_the_docstrings(name):
    schema, group = script.FILES[name]
    docs = script.all_docs(schema)
    described = {key.path: key.meaning for key in _keys(ROOT / "conf" / f"{name}.yaml")}
    known = {path: meaning for path, meaning in described.items() if group + path in docs}
    assert known
    assert known == {path: docs[group + path] for path in known}


@pytest.mark.parametrize("schema", sorted({one for one, _ in script.FILES.values()}, key=repr))
def test_every_field_has_a_docstring(schema):
    def undocumented(group):
        docs = script.field_docs(group)
        yield from (f"{group.__name__}.{f.name}" for f in fields(group) if not docs.get(f.name))
        for hint in get_type_hints(group).values():
            for inner in (hint, *get_args(hint)):
                if is_dataclass(inner) and isinstance(inner, type):
                    yield from undocumented(inner)

    assert [*undocumented(schema)] == []
