"""Training runs: resuming is bitwise, the drop does what it says, controls branch off."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.comparing import (
    assert_resumes,
    assert_same_state,
    assert_same_tensors,
    checkpoint_of,
    contents_of,
    during,
    rows_of,
)
from trainer.checkpoint import (
    BEFORE_DROP,
    read_state,
)
from trainer.common.errors import PreemptedError
from trainer.config import DataConfig, PhaseConfig, RunConfig, TrainerConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.dataset import TrainingSamples
from trainer.data.prepared import Prepared
from trainer.data.tokenizer import SpecialTokens, vocabulary_size
from trainer.lightning.module import LanguageModule
from trainer.model.decoder import initial_value
from trainer.positional.layout import drop
from trainer.runs.directory import plain, write_metrics
from trainer.runs.models import read_run
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import phases_of
from trainer.training import dashboards
from trainer.training.dashboards import log_results
from trainer.training.fit import train
from trainer.training.rows import Rows
from trainer.training.setup import make_decoder, numerics

VARIANTS = {
    "fp32 AdamW": {},
    "bf16": {"trainer": {"precision": "bf16"}},
    "Muon, and a temperature": {
        "optimizer": {"name": "muon"},
        "positional": {"temperature": {"coefficient": 0.3, "reference": 8, "steps": True}},
    },
    "accumulation": {"trainer": {"micro_batch_size": 2}},
    "kept optimizer": {"drop": {"optimizer_state": "keep"}},
    "workers": {"data": {"num_workers": 2}},
    "compiled and recomputed": {
        "trainer": {"compile": True},
        "strategy": {"activation_checkpointing": "selective"},
    },
}


@torch.no_grad()
def test_effect_of_the_drop_matches_the_checkpoints(finished):
    """Before it with the encoding and without, and from the last one; on held-out text alone."""
    config, trained = finished
    corpus = prepare_corpus(config.data, config.tokenizer)
    phase = phases_of(config)[1]
    probe = torch.from_numpy(corpus.mixed(phase.data).probe(4, phase.length))
    ids, targets = probe[:, :-1], probe[:, 1:]

    def losses(model):
        logits = model(ids).double().transpose(1, 2)
        return F.cross_entropy(logits, targets, reduction="none").mean(1).tolist()

    path = Path(config.run_dir) / "checkpoints" / BEFORE_DROP
    model = read_run(path).decoder()
    each = {"before": losses(model)}
    model.layout = drop(model.layout, qk_norm=True)
    each |= {"after": losses(model), "end": losses(read_run(trained).decoder())}
    mean = {f"loss_{when}": sum(values) / len(values) for when, values in each.items()}
    assert mean["loss_end"] < min(mean["loss_before"], mean["loss_after"])
    effect = read_state(trained)["effects"]["recalibrate"]
    assert (effect.pop("what"), effect.pop("length")) == ("dropped the encoding (nope)", 32)
    sequences = effect.pop("sequences")
    assert sequences == {when: pytest.approx(values) for when, values in each.items()}
    assert effect == {"step": 6} | {name: pytest.approx(value) for name, value in mean.items()}
    rows = rows_of(config)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert [row["phase"] for row in rows] == [0] * 3 + [1] * 3
    logged = {key: row[f"drop/{key}"] for row in rows for key in mean if f"drop/{key}" in row}
    assert effect == {"step": 6} | logged
    assert "drop/loss_before" in rows[3]


@pytest.mark.parametrize(
    ("weights", "windows"), [(None, [4, 4]), ({"a": 3.0, "b": 1.0}, [6, 2]), ({"b": 2.0}, [0, 8])]
)
def test_a_probe_mixes_texts_as_its_phase_does(weights, windows):
    tokens = SpecialTokens(None, None, None, 0, frozenset())
    parts = []
    for number, name in enumerate("ab", 1):
        ids = np.full(500, number)
        parts.append(Prepared(Path(), tokens, ids, ids, ids, name, name, 1.0))
    data = DataConfig(sequence_length=16, mixture={name: {"weight": 1.0} for name in "ab"})
    config = RunConfig(data=data, phases={"only": PhaseConfig(2, weights=weights)})
    phase = phases_of(config)[0]
    probe = torch.from_numpy(Corpus(tuple(parts)).mixed(phase.data).probe(8, phase.length))
    assert [int((probe[:, 1] == number).sum()) for number in (1, 2)] == windows


def test_optimizer_policies_at_the_crossing(run):
    """The Adam step count tells which state survived: 12 updates in all, 6 of them since."""
    for policy, old, new in (("reset", 6, 6), ("keep", 12, 12), ("reset_new", 12, 6)):
        config, _ = run(policy, drop={"optimizer_state": policy})
        tensors = contents_of(checkpoint_of(config))
        steps = {name: int(t) for name, t in tensors.items() if name.endswith(".step")}
        assert len(steps) == sum(name.startswith("model.") for name in tensors)
        for name, taken in steps.items():
            expected = new if "q_norm" in name or "k_norm" in name else old
            assert taken == expected, (policy, name)


@pytest.mark.slow
def test_learning_rates_follow_the_phases(run):
    """Pretraining that the drop cuts short has the schedule of all 12 steps, the 6 after it one of
    their own; both warm up over two."""

    def falling(done, steps):
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done / steps)) / 2

    config, _ = run(trainer={"log_every": 1})
    rates = [row["learning_rate"] / config.optimizer.lr for row in rows_of(config)]
    pretraining = [0.5, 1.0, *(falling(t, 10) for t in range(4))]
    assert rates == pytest.approx([*pretraining, 0.5, 1.0, *(falling(t, 4) for t in range(4))])


@torch.no_grad()
def test_matched_gains_are_the_rms_of_queries_and_keys_before_the_drop(run):
    """Also in the second layer, whose input the drop changes."""
    still = {"qk_norm_gain": "matched", "schedule": {"peak": 1e-12}}
    config, trained = run(drop=still)
    path = Path(config.run_dir) / "checkpoints" / BEFORE_DROP
    model = read_run(path).decoder()
    corpus = prepare_corpus(config.data, config.tokenizer)
    phase = phases_of(config)[1]
    ids = torch.from_numpy(corpus.mixed(phase.data).probe(4, phase.length))[:, :-1]
    seen = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            norm = name.replace("proj", "norm")
            module.register_forward_hook(lambda *args, norm=norm: seen.update({norm: args[2]}))
    model(ids)
    after = read_run(trained).decoder()
    assert len(seen) == 4
    for norm, output in seen.items():
        weight, rms = after.get_parameter(f"{norm}.weight"), output.square().mean().sqrt()
        torch.testing.assert_close(weight, rms.expand_as(weight), rtol=1e-4, atol=0)
    assert not torch.allclose(after.layers[1].self_attn.q_norm.weight, torch.ones(16), rtol=0.01)


def test_control_branches_off_before_the_drop(finished, base, tmp_path):
    """The same run from the beginning, without the drop, ends at the same weights."""
    main, _ = finished
    branch = Path(main.run_dir) / "checkpoints" / BEFORE_DROP
    configs = []
    for name, begin in (("control", branch), ("whole", None)):
        changes = {"run_dir": str(tmp_path / name), "drop": {"at": None}}
        control = parse(merged(base, changes))
        config = control.config
        (tmp_path / name).mkdir()
        trained = train(control, prepare_corpus(config.data, config.tokenizer), begin)
        assert read_run(trained).decoder().layout.layers[0].spectra[0].rotates
        configs.append(config)
    assert_same_tensors(*map(checkpoint_of, configs))
    assert rows_of(configs[0]) == rows_of(configs[1])


def test_checkpoint_of_another_shape_is_refused(run):
    run()
    with pytest.raises(ValueError, match=r"Size mismatch .*32.* and current: .*64"):
        run(model={"hidden_size": 64}, trainer={"max_steps": 14})


def test_tensorboard_events_are_written(run):
    pytest.importorskip("tensorboard")
    config, _ = run(logger={"tensorboard": True})
    assert list(Path(config.run_dir).rglob("events.out.tfevents*"))


def synced(record):
    """The rows that ``wandb sync`` would upload of a file, without what wandb adds."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, begin, parts, rows = record.read_bytes(), 7, b"", []
    while begin + 7 <= len(data):  # LevelDB's log format
        if 32768 - begin % 32768 < 7:
            begin += 32768 - begin % 32768
        size, kind = struct.unpack("<HB", data[begin + 4 : begin + 7])
        parts += data[begin + 7 : begin + 7 + size]
        begin += 7 + size
        if kind in (1, 4):  # whole, or the last part
            items = Record.FromString(parts).history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows, parts = rows + [row] * bool(row), b""
    return rows


def test_updates_that_a_gpu_still_computes_take_their_time_of_training(monkeypatch):
    rows = Rows.__new__(Rows)
    rows.last_time = 0.0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.1))
    with rows.untimed():
        pass
    assert rows.last_time < 0.1


def test_deterministic_settings_end_with_the_block():
    memory = torch.utils.deterministic
    with numerics(TrainerConfig(deterministic=True, accelerator="cpu")):
        assert torch.are_deterministic_algorithms_enabled()
        assert not memory.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert memory.fill_uninitialized_memory


def test_a_process_that_warns_of_other_algorithms_warns_after_the_block():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with numerics(TrainerConfig(deterministic=True, accelerator="cpu")):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_offline_logger_begins_with_the_rows_so_far(tmp_path, monkeypatch):
    from lightning.pytorch.loggers import WandbLogger

    logged = []
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda _, row, step: logged.append((step, row)))
    write_metrics(tmp_path / "metrics.csv", [{"step": 2, "loss": 3.5}, {"step": 4, "loss": 3.0}])
    for offline in (True, False):
        dashboards._wandb.cache_clear()
        dashboards._wandb(tmp_path, "run", "run", offline)
        assert logged == [(2, {"loss": 3.5}), (4, {"loss": 3.0})]  # online the server has them


@pytest.mark.slow
def test_wandb_offline_has_one_complete_series_after_a_resume(run, monkeypatch, tmp_path):
    """The newest directory has all rows of metrics.csv, and the report."""
    monkeypatch.setenv("WANDB_CONSOLE", "off")  # it would stay in this process's streams
    import wandb

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        during(patch, lambda: os.kill(os.getpid(), signal.SIGTERM), 6)
        with pytest.raises(PreemptedError):
            run(logger={"wandb": True, "offline": True})
    wandb.teardown()
    dashboards._wandb.cache_clear()  # another process
    config, _ = run(logger={"wandb": True, "offline": True})
    log_results(parse(plain(config)), {32: {"evaluation/loss/DroPE": 4.0}})
    wandb.teardown()
    first, second = sorted(Path(config.run_dir).rglob("*.wandb"), key=lambda p: p.stat().st_mtime)
    assert first.name == second.name
    *rows, report = synced(second)
    assert report["evaluation/loss/DroPE"] == 4.0
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    for row, expected in zip(rows, rows_of(config), strict=True):
        expected["trainer/global_step"] = expected.pop("step")
        assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize("code", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_run_agrees_with_the_eager_one(run, finished, monkeypatch, code):
    """The drop in mid-run recompiles the blocks and changes nothing else.

    On a busy machine inductor takes minutes to make its code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=code))
    compiled, _ = run(trainer={"compile": True})
    for a, b in zip(rows_of(finished[0]), rows_of(compiled), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


@pytest.mark.parametrize("limit", [0.05, 100.0])
def test_two_accumulated_steps_are_those_of_autograd_clip_grad_norm_and_plain_adamw(run, limit):
    """Whole batches, their weighted mean loss; the gradients are far above the limit, or below."""
    changes = {"micro_batch_size": 2, "gradient_clip": limit, "max_steps": 2, "log_every": 1}
    config, trained = run(trainer=changes, drop={"at": None}, model={"qk_norm": {"when": "never"}})
    corpus = prepare_corpus(config.data, config.tokenizer)
    samples = TrainingSamples(corpus, config.data, config.seed)
    model = make_decoder(parse(plain(config)), vocabulary_size(corpus.tokenizer)).to_empty(
        device="cpu"
    )
    model.fill(lambda name, empty: initial_value(model.config, name, empty.shape, config.seed))
    matrices = [p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2]
    others = [p for n, p in model.named_parameters() if not ("layers" in n and p.ndim == 2)]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    options = {"betas": config.optimizer.betas}
    optimizer = torch.optim.AdamW(
        groups, weight_decay=config.optimizer.weight_decay, fused=False, **options
    )
    for step, row in enumerate(rows_of(config)):
        batch = samples.__getitems__(list(range(4 * step, 4 * step + 4)))
        logits, weights = model(batch["input_ids"]), batch["weights"].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = (weights * losses).sum() / weights.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        assert 0.5 < norm < 50
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * (0.5, 1.0)[step]
        optimizer.step()
        optimizer.zero_grad()
    saved = contents_of(trained)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        # Adam's steps hardly depend on the size of gradients; its averages do.
        for key in ("exp_avg", "exp_avg_sq"):
            rounding = 1e-5 * state[key].abs().max().item()
            torch.testing.assert_close(
                saved[f"optim.{name}.{key}"], state[key], rtol=0, atol=rounding
            )
        torch.testing.assert_close(saved[f"model.{name}"], parameter.detach(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_is_bitwise_the_uninterrupted_run(run, tmp_path, variant):
    whole, _ = run("whole", **VARIANTS[variant])
    # before, at and after the drop
    assert_resumes(run, whole, (3, 6, 9), tmp_path, **VARIANTS[variant])
    # The resume at the drop writes once more what controls branch off from.
    again, before = (tmp_path / name / "checkpoints" / BEFORE_DROP for name in ("from6", "whole"))
    assert_same_state(again, before)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_without_a_finite_gradient_changes_nothing(run, monkeypatch, optimizer):
    """As if the step had not been: the run that skips update 3 ends where one of 2 updates does."""
    original = LanguageModule.training_step

    def broken(module, batch, index):
        loss = original(module, batch, index)
        return loss * float("nan") if module.global_step >= 2 else loss

    changes = {"optimizer": {"name": optimizer}, "drop": {"at": None}}
    changes |= {"model": {"qk_norm": {"when": "never"}}}
    sound, _ = run("sound", **changes, trainer={"checkpoint_every": 2, "max_steps": 4})
    monkeypatch.setattr(LanguageModule, "training_step", broken)
    skipping, _ = run("skipping", **changes, trainer={"checkpoint_every": 2, "max_steps": 4})
    assert_same_tensors(checkpoint_of(sound, 2), checkpoint_of(skipping))
    assert rows_of(skipping)[-1]["skipped_steps"] == 2
