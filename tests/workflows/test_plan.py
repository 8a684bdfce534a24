"""A plan as a whole, where memory is what a stand-in says."""

from __future__ import annotations

import json

import pytest

from trainer.common.errors import Problem, UserError
from trainer.data.corpus import prepare_corpus
from trainer.runs.config import RunConfig
from trainer.runs.parsing import parse
from trainer.workflows import plan as plans
from trainer.workflows.plan import GIB, PlanRequest, plan

MODEL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
         "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1024}  # fmt: skip


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """The sections of a plan, by their titles. A step takes 8 GiB, shared by the ranks, and for
    every sequence of a micro-batch 30 GiB, or a third or an eighth of that where it is recomputed;
    a checkpoint takes a million times what it does."""

    def step_memory(config, ranks, exact):
        run, kept = config.trainer, {"none": 30, "selective": 10, "full": 3.75}
        rows = run.micro_batch_size or run.batch_size // ranks.world_size
        assert config.strategy.name in ("single", "fsdp2", "hsdp")
        share = 1 if config.strategy.name == "single" else ranks.world_size
        sizes = {"parameters": 2 / share, "optimizer": 6 / share}
        sizes["activations"] = rows * kept[config.strategy.activation_checkpointing]
        return {name: int(size * GIB) for name, size in sizes.items()}

    monkeypatch.setattr(plans, "step_memory", step_memory)
    monkeypatch.setattr(plans, "STATE", 12 * 10**6)
    monkeypatch.setattr(plans, "product_peak", lambda threads: threads * 5e13)

    def made(values, ranks=1, local=1, **options):
        data = {"sequence_length": 64, "cache_dir": str(tmp_path)} | values.pop("data", {})
        values = {"name": "big", "run_dir": "runs/big", "model": MODEL, "data": data} | values
        request = PlanRequest(parse(RunConfig, values), ranks, local, **options)
        return {section.title: section.rows for section in plan(request)}

    return made


PARAMETERS = [
    ("embeddings", "65,536"),
    ("head", "0"),
    ("attention", "49,152"),
    ("MLP", "92,160"),
    ("norms", "448"),
    ("in all", "207,296"),
    ("without embeddings and head", "141,760"),
]


def test_the_whole_plan_of_a_run_with_controls_that_does_not_fit(planned):
    """6 operations for each of 206,848 multiplied weights and 12 * 3 * 64 * 32.5 of attention make
    2.7e18 for all tokens; the peaks of TF32 are 156 and 495 TFLOPS, of which half."""
    controls = {
        "rope": {"branch": "drop", "drop": {"at": None}},
        "late": {"branch": 10**8, "label": "late"},
        "nope": {"positional": {"layers": ["nope"]}, "drop": {"at": None}},
    }
    run = {"max_steps": 10**9, "batch_size": 32, "micro_batch_size": 4, "keep_every": 3 * 10**8}
    run |= {"keep_checkpoints": 2, "keep_best": 1, "threads": 2}
    values = {"drop": {"at": 0.75}, "controls": controls, "trainer": run}
    values["strategy"] = {"name": "ddp"}
    found = planned(values, 4, 2, gpu="a100_40gb", mfu=0.5, missing=(Problem("", "weights"),))
    first, (_, second) = found.pop("Missing here")
    assert first == ("", "weights")
    assert second.startswith("data: stdlib_docs has not been prepared")
    assert found == {
        "Parameters": PARAMETERS,
        "Training": [
            ("steps", "1,000,000,000 of 2,048 tokens"),
            ("tokens", "2,048,000,000,000"),
            ("drop", "after step 750,000,000, then 512,000,000,000 tokens"),
            (
                "text",
                "about 450,000 tokens by its size in bytes, read about 4,550,000 times",
            ),
            ("operations of big", "2.7e+18"),
            ("operations of rope", "6.74e+17"),
            ("operations of late", "2.43e+18"),
            ("operations of nope", "2.7e+18"),
            ("evaluation", "9.37e+11 operations, 1.1e-07 times those of the training"),
        ],
        "Memory of each GPU": [
            ("GPUs", "4, strategy ddp"),
            ("micro-batch", "4 x 64 tokens, 2 a step"),
            ("parameters", "2.0 GiB"),
            ("optimizer", "6.0 GiB"),
            ("activations", "120.0 GiB"),
            ("in all", "128.0 GiB of 40 GiB at the peak, uncompiled"),
            (
                "does not fit",
                "strategy=ddp strategy.activation_checkpointing=selective "
                "trainer.micro_batch_size=2 takes 28.0 GiB",
            ),
        ],
        "Time at 50% of the peak": [
            ("4 x A100-SXM4-80GB", "7.6 hours, 30 GPU-hours; evaluation under a minute"),
            ("4 x H100 80GB HBM3", "2.4 hours, 10 GPU-hours; evaluation under a minute"),
            ("4 x H200", "2.4 hours, 10 GPU-hours; evaluation under a minute"),
            (
                "this CPU, 2 threads",
                "47.2 hours; evaluation under a minute; its peak is 100,000 GFLOP/s (fp32, "
                "measured)",
            ),
        ],
        "Disk": [
            ("a checkpoint", "2,487.6 GB"),
            ("checkpoints kept", "8, and one that is written: 22,388.0 GB"),
            ("those of controls", "19: 47,263.5 GB"),
            ("text, prepared", "about 0.9 MB of 2 bytes a token"),
        ],
        "Remarks": [
            (
                "trainer.precision",
                "DroPE multiplies in fp32, and the bf16 peak of these GPUs is at least twice as "
                "high; trainer.precision=bf16 keeps float32 weights",
            )
        ],
    }


@pytest.mark.parametrize(("tf32", "precision"), [(True, "tf32"), (False, "fp32")])
def test_an_evaluation_in_fp32_of_a_run_in_bf16_takes_the_time_of_fp32(
    planned, monkeypatch, tf32, precision
):
    def hours(dtype):
        trainer = {"precision": "bf16", "tf32": tf32, "max_steps": 8, "batch_size": 8}
        values = {"trainer": trainer, "evaluation": {"dtype": dtype}}
        rows = dict(planned(values, gpu="h100", mfu=0.4)["Time at 40% of the peak"])
        return rows["1 x H100 80GB HBM3"].partition("evaluation")[2]

    peaks = {"bf16": 1e9, "tf32": 1e7, "fp32": 1e5}
    monkeypatch.setattr(plans, "dense_peak", lambda gpu, products: peaks[products])
    assert hours("fp32") != hours("bf16")
    peaks["bf16"] = peaks[precision]
    assert hours("fp32") == hours("bf16")


def test_memory_is_that_of_the_control_that_takes_most(planned):
    wide = {"trainer": {"micro_batch_size": 8}, "drop": {"at": None}}
    same = {"positional": {"layers": ["nope"]}, "drop": {"at": None}}
    values = {"drop": {"at": 0.5}, "controls": {"same": same, "wide": wide}}
    values["trainer"] = {"max_steps": 8, "batch_size": 16, "micro_batch_size": 2}
    memory = planned(values, gpu="h200", mfu=0.4)["Memory of each GPU"]
    assert memory[1:3] == [("control", "wide"), ("micro-batch", "8 x 64 tokens, 2 a step")]
    assert dict(memory)["activations"] == "240.0 GiB"


def test_phases_and_offloading_in_a_plan(planned):
    """Of micro-batches alike it is the one of the phase that comes first."""
    long = {"steps": 3, "sequence_length": 256, "batch_size": 8, "drop": {}}
    values = {"phases": {"short": {"steps": 10}, "long": long}, "trainer": {"batch_size": 32}}
    values["strategy"] = {"name": "fsdp2", "cpu_offload": True}
    found = planned(values, 4, 2, gpu="h200", mfu=0.4)
    assert found["Training"] == [
        ("short", "10 steps of 32 x 64: 20,480 tokens"),
        ("long", "3 steps of 8 x 256: 6,144 tokens, dropped the encoding (nope), in a new order"),
        ("tokens", "26,624"),
        ("drop", "after step 10, then 6,144 tokens"),
        ("text", "about 450,000 tokens by its size in bytes, read about 0.0592 times"),
        ("operations of big", "3.64e+10"),
        ("evaluation", "1.75e+12 operations, 48 times those of the training"),
    ]
    assert found["Memory of each GPU"] == [
        ("GPUs", "4, strategy fsdp2"),
        ("phase", "short"),
        ("micro-batch", "8 x 64 tokens, 1 a step"),
        ("parameters", "0.5 GiB of the CPU"),
        ("optimizer", "1.5 GiB of the CPU"),
        ("activations", "240.0 GiB"),
        ("in all", "240.0 GiB of 141 GiB at the peak, uncompiled"),
        (
            "does not fit",
            "strategy=fsdp2 strategy.activation_checkpointing=none trainer.micro_batch_size=4 "
            "takes 120.0 GiB",
        ),
    ]
    times = dict(found["Time at 40% of the peak"])
    assert times["4 x H200"] == "under a minute, under one GPU-hour; evaluation under a minute"


@pytest.mark.parametrize(
    ("length", "size", "phase"), [(128, 16, "short"), (129, 16, "long"), (512, 3, "short")]
)
def test_memory_is_that_of_the_phase_with_most_tokens_in_a_micro_batch(
    planned, length, size, phase
):
    long = {"steps": 3, "sequence_length": length, "batch_size": size}
    values = {"phases": {"short": {"steps": 10}, "long": long}, "trainer": {"batch_size": 32}}
    memory = dict(planned(values, gpu="h200", mfu=0.4)["Memory of each GPU"])
    assert memory["phase"] == phase
    rows = {"short": "32 x 64", "long": f"{size} x {length}"}
    assert memory["micro-batch"] == f"{rows[phase]} tokens, 1 a step"


@pytest.mark.parametrize(
    ("strategy", "rows", "usable", "ranks", "said"),
    [
        ("single", 12, 0.9, 1, "strategy=single none trainer.micro_batch_size=3 takes 98.0 GiB"),
        ("ddp", 4, 0.07, 4, "strategy=fsdp2 full trainer.micro_batch_size=2 takes 9.5 GiB"),
        ("ddp", 4, 0.01, 4, "nor does anything with shards, recomputation and one sequence at a"),
    ],
)
def test_what_costs_least_time_is_changed_first(
    planned, monkeypatch, strategy, rows, usable, ranks, said
):
    monkeypatch.setattr(plans, "USABLE", usable)
    values = {"strategy": {"name": strategy}, "trainer": {"batch_size": rows * ranks}}
    memory = dict(planned(values, ranks, ranks, gpu="h200", mfu=0.4)["Memory of each GPU"])
    found = memory["does not fit"].replace("strategy.activation_checkpointing=", "")
    assert found.startswith(said)


def test_operations_of_a_control_are_those_of_its_own_steps(planned):
    run, half = ({"max_steps": steps, "batch_size": 32} for steps in (100, 50))
    values = {"trainer": run, "controls": {"half": {"trainer": half}}}
    found = dict(planned(values, gpu="h200", mfu=0.4)["Training"])
    whole = float(found["operations of big"])
    assert float(found["operations of half"]) == pytest.approx(whole / 2, rel=1e-2)


def test_checkpoints_of_a_control_have_its_own_size_and_number(planned):
    """A layer takes 47,232 parameters; a checkpoint takes 12 MB for each parameter here."""
    trainer = {"keep_checkpoints": 1, "keep_best": 0}
    deeper = {"model": {"num_hidden_layers": 4}, "trainer": {"keep_checkpoints": 3}}
    values = {"trainer": trainer, "controls": {"deeper": deeper}}
    found = dict(planned(values, gpu="h200", mfu=0.4)["Disk"])
    assert found["those of controls"] == f"3: {3 * 12 * (207_296 + 47_232) / 1000:,.1f} GB"


def test_entries_of_the_vocabulary_are_given_or_those_of_the_tokenizer(planned, tmp_path):
    gpu = {"gpu": "a100", "mfu": 0.5}
    model = {"model": MODEL | {"vocab_size": None}, "tokenizer": {"vocab_size": 512}}
    assert planned(model, **gpu)["Parameters"][0] == ("embeddings", f"{512 * 64:,}")
    lines = [json.dumps({"text": f"Sentence {i} of a text. " * 9}) + "\n" for i in range(99)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    data = {"source": "files", "files": [str(tmp_path / "a.jsonl")]}
    config = parse(RunConfig, {"data": data | {"cache_dir": str(tmp_path)}, **model})
    size = prepare_corpus(config.data, config.tokenizer).tokenizer.get_vocab_size()
    assert size != 512  # it was trained on too little for as many
    found = planned({**model, "data": data}, **gpu)
    assert found["Parameters"][0] == ("embeddings", f"{size * 64:,}")
    held = dict(found["Training"])["text"].partition(" tokens")[0]
    stored = plans._gb(2 * int(held.replace(",", "")))
    assert found["Disk"][-1] == ("text, prepared", f"{stored} of 2 bytes a token")
    model["tokenizer"] = {"path": "no/such/tokenizer.json"}
    with pytest.raises(UserError) as error:
        planned(model, **gpu)
    assert tuple(map(str, error.value.problems)) == (
        "model.vocab_size: not known before the text is prepared; give it, such as "
        "model.vocab_size=49152.",
    )


def test_phases_that_read_text_again_say_how_often_it_was_read(planned, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"Line {i} of a text.\n" for i in range(3000)))
    data = {"source": "files", "files": [str(tmp_path / "a.txt")]}
    phases = {
        "short": {"steps": 10},
        "dropped": {"steps": 10, "drop": {}},
        "long": {"steps": 5, "sequence_length": 128},
    }
    values = {"tokenizer": {"vocab_size": 300}, "trainer": {"batch_size": 8}, "phases": phases}
    config = parse(RunConfig, values | {"data": data | {"cache_dir": str(tmp_path)}})
    blocks = len(prepare_corpus(config.data, config.tokenizer).train) // 64
    rows = dict(planned({**values, "data": data}, gpu="a100", mfu=0.5)["Training"])
    assert "order" not in rows["short"] + rows["dropped"]
    assert rows["long"] == (
        "5 steps of 8 x 128: 5,120 tokens, in a new order of text that was read "
        f"{2 * 10 * 8 / blocks:.3g} times before"
    )


def test_documents_shorter_than_sequences_are_remarked_on(planned, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"Line {i} of a text.\n" for i in range(3000)))
    data = {"source": "files", "files": [str(tmp_path / "a.txt")], "piece_characters": 200}
    values = {"tokenizer": {"vocab_size": 300}, "data": data | {"cache_dir": str(tmp_path)}}
    config = parse(RunConfig, values)
    prepare_corpus(config.data, config.tokenizer)
    assert "Remarks" not in planned({**values, "data": {**data}}, gpu="a100", mfu=0.5)
    masked = {**values, "data": {**data, "document_mask": True}}
    ((key, text),) = planned(masked, gpu="a100", mfu=0.5)["Remarks"]
    assert key == "data.piece_characters"
    assert "documents of 200 characters, about 50 tokens, so that none fills a sequence" in text


@pytest.mark.parametrize(("vocab", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_tokens_take_as_many_bytes_as_the_vocabulary_needs(planned, vocab, width):
    found = planned({"model": MODEL | {"vocab_size": vocab}}, gpu="a100", mfu=0.5)
    (_, text) = found["Disk"][-1]
    assert text.endswith(f" of {width} bytes a token")


def test_what_is_small_in_a_plan_has_smaller_units():
    assert [plans._gb(n * plans.GB) for n in (1234.5, 0.1, 0.09, 1e-5)] == [
        "1,234.5 GB", "0.1 GB", "90.0 MB", "10.0 kB",
    ]  # fmt: skip
    assert [plans._hours(n) for n in (0.1, 0.09, 0.01)] == [
        "0.1 hours", "5.4 minutes", "under a minute",
    ]  # fmt: skip


def test_long_hours_of_a_plan_are_rounded_days_or_years():
    hours = (99.94, 100, 2_654.3, 23_999, 24_000, 1_708_829.4, 1e8)
    assert [plans._hours(n) for n in hours] == [
        "99.9 hours", "4.17 days", "111 days", "1,000 days", "2.74 years", "195 years",
        "11,400 years",
    ]  # fmt: skip


def test_gpu_hours_of_a_plan():
    assert [plans._gpu_hours(n) for n in (1, 0.4)] == ["1 GPU-hours", "under one GPU-hour"]


def test_text_in_files_is_estimated_from_their_bytes_before_it_is_prepared(planned, tmp_path):
    """64,000 bytes are 16,000 tokens of 4; 100 steps of 32 x 64 read 204,800."""
    (tmp_path / "a.txt").write_text("a text " * 8_000 + "words " * 1_000 + "a" * 2_000)
    files = {"source": "files", "files": [str(tmp_path / "*.txt")], "about": "words"}
    run = {"max_steps": 100, "batch_size": 32}
    sections = planned({"data": files, "trainer": run}, gpu="h100", mfu=0.4)
    assert dict(sections["Training"])["text"] == (
        "words, about 16,000 tokens by its size in bytes, read about 12.8 times"
    )
    assert sections["Disk"][-1] == ("text, prepared", "about 32.0 kB of 2 bytes a token")


def test_texts_of_a_mixture_are_estimated_as_far_as_their_sizes_are_known(planned, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 4_000)
    here = {"weight": 1, "source": "files", "files": [str(tmp_path / "a.txt")]}
    hub = {"weight": 3, "source": "hub", "hub_name": "some/text"}
    values = {"data": {"mixture": {"here": here, "hub": hub}}}
    values["trainer"] = {"max_steps": 10, "batch_size": 32}
    sections = planned(values, gpu="h100", mfu=0.4)
    training = dict(sections["Training"])
    assert training["text here"] == (
        "25% of the samples, about 1,000 tokens by its size in bytes, read about 5.12 times"
    )
    assert training["text hub"] == "75% of the samples"
    assert sections["Disk"][-1] == ("text, read once", "41.0 kB of 2 bytes a token")


def test_a_plan_lists_files_that_are_missing(planned, tmp_path):
    away = {"source": "files", "files": [str(tmp_path / "none.txt")]}
    sections = planned({"data": away}, gpu="h100", mfu=0.4)
    assert "text" not in dict(sections["Training"])
    assert "there is no file" in dict(sections["Missing here"])[""]


def test_parts_that_take_nothing_at_the_peak_have_no_row(planned, monkeypatch):
    monkeypatch.setattr(plans, "step_memory", lambda *_: {"loss": GIB, "gradients": 0})
    rows = dict(planned({}, gpu="h100", mfu=0.4)["Memory of each GPU"])
    assert rows["loss"] == "1.0 GiB"
    assert "gradients" not in rows
