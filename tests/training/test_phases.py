"""Runs of several phases: what each reads, what changes between them, and that they resume."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.comparing import assert_resumes, checkpoint_of, contents_of, rows_of
from tests.small_runs import trained_in
from trainer.checkpoint import read_state
from trainer.data.corpus import prepare_corpus
from trainer.positional.encodings import by_name
from trainer.positional.layout import Layout
from trainer.positional.rescaling import position_interpolation
from trainer.runs.directory import read_metrics
from trainer.runs.models import name_and_role, read_run
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import phases_of

PHASES = {
    "first": {"steps": 4},
    "long": {"steps": 3, "sequence_length": 64, "batch_size": 2, "rescale": {"method": "pi"}},
    "dropped": {
        "steps": 2, "sequence_length": 64, "batch_size": 2, "optimizer_state": "reset",
        "schedule": {"name": "constant", "peak": 0.5, "warmup_steps": 1}, "drop": {},
    },
    "short": {"steps": 3, "sequence_length": 16, "batch_size": 8},
}  # fmt: skip
ORDERS = ((32, range(16)), (64, range(10)), (16, range(24)))
"""Tokens of a sequence, and the samples of it, in the orders that these phases read one after
another: three, since the drop changes nothing about what is read."""
CHANGES = {
    "phases": PHASES, "drop": {"at": None}, "trainer": {"checkpoint_every": 1},
    "data": {"needles": {"mentions": [2, 5]}},
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """The run of these phases without any interruption."""
    return trained_in(tmp_path_factory.mktemp("whole") / "run", base, **CHANGES)


@pytest.mark.slow
def test_tokens_rates_and_phases_are_counted_over_all_of_them(whole):
    config, _ = whole
    rows = {row["step"]: row for row in rows_of(config)}
    assert config.trainer.max_steps == 12
    assert phases_of(config).drop_step == 7
    tokens = {step: step * 128 for step in (2, 4, 6, 7, 8, 9, 10, 12)}
    assert {step: row["tokens"] for step, row in rows.items()} == tokens
    assert {step: row["phase"] for step, row in rows.items()} == {
        2: 0, 4: 0, 6: 1, 7: 1, 8: 2, 9: 2, 10: 3, 12: 3
    }  # fmt: skip

    def falling(step):
        return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / 10)) / 2

    rates = {step: row["learning_rate"] / config.optimizer.lr for step, row in rows.items()}
    # Of update number step - 1; a schedule that is no phase's own goes on as if none came between.
    for step in (4, 6, 10, 12):
        assert rates[step] == pytest.approx(falling(step - 1))
    assert rates[8] == rates[9] == pytest.approx(0.5)


@torch.no_grad()
def test_effect_of_a_phase_is_measured_at_its_length(whole):
    config, trained = whole
    corpus = prepare_corpus(config.data, config.tokenizer)
    text = corpus.validation.parts[0][1]
    ends = [len(text) * i // 4 for i in range(1, 5)]
    labels = torch.tensor([text[end - 64 : end].tolist() for end in ends])
    ids = torch.cat([torch.full_like(labels[:, :1], corpus.end_of_text), labels[:, :-1]], dim=1)

    def loss(step, change=lambda layout: layout):
        path = checkpoint_of(config, step)
        model = read_run(path).decoder()
        model.layout = change(model.layout)
        logits = model(ids).double()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()

    effect = read_state(trained)["effects"]["long"]
    slowed = loss(4, lambda layout: layout.rescaled(position_interpolation, 2.0))
    expected = {"loss_before": loss(4), "loss_after": slowed, "loss_end": loss(7)}
    assert {key: effect[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert effect["step"] == 4
    drop = read_state(trained)["effects"]["dropped"]
    dropped = Layout.from_dict(read_state(checkpoint_of(config, 8))["layout"])
    losses = loss(7), loss(7, lambda _: dropped), loss(9)
    assert tuple(drop[f"loss_{when}"] for when in ("before", "after", "end")) == pytest.approx(
        losses, rel=1e-5
    )
    logged = [row for row in rows_of(config) if "phase_long/loss_after" in row]
    assert [row["step"] for row in logged] == [6]


@pytest.mark.parametrize("step", [2, 4, 5, 7, 8, 9, 11])
def test_a_resume_within_and_between_phases_changes_nothing(whole, run, tmp_path, step):
    assert_resumes(run, whole[0], [step], tmp_path, **CHANGES)


@pytest.mark.slow
def test_checkpoints_between_phases_stay(run):
    changes = {"trainer": {"checkpoint_every": 3, "keep_checkpoints": 1}}
    config, _ = run(**{**CHANGES, **changes})
    names = sorted(p.name for p in (Path(config.run_dir) / "checkpoints").glob("step-*"))
    assert names == [checkpoint_of(config, step).name for step in (4, 7, 9, 12)]


def test_texts_are_weighed_anew_and_counted_apart(run, base, tmp_path):
    other = tmp_path / "other.jsonl"
    texts = (f'{{"text": "Number {i} of other words. "}}\n' for i in range(2000))
    other.write_text("".join(texts))
    files = base["data"]["files"]
    mixture = {"old": {"files": files}, "new": {"files": [str(other)]}}
    phases = {
        "both": {"steps": 2},
        "new": {"steps": 2, "weights": {"new": 1.0}},
    }
    data = {"mixture": mixture, "needles": {"share": 0.0}}
    changes = {"phases": phases, "data": data, "drop": {"at": None}, "trainer": {"log_every": 1}}
    config, _ = run(model={"qk_norm": {"when": "never"}}, **changes)
    rows = read_metrics(Path(config.run_dir) / "metrics.csv")
    old, new = ([row[f"epochs/{name}"] for row in rows] for name in ("old", "new"))
    assert old[1] == old[3] > 0
    assert new[3] - new[1] == pytest.approx(2 * (new[1] - 0), rel=0.01)


def test_a_run_may_begin_with_the_weights_of_another(run, whole):
    """Their shape, positions and tokenizer are its own too; nothing is drawn."""
    config, _ = whole
    still = {"lr": 1e-30}
    model = {"from_run": config.run_dir, "hidden_size": 999}
    begun, trained = run(
        "begun", model=model, optimizer=still, drop={"at": None}, trainer={"max_steps": 2}
    )
    assert begun.model.hidden_size == config.model.hidden_size
    weights = [contents_of(checkpoint_of(each)) for each in (config, begun)]
    for name in weights[0]:
        if name.startswith("model."):
            torch.testing.assert_close(weights[0][name], weights[1][name])
    states = [read_state(checkpoint_of(each)) for each in (config, begun)]
    assert states[0]["layout"] == states[1]["layout"]
    assert states[0]["tokenizer"] == states[1]["tokenizer"]
    assert read_state(trained)["effects"] == {}


@pytest.mark.slow
def test_layers_that_a_phase_rescaled_stay_so_in_a_resume(run, tmp_path):
    """Layers with a window of 16 keep their frequencies from 32 to 64 tokens."""
    longer = {"steps": 2, "sequence_length": 64, "batch_size": 2, "rescale": {"method": "pi"}}
    changes = {
        "phases": {"short": {"steps": 2}, "long": longer},
        "positional": {"windows": [16, None]},
        "model": {"qk_norm": {"when": "never"}},
        "drop": {"at": None},
        "trainer": {"checkpoint_every": 1},
    }

    def frequencies(config):
        layout = Layout.from_dict(read_state(checkpoint_of(config))["layout"])
        return [layer.spectra[0].inv_freq for layer in layout.layers]

    config, _ = run("windows", **changes)
    windowed, whole = frequencies(config)
    assert whole == pytest.approx([f / 2 for f in windowed])
    assert_resumes(run, config, (2, 3), tmp_path, **changes)


@pytest.mark.slow
def test_a_new_base_and_new_windows_survive_a_resume(run, tmp_path):
    """SmolLM3's longer stage, then SWAN-GPT's conversion: one global layer without rotation."""
    longer = {"sequence_length": 64, "batch_size": 2}
    swan = {"layers": [0], "windows": [None, 16]}
    changes = {
        "phases": {
            "short": {"steps": 2},
            "long": {"steps": 2, **longer, "rescale": {"base": 2e6}},
            "swan": {"steps": 2, **longer, "drop": swan},
        },
        "model": {"qk_norm": {"when": "never"}},
        "drop": {"at": None},
        "trainer": {"checkpoint_every": 1},
    }
    config, trained = run("swan", **changes)
    assert (
        "new base of the frequencies (2,000,000)" in read_state(trained)["effects"]["long"]["what"]
    )
    assert read_state(trained)["effects"]["swan"]["what"].endswith("of layers 0; windows none, 16")
    free, local = Layout.from_dict(read_state(checkpoint_of(config))["layout"]).layers
    assert (free.window, local.window) == (None, 16)
    assert not free.spectra[0].rotates
    wanted = by_name("rope", 2 * len(local.spectra[0].inv_freq), 64, base=2e6)
    assert local.spectra[0] == wanted
    assert_resumes(run, config, (3, 5), tmp_path, **changes)


@pytest.mark.slow
def test_a_run_that_begins_with_a_dropped_model_goes_on_and_drops_nothing_again(
    base, finished, tmp_path
):
    whole, _ = finished
    early = str(checkpoint_of(whole, 6))
    begun = {**base, "run_dir": str(tmp_path / "new")}

    def config(from_run, norms="after_drop", **changes):
        model = {"from_run": from_run, "qk_norm": {"when": norms}}
        return parse(merged(begun, {"model": model, **changes})).config

    def name_of(config):
        return name_and_role(config, phases_of(config))[0]

    last = config(whole.run_dir, drop={"at": None})
    assert (name_of(last), last.positional.layers) == ("NoPE, continued", ["nope"])
    before = config(early, drop={"at": None}, norms="never")
    assert (name_of(before), before.positional) == ("RoPE", whole.positional)
    assert phases_of(config(whole.run_dir)).drop_step is None
    assert name_of(config(early)) == "DroPE"
