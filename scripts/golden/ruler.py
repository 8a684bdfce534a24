"""Run NVIDIA's RULER and write its prompts, random draws and scores.

Its programs download essays, SQuAD and HotpotQA; small generated texts replace the files that they
read. A tokenizer of words and punctuation replaces the model's. All other code of the checkout runs
unchanged.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import yaml

LENGTHS = (1024, 2048)
SAMPLES = 2
MORE = {("niah_multivalue", 1024): 16, ("cwe", 4096): SAMPLES}
"""Additional samples: a needle before the first sentence, and the repetitions of long lists."""
SEED = 42
DRAWN = ("choice", "choices", "sample", "randint", "getrandbits")
PAIRS = 400


def make(out: Path, checkout: Path) -> None:
    """Write ``ruler_prompts.json`` and ``ruler_scores.json``."""
    with tempfile.TemporaryDirectory() as temporary:
        scripts = Path(shutil.copytree(checkout / "scripts", Path(temporary) / "scripts"))
        files = _stand_ins()
        # RULER reads english_words only for lists longer than these.
        for name, content in {**files, "english_words": {"0": "word"}}.items():
            path = scripts / "data/synthetic/json" / f"{name}.json"
            path.write_text(json.dumps(content))
        samples = dict.fromkeys(itertools.product(_tasks(scripts), LENGTHS), SAMPLES) | MORE
        prompts = [
            prompt
            for (task, length), count in samples.items()
            for prompt in _prompts(scripts, task, length, count)
        ]
        scores = _scores(scripts, prompts)
    essay = files.pop("PaulGrahamEssays")["text"]
    _write(out / "ruler_prompts.json", {"essay": essay, **files, "prompts": prompts})
    _write(out / "ruler_scores.json", scores)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=0, ensure_ascii=False, default=int) + "\n")


def _tasks(scripts: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load((scripts / "synthetic.yaml").read_text())


# ---------------------------------------------------------------- texts


def _stand_ins() -> dict[str, Any]:
    """Return texts in the formats of the essays, SQuAD and HotpotQA."""
    places = ("Arden", "Bray", "Colne", "Dale", "Esk", "Firth", "Gower")
    goods = ("wool", "salt", "grain", "slate", "cider")
    ends = (".", "!", "?", '."', ".)")
    sentences = [
        f"{'(' if end == '.)' else ''}{chr(34) if end[-1] == chr(34) else ''}In {1700 + n} the "
        f"people of {places[n % 7]} sold {n * n} loads of {goods[n % 5]} to {places[n % 6]}{end}"
        for n, end in zip(range(1, 61), itertools.cycle(ends), strict=False)
    ]
    squad = [
        {
            "title": f"{place}",
            "paragraphs": [
                {
                    "context": f"{place} has a part called {goods[p % 5]} {p}. It was built in "
                    f"{1500 + 10 * a + p} and has {a + 1}{p}0 houses. Its market opens at dawn.",
                    "qas": [
                        {"question": "Who left?", "answers": [], "is_impossible": True, "id": "a"},
                        {
                            "question": f"How many houses has {goods[p % 5]} {p} of {place}?",
                            "answers": [{"text": f"{a + 1}{p}0"}, {"text": f"{a + 1}{p}0 houses"}],
                            "is_impossible": False,
                            "id": "b",
                        },
                    ],
                }
                for p in range(12)
            ],
        }
        for a, place in enumerate(places)
    ]
    hotpotqa = [
        {
            "question": f"Who owns lake {q}?",
            "answer": f"owner {q}",
            "context": [
                [f"Lake {q}-{p}", [f"Its owner is owner {q}.", " It is deep.", " Fish live in it."]]
                if p == q % 10
                else [f"River {q}-{p}", ["It runs to the sea.", f" It is {p} miles long."]]
                for p in range(10)
            ],
        }
        for q in range(20)
    ]
    essay = {"text": " ".join(sentences)}
    return {"PaulGrahamEssays": essay, "squad": {"data": squad}, "hotpotqa": hotpotqa}


# ---------------------------------------------------------------- prompts


class Recorder:
    """Stand-in for the module ``random`` that records draws."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen
        self.Random = random.Random

    def __getattr__(self, name: str) -> Any:
        function = getattr(random, name)

        def draw(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if name in DRAWN:
                joined = "".join(result) if name == "choices" else result
                self.seen.append([name, joined])
            return result

        return draw


class RecordedNumpy:
    """Stand-in for numpy that records draws of ``numpy.random.randint``."""

    def __init__(self, seen: list[Any]) -> None:
        def randint(*arguments: int) -> int:
            seen.append(["randint", int(np.random.randint(*arguments))])  # noqa: NPY002
            return seen[-1][1]

        self.random = types.SimpleNamespace(randint=randint, seed=np.random.seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class WordTokenizer:
    """Tokenizer with a token for each word and punctuation mark."""

    def text_to_tokens(self, text: str) -> list[str]:
        """Return the tokens of ``text``."""
        return re.findall(r"\w+|[^\w\s]", text)


def _load(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prompts(scripts: Path, task: str, length: int, count: int) -> list[dict[str, Any]]:
    """Run the program of a task as ``prepare.py`` does, and return its prompts."""
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    config = _tasks(scripts)[task]
    data = scripts / "data"
    sys.modules["constants"] = _load(data / "synthetic/constants.py", "constants")
    base = sys.modules["constants"].TASKS[config["task"]]
    sys.modules["tokenizer"] = types.ModuleType("tokenizer")
    sys.modules["tokenizer"].select_tokenizer = lambda *_: WordTokenizer()  # type: ignore[attr-defined]
    sys.modules["manifest_utils"] = types.ModuleType("manifest_utils")
    written: list[dict[str, Any]] = []
    sys.modules["manifest_utils"].write_manifest = lambda _, rows: written.extend(rows)  # type: ignore[attr-defined]
    options = {
        **{"save_dir": data, "save_name": task, "tokenizer_path": "words", "tokenizer_type": "hf"},
        **{"max_seq_length": length, "num_samples": count, "random_seed": SEED},
        **{"tokens_to_generate": base["tokens_to_generate"], **config["args"]},
        "template": base["template"] + base["answer_prefix"],
    }
    sys.argv = [task, *(str(x) for key, value in options.items() for x in (f"--{key}", value))]
    program = _load(data / f"synthetic/{config['task']}.py", task)
    # Untrained: the text has no abbreviations.
    program.sent_tokenize = PunktSentenceTokenizer().tokenize  # type: ignore[attr-defined]
    calls: list[tuple[str, int, list[Any]]] = []
    generate = program.generate_input_output

    def recorded(*arguments: Any, **names: Any) -> Any:
        seen: list[Any] = []
        program.random, program.np = Recorder(seen), RecordedNumpy(seen)  # type: ignore[attr-defined]
        result = generate(*arguments, **names)
        units = result[2] if config["task"] == "freq_words_extraction" else arguments[-1]
        if config["task"] == "variable_tracking":
            units = arguments[0]
        calls.append((result[0], units, seen))
        return result

    program.generate_input_output = recorded  # type: ignore[attr-defined]
    program.main()
    rows = []
    for number, row in enumerate(written):
        text = row["input"] + row["answer_prefix"]
        (_, units, draws) = next(call for call in reversed(calls) if text.endswith(call[0]))
        prompt = {"task": task, "length": length, "trial": number}
        prompt |= {"units": units, "draws": draws}
        prompt |= {"text": text, "prefix": row["answer_prefix"], "outputs": row["outputs"]}
        prompt |= {"tokens": row["length"], "new_tokens": base["tokens_to_generate"]}
        rows.append(prompt)
    return rows


# ---------------------------------------------------------------- scores


def _scores(scripts: Path, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Score each (prediction, references) pair of each task with ``evaluate.py``."""
    for name in ("nemo", "nemo.collections", "nemo.collections.asr", "nemo.collections.asr.parts"):
        sys.modules[name] = types.ModuleType(name)
    name = "nemo.collections.asr.parts.utils"
    sys.modules[name] = types.ModuleType(name)
    utils = types.ModuleType(f"{name}.manifest_utils")
    utils.read_manifest = utils.write_manifest = None  # type: ignore[attr-defined]
    sys.modules[utils.__name__] = utils
    sys.argv = ["evaluate", "--data_dir", "."]
    import nltk

    nltk.download = lambda *_: None
    evaluate = _load(scripts / "eval/evaluate.py", "evaluate")
    metrics = _load(scripts / "eval/synthetic/constants.py", "metrics").TASKS
    tasks = {task: config["task"] for task, config in _tasks(scripts).items()}
    pairs = _pairs(prompts)
    table: dict[str, list[float]] = {}
    for kind in dict.fromkeys(tasks.values()):
        config = metrics[kind]
        table[kind] = [
            config["metric_fn"]([evaluate.postprocess_pred(prediction, config)], [references])
            for prediction, references in pairs
        ]
    return {"tasks": tasks, "pairs": pairs, "scores": table}


def _pairs(prompts: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return predictions and references: edge cases, then partly right answers."""
    edge = [
        ("", ["a"]),
        (" ", ["a", "b"]),
        ("\n\t A \x00", ["a"]),
        ("1019173.", ["1019173"]),
        ("101917 3", ["1019173"]),
        ("10191733", ["1019173"]),
        ("1,019,173", ["1019173"]),
        ("PARIS, of course", ["Paris", "London"]),
        ("paris london", ["Paris", "LONDON"]),
        ("straße", ["STRASSE"]),
        ("STRAßE", ["straße"]),
        ("İstanbul", ["istanbul"]),
        ("naïve café", ["NAÏVE", "CAFÉ"]),
        ("a\u00a0b", ["a b"]),
        ("one\ntwo", ["one two"]),
        ("x\x0by", ["x\ny"]),
        ("x\x1fy", ["x\x1fy"]),
        ("answer  ", ["answer "]),
        (" answer", [" answer"]),
        ("anything", [""]),
        ("", [""]),
        ("12 12 12", ["12", "12", "13"]),
        ("aaa", ["a", "aa", "aaa", "aaaa"]),
        ("ABC, DEF", ["abc", "def", "ghi"]),
        ("the answer is\x7f7", ["\x7f7"]),
        ("日本語の答え", ["日本語"]),
        ("🙂 yes", ["🙂"]),
    ]
    generator = random.Random(7)
    pairs = list(edge)
    while len(pairs) < PAIRS:
        prompt = generator.choice(prompts)
        answers = prompt["outputs"]
        other = generator.choice(prompts)["outputs"]
        words = generator.sample(answers, generator.randint(0, len(answers)))
        words += generator.sample(other, min(len(other), generator.randint(0, 2)))
        generator.shuffle(words)
        change = generator.choice([str, str.upper, str.title, str.swapcase])
        text = generator.choice([", ", " ", "\n", "", "\t"]).join(map(change, words))
        cut = generator.choice([0, 0, 1, 3])
        pairs.append((" " + text[: len(text) - cut], answers))
    return pairs
