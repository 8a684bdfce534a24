"""Rules that choose a recalibration's recipe: how long, at which length and learning rate.

The rules are those of docs/guide.md. docs/pretrained.md tells them with their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.common.errors import UserError
from trainer.common.words import duration
from trainer.evaluation.method_config import TemperatureSettings
from trainer.model.config import ModelConfig
from trainer.model.flops import forward_flops, training_flops
from trainer.positional.layout import Layout

TRAINING = 0.75
"""Share of the minutes that the recalibration takes; the evaluation may take the rest."""
SHORTEST = 512
"""Tokens of a sequence, unless the model's context is shorter."""
SEQUENCES = 4096
"""Sequences of the model's whole context that a run must be able to read to use it."""
STEPS = 1000
"""Steps that the batch is chosen for."""
BATCH_TOKENS = SHORTEST, 512 * 2048
"""Fewest and most tokens of a step: in few minutes more and smaller steps recover more
(docs/pretrained.md); DroPE's recipes have the most (App. D)."""
ROOM = 1.25
"""Suggested minutes over those needed: a second measurement may be slower."""
WARMUP = 10, 500
"""Fewest and most steps of warm-up, otherwise a tenth of the steps."""
LARGE = 2e9
"""Parameters up to which the higher of the two rates is right."""
RATES = 3e-4, 1e-4
"""Learning rates of models up to :data:`LARGE`, and of larger ones."""
NORMED_RATE = 1e-3
"""Learning rate from which on training needs QK-norm (DroPE, Table 11)."""
MULTIPLES = (1, 2, 4, 8)
"""Evaluated lengths, in multiples of the sequence length."""
NEEDLES = "standard"
"""Task that the evaluation asks beside perplexity: a needle in words, which any model can read."""
ANSWER = 16, 32, 1e-3
"""Tokens of an answer, the tokens that a pass for one of them costs as much as, and the seconds
that each layer adds to such a pass on its own."""
EFFECT = 4, 64
"""Fewest and most held-out sequences for the loss before, after and at the end."""
CPU_PASS = 2048
"""Tokens of a forward pass on a CPU; more are no faster."""

Pick = Callable[[str, Any, str], Any]
"""Takes a key, a value and the reason; returns the user's value if there is one."""


@dataclass(frozen=True)
class Facts:
    """Properties of a model that the rules use."""

    parameters: int
    """Number of parameters, with embeddings."""
    config: ModelConfig
    layout: Layout
    """Its encoding; the context C is the training length."""

    @property
    def context(self) -> int:
        """The model's context C, in tokens."""
        return self.layout.training_length

    @property
    def has_qk_norm(self) -> bool:
        """Whether its queries and keys are normalized already."""
        return any(layer.qk_norm for layer in self.layout.layers)


@dataclass(frozen=True)
class Speed:
    """Measured speed of training on a device."""

    device: str
    """Its name in messages, such as ``NVIDIA H100`` or ``2 CPU threads``."""
    is_gpu: bool
    precision: str
    """The faster of ``fp32`` and ``bf16``."""
    operations: float
    """Operations per second, forward and backward."""
    update: float
    """Seconds of an update of the optimizer."""
    pass_tokens: int
    """Tokens of a forward pass that fit into memory."""


@dataclass(frozen=True)
class Choice:
    """A key, its value, and the reason."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Recipe:
    """Choices for a recalibration and their expected cost."""

    choices: tuple[Choice, ...]
    """Keys that the user does not set."""
    steps: int
    tokens: int
    seconds: float
    """Expected seconds of the recalibration."""
    evaluation_seconds: float


def choose(facts: Facts, speed: Speed, minutes: float, user_values: Mapping[str, Any]) -> Recipe:
    """Return the recipe for a model, a device and a time.

    ``minutes``: time for recalibration and evaluation together. ``user_values``: values of dotted
    keys that the user sets; the choices follow from them.

    Raises:
        UserError: the minutes do not suffice for the warm-up.
    """
    choices: list[Choice] = []

    def pick(key: str, value: Any, why: str) -> Any:
        if key in user_values:
            return user_values[key]
        choices.append(Choice(key, value, why))
        return value

    evaluates = user_values.get("evaluation.enabled", True)
    seconds = 60 * minutes * (TRAINING if evaluates else 1.0)
    length = pick("data.sequence_length", *_length(facts, speed, seconds))
    token = seconds_a_token(facts, speed, length)
    batch, why = _batch(seconds / token, length)
    batch = pick("trainer.batch_size", batch, why)
    fitting = speed.pass_tokens // length
    micro = next(n for n in range(batch, 0, -1) if batch % n == 0 and n <= max(1, fitting))
    pick(
        "trainer.micro_batch_size", micro, f"at most {speed.pass_tokens:,} tokens in a forward pass"
    )
    a_step = batch * length * token + speed.update
    steps = user_values.get("trainer.max_steps")
    if (tokens := user_values.get("trainer.max_tokens")) is not None:
        steps = max(1, tokens // (batch * length))
    if steps is None:
        steps = int(seconds / a_step)
        if steps < 2 * WARMUP[0]:
            needed = 2 * WARMUP[0] * a_step / (seconds / minutes)
            raise UserError.at(
                "minutes",
                f"{minutes:g} is too short: {WARMUP[0]} steps of warm-up and as many after it, of "
                f"{batch} x {length:,} tokens, need {_rounded_up(needed):g} on {speed.device}.",
                f"Write minutes={_rounded_up(ROOM * needed):g}: another measurement may be slower.",
            )
        pick(
            "trainer.max_steps",
            steps,
            f"{duration(seconds)} at {1 / token:,.0f} tokens/s on {speed.device}",
        )
    pick("trainer.precision", speed.precision, "the faster of what the device offers")
    rate = pick(
        "optimizer.lr",
        RATES[0] if facts.parameters <= LARGE else RATES[1],
        f"{facts.parameters / 1e6:,.3g}M parameters; 3e-4 up to 2B, 1e-4 above (DroPE, App. D)",
    )
    _norm(facts, rate, pick)
    low, high = WARMUP
    pick(
        "drop.schedule.warmup_steps",
        min(max(steps // 10, low), high, steps),
        f"a tenth of the steps, {low} to {high}",
    )
    pick("trainer.checkpoint_minutes", max(minutes / 5, 0.1), "five checkpoints on the way")
    share = steps * batch // 20  # the three measurements then take a twentieth of the time
    pick(
        "drop.effect_sequences",
        min(max(share, EFFECT[0]), EFFECT[1]),
        "the drop's effect costs a twentieth of the time at most",
    )
    costs = 0.0
    if evaluates:
        costs = _evaluation(facts, speed, length, 60 * minutes - seconds, user_values, pick)
    total = steps * a_step
    return Recipe(tuple(choices), steps, steps * batch * length, total, costs)


def seconds_a_token(facts: Facts, speed: Speed, length: int) -> float:
    """Return the seconds of forward and backward for a token in sequences of ``length``."""
    return training_flops(facts.config, facts.layout, length) / length / speed.operations


def _length(facts: Facts, speed: Speed, seconds: float) -> tuple[int, str]:
    """Return the longest sequences up to C that leave time for enough of them, and why."""
    C = facts.context
    length, why = C, f"the model's context C = {C:,}, as DroPE trains"
    while length // 2 >= SHORTEST:
        if speed.is_gpu and length > speed.pass_tokens:
            why = f"C = {C:,}, halved until a sequence fits the GPU"
        elif seconds / (length * seconds_a_token(facts, speed, length)) < SEQUENCES:
            why = f"C = {C:,}, halved until {SEQUENCES:,} sequences fit the time, to {SHORTEST}"
        else:
            break
        length //= 2
    return length, why


def _batch(tokens: float, length: int) -> tuple[int, str]:
    """Return the sequences of a step, a power of two, for a run of ``tokens`` tokens, and why."""
    low, high = BATCH_TOKENS
    wanted = min(max(tokens / STEPS, low), high)
    size = 1 << max(0, int(math.log2(max(1.0, wanted / length))))
    return size, f"about {STEPS:,} steps, of {low:,} to {high:,} tokens"


def _norm(facts: Facts, rate: float, pick: Pick) -> None:
    """Choose QK-norm from the learning rate."""
    if facts.has_qk_norm:
        return
    if rate < NORMED_RATE:
        pick("model.qk_norm.when", "never", "rates below 1e-3 do better without (Table 11)")
        return
    if pick("model.qk_norm.when", "after_drop", "rates from 1e-3 need it (Table 11)") != "never":
        pick("drop.qk_norm_gain", "matched", "attention logits keep their scale at the drop")


@dataclass(frozen=True)
class Effort:
    """How exactly an evaluation measures; 0 leaves a part out."""

    windows: int
    """Held-out windows of each length."""
    trials: int
    """Texts of the needle task at each length, asked once at each of :data:`DEPTHS`. A sign test of
    fewer than six never has p < 0.05."""
    fit_windows: int
    """Windows of each length that the temperature is fitted on."""


EFFORTS = (
    (Effort(32, 8, 8), Effort(16, 6, 4), Effort(8, 2, 4), Effort(4, 1, 2)),
    (Effort(16, 0, 4), Effort(8, 0, 4), Effort(4, 0, 2)),
    (Effort(32, 0, 0), Effort(16, 0, 0), Effort(8, 0, 0), Effort(4, 0, 0)),
)
"""Evaluations with needles and a temperature, with a temperature alone, and of losses alone; each
from the most exact to the cheapest."""

DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
"""Depths of the needles: the texts decide how exact an evaluation is."""


@dataclass(frozen=True)
class _Evaluation:
    """An evaluation of some lengths, in tokens, with an effort.

    ``unit``: tokens beyond which methods change a model. ``methods``, ``tasks``: as in the
    configuration.
    """

    tokens: list[int]
    effort: Effort
    unit: int
    methods: list[str]
    tasks: list[str]

    def seconds(self, facts: Facts, speed: Speed, user_values: Mapping[str, Any]) -> float:
        """Return the expected time: no pass is shared, so that it is rather too long."""

        def passes(length: int) -> float:
            return forward_flops(facts.config, facts.layout, length) / speed.operations

        def user(key: str, default: Any) -> Any:
            return user_values.get(f"evaluation.{key}", default)

        temperature = TemperatureSettings()
        answer_tokens, as_many, of_layer = ANSWER
        answer = answer_tokens * (passes(as_many) + facts.config.num_hidden_layers * of_layer)
        windows = user("windows", self.effort.windows)
        asked = NEEDLES in self.tasks
        trials = user("needles.trials", self.effort.trials) if asked else 0
        prompts = trials * len(user("needles.depths", DEPTHS))
        tried = len(user("temperature.grid", temperature.grid)) + 1
        fits = "temperature" in self.methods
        fit_windows = user("fit_windows", self.effort.fit_windows) * tried if fits else 0
        models = 1 + len(self.methods)  # as it is there are two
        return sum(
            models * (windows * passes(n) + prompts * (passes(n) + answer))
            + (fit_windows * passes(n) if n > self.unit else 0)
            for n in self.tokens
        )


def _evaluation(
    facts: Facts,
    speed: Speed,
    length: int,
    seconds: float,
    user_values: Mapping[str, Any],
    pick: Pick,
) -> float:
    """Choose lengths, methods and tasks of the evaluation, and how exactly it measures; return its
    expected seconds."""
    C = user_values.get("evaluation.training_length", facts.context)
    asked = user_values.get("evaluation.tokens")
    if (factors := user_values.get("evaluation.lengths")) is not None:
        asked = [round(C * factor) for factor in factors]
    tokens = asked or [length * n for n in MULTIPLES]

    def evaluation(lengths: list[int], effort: Effort) -> _Evaluation:
        extends = max(lengths) > C
        unit = C if extends or factors is not None else min(C, length)
        unit = user_values.get("evaluation.training_length", unit)
        methods = ["none", *["yarn", "dynamic_ntk"] * extends]
        methods += ["temperature"] * (effort.fit_windows > 0 and max(lengths) > unit)
        methods = user_values.get("evaluation.methods", methods)
        has_needles = effort.trials > 0 and min(lengths) >= SHORTEST
        tasks = user_values.get("evaluation.tasks", ["perplexity", *[NEEDLES] * has_needles])
        at_least = replace(  # what a user asks for is not left out
            effort,
            trials=max(effort.trials, int(NEEDLES in tasks)),
            fit_windows=max(effort.fit_windows, int("temperature" in methods)),
        )
        return _Evaluation(lengths, at_least, unit, methods, tasks)

    tried = [
        evaluation(tokens[:count], effort)
        for efforts in EFFORTS
        for count in range(len(tokens), 0, -1)
        for effort in efforts
        if count == len(tokens) or (asked is None and (count > 1 or not effort.fit_windows))
    ]
    costs = (plan.seconds(facts, speed, user_values) for plan in tried)
    plan = next((p for p, c in zip(tried, costs, strict=False) if c <= seconds), tried[-1])
    if asked is None:
        left_out = [n for n in tokens if n not in plan.tokens]
        why = f"1 to {plan.tokens[-1] // length} times {length:,} tokens"
        if left_out:
            why += f"; {', '.join(f'{n:,}' for n in left_out)} take more than the time"
        pick("evaluation.tokens", plan.tokens, why)
    if plan.unit == length < C:
        why = f"the sequences, from which the temperature counts; no length is beyond C = {C:,}"
    else:
        why = "the model's context, from which extensions and the temperature count"
    pick("evaluation.training_length", plan.unit, why)
    why = "a needle in words beside the loss" if NEEDLES in plan.tasks else "needs no questions"
    pick("evaluation.tasks", plan.tasks, why)
    reasons = [
        "extensions of the model as it was"
        if max(plan.tokens) > C
        else f"YaRN and dynamic NTK change nothing up to C = {C:,}"
    ]
    if "temperature" in plan.methods:
        reasons.append("a temperature fitted for the recalibrated one")
    pick("evaluation.methods", plan.methods, "; ".join(reasons))
    effort, most = plan.effort, EFFORTS[0][0]
    pick("evaluation.windows", effort.windows, f"up to {most.windows}, as the time allows")
    if NEEDLES in plan.tasks:
        why = f"up to {most.trials} texts, each asked at every depth, as the time allows"
        pick("evaluation.needles.trials", effort.trials, why)
        pick("evaluation.needles.depths", DEPTHS, "texts decide how exact it is, not depths")
    if "temperature" in plan.methods:
        why = f"up to {most.fit_windows} windows, as the time allows"
        pick("evaluation.fit_windows", effort.fit_windows, why)
    pick("evaluation.dtype", speed.precision, "as in training")
    return plan.seconds(facts, speed, user_values)


def _rounded_up(minutes: float) -> float:
    """Round up to two digits."""
    digits = 10 ** (math.floor(math.log10(minutes)) - 1)
    return math.ceil(minutes / digits) * digits
