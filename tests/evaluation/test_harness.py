"""lm-eval gets from the wrapper what its own ``hf`` model says of the same weights."""

import json
from types import SimpleNamespace

import pytest

from tests.evaluation.conftest import values_of
from tests.model.test_decoder import published
from trainer.common.errors import UserError
from trainer.config import HarnessSettings
from trainer.data.tokenizer import END_OF_TEXT, special_tokens, train_tokenizer
from trainer.evaluation.likelihood import Encoder

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from trainer.evaluation import harness
from trainer.evaluation.harness import HarnessModel, harness_tasks

MAX_LENGTH = 32
TEXTS = [f"The answer to question {i} is either {i * i} or {i + 7}, they say. " for i in range(50)]
PAIRS = [
    ("The answer", " is"),
    ("The answer ", "is either"),
    ("The answer", " to question 3"),
    ("", "The answer"),
    ("The answer to " * 30, "question 3, they say."),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300, ())


@pytest.fixture
def models(tiny_decoder, tokenizer):
    """Ours and lm-eval's, with the same weights."""
    decoder = tiny_decoder(model={"vocab_size": 300})
    theirs = HFLM(
        pretrained=published("Llama", decoder),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=END_OF_TEXT,
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
        ),
        max_length=MAX_LENGTH,
        batch_size=2,
        device="cpu",
    )
    encoder = Encoder(tokenizer, (), special_tokens(tokenizer).end)
    return HarnessModel(decoder, encoder, MAX_LENGTH, 64), theirs


def asked(*arguments):
    return SimpleNamespace(args=arguments, task_name="t")


def test_log_likelihoods(models):
    requests = [asked(*pair) for pair in PAIRS]
    ours, theirs = (model.loglikelihood(requests) for model in models)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [x for x, _ in ours] == pytest.approx([x for x, _ in theirs], abs=1e-4)


def test_generation_up_to_a_stop_string(models):
    settings = [
        {"until": [], "max_gen_toks": 10, "do_sample": False},
        {"until": ["e", "\n"], "max_gen_toks": 10},
        {"until": "a", "max_gen_toks": 4, "temperature": 0.0},
    ]
    requests = [asked(c, s) for s in settings for c in ("The answer", "They say. " * 20, "is")]
    ours, theirs = (model.generate_until(requests) for model in models)
    assert ours == theirs
    assert any(ours)


@pytest.mark.parametrize("key", ["max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_every_name_of_the_most_tokens_is_read(models, key):
    ours, theirs = (model.generate_until([asked("is", {key: 3})]) for model in models)
    assert ours == theirs


def test_a_prompt_needs_room(models):
    with pytest.raises(UserError, match="expected at least 41 tokens"):
        models[0].generate_until([asked("a", {"max_gen_toks": 40})])


def tasks_in(directory):
    return TaskManager(include_path=str(directory), include_defaults=False)


def look_in(directory, monkeypatch):
    monkeypatch.setattr(harness, "TaskManager", lambda: tasks_in(directory))


@pytest.fixture
def task(tmp_path, monkeypatch):
    """The directory of a multiple-choice task whose data is a file, where tasks are looked for."""
    look_in(tmp_path, monkeypatch)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": text[:24], "choices": [" 1", " 49"], "answer": 0} for text in TEXTS[:6]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(
        "task: sums\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        "doc_to_text: question\n"
        "doc_to_choice: choices\n"
        "doc_to_target: answer\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    return tmp_path


def values(task, model, metric="acc"):
    """Values of a metric by question."""
    read = sorted(values_of(task, model, 64))
    return {trial: x for trial, key, x in read if key.endswith(f"_{metric}")}


def test_a_task_from_a_file(models, task):
    """lm-eval's own model scores the same questions alike."""
    ours, theirs = models
    (found,) = harness_tasks(HarnessSettings(["sums"]), ours.encoder, [MAX_LENGTH], 4)
    assert {*found.titles} == {"sums_acc", "sums_acc_norm"}
    expected = lm_eval.simple_evaluate(
        theirs, tasks=["sums"], limit=4, task_manager=tasks_in(task)
    )["results"]["sums"]
    for metric in ("acc", "acc_norm"):
        scores = values(found, ours.model, metric)
        assert [*scores] == [0, 1, 2, 3]
        assert sum(scores.values()) / 4 == expected[f"{metric},none"]


def test_a_group_is_the_questions_of_all_its_tasks(models, task):
    text = (task / "sums.yaml").read_text().replace("task: sums", "task: more")
    (task / "more.yaml").write_text(text)
    (task / "both.yaml").write_text(
        "group: both\ntask: [sums, more]\naggregate_metric_list: [{metric: acc}]\n"
    )
    settings = HarnessSettings(["both", "sums"])
    model = models[0].model
    both, sums = harness_tasks(settings, models[0].encoder, [MAX_LENGTH], 4)
    whole = values(sums, model)
    assert [*values(both, model).values()] == 2 * [*whole.values()]
    assert both.trials.label.tolist() == ["sums"] * 4 + ["more"] * 4
    assert both.fingerprint != sums.fingerprint


def test_a_task_that_samples_is_refused(models, task):
    text = (task / "sums.yaml").read_text().replace("multiple_choice", "generate_until")
    text = text[: text.index("metric_list")] + "metric_list: [{metric: exact_match}]\n"
    (task / "sums.yaml").write_text(text + "generation_kwargs: {do_sample: true, until: [a]}\n")
    with pytest.raises(UserError, match=r"harness\.tasks: sums samples"):
        fingerprint_of(models)


def test_a_task_that_does_not_exist_is_told_with_the_nearest(models, task):
    with pytest.raises(UserError, match=r"harness\.tasks: .*'sum'; the nearest is 'sums'"):
        fingerprint_of(models, "sum")


def fingerprint_of(models, name="sums"):
    return harness_tasks(HarnessSettings([name]), models[0].encoder, [MAX_LENGTH], 4)[0].fingerprint


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("doc_to_text: question", "doc_to_text: 'Sum: {{question}}'"),
        ("metric: acc}", "metric: acc, ignore_case: true}"),
        ("doc_to_target: answer", "doc_to_target: answer\ntarget_delimiter: ''"),
        ("doc_to_target: answer", "doc_to_target: answer\nnum_fewshot: 1\nfewshot_split: test"),
    ],
    ids=["question", "metric", "delimiter", "examples"],
)
def test_an_edited_task_is_another(models, task, before, after):
    first = fingerprint_of(models)
    assert fingerprint_of(models) == first
    text = (task / "sums.yaml").read_text()
    assert before in text
    (task / "sums.yaml").write_text(text.replace(before, after))
    assert fingerprint_of(models) != first


def test_edited_code_of_a_task_makes_another(models, task):
    """Also where only a helper of the named function has changed."""
    code = "def helper(row):\n    return row\n\n\ndef process(rows):\n    return rows.map(helper)\n"
    (task / "own.py").write_text(code)
    with (task / "sums.yaml").open("a") as file:
        file.write("process_docs: !function own.process\n")
    first = fingerprint_of(models)
    (task / "own.py").write_text(code.replace("return row\n", "return dict(row)\n"))
    assert fingerprint_of(models) != first


def test_a_task_is_the_same_wherever_its_file_lies(models, task, tmp_path_factory, monkeypatch):
    first = fingerprint_of(models)
    other = tmp_path_factory.mktemp("elsewhere")
    (task / "sums.yaml").rename(other / "sums.yaml")
    look_in(other, monkeypatch)
    assert fingerprint_of(models) == first


def test_every_model_reads_the_same_examples(models, task, monkeypatch):
    with (task / "sums.yaml").open("a") as file:
        file.write("num_fewshot: 2\nfewshot_split: test\n")
    settings = HarnessSettings(["sums"])
    read = []
    monkeypatch.setattr(
        HarnessModel,
        "loglikelihood",
        lambda model, requests: read.append([r.args for r in requests]) or [(0.0, True)] * 8,
    )
    for found in harness_tasks(settings, models[0].encoder, [MAX_LENGTH, MAX_LENGTH + 8], 4):
        values(found, models[0].model)
    assert len(read) == 2
    assert read[0] == read[1]


@pytest.mark.parametrize(("context", "tokens"), [(None, MAX_LENGTH), (7, 7), (99, MAX_LENGTH)])
def test_a_model_reads_no_more_than_the_length_and_its_context(
    models, task, monkeypatch, context, tokens
):
    (found,) = harness_tasks(HarnessSettings(["sums"]), models[0].encoder, [MAX_LENGTH], 4)
    read = []
    monkeypatch.setattr(
        HarnessModel,
        "loglikelihood",
        lambda model, requests: read.append(model.max_length) or [(0.0, True)] * 8,
    )
    models[0].model.context = context
    values(found, models[0].model)
    assert read == [tokens]
