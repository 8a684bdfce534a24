"""What a run reads, logs, saves and measures at every step, counted by plain loops."""

from __future__ import annotations

import json
import math
import time

import lightning as L
import pytest
import torch

from tests.comparing import checkpoint_of
from tests.training.rehearsal import Stage, rehearse
from trainer.common.processes import Ranks
from trainer.common.progress import Progress
from trainer.data.dataset import TrainingSamples
from trainer.lightning.module import LanguageModule, Tally
from trainer.runs.parsing import merged
from trainer.training import fit
from trainer.training.run import MOST_SKIPPED, RunCallback

WSD = {"name": "wsd", "peak": 2.0, "warmup_steps": 2, "final": 0.2, "decay_fraction": 0.4}
COSINE = {"name": "cosine", "peak": 0.5, "warmup_steps": 1, "final": 0.25}
PHASES = {
    "a": {"steps": 5, "batch_size": 4, "schedule": WSD},
    "b": {
        "steps": 4,
        "sequence_length": 48,
        "batch_size": 2,
        "micro_batch_size": 1,
        "schedule": COSINE,
        "drop": {"layers": [0]},
        "optimizer_state": "reset_new",
    },
    "c": {
        "steps": 3,
        "sequence_length": 40,
        "batch_size": 6,
        "micro_batch_size": 3,
        "schedule": {"name": "constant", "peak": 0.3},
        "drop": {},
        "optimizer_state": "reset",
    },
}
CHANGES = {
    "drop": {"at": None},
    "phases": PHASES,
    "trainer": {"log_every": 3, "checkpoint_every": 4},
    "benchmarks": {"every": 2, "tasks": ["perplexity"], "limit": 2},
}


@pytest.fixture
def staged(base, tmp_path, monkeypatch):
    def go(*changes, **options):
        values = {**base, "run_dir": str(tmp_path / str(len([*tmp_path.iterdir()])))}
        for change in changes:
            values = merged(values, change)
        return rehearse(values, monkeypatch, **options)

    return go


@pytest.fixture
def three(staged):
    """A run of three phases."""
    return staged(CHANGES)


def test_rates_are_those_of_each_phase_from_its_start(three):
    """Both wsd's ends: the peak until 2 of 5 steps are left, then linearly to a fifth of it."""
    expected = [1.0, 2.0, 2.0, 2.0, 2.0 * (1 - 0.8 / 2)]
    expected += [0.5, *(0.5 * (1 - 0.75 * (1 - math.cos(math.pi * t / 3)) / 2) for t in range(3))]
    expected += [0.3] * 3
    lr = three.run.config.optimizer.lr
    rates = {step: [rate / lr for rate in of_groups] for step, _, of_groups, _ in three.batches}
    assert [*rates] == [*range(12)]
    for of_groups, factor in zip(rates.values(), expected, strict=True):
        assert of_groups == pytest.approx([factor] * 3)
    logged = {row["step"]: row["learning_rate"] / lr for row in three.rows}
    assert logged == {step: pytest.approx(expected[step - 1]) for step in (3, 5, 6, 9, 12)}


def test_rows_count_what_was_read_until_then(three):
    read = [4 * 32] * 5 + [2 * 48] * 4 + [6 * 40] * 3
    tokens = {step: sum(read[:step]) for step in (3, 5, 6, 9, 12)}
    assert {row["step"]: row["tokens"] for row in three.rows} == tokens
    assert [row["phase"] for row in three.rows] == [0, 0, 1, 1, 2]
    corpus = three.callbacks[-1].corpus
    blocks = len(corpus.parts[0].train) // 32, len(corpus.parts[0].train) // 48
    epochs = [4 * 3 / blocks[0], 4 * 5 / blocks[0], 4 * 5 / blocks[0] + 2 / blocks[1]]
    assert [row["epochs/text"] for row in three.rows[:3]] == pytest.approx(epochs, abs=1e-6)
    assert three.run.phases.tokens == sum(read)


def test_rows_have_means_since_the_last_one_and_the_norms_of_the_update(staged):
    stage = staged(CHANGES, skipped={2, 6})
    assert [row["loss"] for row in stage.rows[:2]] == [(1 + 3) / 2, (4 + 5) / 2]
    assert math.isnan(stage.rows[2]["loss"])  # no update of it was finite
    assert [row["gradient_norm"] for row in stage.rows[3:]] == [18.0, 24.0]
    assert [row["skipped_steps"] for row in stage.rows] == [1, 1, 2, 2, 2]
    squares = sum(weight.double().square().sum().item() for weight in stage.last_weights.values())
    assert stage.rows[-1]["parameter_norm"] == pytest.approx(math.sqrt(squares))


def test_what_a_callback_logs_takes_no_column_of_the_run(staged, monkeypatch):
    logged = {"loss": torch.tensor(70.0), "mine": torch.tensor(2.0)}
    monkeypatch.setattr(Stage, "logged_metrics", logged)
    row = staged(CHANGES).rows[0]
    assert (row["loss"], row["callback/loss"], row["mine"]) == (2.0, 70.0, 2.0)


def test_progress_is_that_of_tokens(staged, monkeypatch):
    seen = []

    class Shown(Progress):
        def advance_to(self, step, **values):
            seen.append((step / self.total, values))

    monkeypatch.setattr(fit, "Progress", Shown)
    rows = staged(CHANGES).rows
    assert rows[-1]["tokens"] == 1744
    shown = [place for place in seen if place[1]]
    assert shown == [(row["tokens"] / 1744, {"loss": row["loss"]}) for row in rows]


def test_a_longer_phase_that_changes_nothing_else_is_trained_at_its_length(staged):
    phases = {"a": {"steps": 2}, "b": {"steps": 1, "sequence_length": 48}, "c": {"steps": 1}}
    never = {"drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}}
    batches = staged(never, {"phases": phases}).batches
    assert [layout.training_length for *_, layout in batches] == [32, 32, 48, 48]


def test_it_saves_and_measures_when_it_is_due_and_at_both_ends_of_a_phase(three):
    saves = [event for event in three.events if event[1].startswith("save")]
    of_steps = [(step, f"save step-{step:06}") for step in (4, 5, 8, 9, 12)]
    assert saves == [*of_steps[:2], (5, "save before-drop"), *of_steps[2:]]
    measured = [step for step, event in three.events if event == "benchmarks"]
    assert measured == [2, 4, 5, 5, 6, 8, 9, 9, 10, 12]
    assert three.writer.permanent == {5, 9, 12}


def saved_steps(stage):
    return [step for step, event in stage.events if event.startswith("save step-")]


def test_minutes_between_checkpoints_count_from_the_last_one(staged):
    settings = {"checkpoint_every": 100, "checkpoint_minutes": 2.5}  # a step takes a minute
    assert saved_steps(staged({"drop": {"at": None}, "trainer": settings})) == [3, 6, 9, 12]


def test_a_run_saves_where_its_controls_branch_off(staged):
    control = {"branch": 4, "drop": {"at": 7}}
    stage = staged({"controls": {"later": control}, "trainer": {"checkpoint_every": 100}})
    assert saved_steps(stage) == [4, 6, 12]


def test_a_limit_has_hours_minutes_and_seconds():
    for seconds, reason in ((3722, None), (3724, "time limit")):
        with fit.stop_requests("01:02:03", time.time() - seconds) as stop_requested:
            assert stop_requested() == reason


@pytest.mark.parametrize("rank", [0, 3])
def test_each_rank_draws_random_numbers_of_its_own(staged, monkeypatch, rank):
    monkeypatch.setattr(fit, "current_ranks", lambda: Ranks(rank, 4))
    assert staged({"seed": 5}).initial_seed == 5 + rank


@pytest.mark.parametrize("compiled", [True, False])
def test_blocks_are_compiled_anew_for_other_batches_or_lengths_alone(staged, compiled):
    same = {"steps": 1, "batch_size": 4}
    phases = {"a": same, "b": same, "c": {"steps": 1, "batch_size": 2}}
    phases |= {"d": phases["c"] | {"sequence_length": 48}, "e": same}
    never = {"drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}}
    stage = staged(never, {"phases": phases, "trainer": {"compile": compiled}})
    anew = [step for step, event in stage.events if event == "compile anew"]
    assert anew == ([0, 2, 3, 4] if compiled else [])


def test_every_step_reads_its_samples_in_the_order_of_its_phase(three):
    corpus = three.callbacks[-1].corpus
    read = {}
    for step, batch, _, layout in three.batches:
        read.setdefault(step, []).append(batch["labels"])
        rotating = [any(s.rotates for s in layer.spectra) for layer in layout.layers]
        assert rotating == ([True] * 2 if step < 5 else [False, step < 9])
    for step, micro_batches in read.items():
        phase = three.run.phases.at(step)
        samples = TrainingSamples(corpus, phase.data, phase.seed)
        first = (step - phase.start) * phase.batch_size  # each phase has another length
        whole = samples.__getitems__([*range(first, first + phase.batch_size)])["labels"]
        parts = whole.split(phase.micro_batch_size or phase.batch_size)
        assert len(parts) == len(micro_batches)
        for part, of_step in zip(parts, micro_batches, strict=True):
            assert part.equal(of_step)


@pytest.mark.parametrize("step", [3, 6, 9])
def test_a_run_that_begins_at_a_checkpoint_goes_on_as_the_whole_one(staged, finished, step):
    """Also in its learning rates, which warm up at the drop alone."""
    config, _ = finished
    whole, rest = staged(), staged(branch=checkpoint_of(config, step))
    assert rest.batches[0][0] == step
    for expected, got in zip(whole.batches[step:], rest.batches, strict=True):
        assert expected[0] == got[0]
        assert expected[1]["input_ids"].equal(got[1]["input_ids"])
        assert expected[2:] == got[2:]
    again = (step, "save before-drop")  # which other runs branch off from
    assert rest.events == [event for event in whole.events if event[0] > step or event == again]
    for row, other in zip(whole.rows, rest.rows, strict=True):
        for name in ("step", "tokens", "phase", "learning_rate", "epochs/text"):
            assert row[name] == other[name], name


@pytest.mark.parametrize("step", [3, 6, 9])
def test_speed_counts_from_the_step_at_which_a_process_begins(staged, finished, step):
    """Also in the middle of a phase: steps of 4 x 32 tokens, and of a minute."""
    config, _ = finished
    rows = staged(branch=checkpoint_of(config, step)).rows
    speeds = [row["tokens_per_second"] for row in rows if row["step"] > step]
    assert speeds == pytest.approx([4 * 32 / 60] * len(speeds), abs=0.05)
    assert len(speeds) == (12 - step + 1) // 2  # a row every other step


@pytest.mark.parametrize(
    ("step", "epochs", "batches"),
    [(3, (1, 0), (3, 3)), (5, (1, 1), (0, 5)), (7, (2, 1), (4, 9)), (11, (3, 2), (4, 17))],
)
def test_what_a_checkpoint_holds_is_what_the_next_process_begins_with(
    three, tiny_decoder, step, epochs, batches
):
    """Lightning's counters are those of a phase an epoch: 5, 4 x 2 and 3 x 2 micro-batches."""
    module, before = LanguageModule(tiny_decoder()), three.callbacks[-1]
    module.trainer, before.module = three, module
    three.global_step = step
    held = {
        "step": step,
        "rows": len(three.rows),
        "texts": before.corpus.fingerprints,
        "token_files": {"tokenizer_config.json": "{}"},
        "pending_metrics": {"drop/loss_end": 2.5},
        "benchmarks": [{"step": 4, "scores": {"a": 0.5}}],
        "effects": {"b": {"step": 5}},
    }
    before.token_files = held["token_files"]
    before.measurements.pending = held["pending_metrics"]
    before.measurements.milestones = held["benchmarks"]
    before.measurements.effects = held["effects"]
    for loss in (math.nan, 3.0, math.nan):
        module.tally.add(torch.tensor(loss), torch.tensor(1.0), torch.tensor(math.isnan(loss)))
    state = json.loads(json.dumps(before.describe()))
    module.tally = Tally()
    given = {"writer": None, "progress": None, "stop_requested": None}
    after = RunCallback(three.run, module, before.corpus, state, **given)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
    trainer, checkpoint = L.Trainer(accelerator="cpu", devices=1, **quiet), {"global_step": step}
    after.on_load_checkpoint(trainer, module, checkpoint)
    assert json.loads(json.dumps(after.describe())) == state
    assert {name: state[name] for name in held} == held
    assert (state["tally"]["skipped"], state["tally"]["loss"]) == (2, 3.0)
    counted = checkpoint["loops"]["fit_loop"]
    epoch, batch = counted["epoch_progress"]["current"], counted["epoch_loop.batch_progress"]
    assert (epoch["ready"], epoch["completed"]) == epochs
    assert (batch["current"]["completed"], batch["total"]["completed"]) == batches
    assert counted["epoch_loop.state_dict"]["_batches_that_stepped"] == step


def test_a_run_ends_with_the_last_update_that_it_may_skip_in_a_row(staged):
    """Meanwhile nothing is saved by schedule."""
    most = MOST_SKIPPED
    changes = {"drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}}
    changes |= {"trainer": {"max_steps": most + 9, "checkpoint_every": 1}}
    first = range(3, 3 + most)
    (*saves, (step, end)) = staged(changes, skipped=first).events
    assert (step, end[:3]) == (2 + most, "end")
    assert [step for step, _ in saves] == [1, 2]
    last = staged(changes, skipped=first[:-1]).events
    assert [step for step, _ in last] == [1, 2, *range(2 + most, most + 10)]
