"""Estimates of memory, against what torch counts and against sums by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainer.evaluation import dope
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.method_config import DopeSettings
from trainer.evaluation.results import PERPLEXITY
from trainer.model.config import ModelConfig
from trainer.recalibration.config import DropConfig
from trainer.runs import memory
from trainer.runs.config import RunConfig, StrategyConfig, TrainerConfig
from trainer.runs.memory import (
    cache_memory,
    choice_memory,
    evaluation_memory,
    evaluation_problems,
    free_memory,
    memory_problems,
    needed_memory,
    weights_of,
)
from trainer.runs.training_config import MonitorConfig

GIB = 1 << 30
SHAPE = ModelConfig(
    hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, vocab_size=4096,
)  # fmt: skip
BLOCK = 2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 2048
WEIGHTS = 8 * BLOCK + 4096 * 1024


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_matrices_of_a_decoder(tiny_decoder, tied):
    model = tiny_decoder(model={"tie_word_embeddings": tied, "head_dim": 10})
    assert weights_of(model.config) == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert (
        weights_of(replace(SHAPE, tie_word_embeddings=tied)) == WEIGHTS + (not tied) * 4096 * 1024
    )


def test_what_a_model_needs_is_its_weights_and_the_activations_of_one_layer():
    weights = 4 * WEIGHTS
    assert needed_memory(SHAPE, 0) == weights
    assert needed_memory(SHAPE, 0, models=3) == 3 * weights
    a_token = 4 * (6 * 1024 + 3 * 2048) + 56 * 1024 + 32 * 256
    assert needed_memory(SHAPE, 100) == weights + 100 * a_token
    keys_and_values = torch.zeros(8, 2, 3, 50, 2, 128)  # layers, two, rows, tokens, heads, channels
    assert cache_memory(SHAPE, 3, 50) == keys_and_values.nbytes


def test_free_memory_is_what_the_system_says_or_else_all_there_is(monkeypatch):
    assert 2**20 < free_memory("cpu") < 2**50
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "MemTotal: 9 kB\nMemAvailable:  7 kB")
    assert free_memory("cpu") == 7 * 1024
    for content in ("MemTotal: 9 kB", "MemAvailable: x kB", "nothing"):
        monkeypatch.setattr(Path, "read_text", lambda *_, content=content, **__: content)
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert free_memory("cpu") == whole
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 80))
    assert free_memory("cuda") == 5


PLAIN = RunConfig(
    model=SHAPE, trainer=TrainerConfig(batch_size=8, micro_batch_size=4),
    evaluation=EvaluationConfig(enabled=False),
)  # fmt: skip


def needs(config, ranks=1):
    """The least free memory in bytes with which a run is not refused, and why one byte less is too
    little, by their keys."""

    def problems(free):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "free_memory", lambda device: free)
            return memory_problems(config, ranks)

    low, high = 0, 1 << 50
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if not problems(middle) else (middle + 1, high)
    return low, problems(low - 1)


def activations(micro, length=512, width=1024, layers=8, copies=4):
    return 2 * micro * length * width * layers * copies


LONG = replace(PLAIN.data, sequence_length=512)
STATE = 12 * WEIGHTS


@pytest.mark.parametrize(
    ("changes", "ranks", "least"),
    [
        ({}, 1, STATE + activations(4)),
        ({"trainer": TrainerConfig(batch_size=8)}, 1, STATE + activations(8)),
        ({"trainer": TrainerConfig(batch_size=8)}, 2, STATE + activations(4)),
        ({"strategy": StrategyConfig("ddp")}, 2, STATE + activations(4)),
        ({"strategy": StrategyConfig("fsdp2")}, 2, STATE // 2 + activations(4)),
        ({"strategy": StrategyConfig("hsdp")}, 2, STATE // 2 + activations(4)),
        (
            {"strategy": StrategyConfig(activation_checkpointing="selective")},
            1, STATE + activations(4),
        ),
        (
            {"strategy": StrategyConfig(activation_checkpointing="full")},
            1, STATE + activations(4, copies=1),
        ),
    ],
)  # fmt: skip
def test_a_run_needs_weights_gradients_moments_and_activations(changes, ranks, least):
    config = replace(PLAIN, data=LONG, **changes)
    assert needs(config, ranks)[0] == least


def test_sizes_are_said_in_the_unit_that_fits():
    assert [memory.gib(n * GIB) for n in (1234.5, 0.1, 0.09, 1e-4)] == [
        "1,234.5 GiB", "0.1 GiB", "92.2 MiB", "0.1 MiB",
    ]  # fmt: skip


REMEDY = "What to do: docs/troubleshooting.md, “A run does not fit into memory”."


def test_what_does_not_fit_is_said_with_what_there_is(monkeypatch):
    config = replace(PLAIN, data=LONG)
    monkeypatch.setattr(memory, "free_memory", lambda device: STATE)
    assert [*map(str, memory_problems(config, 1))] == [
        "trainer.micro_batch_size: 4 sequences of 512 tokens need at least 0.1 GiB of activations, "
        f"and {STATE / GIB:.1f} GiB are free; choose fewer or shorter ones. {REMEDY}"
    ]
    monkeypatch.setattr(memory, "free_memory", lambda device: STATE - 1)
    assert [*map(str, memory_problems(config, 1))] == [
        f"model: {WEIGHTS:,} weights with gradients and optimizer need at least "
        f"{STATE / GIB:.1f} GiB, and {STATE / GIB:.1f} GiB are free; choose a smaller model, or "
        f"more devices. {REMEDY}"
    ]
    unknown = replace(config, model=replace(SHAPE, vocab_size=None))  # as the tokenizer's
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    assert str(memory_problems(unknown, 1)[0]).startswith(
        f"model: {WEIGHTS + (unknown.tokenizer.vocab_size - 4096) * 1024:,} weights"
    )


def test_weights_on_the_cpu_are_not_held_against_the_device(monkeypatch):
    """Activations alone decide."""
    offloaded = replace(PLAIN, data=LONG, strategy=StrategyConfig("fsdp2", cpu_offload=True))
    monkeypatch.setattr(memory, "free_memory", lambda device: activations(4))
    assert memory_problems(offloaded, 1) == []
    monkeypatch.setattr(memory, "free_memory", lambda device: activations(4) - 1)
    (problem,) = memory_problems(offloaded, 1)
    assert problem.key == "trainer.micro_batch_size"


TINY = replace(SHAPE, hidden_size=2, intermediate_size=1, num_attention_heads=1,
               num_key_value_heads=1, num_hidden_layers=1, vocab_size=1)  # fmt: skip
ASKED = EvaluationConfig(tasks=[PERPLEXITY], windows=1_000, lengths=[1, 2.5])


@pytest.mark.parametrize(
    ("changes", "key", "tokens"),
    [
        ({"drop": DropConfig(at=10, effect_sequences=300)}, "drop.effect_sequences", 5 * 300 * 512),
        ({"evaluation": ASKED}, "evaluation.windows", 1_000 * 3.5 * 512),
        (
            {"monitor": MonitorConfig(lengths_every=1, windows=700, lengths=[1, 4])},
            "monitor.windows", 700 * 5 * 512,
        ),
    ],
)  # fmt: skip
def test_held_out_text_that_is_held_at_once_has_to_fit(changes, key, tokens):
    small = {"model": TINY, "trainer": TrainerConfig(batch_size=1)}
    config = replace(PLAIN, **small, data=LONG, **changes)
    least, problems = needs(config)
    size = f"{least / 2**20:,.1f} MiB"
    assert least == 8 * tokens
    assert [*map(str, problems)] == [
        f"{key}: held-out text of {size} at once, and {size} are free; choose less."
    ]


def test_text_that_is_not_held_needs_no_memory():
    small = replace(PLAIN, model=TINY, trainer=TrainerConfig(batch_size=1), data=LONG)
    least = needs(small)[0]
    for changes in (
        {"evaluation": replace(ASKED, enabled=False)},
        {"drop": DropConfig(at=10, effect_sequences=10**6, enabled=False)},
        {"monitor": MonitorConfig(windows=10**6)},
    ):
        assert needs(replace(small, **changes))[0] == least


SMOLLM2_360M = ModelConfig(
    hidden_size=960, intermediate_size=2560, num_hidden_layers=32, num_attention_heads=15,
    num_key_value_heads=5, vocab_size=49152, tie_word_embeddings=True,
)  # fmt: skip
MILLION = 1 << 20
GPU = 80 * 10**9


@pytest.fixture
def free(monkeypatch):
    """A function that sets the free memory."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return lambda size: monkeypatch.setattr(memory, "free_memory", lambda device: size)


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_an_evaluation_needs_weights_keys_and_values_and_a_chunk_of_activations(dtype, size):
    """86 GB of keys and values for a million tokens in float32, from a plain sum."""
    asked = EvaluationConfig()
    about = asked, 32768, dtype, "cuda"
    weights, cached, activations = evaluation_memory(SMOLLM2_360M, MILLION, *about)
    assert weights == size * weights_of(SMOLLM2_360M)
    of_a_layer = torch.empty(2, 5, MILLION, 64, device="meta", dtype=memory_type(size))
    assert cached == 32 * of_a_layer.nbytes == {4: 85_899_345_920, 2: 42_949_672_960}[size]
    a_chunk = 32768 * (4 * 960 + 3 * 2560 + 2 * (15 + 2 * 5) * 64)
    of_heads = torch.empty(2, 15, MILLION, 64, device="meta", dtype=memory_type(size))
    assert activations == size * a_chunk + of_heads.nbytes
    # Losses of a sequence that is read at once keep nothing of it; answers do.
    assert evaluation_memory(SMOLLM2_360M, 4096, *about)[1] == 0
    answered = replace(asked, tasks=["standard"], batch_tokens=8192)
    of_two = cache_memory(SMOLLM2_360M, 2, 4096, size)
    assert evaluation_memory(SMOLLM2_360M, 4096, answered, None, dtype, "cuda")[1] == of_two


def test_a_cpu_reads_fewer_short_sequences_at_once_than_a_gpu():
    """As many tokens as its caches hold, 2^19 / 960 of this width."""
    about = SMOLLM2_360M, 128, EvaluationConfig(batch_tokens=1024), None, "fp32"
    of_gpu, of_cpu = (evaluation_memory(*about, device)[2] for device in ("cuda", "cpu"))
    assert of_gpu / of_cpu == 8 / 4


def memory_type(size):
    return {4: torch.float32, 2: torch.bfloat16}[size]


@pytest.mark.parametrize(
    ("changes", "available", "remedy"),
    [
        ({"dtype": "fp32"}, GPU, "evaluation.dtype=bf16 needs 45.3 GiB"),
        (
            {"dtype": "bf16", "prefill_chunk": 10**6}, 60 * 10**9,
            "evaluation.prefill_chunk=8192 needs 44.6 GiB",
        ),
        (
            {"dtype": "fp32", "prefill_chunk": 10**6}, 48 * 10**9,
            "evaluation.dtype=bf16 evaluation.prefill_chunk=8192 needs 44.6 GiB",
        ),
        (
            {"dtype": "bf16"}, 30 * 10**9,
            "choose lengths of up to 614,656 tokens, or a device with more memory",
        ),
        ({"dtype": "bf16"}, 10**8, "choose a smaller model, or a device with more memory"),
    ],
)  # fmt: skip
def test_an_evaluation_that_does_not_fit_names_what_would(free, changes, available, remedy):
    asked = EvaluationConfig(**changes)
    free(available)
    (problem,) = evaluation_problems({"a": SMOLLM2_360M}, MILLION, asked, "cuda")
    beginning, _, message = str(problem).partition("; ")
    assert message == f"{remedy}."
    assert beginning.startswith("evaluation.lengths: 1,048,576 tokens of a need at least ")
    assert beginning.endswith(f" GiB), and {memory.gib(available)} are free")
    free(200 * 10**9)
    assert evaluation_problems({"a": SMOLLM2_360M}, MILLION, asked, "cuda") == []


def test_what_is_named_does_fit(free):
    """To the byte, and processes on a CPU share its memory."""
    asked = EvaluationConfig(dtype="fp32", prefill_chunk=4096)
    needed = sum(evaluation_memory(SMOLLM2_360M, MILLION, asked, 4096, "fp32", "cpu"))
    about = {"a": SMOLLM2_360M}, MILLION, asked
    for available, processes, fits in (
        (needed, 1, True), (needed - 1, 1, False), (2 * needed, 2, True), (2 * needed - 2, 2, False)
    ):  # fmt: skip
        free(available)
        assert (evaluation_problems(*about, "cpu", processes) == []) is fits
    free(needed)
    assert evaluation_problems(*about, "cuda", 8) == []  # each has a GPU of its own


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("wide", ["heads", "MLP"])
def test_a_choice_of_heads_needs_what_one_text_takes_at_once(tiny_decoder, dtype, wide):
    """Peak of what torch allocates, also where it reads several texts."""
    changes = {"head_dim": 32} if wide == "heads" else {"intermediate_size": 256}
    model = tiny_decoder(model=changes).to(memory_type({"fp32": 4, "bf16": 2}[dtype]))
    ids = torch.zeros(3, 512, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        dope.select(model, ids, DopeSettings())
    events = profiled.profiler.kineto_results.events()
    peak = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    _, activations = choice_memory(model.config, 512, dtype)
    assert 0.5 * peak <= activations <= peak


def test_a_choice_that_does_not_fit_the_memory_is_refused(free):
    choices = {"a": 131_072}
    about = {"a": SMOLLM2_360M}, 4096, EvaluationConfig(dtype="bf16", batch_tokens=4096), "cuda"
    needed = sum(choice_memory(SMOLLM2_360M, choices["a"], "bf16"))
    assert needed > sum(evaluation_memory(SMOLLM2_360M, 4096, *about[2:3], None, "bf16", "cuda"))
    free(needed)
    assert evaluation_problems(*about, choices=choices) == []
    free(needed - 1)
    assert evaluation_problems(*about, choices={"b": choices["a"]}) == []
    (problem,) = evaluation_problems(*about, choices=choices)
    assert str(problem).startswith(
        "evaluation.methods: dope or weighted_rope reads 131,072 tokens of a in one pass and needs "
    )
    assert str(problem).endswith(
        "; choose on shorter texts (evaluation.choice.length), or leave the method out."
    )


def test_a_run_whose_evaluation_will_not_fit_is_not_started(free):
    """A remedy is said before the training, not after it."""
    asked = EvaluationConfig(tasks=["standard"], lengths=[1, 4000])
    run = replace(PLAIN, data=LONG, evaluation=asked)
    free(STATE + activations(4) + 2**24)
    (problem,) = memory_problems(run, 1)
    assert str(problem).startswith(
        "evaluation.lengths: 2,048,000 tokens of the model need at least "
    )
    assert memory_problems(replace(run, evaluation=replace(asked, enabled=False)), 1) == []
