"""``recalibrate``: the rules for a model, a device and a time, and a whole recalibration."""

from __future__ import annotations

import os
import re
import time
from functools import reduce
from operator import getitem
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.program import ROOT
from trainer.__main__ import main
from trainer.common.errors import PreemptedError, UserError
from trainer.config import RunConfig
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.flops import forward_flops, training_flops
from trainer.positional.config import PositionalConfig, build_layout
from trainer.runs.directory import RECORD, plain, read_record
from trainer.runs.parsing import merged, parse
from trainer.workflows import recalibrate
from trainer.workflows.recalibrate import Speed, choose, evaluated, shape_of

SHAPES = {
    "135M": (576, 1536, 30, 9, 3, None, 49152),
    "1.7B": (2048, 8192, 24, 32, 32, None, 49152),
    "tiny": (64, 128, 2, 4, 2, None, 300),
    "7B": (4096, 11008, 32, 32, 32, None, 32000),
}


def shape(size, context, qk_norm=False):
    config = ModelConfig(*SHAPES[size], tie_word_embeddings=size == "135M")
    return config, build_layout(
        PositionalConfig(layers=["rope"]),
        num_layers=config.num_hidden_layers,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_size,
        training_length=context,
        qk_norm=qk_norm,
    )


def meta_decoder(*model):
    with torch.device("meta"):
        return Decoder(*model)


def cpu(model, rate):
    """A CPU that trains so many tokens a second in sequences of 512."""
    return Speed(rate * training_flops(*model, 512) / 512, 2048)


GPU = Speed(0.4 * 989e12, 16384)


@pytest.mark.parametrize(
    ("size", "context", "minutes", "rate", "length", "batch", "micro", "lr"),
    [
        ("135M", 8192, 10, 250, 512, 1, 1, 3e-4),  # of 112 tokens a step, not below a sequence
        ("135M", 8192, 240, 250, 512, 4, 4, 3e-4),
        ("135M", 8192, 720, 250, 1024, 4, 2, 3e-4),
        ("135M", 8192, 20, None, 8192, 16, 2, 3e-4),
        ("1.7B", 2048, 20, None, 2048, 8, 8, 3e-4),
        ("7B", 4096, 90, None, 4096, 4, 4, 1e-4),
        ("7B", 4096, 60 * 24 * 30, None, 4096, 256, 4, 1e-4),
    ],
)
def test_size_minutes_and_device_decide(size, context, minutes, rate, length, batch, micro, lr):
    model = shape(size, context)
    speed = GPU if rate is None else cpu(model, rate)
    values = choose(*model, speed, minutes, {})
    assert values["data.sequence_length"] == length
    assert values["trainer.batch_size"] == batch
    assert values["trainer.micro_batch_size"] == micro
    assert values["optimizer.lr"] == lr
    assert values["model.qk_norm.when"] == "never"
    seconds = batch * training_flops(*model, length) / speed.operations
    steps = values["trainer.max_steps"]
    names = dict(meta_decoder(*model).named_parameters())
    parameters = sum(p.numel() for p in names.values())
    left = 60 * minutes - parameters / 4e6  # for files
    effect = 24 * forward_flops(*model, length) / speed.operations
    assert steps == int((0.7 * left - effect) / seconds)
    assert values["drop.schedule.warmup_steps"] == min(max(steps // 10, 10), 500)
    reached = values["evaluation.tokens"]
    assert reached[0] == length
    assert reached == sorted({*reached})
    # The windows and needles of all rows take no more than their share of the time.
    rows = 5 if reached[-1] > context else 2
    texts = rows * (values["evaluation.windows"] + 5 * values["evaluation.needles.trials"])
    cost = sum(texts * forward_flops(*model, n) / speed.operations for n in reached)
    assert cost <= 0.18 * left or reached == [length]


def test_more_minutes_reach_further_within_the_context_and_beyond():
    model = shape("135M", 8192)
    reached = [
        evaluated(*model, cpu(model, 250).operations * 12 * minutes, 512)["evaluation.tokens"]
        for minutes in (1, 20, 60, 100_000)
    ]
    assert reached == [
        [512],
        [512, 2048],
        [512, 2048, 8192],
        [512, 2048, 8192, 16384, 32768, 65536],
    ]


def test_the_guide_states_the_same_rates_norm_and_warmup():
    lines = (ROOT / "docs/guide.md").read_text().splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    rows = {row[0].strip(" `"): " ".join(row[1:]) for row in cells}
    small, large = re.search(r"(\S+) up to 2B, (\S+) at 7B", rows["optimizer.lr"]).groups()
    for size, rate in (("1.7B", small), ("7B", large)):
        assert choose(*shape(size, 2048), GPU, 600, {})["optimizer.lr"] == float(rate)
    never, after, rate = re.search(
        r"`(\w+)`; `(\w+)` for rates of (\S+)", rows["model.qk_norm.when"]
    ).groups()
    assert choose(*shape("135M", 2048), GPU, 20, {})["model.qk_norm.when"] == never
    values = choose(*shape("135M", 2048), GPU, 20, {"optimizer.lr": float(rate)})
    assert values["model.qk_norm.when"] == after
    assert f"`{values['drop.qk_norm_gain']}`" in rows["drop.qk_norm_gain"]
    low, high = re.search(r"(\d+) to (\d+)", rows["drop.schedule.warmup_steps"]).groups()
    for minutes in (20, 2000):
        values = choose(*shape("135M", 2048), GPU, minutes, {})
        assert int(low) <= values["drop.schedule.warmup_steps"] <= int(high)


def test_a_model_with_qk_norm_keeps_its_own():
    values = choose(*shape("135M", 2048, qk_norm=True), GPU, 20, {"optimizer.lr": 1e-3})
    assert not {"model.qk_norm.when", "drop.qk_norm_gain"} & values.keys()


def test_other_choices_follow_the_keys_of_the_user():
    model = shape("135M", 8192)
    values = choose(*model, cpu(model, 250), 20, {"data.sequence_length": 1024})
    assert values["evaluation.tokens"][:2] == [1024, 4096]
    values = choose(*model, GPU, 20, {"trainer.max_steps": 100})
    assert values["drop.schedule.warmup_steps"] == 10


def test_too_few_minutes_are_refused_with_those_that_suffice():
    model = shape("7B", 4096)
    with pytest.raises(UserError, match=r"minutes: expected \S+ more") as error:
        choose(*model, cpu(model, 1), 20, {})
    missing = float(re.search(r"expected (\S+) more", str(error.value))[1])
    choose(*model, cpu(model, 1), 1.05 * (20 + missing), {})


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """A directory as transformers writes it, whose tokens are bytes, beside a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate(["<|endoftext|>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save(str(tmp_path / "llama/tokenizer.json"))
    text = "".join(f"Sentence {i} of a text that is {i * i} long.\n\n" for i in range(1500))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recalibrate, "measure_speed", lambda *_: Speed(1e12, 2048))  # too fast
    return tmp_path / "llama"


def test_cublas_can_be_deterministic_from_the_speed_test_on(monkeypatch):
    """torch reads its configuration at the first product; a later run may be deterministic."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "of the user")
        monkeypatch.delenv(name)
    seen = []

    def measured(*_):
        seen.append(os.environ["CUBLAS_WORKSPACE_CONFIG"])
        return Speed(1e15, 2048)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(recalibrate, "shape_of", lambda _: shape("tiny", 2048))
    monkeypatch.setattr(recalibrate, "measure_speed", measured)
    recalibrate.chosen_keys("llama", 20, {}, time.time(), None)
    assert seen == [":4096:8"]


def test_the_speed_test_computes_as_the_run_and_its_time_counts(monkeypatch):
    """60 seconds of it leave 19 of 20 minutes."""
    timed, left = [], []
    monkeypatch.setattr(recalibrate, "shape_of", lambda _: shape("tiny", 2048))
    monkeypatch.setattr(recalibrate, "measure_speed", lambda *given: timed.append(given[2:]))
    monkeypatch.setattr(recalibrate, "choose", lambda *given: left.append(given[3]))
    monkeypatch.setattr(recalibrate, "time", SimpleNamespace(time=lambda: 1060.0))
    given = {"trainer.accelerator": "cpu", "trainer.threads": 3}
    recalibrate.chosen_keys("llama", 20, given, 1000.0, None)
    assert (timed, left) == ([("cpu", 3)], [19.0])


def test_a_warmup_is_no_longer_than_its_run_and_a_small_evaluation_stays_small():
    values = choose(*shape("135M", 2048), GPU, 20, {"trainer.max_steps": 6})
    assert values["drop.schedule.warmup_steps"] == 6
    most = evaluated(*shape("tiny", 64), 1e30, 64)
    assert (most["evaluation.windows"], most["evaluation.needles.trials"]) == (32, 8)


@pytest.mark.parametrize("given", [{}, {"optimizer.lr": 1e-3}], ids=["usual", "high rate"])
def test_a_run_that_has_begun_keeps_all_that_was_chosen(given, tmp_path):
    """However many minutes are left, and whatever the keys are by default."""
    chosen = choose(*shape("135M", 2048), GPU, 20, given)
    record = plain(RunConfig())
    for key, value in chosen.items():
        *groups, last = key.split(".")
        reduce(getitem, groups, record)[last] = value
    (tmp_path / RECORD).write_text(yaml.safe_dump(record))
    kept = recalibrate.chosen_keys("absent", 1, given, time.time(), tmp_path / RECORD)
    assert {key: kept.get(key) for key in chosen} == chosen
    assert not kept.keys() & given.keys()


WORDS = (
    "minutes=0.05",
    "evaluation.tasks=[perplexity]",
    "text=a.txt",
    "data.cache_dir=cache",
    "trainer.threads=1",
)


def test_a_task_that_has_no_room_is_refused_before_training(llama, monkeypatch, capsys):
    monkeypatch.setattr(recalibrate, "run_experiment", None)
    with pytest.raises(SystemExit):
        main(["recalibrate", "llama", *WORDS, "evaluation.tasks=[standard]"])
    assert "error: evaluation.lengths: expected at least" in capsys.readouterr().err
    assert not (llama.parent / "runs").exists()


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("trainer.batch_size=0", "trainer.batch_size"),
        ("trainer.batch_size=null", "trainer.batch_size"),
        ("data.sequence_length=0", "data.sequence_length"),
        ("optimizer.lr=fast", "optimizer.lr"),
    ],
)
def test_a_wrong_key_is_refused_before_the_speed_test(llama, monkeypatch, capsys, word, key):
    monkeypatch.setattr(recalibrate, "measure_speed", None)
    with pytest.raises(SystemExit):
        main(["recalibrate", "llama", *WORDS, word])
    assert capsys.readouterr().err.startswith(f"error: {key}: ")


def test_given_keys_win_over_chosen_ones_also_in_a_run_that_has_begun(llama, capsys):
    """Whole numbers may be written as floats."""
    words = ["recalibrate", "llama", *WORDS, "--cfg", "job", "evaluation.lengths=[0.5,1]"]
    main([*words, "trainer.batch_size=4.0", "controls=null"])
    shown = yaml.safe_load(capsys.readouterr().out)
    lengths = shown["evaluation"]["lengths"], shown["evaluation"]["tokens"]
    assert (lengths, shown["trainer"]["batch_size"]) == (([0.5, 1.0], None), 4)
    shown["evaluation"]["tokens"] = [64]
    run = llama.parent / shown["run_dir"]
    run.mkdir(parents=True)
    (run / RECORD).write_text(yaml.safe_dump(shown))
    main([*words, "evaluation.windows=7"])
    again = yaml.safe_load(capsys.readouterr().out)
    assert (again["evaluation"]["tokens"], again["evaluation"]["windows"]) == (None, 7)
    assert again["trainer"]["batch_size"] == 4


@pytest.mark.slow
def test_a_stopped_recalibration_resumes_and_exports_a_model_without_rotation(llama, monkeypatch):
    from transformers import AutoModelForCausalLM

    from trainer.checkpoint import find_checkpoint, read_state
    from trainer.runs.models import read_run

    words = ["recalibrate", "llama", *WORDS, "data.num_workers=0", "evaluation.windows=2"]
    with pytest.raises(SystemExit):
        main([*words, "trainer.max_time=0:00:00"])
    monkeypatch.setattr(recalibrate, "measure_speed", None)  # a resumed run is planned already
    run = llama.parent / "runs/llama-drope"
    planned = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"]
    main(words)
    path = find_checkpoint(str(run))
    done = read_state(path)["step"]  # the machine was slower than measured: stopped in time
    assert (
        yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == done < planned
    )
    ours = read_run(path).decoder().eval()
    theirs = AutoModelForCausalLM.from_pretrained(run / "export").eval()
    ids = torch.randint(257, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert not ours.layout.rotates
    page = (run / "report.html").read_text()  # one report, of the run and of the model as it was
    assert "DroPE" in page
    assert "llama" in page
    assert not (run / "evaluation/report.html").exists()
    with pytest.raises(UserError, match="has none"):
        shape_of(str(run / "export"))
    (llama.parent / "empty").mkdir()
    main([*words, "to=empty"])
    assert (llama.parent / "empty/config.json").is_file()
    with pytest.raises(SystemExit):
        main([*words, "to=llama"])


def test_the_speed_is_that_of_steps_of_a_model_of_this_shape():
    speed = recalibrate.measure_speed(*shape("tiny", 2048), "cpu", 1)
    assert 1e7 < speed.operations < 1e13
    assert speed.pass_tokens == 2048


def test_the_fastest_of_three_steps_counts(monkeypatch):
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(recalibrate, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    model = shape("tiny", 2048)
    speed = recalibrate.measure_speed(*model, "cpu", 1)
    assert speed.operations == training_flops(*model, 512) / 2.0


def test_steps_are_timed_with_the_kernels_of_training(monkeypatch):
    """Training forbids cuDNN's attention unless it is the model's backend."""
    loss, allowed = Decoder.loss, []

    def noted(*arguments):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return loss(*arguments)

    monkeypatch.setattr(Decoder, "loss", noted)
    recalibrate.measure_speed(*shape("tiny", 256), "cpu", 1)
    assert allowed == [False] * 3


@pytest.fixture
def recalibrated(base, monkeypatch, tmp_path):
    """A function that recalibrates from the 300th second on, for 20 minutes, with a stop at step 7
    for a reason; returns the configurations that were trained, and the record of the run."""

    def go(reason, values=(), minutes=20.0, **changes):
        trained = []

        def check(text, evaluation, lengths, training_length):
            assert lengths == evaluation.tokens or not evaluation.tokens
            if max(lengths) > 600:
                raise UserError(f"no text for {lengths}")

        def run_experiment(run, beside):
            trained.append(run.config)
            assert beside == ["a/model"]
            if len(trained) == 1 and reason:
                raise PreemptedError("", reason)
            return "report"

        changes = {"run_dir": str(tmp_path / "run"), "overwrite": True, **changes}
        run = parse(merged(base, changes))
        splits = {"validation": 90, "test": 80}
        longest = {name: SimpleNamespace(longest=n) for name, n in splits.items()}
        monkeypatch.setattr(recalibrate, "run_experiment", run_experiment)
        monkeypatch.setattr(recalibrate, "open_corpus", lambda run: SimpleNamespace(**longest))
        start = SimpleNamespace(training_length=64)
        monkeypatch.setattr(recalibrate, "find_model", lambda *_: start)
        monkeypatch.setattr(recalibrate, "held_out_of", lambda *_: None)
        monkeypatch.setattr(recalibrate, "make_tasks", check)
        monkeypatch.setattr(recalibrate, "find_checkpoint", lambda run_dir: run_dir)
        monkeypatch.setattr(recalibrate, "read_state", lambda path: {"step": 7})
        monkeypatch.setattr(recalibrate, "time", SimpleNamespace(time=lambda: 1000.0))
        chosen = dict.fromkeys(values)
        assert recalibrate.recalibrate(run, chosen, "a/model", minutes, 700.0) == "report"
        return trained, read_record(run.directory)

    return go


def test_training_ends_after_three_quarters_of_the_minutes(recalibrated):
    """15 minutes from the beginning, 5 of which are over."""
    (only,), record = recalibrated(None)
    assert (only.trainer.max_time, only.trainer.max_steps, only.overwrite) == ("0:10:00", 12, False)
    assert record["trainer"]["max_time"] is None


@pytest.mark.parametrize(
    ("minutes", "limit"), [(86.6, "0:59:57"), (87.0, "1:00:15"), (200.0, "2:25:00")]
)
def test_the_time_for_training_may_be_hours(recalibrated, minutes, limit):
    """Three quarters of the minutes, 5 of which are over."""
    (only,), _ = recalibrated(None, minutes=minutes)
    assert only.trainer.max_time == limit


def test_lengths_of_a_run_that_has_begun_are_not_checked_again(recalibrated, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run" / RECORD).write_text("controls: {}")
    too_long = {"evaluation": {"tokens": [64, 601]}}
    recalibrated(None, overwrite=False, **too_long)
    with pytest.raises(UserError, match="no text"):
        recalibrated(None, overwrite=True, **too_long)


def test_a_slower_run_has_the_steps_that_it_took_and_one_more(recalibrated):
    (first, then), record = recalibrated("time limit")
    assert (first.trainer.max_time, then.trainer.max_time) == ("0:10:00", None)
    assert (first.trainer.max_steps, then.trainer.max_steps) == (12, 8)
    assert record["trainer"]["max_steps"] == 8


def test_other_stops_and_limits_are_those_of_the_user(recalibrated):
    with pytest.raises(PreemptedError):
        recalibrated("SIGTERM")
    (only,), _ = recalibrated(None, trainer={"max_time": "1:00:00"})
    assert only.trainer.max_time == "1:00:00"


def test_chosen_lengths_are_those_that_the_text_has(recalibrated, capsys):
    evaluation = {"tokens": [64, 80, 81]}
    (only,), _ = recalibrated(None, ["evaluation.tokens"], evaluation=evaluation)
    assert only.evaluation.tokens == [64, 80]
    assert capsys.readouterr().out == "evaluation.tokens=[64,80]\n"
    (given,), _ = recalibrated(None, evaluation=evaluation)
    assert given.evaluation.tokens == [64, 80, 81]


def test_given_lengths_are_checked_before_training(recalibrated):
    with pytest.raises(UserError, match="no text"):
        recalibrated(None, evaluation={"tokens": [64, 601]})
    with pytest.raises(UserError, match="no text"):
        recalibrated(None, evaluation={"tokens": None, "lengths": [1.0, 16.0]})
