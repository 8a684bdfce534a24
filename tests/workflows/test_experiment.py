"""What an experiment leaves behind, how it goes on, and how reports call its runs."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.program import run_ranks
from trainer.commands.hydra.composing import compose_words
from trainer.commands.hydra.files import ConfigFiles
from trainer.commands.train import read_config, read_run
from trainer.common.errors import Problem, UserError
from trainer.evaluation.measurements import Perplexity, Statements
from trainer.evaluation.results import troubles
from trainer.evaluation.store import Share
from trainer.runs.arms import arms_of, control_problems
from trainer.runs.checkpoints import MANIFEST
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import checkpoint_label, label, role
from trainer.runs.directory import open_run_directory, plain
from trainer.runs.fitted_temperature import FILE
from trainer.runs.models import find_candidate
from trainer.runs.parsing import control_config, merged, parse
from trainer.runs.ranks import Ranks
from trainer.workflows import experiment, remarks
from trainer.workflows.evaluate import evaluate_lengths
from trainer.workflows.experiment import run_experiment
from trainer.workflows.experiment_report import _median_rate
from trainer.workflows.remarks import say_epochs, say_idle_settings, say_unusual_settings
from trainer.workflows.requests import EvaluationRequest
from trainer.workflows.training_text import open_corpus

SWA = "positional=rnope_swa", "data.sequence_length=256"
EXPECTED = {
    (): ("rope", "RoPE"),
    ("positional=rope_id", "data.sequence_length=256"): ("rope_id", "RoPE-ID"),
    ("positional.layers=[rope,nope]",): ("rope_nope", "rope + nope"),
    (*SWA, "model.num_hidden_layers=4"): ("rope_nope_window", "rope + nope"),
    (*SWA, "model.num_hidden_layers=3"): ("rope_window", "rope"),  # of a pattern of four
    ("positional=irope",): ("rope", "RoPE"),
    ("+positional.heads.nope=0.5",): ("rope_nope_heads", "rope"),
    ("drop.at=10",): ("drope", "DroPE"),
    ("drop.at=10", "drop.enabled=false"): ("rope", "RoPE"),
    ("label=Mine",): ("rope", "Mine"),
}


@pytest.mark.parametrize("words", EXPECTED)
def test_role_and_label(words):
    config = read_config(list(words))
    assert (role(config), label(config)) == EXPECTED[words]


def test_run_before_its_drop_is_what_its_encoding_says():
    config = read_config(["drop.at=10", "label=Mine"])
    assert (role(config, dropped=False), label(config, dropped=False)) == ("rope", "RoPE")


def test_checkpoint_of_a_run_without_a_drop_has_the_label_of_its_run():
    config = read_config(["label=Mine"])
    assert checkpoint_label(config, config.trainer.max_steps, "last") == "Mine"
    assert checkpoint_label(config, 5, "step-000005") == "Mine (step-000005)"


def test_control_that_keeps_the_encoding_is_called_by_it_and_not_by_the_label_of_the_run():
    words = ["+experiment=drope_demo", "positional.layers=[half_rope]", "label=Mine"]
    config = read_config(words)
    controls = {name: label(control_config(plain(config), name)) for name in config.controls}
    assert (label(config), controls) == ("Mine", {"rope": "HalfRoPE", "nope": "NoPE from scratch"})


def test_runs_that_tables_could_not_tell_apart_are_refused():
    config = read_config(["+controls.again.seed=7", "+controls.other.seed=8"])
    configs = {"main": config, "again": config, "other": replace(config, label="Other")}
    (problem,) = map(str, control_problems(configs))
    assert problem.startswith("controls.again.label: 'RoPE' is what main is called too")
    config = read_config(["drop.at=0.5", "+controls.again.branch=drop"])
    (problem,) = map(str, control_problems(arms_of(config)))
    assert problem.endswith("or controls.again.drop.enabled=false if it is not to drop.")


@pytest.mark.parametrize(
    ("run", "control", "said"),
    [
        ("single", "strategy.name=ddp", "strategy: 'ddp', but the processes of the run are"),
        ("ddp", "strategy.name=single", "strategy: 'single', but the processes of the run are"),
        ("ddp", "strategy.name=fsdp2", None),
        ("single", "trainer.threads=3", "trainer.threads: 3, but a control trains in the"),
        ("single", "trainer.accelerator=cpu", "trainer.accelerator: 'cpu', but a control"),
    ],
)
def test_a_control_trains_in_the_processes_of_its_run(run, control, said):
    words = [f"strategy.name={run}", "+controls.odd.label=Odd", f"+controls.odd.{control}"]
    found = [str(problem) for problem in control_problems(arms_of(read_config(words)))]
    assert len(found) == (said is not None)
    assert all(problem.startswith(f"controls.odd.{said}") for problem in found)


def warnings(caplog, *arms):
    """The warnings about arms, given by the words of their command lines."""
    caplog.clear()
    configs = [read_config(words) for words in arms]
    say_unusual_settings(dict(zip(("main", "odd"), configs, strict=False)))
    return caplog.messages


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trainer.max_steps=30", "drop.at=20", "drop.schedule.warmup_steps=9"],
            "schedule.warmup_steps: 50 steps, but DroPE has 20 in this phase: its learning rate "
            "only rises; schedule.warmup_steps=2 is a tenth of them",
        ),
        (
            ["positional=irope"],
            "positional.layers: of a pattern of 4 layers RoPE has 3, none with nope; "
            "model.num_hidden_layers=4 has all of its encodings",
        ),
    ],
)
def test_settings_of_any_arm_that_have_no_effect_are_named(caplog, words, message):
    budget = [word for word in words if word.startswith("trainer")]
    run = [*budget, "schedule.warmup_steps=29"]
    (warned,) = warnings(caplog, run, words)
    assert warned.startswith(message)


def test_a_phase_that_rescales_what_does_not_rotate_is_named(caplog):
    """A comparison of encodings has one list of phases for all."""
    phases = ["+phases.a.steps=1", "+phases.b={steps: 1, rescale: {factor: 2.0}}"]
    phases += ["+phases.c={steps: 1, drop: {}}", "+phases.d={steps: 1, rescale: {factor: 2.0}}"]
    phases += ["schedule.warmup_steps=1"]
    message = "phases.{}.rescale: nothing of DroPE rotates by then, so that nothing is rescaled"
    for encoding, idle in (("rope", "d"), ("alibi", "bd"), ("half_rope", "d")):
        found = warnings(caplog, [f"positional={encoding}", *phases])
        assert found == [message.format(name) for name in idle]


def test_a_phase_that_rescales_no_layer_names_the_key_that_does(caplog):
    """RNoPE-SWA rotates in its windows alone, which see no further in longer sequences."""
    words = ["positional.windows=[32,null]", "model.num_hidden_layers=4", "+phases.a.steps=1"]
    words += ["schedule.warmup_steps=1"]
    longer = "+phases.b={{steps: 1, sequence_length: 128, rescale: {{{}}}}}"
    for layers, choice, idle in (
        ("[rope,nope]", "", True),
        ("[rope,nope]", "layers: all", False),
        ("[rope,nope]", "layers: [1, -1]", True),
        ("[rope,rope]", "", False),
    ):
        messages = warnings(caplog, [*words, f"positional.layers={layers}", longer.format(choice)])
        assert len(messages) == idle
        for message in messages:
            assert message.startswith("phases.b.rescale: no layer of rope + nope that is rescaled")
            assert "phases.b.rescale.layers=all rescales every layer" in message


def test_a_control_of_another_budget_is_named(caplog):
    words = ["+experiment=drope_demo", "+controls.nope.trainer.max_steps=300"]
    config = read_config(words)
    controls = {name: control_config(plain(config), name) for name in config.controls}
    say_unusual_settings({"main": config} | controls)
    assert caplog.messages == [
        "controls.nope: NoPE from scratch trains on 614,400 tokens, and DroPE on 2,621,440"
    ]


UNHEARD = ["evaluation.tasks=[perplexity]", "evaluation.needles.trials=5"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["evaluation.dope.heads=4"], ["dope.heads: without effect; no method of"]),
        (["evaluation.dope.heads=4", "evaluation.methods=[none,yarn+dope]"], []),
        (["evaluation.dope.heads=4", "evaluation.methods=null"], []),
        (["evaluation.weighted_rope=[{tau: 0.5}]"], ["weighted_rope: without effect"]),
        (
            ["evaluation.choice.texts=2", "evaluation.longrope.seed=1"],
            ["choice.texts: without effect; no method of", "longrope.seed: without effect"],
        ),
        (["evaluation.temperature.grid=[0.1]"], []),
        (["evaluation.layers=all"], []),
        (["evaluation.layers=all", "evaluation.methods=[none,dope]"], ["layers: without effect"]),
        (["evaluation.ruler.trials=5", "evaluation.needles.trials=5"], ["ruler.trials: without"]),
        (
            UNHEARD,
            ["needles.trials: without effect; no task of evaluation.tasks reads it (statements,"],
        ),
        (["evaluation.tasks=[standard]", "evaluation.windows=5"], ["windows: without effect"]),
        (["evaluation.tasks=[standard]", "evaluation.needles.trials=5"], []),
        (
            [*UNHEARD, "evaluation.choice.text=noisy", "evaluation.methods=[none,dope]"],
            [],
        ),
        (
            [*UNHEARD, "monitor.lengths_every=10"],
            [],
        ),
    ],
)
def test_settings_of_an_evaluation_that_nothing_reads_are_named(caplog, words, said):
    config = read_config(words)
    say_idle_settings(config.evaluation, words, config.monitor)
    assert len(caplog.messages) == len(said)
    for message, part in zip(caplog.messages, said, strict=True):
        assert message.startswith(f"evaluation.{part}")


EVALUATION = {
    "lengths": [1, 2],
    "windows": 2,
    "fit_windows": 2,
    "needles": {"trials": 4, "needles": 2},
    "temperature": {"grid": [0.3, 0.4]},
}


@pytest.fixture
def measured(monkeypatch):
    """What was measured: (task, length) of every cell; the list's ``limit`` interrupts."""

    class Measured(list):
        limit = None

    found = Measured()
    for kind in (Perplexity, Statements):

        def counting(task, reading, read=kind.read):
            if len(found) == found.limit:
                raise KeyboardInterrupt
            found.append((task.key, reading.length))
            return read(task, reading)

        monkeypatch.setattr(kind, "read", counting)
    return found


def test_all_that_is_wrong_is_said_at_once_and_of_every_arm(base, tmp_path, monkeypatch):
    checks = (*("device", "logger", "benchmark", "memory", "vocabulary", "spread", "control"),)
    for check in checks:

        def problems(config, *_, check=check):
            names = [config.name] if isinstance(config, RunConfig) else [*config]
            return [Problem(check, f"of {', '.join(names)}")]

        monkeypatch.setattr(experiment, f"{check}_problems", problems)

    def refuse(place):
        raise UserError.at("writing", f"to {place}")

    monkeypatch.setattr(experiment, "check_writable", refuse)
    controls = {"other": {"seed": 9, "label": "other", "trainer": {"max_steps": 13}}}
    values = {**base, "name": "x", "run_dir": str(tmp_path), "controls": controls}
    with pytest.raises(UserError) as error:
        run_experiment(parse(RunConfig, values))
    said = [f"{check}: of {'main, other' if check == 'control' else 'x'}" for check in checks]
    assert tuple(map(str, error.value.problems)) == (*said, f"writing: to {tmp_path}")


PHASES = {"a": {"steps": 6}, "b": {"steps": 6, "batch_size": 3}}
WRONG = {
    "logger": {"logger": {"tensorboard": True}},
    "vocabulary": {"model": {"vocab_size": 9}},
    "text": {"data": {"revision": "another"}},
    "spread": {"trainer": {"batch_size": 3}},
    "length": {"data": {"sequence_length": 24}},
    "benchmark": {"monitor": {"benchmarks": {"every_tokens": 512, "harness": ["x"]}}},
    "phase": {"phases": PHASES},
    "memory": {"phases": {"a": {"steps": 6}, "b": {"steps": 6, "batch_size": 1 << 30}}},
}
"""What is wrong with a configuration."""
SAID = {
    "logger": "logger.tensorboard: TensorBoard is not installed",
    "vocabulary": "model.vocab_size: 9 embeddings, but a tokenizer",
    "text": "data: a control reads the text of its run",
    "spread": "trainer.batch_size: 3 sequences do not divide",
    "length": " its longest sequences have 24 tokens",
    "benchmark": "monitor.benchmarks: lm-eval is not installed",
    "phase": "trainer.batch_size: 3 sequences do not divide",
    "memory": "trainer.micro_batch_size: 536870912 sequences of",
}


@pytest.mark.parametrize(
    ("wrong", "in_a_control"),
    [
        *((wrong, True) for wrong in WRONG),
        # Text and length of a control are held against its run.
        *((wrong, False) for wrong in WRONG if wrong not in ("text", "length")),
    ],
)
def test_a_fault_in_a_control_or_a_later_phase_alone_is_refused_before_anything_runs(
    base, tmp_path, monkeypatch, wrong, in_a_control
):
    for name in ("trainer.training.loggers", "trainer.training.callbacks.monitors"):
        monkeypatch.setattr(f"{name}.find_spec", lambda _: None)
    for heavy in ("open_corpus", "open_run_directory", "train"):
        monkeypatch.setattr(experiment, heavy, lambda *_, **__: pytest.fail("began"))
    ranks = Ranks(world_size=2, local_size=2)
    monkeypatch.setattr(experiment, "process_group", lambda _: nullcontext(ranks))
    values = {**base, "drop": {"at": None}, "model": {**base["model"], "qk_norm": {}}}
    controls = {"odd": {"label": "Odd", **WRONG[wrong]}}
    changes = {"controls": controls} if in_a_control else WRONG[wrong]
    values = merged(values, {"run_dir": str(tmp_path / "x"), **changes})
    with pytest.raises(UserError) as error:
        run_experiment(parse(RunConfig, values))
    (problem,) = map(str, error.value.problems)
    begin = "controls.odd" if in_a_control else ""
    assert problem.removeprefix(begin).lstrip(".:").startswith(SAID[wrong])
    assert problem.startswith(begin)
    assert not (tmp_path / "x").exists()


LACKS = "trainer.fp8", "float8 products need an NVIDIA GPU of compute capability 8.9 or later."
SHORT = "evaluation.lengths", "more than is free."
SIZES = "strategy.shard_size: by default the number of ranks on a node, but nodes have 2 or 4"


@pytest.mark.parametrize(
    ("first", "others", "strategy", "said"),
    [
        # On four ranks of three nodes: what the first sees is said once, and of the others once
        # a node.
        ([], [("b", 2, LACKS), ("b", 2, LACKS), ("c", 2, None)], {}, [(LACKS, "b")]),
        ([LACKS], [("b", 2, LACKS), ("b", 2, SHORT), ("c", 2, SHORT)], {}, [
            (LACKS, None), (SHORT, "b"), (SHORT, "c")
        ]),
        ([], [("b", 4, None)], {}, []),
        ([], [("b", 4, None)], {"name": "hsdp", "shard_size": 2}, []),
        ([], [("b", 4, None)], {"name": "hsdp"}, [SIZES]),
    ],
)  # fmt: skip
def test_what_gpus_and_nodes_of_other_ranks_lack_is_refused_before_anything_runs(
    base, tmp_path, monkeypatch, first, others, strategy, said
):
    """As on a node of an L40S, first, and an A100."""
    monkeypatch.setattr(experiment, "machine_problems", lambda *_: [Problem(*one) for one in first])
    rows = [(node, size, [Problem(*one)] if one else []) for node, size, one in others]

    def gathered(mine):
        return [mine, *rows] if isinstance(mine, tuple) else [mine]

    monkeypatch.setattr(experiment, "all_gather", gathered)
    monkeypatch.setattr(experiment, "open_corpus", lambda *_, **__: pytest.fail("began"))
    ranks = Ranks(world_size=4, local_size=2)
    monkeypatch.setattr(experiment, "process_group", lambda _: nullcontext(ranks))
    values = merged(base, {"run_dir": str(tmp_path / "x"), "strategy": strategy})
    outcome = pytest.raises(UserError if said else pytest.fail.Exception)
    with outcome as error:
        run_experiment(parse(RunConfig, values))
    if not said:
        return
    found = [str(problem) for problem in error.value.problems]
    wanted = [
        one
        if isinstance(one, str)
        else f"{one[0][0]}: {one[0][1]}" + f" (On {one[1]}.)" * bool(one[1])
        for one in said
    ]
    assert len(found) == len(wanted)
    assert all(map(str.startswith, found, wanted))


def test_what_another_process_may_train_is_locked_before_it_is_opened(base, tmp_path, monkeypatch):
    done = []

    class Lock:
        def acquire(self, place):
            done.append(f"lock {place.name}")

        def release(self):
            pass

    open_run_directory = experiment.open_run_directory

    def opening(arm):
        done.append("open")
        open_run_directory(arm)

    def train(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "RunLock", Lock)
    monkeypatch.setattr(experiment, "open_run_directory", opening)
    monkeypatch.setattr(experiment, "train", train)
    config = parse(RunConfig, {**base, "run_dir": str(tmp_path / "x")})
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_experiment(config)
    assert done == ["open", "lock x", "lock x", "open", "lock x"]


@pytest.mark.parametrize(
    ("sees", "rank", "share"),
    [
        ([True], 0, Share(0, 1, "now")),
        ([True, True, True], 2, Share(2, 3, "now")),
        ([False, True, True], 0, None),
        ([False, True, True], 2, Share(1, 2, "now")),
    ],
)
def test_ranks_that_see_all_checkpoints_share_the_evaluation(
    tmp_path, monkeypatch, sees, rank, share
):
    places = [tmp_path / "a", tmp_path / "b"]
    for path in places:
        path.mkdir()
    (places[0] / MANIFEST).touch()
    if sees[rank]:
        (places[1] / MANIFEST).touch()

    def gathered(own):
        assert own is sees[rank]
        return sees

    monkeypatch.setattr(experiment, "damage_together", lambda path: None)
    monkeypatch.setattr(experiment, "all_gather", gathered)
    monkeypatch.setattr("trainer.runs.ranks.all_gather", lambda own: ["now", own, own])
    ranks = Ranks(rank, len(sees), rank, len(sees))
    assert experiment.evaluation_share(places, ranks) == share


@pytest.mark.parametrize("names", [["only"], ["first", "second"]])
def test_texts_are_named_where_there_are_several(monkeypatch, caplog, names):
    monkeypatch.setattr(remarks, "epochs_read", lambda *_: lambda step: dict.fromkeys(names, 1.5))
    parts = [SimpleNamespace(name=name, text=SimpleNamespace(train=range(1234))) for name in names]
    with caplog.at_level("INFO"):
        say_epochs(RunConfig(), SimpleNamespace(parts=parts))
    called = ["The training part of the text"]
    if len(names) > 1:
        called = [f"The training part of the text {name!r}" for name in names]
    assert caplog.messages == [
        f"{name} holds 1,234 tokens: this run reads it 1.5 times" for name in called
    ]


def test_a_text_that_is_read_often_is_warned_of_once_with_what_to_write(caplog, monkeypatch):
    parts = [SimpleNamespace(name="", text=SimpleNamespace(train=range(1234)))]
    corpus = SimpleNamespace(parts=parts)
    monkeypatch.setattr(remarks, "epochs_read", lambda *_: lambda step: {"": 79.0 * step / 1000})
    with caplog.at_level("INFO"):
        say_epochs(parse(RunConfig, {"trainer": {"max_steps": 1000}}), corpus)
        say_epochs(parse(RunConfig, {"trainer": {"max_steps": 202}}), corpus)
    often, seldom = caplog.records
    assert (often.levelname, seldom.levelname) == ("WARNING", "INFO")
    assert often.message == (
        "The training part of the text holds 1,234 tokens: this run reads it 79 times, and learns "
        "it by heart; give more text, or fewer steps (trainer.max_steps=202 reads it 16 times)"
    )


APART = {"packing": "best_fit"}, {"document_mask": True}


@pytest.mark.parametrize(
    ("data", "characters", "told"),
    [
        *(({**apart, "sequence_length": 4096}, 8192, True) for apart in APART),
        *(({**apart, "sequence_length": 2048}, 8192, False) for apart in APART),
        ({"sequence_length": 4096}, 8192, False),  # whose sequences run on over documents
        ({**APART[0], "sequence_length": 4096}, None, False),  # not plain text, or whole files
        ({**APART[0], "sequence_length": 2048}, 4000, True),
    ],
)
def test_a_text_whose_documents_are_shorter_than_sequences_is_warned_of(
    caplog, data, characters, told
):
    text = SimpleNamespace(piece_characters=characters)
    corpus = SimpleNamespace(parts=[SimpleNamespace(name="text", text=text)])
    config = parse(RunConfig, {"data": data})
    remarks.say_short_documents({"main": config}, corpus)
    longest = data["sequence_length"]
    expected = (
        f"data.piece_characters: plain text is cut into documents of {characters or 0:,} "
        f"characters, about {(characters or 0) // 4:,} tokens, so that none fills a sequence of "
        f"{longest:,}; piece_characters={4 * longest} cuts it into longer ones, and "
        "piece_characters=null keeps every file whole"
    )
    assert caplog.messages == ([expected] if told else [])


def test_phases_controls_and_texts_with_short_documents_are_named():
    cut, other = SimpleNamespace(piece_characters=1000), SimpleNamespace(piece_characters=None)
    parts = [SimpleNamespace(name="a", text=other), SimpleNamespace(name="b", text=cut)]
    phases = {"short": {"steps": 1}, "long": {"steps": 1, "sequence_length": 512}}
    config = parse(RunConfig, {"phases": phases, "data": {"document_mask": True}})
    told = remarks.short_documents(
        {"main": parse(RunConfig, {}), "x": config}, SimpleNamespace(parts=parts)
    )
    assert [*told] == ["data.mixture.b.piece_characters"]
    assert "none fills a sequence of 512;" in told["data.mixture.b.piece_characters"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), False),
        (("model=llama_135m",), True),
        (("model=llama_135m", "tokenizer.vocab_size=8192"), False),
        (("model=llama_135m", "tokenizer.path=a.json"), False),
    ],
)
def test_a_small_vocabulary_under_a_large_model_is_said_once(words, told, caplog):
    config = read_config([*words, "+controls.again.seed=7"])
    say_unusual_settings(arms_of(config))
    assert len(caplog.messages) == told
    assert all("1,024 tokens are few for RoPE with 106," in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("before", "length", "told"),
    [
        (2048, 128, True),
        (2048, 129, False),
        (8192, 256, True),
        (8192, 511, True),
        (8192, 512, False),
        (131072, 512, False),
    ],
)
def test_weights_that_go_on_with_much_shorter_sequences_than_recalibrate_takes_are_named(
    before, length, told, caplog, monkeypatch
):
    start = SimpleNamespace(layout=SimpleNamespace(training_length=before))
    monkeypatch.setattr(remarks, "starting_weights", lambda model: start)
    messages = warnings(caplog, [f"data.sequence_length={length}"])
    assert len(messages) == told
    least = "keeps that length, and 512 is the least that recalibrate takes"
    assert all(f"data.sequence_length={before} {least}" in message for message in messages)


@pytest.mark.parametrize(
    ("words", "now"),
    [
        (["drop.at=9", "data.sequence_length=2048"], None),
        (["drop.at=9", "data.sequence_length=1024"], 1024),
        (["drop.at=9", "data.sequence_length=64"], 64),
        (["drop.at=0.5", "data.sequence_length=1024"], 1024),
        (["data.sequence_length=1024"], None),
        (["+phases.a.steps=9", "+phases.b={steps: 9, sequence_length: 512, drop: {}}"], 512),
        (["+phases.a.steps=9", "+phases.b={steps: 9, sequence_length: 2048, drop: {}}"], None),
    ],
)
def test_a_drop_of_trained_weights_on_sequences_shorter_than_their_context_is_named(
    words, now, caplog, monkeypatch
):
    words = [*words, "schedule.warmup_steps=1"]
    if any(word.startswith("drop.at") for word in words):
        words.append("drop.schedule.warmup_steps=1")
    start = SimpleNamespace(layout=SimpleNamespace(training_length=2048))
    monkeypatch.setattr(remarks, "starting_weights", lambda model: start)
    messages = warnings(caplog, words)
    assert len(messages) == (now is not None)
    for message in messages:
        assert f"trains on sequences of {now:,} tokens, and its weights were" in message
        assert "trained on 2,048: it never sees that context without its positions" in message
        assert message.endswith(f"from {now:,}, unless evaluation.training_length=2048 is given")
    monkeypatch.setattr(remarks, "starting_weights", lambda model: None)  # from scratch
    assert warnings(caplog, words) == []


def test_a_length_that_the_caller_chose_is_not_warned_of(caplog, monkeypatch):
    start = SimpleNamespace(layout=SimpleNamespace(training_length=2048))
    monkeypatch.setattr(remarks, "starting_weights", lambda model: start)
    configs = {"main": read_config(["data.sequence_length=128"])}
    say_unusual_settings(configs, chosen=["data.sequence_length"])
    assert caplog.messages == []


def test_the_first_process_opens_the_text_once_and_says_what_is_known_before_it_trains(
    base, tmp_path, monkeypatch
):
    opened, told = [], []
    names = ["set_environment", "set_threads", "open_gpus", "say_epochs", "say_unusual_settings"]
    names.append("say_costs")
    for name in names:
        monkeypatch.setattr(experiment, name, lambda *_, name=name: told.append(name))

    def opening(*given):
        opened.append(open_corpus(*given))
        return opened[-1]

    def reached(config, corpus, *_, **__):
        assert [corpus] == opened
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "open_corpus", opening)
    monkeypatch.setattr(experiment, "train", reached)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(parse(RunConfig, {**base, "run_dir": str(tmp_path)}))
    assert told == names


@pytest.mark.parametrize(("schedule", "warmup"), [("cosine", 1), ("wsd", 3)])
@pytest.mark.parametrize("drop", [6, None])
def test_a_finished_run_that_should_be_longer_is_refused_with_the_command_that_trains_on(
    base, tmp_path, monkeypatch, schedule, warmup, drop
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    when = "never" if drop is None else "after_drop"
    changes = {
        "model": {"qk_norm": {"when": when}},
        "drop": {"at": drop},
        "schedule": {"name": schedule, "warmup_steps": warmup},
        "controls": {"rope": {"label": "Other", "seed": 5}},
        "evaluation": {"enabled": False},
    }
    experiment_text = yaml.safe_dump(merged(base, changes))
    (tmp_path / "own/experiment/tiny.yaml").write_text(f"# @package _global_\n{experiment_text}")
    words = ["--config-dir", "own", "+experiment=tiny", "run_dir=runs/mine"]
    words += ["trainer.max_steps=12"]

    def command(words):
        monkeypatch.setattr(sys, "argv", ["trainer", *words])
        return run_experiment(read_run(compose_words(words[2:], files=ConfigFiles(Path("own")))))

    command(words)
    with pytest.raises(UserError) as refused:
        command([*words[:-1], "trainer.max_steps=15"])
    said = str(refused.value.problems[-1])
    begun = said.partition("another order: ")[2].partition(". Its controls")[0].split()
    assert begun[:3] == ["python", "-m", "trainer"]
    assert ("schedule.warmup_steps=1" in begun) == (warmup == 3)  # or the rate would only rise
    assert said.endswith("from runs/mine/controls/NAME.")
    assert not (tmp_path / "runs" / "tiny_longer").exists()
    report, existed = command([*begun[3:], "run_dir=runs/longer"])
    (arm,) = report.arms
    assert (arm.steps, arm.tokens, existed) == (3, 3 * 4 * 32, False)
    assert arm.name == ("RoPE" if drop is None else "DroPE")


def test_a_run_that_is_not_finished_is_to_be_finished_before_it_is_made_longer(base, tmp_path):
    config = parse(RunConfig, {**base, "run_dir": str(tmp_path / "run")})
    open_run_directory(config)
    longer = replace(config, trainer=replace(config.trainer, max_steps=15))
    with (
        pytest.raises(UserError, match="over 12 steps; finish these first"),
        experiment.naming_longer_runs(longer),
    ):
        open_run_directory(longer)


def test_each_control_is_trained_with_its_own_callbacks_from_where_it_branches_off(
    base, tmp_path, monkeypatch
):
    trained, looked, begun, started = [], [], [], []
    monkeypatch.setattr(
        experiment, "check_run_directory", lambda arm: looked.append(Path(arm.run_dir).name)
    )

    def opening(*given):
        begun.append(time.time())
        return open_corpus(*given)

    def train(config, corpus, branch, *, user_callbacks, is_control, start_time):
        # The limit of time covers what precedes training, and all controls.
        assert start_time < begun[-1]
        started.append(start_time)
        assert is_control == ("controls" in Path(config.run_dir).parts)
        place = branch and str(branch.relative_to(tmp_path))
        trained.append((config.run_dir, config.seed, place, user_callbacks))
        if len(trained) >= 4:
            raise KeyboardInterrupt
        return "done"

    monkeypatch.setattr(experiment, "open_corpus", opening)
    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(experiment, "make_all_callbacks", lambda arms: {n: [n] for n in arms})
    controls = {
        "rope": {"branch": "drop", "drop": {"enabled": False}},
        "early": {"branch": 3, "label": "early"},
        "other": {"seed": 9, "label": "other"},
    }
    values = {**base, "run_dir": str(tmp_path / "run"), "controls": controls}
    with pytest.raises(KeyboardInterrupt):
        run_experiment(parse(RunConfig, values))
    # A run that is made anew takes its controls' directories with it.
    assert looked == ["run", "rope", "early", "other"]
    with pytest.raises(KeyboardInterrupt):
        run_experiment(parse(RunConfig, {**values, "overwrite": True}))
    assert looked[4:] == ["run"]
    assert len(set(started[:4])) == 1
    run, seed = str(tmp_path / "run"), base.get("seed", 0)
    assert trained[:4] == [
        (run, seed, None, ["main"]),
        (f"{run}/controls/rope", seed, "run/checkpoints/before-drop", ["rope"]),
        (f"{run}/controls/early", seed, "run/checkpoints/step-000003", ["early"]),
        (f"{run}/controls/other", 9, None, ["other"]),
    ]


def test_controls_that_a_resume_adds_begin_where_they_should(base, tmp_path):
    """Of a run that was interrupted after step 8 of 12, with its drop at 6."""
    run = {**base, "run_dir": str(tmp_path)}
    open_run_directory(parse(RunConfig, run))
    for name in ("step-000006", "step-000008", "before-drop"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "controls" / "old").mkdir(parents=True)

    def problems(name="new", **control):
        config = parse(RunConfig, {**run, "controls": {name: {"label": "x", **control}}})
        try:
            experiment.check_added_controls(config)
        except UserError as error:
            return [str(problem) for problem in error.problems]
        return []

    keeps = {"drop": {"enabled": False}}
    assert not problems()
    assert not problems(branch="drop", **keeps)
    assert not problems(branch=6, **keeps)
    assert problems(branch=3) == [
        "controls.new.branch: the run has passed step 3 and keeps checkpoints of [6, 8] alone; "
        "choose one of these, or leave branch out."
    ]
    (problem,) = problems("old")
    assert problem.startswith(f"controls.old: '{tmp_path / 'controls' / 'old'}' holds a control")
    (tmp_path / "checkpoints" / "step-000008").rmdir()
    assert not problems(branch=6, **keeps)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("PreemptedError", "stopped"), ("DivergedError", "trainer.rewind_after: diverged.")],
)
def test_no_rank_leaves_before_the_first_has_uploaded_and_unlocked(base, tmp_path, kind, message):
    """A launcher ends all ranks as soon as one exits with an error."""
    open_corpus(parse(RunConfig, base), alone=True)
    values = {**base, "run_dir": str(tmp_path / "run"), "strategy": {"name": "ddp"}}
    (tmp_path / "run.json").write_text(json.dumps(values))
    script = Path(__file__).with_name("leaving_ranks.py")
    ranks = run_ranks(2, script, tmp_path / "run.json", kind, cwd=tmp_path)
    assert [rank.stdout.splitlines()[-1:] for rank in ranks] == [[f"{message} uploaded free"]] * 2


def test_a_diverged_run_is_reported_as_one(base, tmp_path, caplog):
    rates = {"optimizer": {"lr": 1e3, "weight_decay": 1e3}, "schedule": {"peak": 1e3}}
    changes = {"run_dir": str(tmp_path), "evaluation": EVALUATION, **rates}
    report, _ = run_experiment(parse(RunConfig, {**base, **changes}))
    (arm,) = report.arms
    assert not arm.finite
    assert 8 < arm.skipped <= arm.steps == 12
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == troubles(report.arms)
    assert all(line in (tmp_path / "log.txt").read_text() for line in said)
    assert not any(observation.shown for observation in report.observations)


def test_an_evaluation_that_was_interrupted_goes_on_with_its_next_cell(base, tmp_path, measured):
    run_dir = tmp_path / "run"
    config = parse(RunConfig, {**base, "run_dir": str(run_dir), "evaluation": EVALUATION})
    measured.limit = 3
    with pytest.raises(KeyboardInterrupt):
        run_experiment(config)
    assert not (run_dir / "report.json").exists()

    measured.limit = None
    report, existed = run_experiment(config)
    assert not existed
    # As it is and with its temperature, two tasks at two lengths; none of them twice.
    assert len(measured) == len(report.cells) == 8
    assert {(cell.model, cell.method) for cell in report.cells} == {
        ("DroPE", "none"),
        ("DroPE", "temperature"),
    }
    kept = json.loads(find_candidate(str(run_dir)).path.joinpath(FILE).read_text())
    assert report.temperature == {"DroPE + temperature": kept["coefficient"]}
    assert kept["coefficient"] in (0.3, 0.4)
    (arm,) = report.arms
    assert (arm.name, arm.encoding) == ("DroPE", "rope, dropped at step 6")
    assert arm.final_loss == report.cells[0].last_loss
    assert report.drop.step == 6
    assert any("Recalibration wins back" in o.claim for o in report.observations)

    # `evaluate` has nothing left to measure, and a finished run is shown as it was.
    again, output = evaluate_lengths(EvaluationRequest(str(run_dir), evaluation=config.evaluation))
    assert output == run_dir / "evaluation"
    assert again.cells == report.cells
    assert len(measured) == 8
    assert run_experiment(config) == (report, True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_evaluation_names_the_command_that_trains_nothing(
    base, tmp_path, measured, monkeypatch, overwrite
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cells/a")

    run_dir = tmp_path / "run"
    config = parse(RunConfig, {**base, "run_dir": str(run_dir), "evaluation": EVALUATION})
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "make_report", full)
        with pytest.raises(UserError) as error:
            run_experiment(replace(config, overwrite=overwrite))
    again = " without overwrite=true" * overwrite
    assert str(error.value) == (
        "'cells/a': No space left on device. The run is trained: the same "
        f"command{again} evaluates it, and trains nothing."
    )
    assert error.value.is_transient
    trained = (run_dir / "metrics.csv").read_text()
    report, existed = run_experiment(config)
    assert (run_dir / "metrics.csv").read_text() == trained
    assert (existed, len(report.cells)) == (False, 8)


def test_a_run_of_an_earlier_version_is_evaluated_again_once_its_report_is_away(
    base, tmp_path, measured
):
    run_dir = tmp_path / "run"
    config = parse(RunConfig, {**base, "run_dir": str(run_dir), "evaluation": EVALUATION})
    run_experiment(config)
    trained = (run_dir / "metrics.csv").read_text()
    record = yaml.safe_load((run_dir / "config.yaml").read_text())
    record["evaluation"] = {"enabled": True, "trials": 256, "needles": 4, "rescalings": ["pi"]}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(record))
    (run_dir / "report.json").write_text('{"name": "tiny", "table": []}')
    with pytest.raises(UserError, match=r"report\.json' is damaged, or of an earlier") as caught:
        run_experiment(config)
    assert len(caught.value.problems) == 1
    (run_dir / "report.json").unlink()
    _, existed = run_experiment(config)
    assert not existed
    assert (run_dir / "metrics.csv").read_text() == trained
    assert len(measured) == 8


def test_a_run_is_finished_before_its_dashboard_gets_the_results(base, tmp_path, monkeypatch):
    def refuse(*_):
        raise ConnectionError

    monkeypatch.setattr(experiment, "log_table", refuse)
    config = parse(RunConfig, {**base, "run_dir": str(tmp_path / "run")})
    config = replace(config, evaluation=replace(config.evaluation, enabled=False))
    with pytest.raises(ConnectionError):
        run_experiment(config)
    report, existed = run_experiment(config)
    assert (report.name, existed) == (base["name"], True)


def test_a_run_may_end_without_an_evaluation(base, tmp_path, measured):
    changes = {"run_dir": str(tmp_path / "run"), "evaluation": {"enabled": False}}
    report, _ = run_experiment(parse(RunConfig, {**base, **changes}))
    assert (measured, report.cells) == ([], ())
    assert report.arms[0].final_loss is None
    assert (tmp_path / "run" / "report.html").is_file()
    # What is known without one.
    assert (report.config["name"], report.drop.step) == (base["name"], 6)
    assert report.made["Of"].startswith("DroPE: ")
    assert (report.reach, report.milestones) == ({"DroPE": ()}, {"DroPE": ()})
    rate, seconds = report.timing["tokens_per_second"], report.timing["training_seconds"]
    assert rate["DroPE"] == _median_rate(tmp_path / "run") > 0
    assert seconds["DroPE"] > 0 <= report.timing["evaluation_seconds"]
