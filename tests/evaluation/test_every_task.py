"""What holds for all registered tasks: numbers of trials, lengths of prompts, batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.evaluation.conftest import values_of
from tests.evaluation.test_keys_of_evaluations import BASE, FILES, places  # noqa: F401
from tests.relations.leaves import with_value
from trainer.common.errors import UserError
from trainer.common.fields import configuration, validated
from trainer.config import DopeSettings, EvaluationConfig
from trainer.evaluation import multiple_choice
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.task import TASKS, PromptTask, TaskInputs, TaskKind
from trainer.evaluation.tasks import check_names, make_tasks, settings_of

FIXED = {"longbench", "many_shot"}
"""Tasks whose trials are given, or drawn without replacement."""
OF_PROMPTS = "standard noisy multi_key multi_query multi_value sentence ruler longbench many_shot"


@pytest.fixture
def config(places):  # noqa: F811
    config = validated(EvaluationConfig, BASE)
    for name, file in FILES.items():
        config = with_value(config, name, str(places[0] / file))
    return config


@pytest.fixture
def text(corpus):
    return HeldOut(corpus, corpus.test, (corpus.first_token,), 0.5)


def test_every_task_makes_one_or_the_other():
    scored = {"perplexity", "statements", "multiple_choice", "harness"}
    own = {name for name, (make, _) in TASKS.items() if make.__module__.startswith("trainer.")}
    assert own == {*OF_PROMPTS.split()} | scored


@pytest.mark.parametrize("name", OF_PROMPTS.split())
def test_prompts_are_distinct_fit_their_length_and_do_not_depend_on_their_number(
    config, text, name
):
    def tasks(trials):
        settings = settings_of(name, config)
        if name not in FIXED:
            settings = replace(settings, trials=trials)
        return TASKS[name][0](TaskInputs(text, [700], 32, 99, settings))

    few, many = tasks(2), tasks(4)
    for fewer, more in zip(few, many, strict=True):
        assert isinstance(more, PromptTask)
        assert fewer.name == more.name
        prompts = more.prompts(700)
        if name not in FIXED:
            asked = fewer.prompts(700)
            assert asked == prompts[: len(asked)]
            assert len(prompts) == 2 * len(asked)
            assert len({tuple(prompt.tokens) for prompt in prompts}) == len(prompts)
        for prompt in prompts:
            assert prompt.tokens[0] == text.bos[0]
            assert len(prompt.tokens) + prompt.new_tokens <= 700


@pytest.mark.parametrize("name", ["standard", "ruler", "many_shot"])
def test_a_limit_asks_as_many_trials_as_that_many_would(config, text, name):
    settings = settings_of(name, config)

    def prompts(trials, limit):
        inputs = TaskInputs(text, [700], 32, limit, replace(settings, trials=trials))
        return [task.prompts(700) for task in TASKS[name].make(inputs)]

    assert prompts(3, 1) == prompts(1, 99) != prompts(3, 99)


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_each_trial_reads_an_excerpt_of_its_own(config, text, name):
    """Whatever is hidden in it; all depths of a trial share one."""
    settings = replace(config.needles, trials=8, depths=(0.5, 1.0))
    prompts = NEEDLE_TASKS[name](text.haystack, settings).prompts(700)
    begins = {}
    for prompt in prompts:
        begins.setdefault(prompt.group, set()).add(tuple(prompt.tokens[40:70]))
    if len(prompts) > 8:
        assert {len(of_trial) for of_trial in begins.values()} == {1}
    assert len(set().union(*begins.values())) > 5


@pytest.mark.parametrize("length", [100, 101])
def test_long_texts_of_longbench_fill_their_length_but_for_one(config, text, length):
    """Both halves have as many tokens, the first and the last ones."""
    (task,) = TASKS["longbench"][0](TaskInputs(text, [length], 32, 99, config.longbench))
    (whole,) = {tuple(prompt.tokens) for prompt in task.prompts(10_000)}
    for prompt in task.prompts(length):
        room = length - prompt.new_tokens
        half = room // 2
        assert tuple(prompt.tokens) == whole[:half] + whole[-half:]


@pytest.mark.parametrize("batch_tokens", [1, 200, 4096])
def test_values_do_not_depend_on_batches(config, text, model, monkeypatch, batch_tokens):
    """Trials are numbered from 0 in all of them."""
    monkeypatch.setattr(multiple_choice, "TOGETHER", 7)
    asked = ["perplexity", "statements", "multiple_choice"]
    config = replace(config, tasks=asked, limit=10)
    tasks, _ = make_tasks(text, config, [64], 32)
    for task in tasks:
        values = values_of(task, model, batch_tokens)
        together = values_of(task, model, 10**6)
        assert [value[:2] for value in values] == [value[:2] for value in together]
        assert [value[2] for value in values] == pytest.approx([value[2] for value in together])
        for title in task.titles:
            numbers = [number for number, name, _ in values if name == title]
            assert numbers == [*range(len(task.trials))]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tasks": ["standart"]}, r"^evaluation\.tasks: .*\['standart'\]; .* 'standard'$"),
        ({"methods": ["none", "yarn+dopee"]}, r"^evaluation\.methods: .*\['dopee'\]; .* 'dope'$"),
        ({"choice": {"text": "perplexity"}}, r"^evaluation\.choice\.text: .*\['perplexity'\]"),
    ],
)
def test_names_that_do_not_exist_are_told_with_the_nearest(keys, message):
    with pytest.raises(UserError, match=message):
        check_names(validated(EvaluationConfig, keys))


@pytest.mark.parametrize("text", ["validation", "zero_shot", "multi_key"])
def test_heads_are_chosen_on_validation_text_or_prompts_of_a_seed(text):
    check_names(validated(EvaluationConfig, {"choice": {"text": text}, "methods": ["yarn+dope"]}))


@configuration
class CountSettings:
    count: int = 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mine": {"count": 2}}, None),
        ({"mine": {"counts": 2}}, r"^evaluation\.settings\.mine\.counts: "),
        ({"yarn": {"beta_fast": 16}}, r"^evaluation\.settings: .*\['yarn'\]"),
        ({"standard": {"trials": 3}}, r"^evaluation\.settings: .*\['standard'\]"),
    ],
)
def test_settings_that_nothing_reads_are_refused(monkeypatch, settings, message):
    """Whether or not the task is among those measured; methods have keys of their own."""
    monkeypatch.setitem(TASKS, "mine", TaskKind(lambda inputs: [], CountSettings))
    config = EvaluationConfig(methods=["none", "yarn"], tasks=["standard"], settings=settings)
    if message is None:
        check_names(config)
        assert settings_of("mine", config) == CountSettings(2)
    else:
        with pytest.raises(UserError, match=message):
            check_names(config)


@pytest.mark.parametrize(
    ("name", "changes", "is_refused"),
    [
        ("weighted_rope+yarn+weighted_rope", {}, True),
        ("dope+weighted_rope", {}, False),
        ("weighted_rope+dope", {"removal": "zero"}, True),
        ("dope+weighted_rope", {"variant": "by_gaussian"}, True),
        ("yarn+dope", {"variant": "by_gaussian", "removal": "zero"}, False),
    ],
)
def test_a_method_with_two_interventions_is_refused(name, changes, is_refused):
    config = EvaluationConfig(methods=["none", name], dope=DopeSettings(**changes))
    if is_refused:
        with pytest.raises(UserError, match=r"^evaluation\.methods: .* do not combine"):
            check_names(config)
    else:
        check_names(config)
