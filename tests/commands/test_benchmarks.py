"""``evaluate +evaluation=...``: a table, numbers beside it, and a sentence for every mistake."""

import gzip
import json
import shutil

import pytest

from tests.model.test_decoder import published
from trainer.commands import evaluate
from trainer.commands.hydra.running import run_command
from trainer.common.errors import UserError
from trainer.data.tokenizer import train_tokenizer
from trainer.evaluation.benchmarks import Score, Scored
from trainer.workflows import requests
from trainer.workflows.benchmarks import Benchmarks


@pytest.fixture
def place(tmp_path, tiny_decoder, monkeypatch):
    """A published tiny model in ``model/`` and two questions in ``cache/benchmarks/``."""
    monkeypatch.setenv("UNROPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    decoder = tiny_decoder(model={"vocab_size": 300})
    published("Llama", decoder).save_pretrained("model")
    train_tokenizer(["Some text, and some more."], 300, ()).save("model/tokenizer.json")
    rows = [
        {
            "doc_id": number,
            "idx": index,
            "label": 0,
            "request": {"context": f"Question {number}?", "continuation": f" {answer}"},
        }
        for number in range(2)
        for index, answer in enumerate(("yes", "no"))
    ]
    (tmp_path / "cache/benchmarks").mkdir(parents=True)
    with gzip.open(tmp_path / "cache/benchmarks/piqa.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return tmp_path


CHOICE = ["checkpoint=model", "+evaluation=multiple_choice", "threads=1"]


def test_table_and_numbers(place, capsys):
    shutil.copytree("model", "other/model")
    run_command(
        evaluate.COMMAND,
        [*CHOICE, "evaluation.tasks=[piqa]", "output=out", "compare=[other/model]"],
    )
    shown = capsys.readouterr().out
    assert "acc_norm" in shown
    assert max(map(len, shown.splitlines())) <= 100
    record = json.loads((place / "out/multiple_choice.json").read_text())
    assert record["kind"] == "multiple_choice"
    assert record["config"]["tasks"] == ["piqa"]
    first, second = record["models"]
    assert [first["name"], second["name"]] == ["model (model)", "model (other/model)"]
    unchanged = {"change": {"better": 0, "worse": 0, "p_value": 1.0}}
    assert [score | unchanged for score in first["scores"]] == second["scores"]
    score = first["scores"][0]
    assert (score["task"], score["metric"], score["questions"]) == ("piqa", "acc", 2)
    assert score["value"] in (0, 0.5, 1)
    assert score["standard_error"] is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*CHOICE, "evaluation.tasks=[piqua]"], "Did you mean 'piqa'?"),
        ([*CHOICE, "evaluation.tasks=[]"], "evaluation.tasks: expected one or more"),
        ([*CHOICE, "evaluation.tasks=[piqa]", "evaluation.limit=0"], "evaluation.limit: expected"),
        (
            [*CHOICE, "evaluation.tasks=[piqa]", "evaluation.task=[arc]"],
            "unknown key. Did you mean 'tasks'?",
        ),
        ([*CHOICE, "evaluation.tasks=[piqa]", "evaluation.lengths=[1]"], "lengths: unknown key"),
        ([*CHOICE, "evaluation.tasks=[piqa]", "text={source: files, files: [a]}"], "text: this"),
        (
            [*CHOICE, "evaluation.tasks=[piqa]", "evaluation.methods=[none,yarn+dope]"],
            "evaluation.factor: 1 leaves nothing to do for yarn; expected how many times",
        ),
        (
            [*CHOICE, "evaluation.tasks=[piqa]", "evaluation.methods=[yarm]"],
            "Did you mean 'yarn'?",
        ),
        (
            [*CHOICE, "evaluation.tasks=[piqa]", "evaluation.factor=0.5"],
            "evaluation.factor: expected 1 or more, got 0.5",
        ),
        (
            [
                *(*CHOICE, "evaluation.tasks=[piqa]", "evaluation.factor=2"),
                "evaluation.methods=[temperature]",
            ],
            "evaluation.methods: model has positions",
        ),
        ([*CHOICE, "evaluation.directory=none"], "python scripts/fetch_benchmarks.py"),
        (["checkpoint=x", *CHOICE[1:], "evaluation.tasks=[piqa]"], "neither a run directory"),
        ([*CHOICE[1:], "evaluation.tasks=[piqa]"], "checkpoint: give checkpoint="),
        ([CHOICE[0], "+evaluation=multiple_choise"], "Did you mean 'multiple_choice'?"),
    ],
)
def test_mistakes(place, words, said):
    with pytest.raises(UserError) as error:
        run_command(evaluate.COMMAND, words)
    (sentence,) = map(str, error.value.problems)
    assert said in sentence
    assert not (place / "evaluation").exists()


def test_a_missing_package_is_named(place, monkeypatch):
    monkeypatch.setattr(requests, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'unrope\[eval\]'"):
        run_command(
            evaluate.COMMAND, ["checkpoint=model", "+evaluation=harness", "evaluation.tasks=[piqa]"]
        )


def test_tables_have_four_columns_and_notes_follow_them(monkeypatch, capsys):
    scores = [Score("piqa", "acc", 0.5, 0.01, 26), Score("piqa", "acc_norm", 0.25, 0.01, 26)]
    scores.append(Score("arc_[x]", "ppl", 12.0, None, 9))
    scored = [Scored(f"model {i}", "none", "as is", f"of [model {i}]", scores) for i in range(5)]
    results = Benchmarks(scored, ["One [of two] was left out."])
    monkeypatch.setattr(
        "trainer.workflows.benchmarks.run_benchmarks", lambda *_: (results, "out/scores.json")
    )
    evaluate.show_benchmarks(None, "scores")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip("─ ")]
    assert " ".join(lines[0]) == "task metric questions model 0 model 1 model 2 model 3"
    assert lines[1] == ["piqa", "acc", "26", *["0.500", "±", "0.010"] * 4]
    assert lines[2] == ["acc_norm", "26", *["0.250", "±", "0.010"] * 4]
    assert lines[3] == ["arc_[x]", "ppl", "9", *["12.000"] * 4]
    assert " ".join(lines[4]) == "task metric questions model 4"
    assert lines[7] == ["arc_[x]", "ppl", "9", "12.000"]
    text = " ".join(word for line in lines[8:] for word in line)
    assert text.startswith("↑ and ↓: other than the model as is, or than the first model, on the")
    assert text.endswith("test. Note: One [of two] was left out. Numbers: out/scores.json")


def test_a_column_for_every_method_with_a_mark_where_paired_questions_differ():
    """7 of 7 questions that changed were lost: p = 2 / 2^7 = 0.016."""
    before = Score("piqa", "acc", 0.7, None, 10, (1.0,) * 7 + (0.0,) * 3)
    after = Score("piqa", "acc", 0.0, None, 10, (0.0,) * 10)
    models = [
        Scored("m", method, title, "m", [score])
        for method, title, score in (
            ("none", "as is", before),
            ("yarn", "YaRN", after),
            ("pi", "PI", before),
        )
    ]
    made = evaluate.benchmark_table(models[1:], models)
    assert [str(column.header) for column in made.columns[3:]] == ["m + YaRN", "m + PI"]
    assert [list(column.cells) for column in made.columns[3:]] == [["0.000 ↓"], ["0.700"]]


def test_every_method_is_a_column_and_says_what_it_was_set_for(place, capsys):
    words = ["evaluation.tasks=[piqa]", "output=out", "evaluation.factor=4"]
    methods = "evaluation.methods=[none,crop,pi,ntk,dynamic_ntk,yarn]"
    run_command(evaluate.COMMAND, [*CHOICE, *words, methods])
    shown = " ".join(capsys.readouterr().out.split())
    assert "model + cropped" in shown
    assert "model, YaRN: set for 8,192 tokens, 4 times the training length" in shown
    record = json.loads((place / "out/multiple_choice.json").read_text())
    assert [model["method"] for model in record["models"]] == [
        *("none", "crop", "pi", "ntk", "dynamic_ntk", "yarn")
    ]
    as_is, cropped, *_ = (model["scores"][0] for model in record["models"])
    assert "change" not in as_is
    assert cropped["change"] == {"better": 0, "worse": 0, "p_value": 1.0}


def test_an_option_of_ones_own_gives_its_name_to_the_numbers(place, capsys):
    (place / "my/evaluation").mkdir(parents=True)
    text = "defaults: [multiple_choice, _self_]\ntasks: [piqa]\nlimit: 1\n"
    (place / "my/evaluation/one.yaml").write_text(text)
    words = ["checkpoint=model", "threads=1", "output=out", "--config-dir", "my"]
    run_command(evaluate.COMMAND, [*words, "evaluation=one"])
    assert json.loads((place / "out/one.json").read_text())["config"]["limit"] == 1
