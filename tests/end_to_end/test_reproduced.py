"""Every command of docs/reproduce.md does its work, with tiny models and little text; every line
for pytest runs as it stands.

Experiments without changes train in tests/workflows/test_experiments.py.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from scripts.write_reproduce import DATA
from tests.interchange.families import made
from tests.small_runs import trained_in
from tests.workflows.test_experiments import small as small_values
from trainer.checkpoint import find_checkpoint, read_state
from trainer.commands import compose_words
from trainer.common.fields import validated
from trainer.config import AnalysisRequest, EvaluationRequest
from trainer.evaluation.longbench import KINDS
from trainer.runs.directory import read_metrics
from trainer.runs.parsing import parse
from trainer.workflows import analyze, evaluate
from trainer.workflows.experiment import run_experiment

pytestmark = pytest.mark.weekly

C = 1024
"""As short as a frame of SpectrumFE."""
FAMILIES = {
    "DeepSeek-V2-Lite": "DeepseekV2",
    "OLMo-7B-hf": "Olmo",
    "gemma-2-9b-it": "Gemma2",
    "gemma-7b": "Gemma",
    "phi-1": "Phi",
    "Llama-4-Scout-17B-16E-Instruct": "Llama4",
}
"""Of published weights; the others are a Llama."""
TEXT = "text={source: files, files: [wikitext2.txt], validation: 0.3, test: 0.6}"
FEW = [
    *("evaluation.windows=1", "evaluation.fit_windows=1", "evaluation.longrope.evaluations=2"),
    *("evaluation.needles.trials=1", "evaluation.ruler.trials=1", "evaluation.many_shot.trials=1"),
    *("evaluation.many_shot.new_tokens=4", "evaluation.longbench.directory=longbench"),
]
FETCHED = "$(python scripts/fetch_smollm2.py)"
"""In the place of a published model's directory."""
PAGE = yaml.safe_load(DATA.read_text())
ITEMS = [item for paper in PAGE["papers"] for item in paper["items"]]
OF_ITEMS = {command for item in ITEMS for command in item.get("command", ())}
OF_LAPTOPS = {command for run in PAGE["laptops"].values() for command in run["commands"]}
COMMANDS = sorted(c.replace(FETCHED, "SmolLM2-135M-Instruct") for c in OF_ITEMS | OF_LAPTOPS)
AS_IT_STANDS = re.compile(r"\+experiment=\w+( name=\S+)?")
OTHERS = ("analyze", "evaluate", "pytest")
CHANGED = [c for c in COMMANDS if not c.startswith(OTHERS) and not AS_IT_STANDS.fullmatch(c)]
"""Trainings of an experiment with other values, or of none."""


def commands_with(first, *besides):
    return [c for c in COMMANDS if c.startswith(first) and not any(word in c for word in besides)]


def first_job(line):
    """The words of a training; of a sweep those of its first job."""
    words = shlex.split(line)
    if "--multirun" in words:
        words.remove("--multirun")
        words = [re.sub(r"=([^\[\]{},]+),.*", r"=\1", word) for word in words]
    return words


def named_models():
    """Return the directories that the commands name as models."""
    values = re.findall(
        r"(?:checkpoint|compare)=(\S+?)'?(?= |$)", "\n".join(COMMANDS), re.MULTILINE
    )
    names = {name.removeprefix("hf:") for value in values for name in value.strip("[]").split(",")}
    return sorted(names, key=len)  # a run before its controls


def model_of(name):
    """Return the encoding of a run's copy, or the family of a model in the place of another."""
    if name.startswith("runs/"):
        return "nope" if re.search("drope|/nope", name) else "rope"
    return FAMILIES.get(name, "Llama")


@pytest.fixture(scope="module")
def place(tmp_path_factory, base):
    """A directory with all models and files that the commands name."""
    directory = tmp_path_factory.mktemp("reader")
    text = "".join(f"Problem {i}: the sum of {i} and {i * i} is {i + i * i}. " for i in range(3000))
    (directory / "wikitext2.txt").write_text(text)
    for name in ("code.txt", "wikipedia.txt"):
        (directory / name).write_text(text[:6000])
    problems = ({"problem": f"{i} + 1?", "solution": f"\\boxed{{{i + 1}}}"} for i in range(200))
    (directory / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    write_questions(directory, text)
    changes = {
        "data": {"sequence_length": C, "files": [str(directory / "wikitext2.txt")]}
        | {"validation": 0.3, "test": 0.6},
        "model": {"num_hidden_layers": 3, "num_attention_heads": 4, "qk_norm": {"when": "never"}},
        "trainer": {"max_steps": 2},
        "drop": {"at": None},
    }
    without = {"positional": {"layers": ["nope"]}}
    for encoding, changed in {"rope": changes, "nope": changes | without}.items():
        trained_in(directory / encoding, base, **changed)
    tokenizer = read_state(find_checkpoint(str(directory / "rope")))["tokenizer"]
    shape = {"max_position_embeddings": C, "vocab_size": base["tokenizer"]["vocab_size"] + 200}
    for name in named_models():
        path = directory / name
        if name.startswith("runs/"):
            shutil.copytree(directory / model_of(name), path, dirs_exist_ok=True)
        else:
            chunk = {"attention_chunk_size": 8 * C} if "Llama-4" in name else {}
            made(model_of(name), **shape, **chunk).save_pretrained(path)
            (path / "tokenizer.json").write_text(tokenizer)
    return directory


def write_questions(directory, text):
    """A question of every task of LongBench and of multiple choice."""
    (directory / "longbench").mkdir()
    row = {"input": "Which?", "context": text[:3000], "length": 600}
    for task in KINDS:
        answer = "Paragraph 12" if "retrieval" in task else "twelve"
        line = json.dumps(row | {"answers": [answer], "all_classes": ["twelve", "thirteen"]})
        (directory / "longbench" / f"{task}.jsonl").write_text(line + "\n")
    (directory / "questions").mkdir()
    for task in ("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande"):
        with gzip.open(directory / "questions" / f"{task}.jsonl.gz", "wt") as file:
            for index, choice in enumerate(("twelve", "thirteen")):
                request = {"context": "The sum is", "continuation": f" {choice}"}
                row = {"doc_id": 0, "idx": index, "label": 0, "request": request}
                file.write(json.dumps(row) + "\n")


def small(command, output):
    """The command's words with the least that shows the same, and the text at hand."""
    words = [smaller(word, "+evaluation=ruler" in command) for word in shlex.split(command)[1:]]
    if "multiple_choice" in command:
        words.append("evaluation.multiple_choice.directory=questions")
    if command.startswith("evaluate"):
        words += FEW if "evaluation.lengths" in command else [*FEW, "evaluation.lengths=[2]"]
    else:
        words += [] if "analysis.texts" in command else ["analysis.texts=1"]
        words += [f"analysis.length={C}"] if "+analysis=attenuation" in command else []
    if "checkpoint=runs/" not in command and "text=" not in command:
        words.append(TEXT)
    return [*words, f"output={output}"]


def smaller(word, ruler):
    """Lengths, layers and heads that the tiny models have; text at hand in place of the hub's."""
    key, _, value = word.partition("=")
    match key:
        case "text":
            return TEXT
        case "analysis.length" if int(value) > 2 * C:
            return f"{key}={2 * C}"
        case "evaluation.choice.length" if float(value) < 1:  # a frame of SpectrumFE
            replacement = 1
        case "analysis.prefixes":
            replacement = [C, 3 * C // 2]
        case "analysis.chosen":
            replacement = sorted({(layer % 3, head % 4) for layer, head in json.loads(value)})
        case "analysis.pairs":
            replacement = sorted({pair % 4 for pair in json.loads(value)})
        case "evaluation.lengths":  # RULER's prompts are longer than C
            replacement = [2] if ruler or max(json.loads(value)) > 1 else [1]
        case _:
            return word
    return f"{key}={json.dumps(replacement, separators=(',', ':'))}"


def different(lines):
    """Leave out commands that are the same with tiny models and little text."""
    names = sorted(named_models(), key=len, reverse=True)
    lines_by_words = {}
    for line in lines:
        words = shlex.join(small(line, ""))
        for name in names:
            words = words.replace(name, model_of(name))
        lines_by_words.setdefault(words, line)
    return [*lines_by_words.values()]


@pytest.fixture(autouse=True)
def quick(monkeypatch, place):
    """Skip slow work that does not depend on the command; other tests cover it."""
    monkeypatch.setattr(analyze, "write_analysis", lambda output, *_, **__: output)
    monkeypatch.setattr(evaluate, "write_renderings", lambda report, output: None)
    for name, kind in KINDS.items():
        monkeypatch.setitem(KINDS, name, {**kind, "new_tokens": 4})
    monkeypatch.chdir(place)


def asked(command, line, output):
    """The checked request."""
    request = AnalysisRequest if command == "analyze" else EvaluationRequest
    return validated(request, compose_words(small(line, output), command).values)


class TestAnalyses:
    """Three classes, so that processes share the commands."""

    @pytest.mark.parametrize("line", different(commands_with("analyze")))
    def test_every_topic_has_figures_and_rows(self, line, tmp_path):
        request = asked("analyze", line, tmp_path)
        results, _ = analyze.analyze(request, request.analysis.kind)
        assert results
        assert all(result.plots and len(result.rows) for result in results)


class TestEvaluations:
    @pytest.mark.parametrize("line", different(commands_with("evaluate", "harness")))
    def test_every_method_is_measured(self, line, tmp_path):
        request = asked("evaluate", line, tmp_path)
        report, _ = evaluate.evaluate_lengths(request, "page")
        assert {*report.rows.method} == set(request.evaluation.methods)


class TestTrainings:
    @pytest.mark.parametrize("line", CHANGED)
    def test_every_run_trains_to_its_end_and_is_evaluated(self, line, base, tmp_path, monkeypatch):
        monkeypatch.setattr(evaluate, "write_renderings", lambda *_: [])
        trained = parse(small_values(first_job(line), base, tmp_path))
        report = run_experiment(trained)
        steps = [row["step"] for row in read_metrics(trained.directory / "metrics.csv")]
        assert steps == [*range(1, trained.phases[-1].end + 1)]
        assert len(report.runs) == 1 + len(trained.config.controls)
        assert len(report.rows)


class TestLaptops:
    def test_every_row_that_is_smaller_has_a_run_and_values_beside_the_papers(self):
        smaller = [item for item in ITEMS if item["state"] == "smaller"]
        assert smaller
        assert {item["laptop"] for item in smaller} <= {*PAGE["laptops"]}
        cells = [cells for item in smaller for cells in item["compared"]]
        assert {len(row) for row in cells} == {3}
        assert {type(cell) for row in cells for cell in row} == {str}


class TestLines:
    @pytest.mark.parametrize("line", commands_with("pytest"))
    def test_every_line_selects_tests_that_pass(self, line):
        options = ["-rA", "-n", "0", "-p", "no:cacheprovider"]
        words = [sys.executable, "-m", *shlex.split(line), *options]
        done = subprocess.run(
            words, cwd=DATA.parent.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:]  # 5 if nothing is selected
        passed = {*re.findall(r"^PASSED ([\w/.]+)::", done.stdout, re.MULTILINE)}
        assert passed == {word for word in words if word.startswith("tests/")}  # some of each file
