#!/usr/bin/env python
"""Draw docs/images/rooms.svg from the code: which room of the package imports which.

python scripts/draw_rooms.py
"""

from __future__ import annotations

import ast
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
ROW, CELL, NAME, TEXT, TOP = 30, 26, 120, 560, 110
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .room { font-weight: 600; }
  .said { fill: #59636e; }
  line { stroke: #d1d9e0; }
  circle { fill: #0969da; }
  .self { fill: none; stroke: #d1d9e0; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .said { fill: #9198a1; } line, .self { stroke: #3d444d; }
    circle { fill: #4493f8; }
  }
"""


def rooms() -> list[str]:
    """Return the rooms from top to bottom, in import-linter's order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [name for name in layers["layers"] if (ROOT / "trainer" / name).is_dir()]


def imports(room: str) -> set[str]:
    """Return the rooms that ``room`` imports modules of."""
    imported: set[str] = set()
    for path in (ROOT / "trainer" / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            imported |= {n.split(".")[1] for n in names if n.startswith("trainer.")}
    return imported - {room}


def purpose(room: str) -> str:
    """Return the first paragraph of the room's docstring."""
    source = (ROOT / "trainer" / room / "__init__.py").read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    return text.split("\n\n")[0].replace("\n", " ").rstrip(".")


def drawing() -> str:
    """Return the SVG picture: a row and column per room, a dot where the row imports the column."""
    names = rooms()
    left = NAME + TEXT
    width, height = left + CELL * len(names) + 20, TOP + ROW * len(names) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
        "<title>Which room imports which; dots lie to the right, imports run downwards</title>",
        f"<style>{STYLE}</style>",
    ]
    for column, name in enumerate(names):
        x = left + CELL * column + CELL // 2
        parts.append(
            f'<text transform="translate({x + 4} {TOP - 10}) rotate(-60)">{escape(name)}</text>'
        )
    for row, name in enumerate(names):
        y = TOP + ROW * row + ROW // 2
        parts.append(f'<line x1="0" x2="{width}" y1="{y + ROW // 2}" y2="{y + ROW // 2}"/>')
        parts.append(f'<text class="room" x="4" y="{y + 5}">{escape(name)}/</text>')
        parts.append(f'<text class="said" x="{NAME}" y="{y + 5}">{escape(purpose(name))}</text>')
        used = imports(name)
        for column, other in enumerate(names):
            x = left + CELL * column + CELL // 2
            if other == name:
                parts.append(f'<rect class="self" x="{x - 6}" y="{y - 6}" width="12" height="12"/>')
            elif other in used:
                parts.append(f'<circle cx="{x}" cy="{y}" r="6"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
    print(PICTURE)
