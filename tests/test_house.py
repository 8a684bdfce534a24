"""The structure of the package: imports run downwards, and two rooms keep their libraries."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_imports_run_downwards_only():
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_type_ignore_names_its_error_and_a_reason():
    lines = [
        f"{path}: {line}"
        for path in (ROOT / "trainer").rglob("*.py")
        for line in path.read_text().splitlines()
        if "type: ignore" in line
    ]
    assert lines
    reasoned = re.compile(r"# type: ignore\[[a-z-]+\]  # \w+")
    assert [line for line in lines if not reasoned.search(line)] == []


ALONE = """
import os, sys, torch  # takes longer than the rest, so they are forked with it
for modules in sys.argv[1:]:
    if not os.fork():
        for module in modules.split():
            __import__(module)
        os._exit("lightning" in sys.modules)
    if os.wait()[1]:
        sys.exit(f"{modules} import Lightning, or fail")
"""


def test_rooms_and_what_does_not_train_import_without_the_training_stack():
    """Each room can be used on its own; Lightning takes twice as long to import as all else."""
    rooms = [
        "positional",
        "model",
        "generation",
        "interchange",
        "data",
        "recalibration",
        "report",
        "runs",
    ]
    modules = [
        [
            f"trainer.{room}.{path.stem}"
            for path in (ROOT / "trainer" / room).glob("*.py")
            if path.stem != "__init__"
        ]
        for room in rooms
    ]
    jobs = ("analyze", "evaluate", "benchmarks", "export", "generate", "remarks")
    modules.append([f"trainer.workflows.{job}" for job in jobs])
    command = [sys.executable, "-c", ALONE, *map(" ".join, modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


USED_BY_THE_PACKAGE = [
    extra
    for extra in ("flash", "fp8", "gguf", "export", "eval")
    if extra
    in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
]
"""Extras that trainer/ itself imports; the others serve Lightning, Hydra or scripts/."""


def test_every_dependency_is_used_and_every_import_is_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {
        "hydra": "hydra-core",
        "yaml": "pyyaml",
        "flash_attn": "flash-attn",
        "lm_eval": "lm-eval",
    }
    imported = set()
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    third_party = {
        names.get(name, name)
        for name in imported - set(sys.stdlib_module_names) - {"trainer", "omegaconf"}
    }
    declared = {
        requirement.split(">")[0].split("=")[0]
        for extra in (project["dependencies"], *(extras[name] for name in USED_BY_THE_PACKAGE))
        for requirement in extra
    }
    assert third_party == declared


def test_no_two_files_import_each_other_in_a_circle():
    """Not even for types, where one would otherwise have to be read before the other."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "trainer").rglob("*.py")
    }
    imports = {name: imported_modules(path, modules) - {name} for name, path in modules.items()}
    circles = []

    def visit(name, trail):
        if name in trail:
            circles.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            done.add(name)
            for other in sorted(imports[name]):
                visit(other, [*trail, name])

    done = set()
    for name in sorted(imports):
        visit(name, [])
    assert not circles


def imported_modules(path, modules):
    offences = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            offences |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            offences |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return offences & modules.keys()


def test_the_picture_of_the_rooms_is_that_of_the_imports():
    spec = importlib.util.spec_from_file_location("draw_rooms", ROOT / "scripts" / "draw_rooms.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PICTURE.read_text() == script.drawing(), "run python scripts/draw_rooms.py"


STRING_METHODS = {
    *("partition", "rpartition", "replace", "removeprefix", "removesuffix"),
    *("startswith", "endswith", "split", "rsplit"),
}
MESSAGES = re.compile(
    r"str\((error|problem|p)\)|(\w+\.)?(problem|problems\[.*\]|message|hint)|error\.problems.*"
)


def test_no_message_is_taken_apart():
    """Problems are values: their key, hint and kind are fields, and nobody reads their text."""
    offences = []
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_message = MESSAGES.fullmatch(ast.unparse(node.func.value))
                if is_message and node.args and node.func.attr in STRING_METHODS:
                    offences.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                if re.fullmatch(r"(\w+\.)?(message|hint)", ast.unparse(node.comparators[0])):
                    offences.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert offences == []


VAGUE = {
    *("around", "found", "given", "here", "kept", "of"),
    *("one", "own", "said", "told", "what"),
}
STORED = [
    "trainer/evaluation/results.py: what",
    "trainer/positional/spectrum.py: kept",
    "trainer/runs/saved_state.py: what",
]
"""Fields of file formats, whose names stay."""
NAME_FIELDS = {
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "name"),
    **dict.fromkeys((ast.ExceptHandler, ast.MatchAs, ast.MatchStar), "name"),
    **{ast.MatchMapping: "rest", ast.arg: "arg", ast.alias: "asname"},
    **{ast.Name: "id", ast.Attribute: "attr"},
}
"""Attribute of a syntax node that holds the name it defines; a load defines none."""


def defined_name(node):
    is_load = isinstance(getattr(node, "ctx", None), ast.Load)
    return None if is_load else getattr(node, NAME_FIELDS.get(type(node), ""), None)


def test_names_say_what_they_hold():
    offences, stored = [], []
    for path in sorted(
        path for room in ("trainer", "scripts") for path in (ROOT / room).rglob("*.py")
    ):
        place = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text())
        fields = {
            field.target
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for field in node.body
            if isinstance(field, ast.AnnAssign)
        }
        for node in ast.walk(tree):
            if (name := defined_name(node)) in VAGUE:
                if node in fields and f"{place}: {name}" in STORED:
                    stored.append(f"{place}: {name}")
                else:
                    offences.append(f"{place}:{node.lineno}: {name}")
    assert offences == []
    assert stored == STORED


def test_help_needs_no_pydantic_and_a_wrong_configuration_no_torch():
    code = """if True:
        import contextlib, io, sys
        from trainer.__main__ import main
        with contextlib.redirect_stdout(io.StringIO()):
            main(["--help"])
        assert not {"pydantic", "hydra", "torch"} & {*sys.modules}
        try:
            main(["optimizer.lr=x"])
        except SystemExit as stop:
            assert stop.code == 2
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
