"""Every function that makes a key is listed with the reason for trusting it, or with its test."""

from __future__ import annotations

import ast

from tests.program import ROOT

CONTENT = "hashes the whole content of text or files"
CHECKSUM = "a checksum of what is written or read"
TESTED = "tested in test_keys_of_*.py"
HASHED = {
    **dict.fromkeys(
        (
            *("sbatch.snapshot", "encoding.document_hash", "sources.stdlib_docs", "sweep._note"),
            "sources.code_hash",
        ),
        CONTENT,
    ),
    **dict.fromkeys(
        (
            *("prepared.open_prepared", "shards.__init__"),
            *("units.write_manifest", "store._checksum"),
            "files.checksum",
        ),
        CHECKSUM,
    ),
    **dict.fromkeys(
        (
            "plan.digest",
            "store.fingerprint",
            "store._pieces",
            "directory.differences",
            "plan.request_digest",
        ),
        "the hash or the comparison itself",
    ),
    **dict.fromkeys(
        (
            *("plan.directory_name", "tokenizer.tokenizer_identity", "corpus.fingerprint"),
            "corpus.held_out_fingerprint",
            *("prepared.fingerprint", "fitting.key", "fitting.choice_key"),
            *("measurements.fingerprint", "measurements._summarise", "methods._identity"),
            *("plan.plan_cells", "plan.key", "store.path", "store.take"),
            *("directory.check_run_directory", "starting_point.data_fingerprints"),
            *("benchmarks._is_same", "compare._measured_on", "evaluate._asked"),
            *("key_tokens.choose", "key_tokens.fingerprint", "subjects.subject_of"),
        ),
        TESTED,
    ),
    **dict.fromkeys(
        ("preparing._any_prepared", "preparing._states", "preparing.without_tokenizer"),
        "look for prepared text by the whole request",
    ),
    **dict.fromkeys(
        (
            *("methods._longrope", "methods.layout_at", "methods._fitted_temperature"),
            *("methods.best", "methods._temperature_per_head"),
        ),
        "each fits on a layout that it tells apart, with settings that its method is stored with",
    ),
    "arms.control_problems": "tests/relations/test_controls.py compares all arms",
    "tasks.check_prompts": "asks for a fingerprint to find prompts that do not fit",
    "decoder.initial_value": "a seed for each parameter's name",
    "benchmarks.run_benchmarks": "writes all fields of the request",
    "compare._settings": "names the settings in which runs differ",
    "evaluate.evaluate_lengths": "writes the fingerprints of all models",
    "evaluate._stated": "writes all settings but those that the report states",
}
"""Functions that hash, fingerprint or compare, and where their keys are tested."""


def test_every_function_that_makes_a_key_is_classified():
    assert functions_that_hash() == {*HASHED}


def functions_that_hash():
    """Return the functions that hash, fingerprint or compare their arguments."""
    functions = set()
    calls = {"sha256", "fingerprint", "digest", "request_digest", "all_fields", "differences"}
    calls |= {"stored", "file_digest"}
    for path in (ROOT / "trainer").rglob("*.py"):
        text = path.read_text()
        if not any(f"{name}(" in text for name in calls):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                names = {
                    getattr(call.func, "attr", getattr(call.func, "id", ""))
                    for call in ast.walk(node)
                    if isinstance(call, ast.Call)
                }
                functions |= {f"{path.stem}.{node.name}"} if names & calls else set()
    return functions
