"""Training runs: resuming is bitwise, the drop does what it says, controls branch off."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.small_runs import decoder_of
from trainer.data.corpus import prepare_corpus
from trainer.errors import UserError
from trainer.recalibration.gain import input_sizes, set_gains
from trainer.runs import state
from trainer.runs.checkpoints import BEFORE_DROP, read_state, step_name
from trainer.runs.config import RunConfig
from trainer.runs.metrics_file import TIMES, read_metrics
from trainer.runs.parsing import merged, parse
from trainer.runs.state import load, read_metadata
from trainer.training import strategy
from trainer.training.module import LanguageModule
from trainer.training.run import effect_batch, train


def checkpoint_of(config, step=None):
    return Path(config.run_dir) / "checkpoints" / step_name(step or config.trainer.max_steps)


def tensors_in(path):
    """Everything a checkpoint holds, by name."""
    tensors = {
        name: torch.zeros(about.size, dtype=about.properties.dtype)
        for name, about in read_metadata(path).items()
    }
    load(tensors, path)
    return tensors


def assert_same_tensors(left, right, only=""):
    a, b = ({k: v for k, v in tensors_in(path).items() if only in k} for path in (left, right))
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def assert_same_state(a, b):
    assert_same_tensors(a, b)
    left, right = read_state(a), read_state(b)
    for part in ("step", "layout", "tally", "data", "callbacks"):
        assert left[part] == right[part], part


def rows_of(config):
    rows = read_metrics(Path(config.run_dir) / "metrics.csv")
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


VARIANTS = {
    "fp32 AdamW": {},
    "bf16": {"trainer": {"precision": "bf16"}},
    "Muon": {"optimizer": {"name": "muon"}},
    "accumulation": {"trainer": {"micro_batch_size": 2}},
    "kept optimizer": {"drop": {"optimizer_state": "keep"}},
    "workers": {"data": {"num_workers": 2}},
    "compiled and recomputed": {
        "trainer": {"compile": True},
        "strategy": {"activation_checkpointing": "selective"},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_is_bitwise_the_uninterrupted_run(run, tmp_path, variant):
    whole, _ = run("whole", **VARIANTS[variant])
    for step in (3, 6, 9):  # before, at and after the drop
        target = tmp_path / f"from{step}" / "checkpoints"
        target.mkdir(parents=True)
        shutil.copytree(checkpoint_of(whole, step), target / step_name(step))
        shutil.copy(Path(whole.run_dir) / "metrics.csv", target.parent)
        resumed, _ = run(f"from{step}", **VARIANTS[variant])
        assert_same_state(checkpoint_of(resumed), checkpoint_of(whole))
        assert rows_of(resumed) == rows_of(whole)
        if step == 6:  # what controls branch off from is written once more
            before = [
                Path(config.run_dir) / "checkpoints" / BEFORE_DROP for config in (resumed, whole)
            ]
            assert_same_state(*before)
            assert read_state(before[0])["certificate"] == read_state(before[1])["certificate"]


def test_a_resume_draws_no_weights(run, tmp_path, monkeypatch):
    """They come from the checkpoint, and one that lacks a parameter is refused."""
    whole, _ = run("whole")
    target = tmp_path / "at9" / "checkpoints" / step_name(9)
    shutil.copytree(checkpoint_of(whole, 9), target)
    shutil.copy(Path(whole.run_dir) / "metrics.csv", tmp_path / "at9")
    monkeypatch.setattr(strategy, "initial_value", pytest.fail)
    resumed, _ = run("at9")
    assert_same_state(checkpoint_of(resumed), checkpoint_of(whole))
    monkeypatch.setattr(state, "read_metadata", without_norm)
    shutil.rmtree(checkpoint_of(resumed))
    with pytest.raises(UserError, match=r"'step-000009' has no parameter 'norm\.weight'"):
        run("at9")


def without_norm(path):
    return {
        name: about for name, about in read_metadata(path).items() if name != "model.norm.weight"
    }


def test_drop_is_recorded_everywhere(run):
    config, trained = run()
    effect = trained.effect
    assert effect["step"] == 6
    assert set(effect) == {"step", "loss_before", "loss_after", "loss_end", "sequences"}
    rows = rows_of(config)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert [row["phase"] for row in rows] == [0] * 3 + [1] * 3
    after_drop, last = rows[3], rows[-1]
    assert after_drop["drop/loss_before"] == effect["loss_before"]
    assert after_drop["drop/loss_after"] == effect["loss_after"]
    assert last["drop/loss_end"] == effect["loss_end"]


def test_checkpoint_before_the_drop_rotates_and_the_last_does_not(run):
    config, trained = run()
    before = read_state(Path(config.run_dir) / "checkpoints" / BEFORE_DROP)["layout"]
    assert any(spectrum["inv_freq"] for spectrum in before["spectra"])
    assert not any(layer["qk_norm"] for layer in before["layers"])
    layout = decoder_of(trained).layout
    assert not any(spectrum.rotates for spectrum in layout.spectra)
    assert all(layer.qk_norm for layer in layout.layers)


def test_optimizer_policies_at_the_crossing(run):
    """The Adam step count tells which state survived: 12 updates in all, 6 of them since."""
    for policy, old, new in (("reset", 6, 6), ("keep", 12, 12), ("reset_new", 12, 6)):
        config, _ = run(policy, drop={"optimizer_state": policy})
        tensors = tensors_in(checkpoint_of(config))
        steps = {name: int(t) for name, t in tensors.items() if name.endswith(".step")}
        assert len(steps) == sum(name.startswith("model.") for name in tensors)
        for name, taken in steps.items():
            expected = new if "q_norm" in name or "k_norm" in name else old
            assert taken == expected, (policy, name)


def test_learning_rates_follow_the_phases(run):
    config, _ = run(trainer={"log_every": 1})
    rates = [row["learning_rate"] / config.optimizer.lr for row in rows_of(config)]
    assert rates[0] == pytest.approx(0.5)  # warm-up over two steps
    assert rates[1] == pytest.approx(1.0)
    assert rates[6] == pytest.approx(0.5)  # warm-up again after the drop
    assert rates[7] == pytest.approx(1.0)
    assert rates[-1] < rates[8]


def test_only_chosen_layers_drop(run):
    _, trained = run(drop={"layers": [-1]})
    first, last = decoder_of(trained).layout.layers
    assert first.spectra[0].rotates
    assert not first.qk_norm
    assert not last.spectra[0].rotates
    assert last.qk_norm


def test_matched_gain_is_the_rms_of_queries_and_keys(run):
    config, trained = run(drop={"at": None}, model={"qk_norm": {"when": "always"}})
    corpus = prepare_corpus(config.data, config.tokenizer)
    ids = effect_batch(config, corpus)["input_ids"]
    model = decoder_of(trained)
    first = model.layers[0]
    set_gains(input_sizes(model, [ids]))
    inputs = first.input_layernorm(model.embed_tokens(ids))
    for projection, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
        raw = getattr(first.self_attn, projection)(inputs).double()
        weight = getattr(first.self_attn, norm).weight.double()
        torch.testing.assert_close(
            weight, raw.pow(2).mean().sqrt().expand_as(weight), rtol=1e-4, atol=0
        )


def test_control_branches_off_before_the_drop(run, base, tmp_path):
    main, _ = run()
    changes = {"run_dir": str(tmp_path / "rope"), "drop": {"enabled": False}}
    config = parse(RunConfig, merged(base, changes))
    (tmp_path / "rope").mkdir()
    branch = Path(main.run_dir) / "checkpoints" / BEFORE_DROP
    control = train(config, prepare_corpus(config.data, config.tokenizer), branch)
    assert decoder_of(control).layout.layers[0].spectra[0].rotates
    # The same run from the beginning, without the drop, ends at the same weights.
    whole, _ = run("whole", drop={"enabled": False})
    assert_same_tensors(checkpoint_of(config), checkpoint_of(whole))
    assert rows_of(config) == rows_of(whole)


def test_checkpoint_of_another_shape_is_refused(run):
    run()
    with pytest.raises(UserError, match=r"model\.hidden_size.*32.*64"):
        run(model={"hidden_size": 64})


def test_other_numerics_than_the_checkpoints_are_said(run, caplog):
    run("first", trainer={"max_steps": 4}, drop={"at": 2})
    assert not [r for r in caplog.records if "Goes on" in r.message]
    run("first", trainer={"max_steps": 6, "precision": "bf16"}, drop={"at": 2})
    (said,) = [r.getMessage() for r in caplog.records if "Goes on" in r.getMessage()]
    assert said.startswith("Goes on from step 4 in bfloat16 activations")
    assert said.endswith("until there: float32")


def test_tensorboard_events_are_written(run):
    pytest.importorskip("tensorboard")
    config, _ = run(logger={"tensorboard": True})
    assert list(Path(config.run_dir).rglob("events.out.tfevents*"))


def test_wandb_runs_offline_without_a_key(run, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    config, _ = run(logger={"wandb": True})
    (record,) = Path(config.run_dir).rglob("*.wandb")
    assert record.stat().st_size > 0


def test_compiled_run_agrees_with_the_eager_one(run):
    """The drop in mid-run recompiles the blocks and changes nothing else."""
    eager, _ = run("eager", trainer={"log_every": 1})
    compiled, _ = run("compiled", trainer={"log_every": 1, "compile": True})
    for a, b in zip(rows_of(eager), rows_of(compiled), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_tokens_weigh_the_same_however_the_batch_is_cut(run):
    """Needles weigh 10 times: means of micro-batches would differ by far more than rounding."""
    whole, _ = run("whole", trainer={"log_every": 1})
    cut, _ = run("cut", trainer={"log_every": 1, "micro_batch_size": 1})
    for a, b in zip(rows_of(whole), rows_of(cut), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-2)


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
