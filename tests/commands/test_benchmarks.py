"""``evaluate +evaluation=...``: a table, numbers beside it, and a sentence for every mistake."""

import gzip
import json
import shutil

import pytest

from tests.model.test_decoder import published
from trainer.commands import evaluate
from trainer.commands.benchmarks import table
from trainer.commands.running import run_command
from trainer.data.tokenizer import train_tokenizer
from trainer.errors import UserError
from trainer.evaluation.benchmarks import Score
from trainer.workflows import evaluation_request


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
            "label": 0,
            "request": {"context": f"Question {number}?", "continuation": f" {answer}"},
        }
        for number in range(2)
        for answer in ("yes", "no")
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
    assert first["scores"] == second["scores"]
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
        ([*CHOICE, "evaluation.directory=none"], "python scripts/fetch_benchmarks.py"),
        (["checkpoint=x", *CHOICE[1:], "evaluation.tasks=[piqa]"], "neither a run directory"),
        ([*CHOICE[1:], "evaluation.tasks=[piqa]"], "checkpoint: give checkpoint="),
        ([CHOICE[0], "+evaluation=multiple_choise"], "Did you mean 'multiple_choice'?"),
    ],
)
def test_mistakes(place, words, said):
    with pytest.raises(UserError) as error:
        run_command(evaluate.COMMAND, words)
    (sentence,) = error.value.problems
    assert said in sentence
    assert not (place / "evaluation").exists()


def test_a_missing_package_is_named(place, monkeypatch):
    monkeypatch.setattr(evaluation_request, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'unrope\[eval\]'"):
        run_command(
            evaluate.COMMAND, ["checkpoint=model", "+evaluation=harness", "evaluation.tasks=[piqa]"]
        )


def test_a_row_for_every_metric_and_a_column_for_every_model():
    scores = [Score("piqa", "acc", 0.5, 0.1, 26), Score("arc", "ppl", 12.0, None, 9)]
    made = table({"a": scores, "b": scores})
    cells = [list(column.cells) for column in made.columns]
    assert cells[0] == ["piqa", "arc"]
    assert cells[3] == cells[4] == ["0.500 ± 0.100", "12.000"]


def test_an_option_of_ones_own_gives_its_name_to_the_numbers(place, capsys):
    (place / "my/evaluation").mkdir(parents=True)
    text = "defaults: [multiple_choice, _self_]\ntasks: [piqa]\nlimit: 1\n"
    (place / "my/evaluation/one.yaml").write_text(text)
    words = ["checkpoint=model", "threads=1", "output=out", "--config-dir", "my"]
    run_command(evaluate.COMMAND, [*words, "evaluation=one"])
    assert json.loads((place / "out/one.json").read_text())["config"]["limit"] == 1
