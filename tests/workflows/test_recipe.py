"""Rules of `recalibrate`: what a model, a device and a time lead to, as the guide says."""

from __future__ import annotations

import re

import pytest

from tests.program import ROOT
from trainer.common.errors import UserError
from trainer.common.words import override_value
from trainer.model.config import ModelConfig
from trainer.model.flops import forward_flops, training_flops
from trainer.positional.config import PositionalConfig, build_layout
from trainer.runs.memory import weights_of
from trainer.workflows.recipe import Facts, Speed, choose

SHAPES = {
    "135M": (576, 1536, 30, 9, 3, None, 49152),
    "1.7B": (2048, 8192, 24, 32, 32, None, 49152),
    "7B": (4096, 11008, 32, 32, 32, None, 32000),
}


def facts(size, context, qk_norm=False):
    config = ModelConfig(*SHAPES[size], tie_word_embeddings=size == "135M")
    layout = build_layout(
        PositionalConfig(layers=["rope"]),
        num_layers=config.num_hidden_layers,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_size,
        training_length=context,
        qk_norm=qk_norm,
    )
    return Facts(weights_of(config), config, layout)


def cpu(model, rate, update=0.0):
    """A CPU that trains so many tokens a second in sequences of 512."""
    operations = rate * training_flops(model.config, model.layout, 512) / 512
    return Speed("2 CPU threads", False, "bf16", operations, update, 2048)


def gpu(share=0.4, fitting=16384):
    return Speed("NVIDIA H100", True, "bf16", share * 989e12, 0.01, fitting)


def chosen(*arguments, **given):
    given = {key.replace("__", "."): value for key, value in given.items()}
    recipe = choose(*arguments, given)
    return {choice.key: choice.value for choice in recipe.choices}, recipe


@pytest.mark.parametrize(
    ("size", "context", "minutes", "speed", "length", "batch", "micro", "lr"),
    [
        ("135M", 8192, 10, 250, 512, 1, 1, 3e-4),  # of 112 tokens a step, not below a sequence
        ("135M", 8192, 240, 250, 512, 4, 4, 3e-4),
        ("135M", 8192, 720, 250, 1024, 4, 2, 3e-4),
        ("135M", 8192, 20, None, 8192, 16, 2, 3e-4),
        ("1.7B", 2048, 20, None, 2048, 8, 8, 3e-4),
        ("7B", 4096, 60, None, 4096, 4, 4, 1e-4),
        ("7B", 4096, 60 * 24 * 30, None, 4096, 256, 4, 1e-4),
    ],
)
def test_size_minutes_and_device_decide(size, context, minutes, speed, length, batch, micro, lr):
    model = facts(size, context)
    device = gpu() if speed is None else cpu(model, speed)
    values, recipe = chosen(model, device, minutes)
    assert values["data.sequence_length"] == length
    assert values["trainer.batch_size"] == batch
    assert values["trainer.micro_batch_size"] == micro
    assert values["optimizer.lr"] == lr
    assert values["model.qk_norm.when"] == "never"
    seconds = batch * training_flops(model.config, model.layout, length) / device.operations
    steps = values["trainer.max_steps"]
    assert steps == int(45 * minutes / (seconds + device.update))
    assert values["drop.schedule.warmup_steps"] == min(max(steps // 10, 10), 500)
    assert recipe.tokens == steps * batch * length
    assert recipe.seconds + recipe.evaluation_seconds <= 60 * minutes


def test_ten_minutes_on_a_cpu_are_the_tokens_that_it_reads_meanwhile():
    model = facts("135M", 8192)
    values, recipe = chosen(model, cpu(model, 250), 10)
    assert values["trainer.max_steps"] == 219  # 450 s of 512 tokens at 250 tokens/s
    assert recipe.tokens == 219 * 512


def rows_of_the_guide():
    lines = (ROOT / "docs/guide.md").read_text().splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return {row[0].strip(" `"): " ".join(row[1:]) for row in cells}


def test_the_guide_tells_the_same_rates_norm_and_warmup():
    rows = rows_of_the_guide()
    small, large = re.search(r"(\S+) up to 2B, (\S+) at 7B", rows["optimizer.lr"]).groups()
    for size, rate in (("1.7B", small), ("7B", large)):
        assert chosen(facts(size, 2048), gpu(), 600)[0]["optimizer.lr"] == float(rate)
    never, after, rate = re.search(
        r"`(\w+)`; `(\w+)` for rates of (\S+)", rows["model.qk_norm.when"]
    ).groups()
    values, _ = chosen(facts("135M", 2048), gpu(), 20)
    assert values["model.qk_norm.when"] == never
    assert "drop.qk_norm_gain" not in values
    values, _ = chosen(facts("135M", 2048), gpu(), 20, optimizer__lr=float(rate))
    assert values["model.qk_norm.when"] == after
    assert f"`{values['drop.qk_norm_gain']}`" in rows["drop.qk_norm_gain"]
    low, high = re.search(r"(\d+) to (\d+)", rows["drop.schedule.warmup_steps"]).groups()
    for minutes in (20, 2000):
        values, recipe = chosen(facts("135M", 2048), gpu(), minutes)
        assert recipe.steps >= 1000
        assert int(low) <= values["drop.schedule.warmup_steps"] <= int(high)


def test_a_model_with_qk_norm_keeps_its_own():
    values, _ = chosen(facts("135M", 2048, qk_norm=True), gpu(), 20, optimizer__lr=1e-3)
    assert not {"model.qk_norm.when", "drop.qk_norm_gain"} & values.keys()


def test_what_is_given_is_kept_and_the_rest_follows():
    model = facts("135M", 8192)
    given = {"trainer__batch_size": 6, "data__sequence_length": 256}
    values, recipe = chosen(model, cpu(model, 250), 10, **given)
    assert not {"trainer.batch_size", "data.sequence_length"} & values.keys()
    assert values["trainer.micro_batch_size"] == 6  # of 8 that fit, one that divides
    a_token = training_flops(model.config, model.layout, 256) / 256
    assert recipe.steps == int(450 * cpu(model, 250).operations / (6 * 256 * a_token))
    values, recipe = chosen(model, cpu(model, 250), 10, trainer__max_tokens=10_000)
    assert "trainer.max_steps" not in values
    assert recipe.steps == 19  # even fewer than the warm-up would be
    assert chosen(model, cpu(model, 250), 10, trainer__max_steps=5)[1].steps == 5


def test_minutes_without_an_evaluation_are_all_of_recalibration():
    model = facts("135M", 8192)
    values, recipe = chosen(model, cpu(model, 250), 10, evaluation__enabled=False)
    assert recipe.steps == 292  # 600 s of 512 tokens at 250 tokens/s
    assert recipe.evaluation_seconds == 0
    assert not [key for key in values if key.startswith("evaluation")]


def test_too_few_minutes_name_those_that_suffice():
    model = facts("135M", 8192)
    with pytest.raises(UserError) as error:
        chosen(model, cpu(model, 25), 5)
    (problem,) = error.value.problems
    assert problem.key == "minutes"
    needed = float(re.search(r"need ([\d.]+) on 2 CPU threads", problem.message)[1])
    assert needed == 9.2  # 20 steps of 20.5 s, in three quarters of the time
    assert chosen(model, cpu(model, 25), needed)[1].steps == 20


def test_sequences_fit_the_gpu():
    values, _ = chosen(facts("135M", 8192), gpu(fitting=4096), 600)
    assert values["data.sequence_length"] == 4096
    assert values["trainer.micro_batch_size"] == 1


def seconds_of(model, device, values):
    """Seconds of every pass of an evaluation, each on its own, as if none were shared."""
    unit, models = values["evaluation.training_length"], 1 + len(values["evaluation.methods"])
    depths = values.get("evaluation.needles.depths", [])
    prompts = len(depths) * values.get("evaluation.needles.trials", 0)
    fits = 10 * values.get("evaluation.fit_windows", 0)  # 9 coefficients, and a tenth between them

    def passes(length):
        return forward_flops(model.config, model.layout, length) / device.operations

    answer = 16 * (passes(32) + 0.001 * model.config.num_hidden_layers)
    return sum(
        models * (values["evaluation.windows"] * passes(n) + prompts * (passes(n) + answer))
        + fits * passes(n) * (n > unit)
        for n in values["evaluation.tokens"]
    )


@pytest.mark.parametrize("minutes", [10, 20, 60, 720])
@pytest.mark.parametrize(("size", "context"), [("135M", 8192), ("1.7B", 2048), ("7B", 4096)])
@pytest.mark.parametrize("is_gpu", [False, True])
def test_the_evaluation_fits_the_time_that_is_left(size, context, minutes, is_gpu):
    model = facts(size, context)
    device = gpu() if is_gpu else cpu(model, 250)
    values, recipe = chosen(model, device, minutes)
    assert recipe.evaluation_seconds == pytest.approx(seconds_of(model, device, values))
    assert recipe.evaluation_seconds <= 15 * minutes
    lengths, length = values["evaluation.tokens"], values["data.sequence_length"]
    assert lengths == [length * n for n in (1, 2, 4, 8)][: len(lengths)]
    # Whatever the time, longer sequences are read with the temperature that they need.
    assert len(lengths) >= 2
    assert "temperature" in values["evaluation.methods"]


def test_a_short_evaluation_leaves_out_needles_then_the_temperature():
    model = facts("135M", 8192)
    values, _ = chosen(model, cpu(model, 250), 20)
    assert values["evaluation.tasks"] == ["perplexity", "standard"]
    assert values["evaluation.needles.trials"] == 1
    values, _ = chosen(model, cpu(model, 150), 10)
    assert values["evaluation.tasks"] == ["perplexity"]
    assert "evaluation.needles.trials" not in values
    assert values["evaluation.methods"] == ["none", "temperature"]
    tokens = [512, 1024, 2048, 4096]  # as a user wants them
    values, recipe = chosen(model, cpu(model, 250), 10, evaluation__tokens=tokens)
    assert values["evaluation.methods"] == ["none"]
    assert "evaluation.fit_windows" not in values
    assert recipe.evaluation_seconds <= 150


def test_methods_count_from_the_sequences_unless_a_length_is_beyond_the_context():
    model = facts("135M", 8192)
    values, recipe = chosen(model, cpu(model, 250), 20)
    assert values["evaluation.training_length"] == values["data.sequence_length"] == 512
    # Up to C, YaRN and dynamic NTK are the identity.
    assert values["evaluation.methods"] == ["none", "temperature"]
    reasons = {choice.key: choice.why for choice in recipe.choices}
    assert "no length is beyond C = 8,192" in reasons["evaluation.training_length"]
    values, _ = chosen(model, gpu(), 20)
    assert values["evaluation.tokens"] == [8192 * n for n in (1, 2, 4, 8)]
    assert values["evaluation.training_length"] == 8192
    assert values["evaluation.methods"] == ["none", "yarn", "dynamic_ntk", "temperature"]
    values, _ = chosen(model, cpu(model, 250), 20, evaluation__training_length=8192)
    assert values["evaluation.methods"] == ["none"]


def test_needles_and_a_temperature_that_a_user_asks_for_are_never_left_out():
    model, names = facts("135M", 8192), {"evaluation__methods": ["temperature"]}
    given = {"evaluation__tokens": [4096, 8192], "evaluation__tasks": ["standard"], **names}
    values, recipe = chosen(model, cpu(model, 250), 10, **given)
    counts = values["evaluation.needles.trials"], values["evaluation.fit_windows"]
    assert [*map(override_value, counts)] == ["1", "1"]
    assert recipe.evaluation_seconds > 150


def test_short_prompts_hold_no_needles_and_what_a_user_measures_is_counted():
    model = facts("135M", 8192)
    values, _ = chosen(model, gpu(), 20, evaluation__tokens=[256, 16384])
    assert values["evaluation.tasks"] == ["perplexity"]
    given = {"evaluation__windows": 96, "evaluation__methods": ["none"]}
    _, recipe = chosen(model, gpu(), 20, evaluation__tasks=["perplexity"], **given)
    given = {key.replace("__", "."): value for key, value in given.items()}
    tokens = [8192, 16384, 32768, 65536]
    given |= {"evaluation.tokens": tokens, "evaluation.training_length": 8192}
    assert recipe.evaluation_seconds == pytest.approx(seconds_of(model, gpu(), given))


@pytest.mark.parametrize(
    "given", [{"evaluation__tokens": [256, 16384]}, {"evaluation__lengths": [0.03125, 2]}]
)
def test_lengths_that_are_given_are_kept_in_either_unit(given):
    model = facts("135M", 8192)
    values, _ = chosen(model, gpu(), 10, **given)
    assert not {"evaluation.tokens", "evaluation.lengths"} & values.keys()
    assert values["evaluation.training_length"] == 8192
    # beyond C
    assert values["evaluation.methods"] == ["none", "yarn", "dynamic_ntk", "temperature"]
