"""``recalibrate``: a model and a text in, choices, a recalibrated model and its export out."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.data.streams import held_out
from trainer.__main__ import main
from trainer.common.errors import Problem, UserError
from trainer.evaluation.config import EvaluationConfig
from trainer.training.speed import Times
from trainer.workflows import recalibrate
from trainer.workflows.recipe import Choice

CONTEXT = 32
STEP = 0.045
"""Seconds of a step of 4 sequences, as if measured: 50 in three quarters of 0.05 minutes."""
ENDS = {"eos_token_id": [0, 5]}
TEXT = "".join(f"Sentence {i} of a text that is {i * i} long.\n\n" for i in range(1500))
SMALL = ("minutes=0.05", "trainer.batch_size=4", "data.num_workers=0", "trainer.threads=1")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A directory as transformers writes it, whose tokens are bytes, beside a text."""
    place = tmp_path_factory.mktemp("published")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate(["<|endoftext|>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(place / "llama")
    tokenizer.save(str(place / "llama/tokenizer.json"))
    (place / "llama/chat_template.jinja").write_text("{{ messages[0].content }}")
    (place / "llama/generation_config.json").write_text(json.dumps(ENDS))
    (place / "a.txt").write_text(TEXT)
    return place / "llama"


def as_if_measured(config, layout, shape, **options):
    """As fast as STEP says, and faster in fp32."""
    slower = 2 if options["precision"] == "bf16" else 1
    return Times(slower * STEP * shape[0] * shape[1] / (4 * CONTEXT), 0.0)


@contextmanager
def standing_in(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(recalibrate, "measure_step", as_if_measured)
        yield patch


@pytest.fixture
def place(llama, tmp_path):
    with standing_in(tmp_path):
        yield tmp_path


def words_for(llama, *words):
    own = [*SMALL, f"data.cache_dir={llama.parent}/cache"]
    if not any(word.startswith(("text=", "data=")) for word in words):
        own.append(f"text={llama.parent}/a.txt")
    given = {word.partition("=")[0] for word in words}
    return [
        *("recalibrate", str(llama)),
        *(word for word in own if word.partition("=")[0] not in given),
        *words,
    ]


@pytest.fixture(scope="module")
def done(llama, tmp_path_factory):
    """The directory of a recalibration that was stopped after its first step, then resumed; the
    output of both is in files."""
    import contextlib
    import io

    place, said = tmp_path_factory.mktemp("done"), []
    with standing_in(place) as patch:
        for words in (["trainer.max_time=0:00:00"], []):
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
                main(words_for(llama, *words))
            said.append(out.getvalue())
            # A resumed run measures nothing: its choices are stored.
            patch.setattr(recalibrate, "measure_step", None)
    (place / "said.json").write_text(json.dumps(said))
    return place


def said_of(done, call):
    return json.loads((done / "said.json").read_text())[call]


def test_a_stopped_recalibration_is_resumed_with_its_choices_by_the_same_command(done):
    run = done / "runs/llama-drope"
    stopped, resumed = said_of(done, 0), said_of(done, 1)
    assert "Drop after step 0" not in stopped
    assert "Drop after step 0" in resumed
    assert "generate runs/llama-drope/export" in resumed
    table = resumed.partition("Parameters")[0]
    assert table == stopped.partition("Parameters")[0].replace(" trainer.max_time=0:00:00", "")
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["trainer"]["max_steps"] == 50
    assert [path.name for path in sorted((run / "checkpoints").iterdir())][-1] == "step-000050"


def test_the_choices_stand_in_the_plan_and_in_the_run_with_their_reasons(done):
    record = json.loads((done / "runs/llama-drope/recalibrate.json").read_text())
    choices = {one["key"]: one for one in record["recipe"]["choices"]}
    assert all(one["why"] for one in choices.values())
    assert choices["trainer.max_steps"]["value"] == 50
    assert choices["trainer.precision"]["value"] == "fp32"
    assert "trainer.batch_size" not in choices  # given
    plan = said_of(done, 0)
    for word in ("trainer.max_steps=50", "optimizer.lr=0.0003", "data.sequence_length=32"):
        assert word in plan.partition("The run alone")[0]
    assert "6,400 in 50 steps" in " ".join(plan.split())  # wrapped by the width of a path
    assert "trainer.batch_size" not in plan.partition("The run alone")[0]


def test_the_export_is_the_recalibrated_model_without_rotation(done):
    from trainer.runs.checkpoints import find_checkpoint, load_decoder, read_state

    run = done / "runs/llama-drope"
    path = find_checkpoint(str(run))
    ours = load_decoder(path, read_state(path)).eval()
    theirs = AutoModelForCausalLM.from_pretrained(run / "export").eval()
    ids = torch.randint(257, (1, 3 * CONTEXT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert not ours.layout.rotates
    assert (run / "export/chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert json.loads((run / "export/generation_config.json").read_text()) == ENDS


def test_the_evaluation_sets_the_model_beside_what_it_was(done):
    report = json.loads((done / "runs/llama-drope/evaluation/report.json").read_text())
    methods = {(cell["model"], cell["method"]) for cell in report["cells"]}
    assert methods == {
        ("DroPE", "none"),
        ("DroPE", "temperature"),
        ("llama", "none"),
        ("llama", "yarn"),
        ("llama", "dynamic_ntk"),
    }
    (checkpoint,) = (done / "runs/llama-drope/checkpoints").glob("step-000050")
    fitted = json.loads((checkpoint / "temperature.json").read_text())
    assert (fitted["lengths"], fitted["training_length"]) == ([64], CONTEXT)


@pytest.mark.parametrize("lengths", [(), ("evaluation.tokens=[16,32]",)])
def test_sequences_shorter_than_the_context_are_compared_at_lengths_in_tokens(
    place, llama, lengths
):
    """Methods count from the context where a length is beyond it, otherwise from the sequences."""
    words = ["trainer.max_steps=2", "data.sequence_length=16", "drop.schedule.warmup_steps=1"]
    main(words_for(llama, *words, *lengths))
    report = json.loads((place / "runs/llama-drope/evaluation/report.json").read_text())
    assert report["training_length"] == (16 if lengths else CONTEXT)  # 64 is beyond it
    measured = {cell["length"] for cell in report["cells"]}
    assert measured == ({16, 32} if lengths else {16, 32, 64})
    methods = {(cell["model"], cell["method"]) for cell in report["cells"]}
    extended = {("llama", "yarn"), ("llama", "dynamic_ntk")}
    assert methods == {
        *(("DroPE", "none"), ("DroPE", "temperature"), ("llama", "none")),
        *(() if lengths else extended),
    }


def test_a_finished_recalibration_is_shown_again(done, llama, capsys):
    with standing_in(done) as patch:
        for name in ("measure_step", "export_checkpoint"):
            patch.setattr(recalibrate, name, None)
        main(words_for(llama))
    out = capsys.readouterr().out
    assert "This run was finished before" in out
    assert "For transformers: runs/llama-drope/export" in out


def test_a_finished_recalibration_stays_unchanged_on_a_machine_that_cannot_train_it(done, llama):
    run = done / "runs/llama-drope"
    names = "config.yaml", "recalibrate.json", "report.json", ".lock"
    before = {name: (run / name).stat() for name in names}
    lacks = [Problem("trainer.accelerator", "torch sees no GPU.")]
    with standing_in(done) as patch:
        patch.setattr("trainer.workflows.experiment.machine_problems", lambda *_: lacks)
        main(words_for(llama))
    assert {name: (run / name).stat() for name in names} == before


def test_an_evaluation_that_failed_on_a_full_disk_is_resumed_without_overwriting(
    place, llama, capsys, monkeypatch
):
    def full(request):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cells/a")

    short = ["trainer.max_steps=2", "drop.schedule.warmup_steps=1", "evaluation.tokens=[16]"]
    evaluate = recalibrate.evaluate_lengths
    monkeypatch.setattr(recalibrate, "evaluate_lengths", full)
    (said,) = refused(capsys, *words_for(llama, *short, "overwrite=true"))
    assert said == (
        "'cells/a': No space left on device. The run is trained: the same command without "
        "overwrite=true evaluates and exports it, and trains nothing."
    )
    monkeypatch.setattr(recalibrate, "evaluate_lengths", evaluate)
    monkeypatch.setattr("trainer.workflows.experiment.train", None)
    main(words_for(llama, *short))
    assert (place / "runs/llama-drope/export/config.json").is_file()


def test_cfg_job_shows_the_run_with_what_was_chosen_and_overridden(place, llama, capsys):
    main(words_for(llama, "optimizer.lr=1e-3", "name=mine", "--cfg", "job"))
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["minutes"] == 0.05
    assert values["model"]["from_pretrained"] == str(llama)
    assert values["model"]["qk_norm"]["when"] == "after_drop"  # as the rate wants it
    assert values["drop"]["qk_norm_gain"] == "matched"
    assert values["drop"]["at"] == 0
    assert values["optimizer"]["lr"] == 1e-3
    assert (values["name"], values["trainer"]["batch_size"]) == ("mine", 4)
    assert values["trainer"]["max_steps"] == 50
    assert values["data"]["files"] == [f"{llama.parent}/a.txt"]
    assert not list(place.iterdir())


def refused(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return [line[7:] for line in said.splitlines() if line.startswith("error: ")]


def test_a_text_a_model_and_enough_minutes_are_needed(place, llama, capsys):
    (said,) = refused(capsys, "recalibrate", str(llama))
    assert said.startswith("text: give the text to recalibrate on")
    assert "data=stdlib_docs" in said
    (said,) = refused(capsys, *words_for(llama, "text=none.txt"))
    assert said == "text: there is no file 'none.txt'."
    (said,) = refused(capsys, *words_for(llama, "data=stdlib_docs", "text=a.txt"))
    assert said.startswith("text: the text is given by data already")
    (said,) = refused(capsys, "recalibrate", "text=a.txt")
    assert said.startswith("MODEL: expected one directory")
    (said,) = refused(capsys, *words_for(llama / "none", f"text={llama.parent}/a.txt"))
    assert said.startswith("MODEL: there is no directory")
    (said, _) = refused(capsys, "recalibrate", "runs/none")
    assert said.startswith("MODEL: 'runs/none' is neither a run directory nor a checkpoint")
    (said,) = refused(capsys, *words_for(llama, "model.from_pretrained=x"))
    assert said.startswith("model.from_pretrained: MODEL names the weights")
    (said,) = refused(capsys, *words_for(llama, "minutes=0.01"))
    assert said == (
        "minutes: 0.01 is too short: 10 steps of warm-up and as many after it, of 4 x 32 tokens, "
        "need 0.02 on 1 CPU thread. Write minutes=0.025: another measurement may be slower."
    )
    assert not list(place.iterdir())


def test_a_file_that_is_no_text_is_named_as_text(place, llama, capsys):
    (place / "zeros.txt").write_bytes(b"A\0" * 9999)
    (said,) = refused(capsys, *words_for(llama, "text=zeros.txt"))
    assert said == "text: 'zeros.txt' is not text: byte 1 is NUL."


def test_text_and_export_are_checked_before_the_speed_is_measured(
    place, llama, capsys, monkeypatch
):
    monkeypatch.setattr(recalibrate, "measure_step", None)
    (place / "zeros.txt").write_bytes(b"A\0" * 9999)
    (place / "full").mkdir()
    (place / "full/file").touch()
    text, to = sorted(refused(capsys, *words_for(llama, "text=zeros.txt", "to=full")))
    assert text == "text: 'zeros.txt' is not text: byte 1 is NUL."
    assert to == "to: 'full' is not empty; choose another directory, or remove it."
    (said,) = refused(capsys, *words_for(llama, "to=full/file/export"))
    assert said.startswith("to: 'full/file' is a file")
    assert not (place / "runs").exists()


def test_an_export_that_failed_is_all_that_the_next_call_does(place, llama, capsys, monkeypatch):
    """As with a full disk; what the error says is what then happens."""
    short = ["trainer.max_steps=2", "drop.schedule.warmup_steps=1", "evaluation.enabled=false"]
    export = recalibrate.export_checkpoint

    def full(request):
        raise UserError.at("to", "'x' cannot be written (No space left on device).")

    monkeypatch.setattr(recalibrate, "export_checkpoint", full)
    (said,) = refused(capsys, *words_for(llama, *short, "overwrite=true"))
    assert said == (
        "to: 'x' cannot be written (No space left on device). The run is trained: the same "
        "command without overwrite=true exports it, and trains nothing."
    )
    (said,) = refused(capsys, *words_for(llama, *short))
    assert said.endswith("The run is trained: the same command exports it, and trains nothing.")
    monkeypatch.setattr(recalibrate, "export_checkpoint", export)
    monkeypatch.setattr(recalibrate, "measure_step", None)
    monkeypatch.setattr("trainer.workflows.experiment.train", None)
    main(words_for(llama, *short))
    assert (place / "runs/llama-drope/export/config.json").is_file()


def test_minutes_that_read_the_text_too_often_are_said(place, llama, capsys, monkeypatch):
    """The run then begins all the same: a user may have a reason."""

    def begun(*_):
        raise UserError.at("", "begun")

    monkeypatch.setattr(recalibrate, "run_experiment", begun)
    with pytest.raises(SystemExit):
        main(words_for(llama, "minutes=1e6"))
    said = " ".join(capsys.readouterr().err.split())
    assert "minutes: 1e+06 are more than the text holds: its training part is read 2.49e" in said
    assert "minutes=6.4 reads it 16 times, or give more text" in said
    assert "error: begun" in said


def test_many_minutes_are_suggested_in_digits(monkeypatch, caplog):
    config = SimpleNamespace(trainer=SimpleNamespace(max_steps=100))
    recipe = SimpleNamespace(choices=[Choice("trainer.max_steps", 100, "")])
    asked = SimpleNamespace(minutes=3000.0)
    monkeypatch.setattr(recalibrate, "phases_of", lambda config: [])
    monkeypatch.setattr(recalibrate, "epochs_read", lambda *_: lambda step: {"text": 39.0})
    request = SimpleNamespace(config=config, recipe=recipe, asked=asked)
    recalibrate._say_long_minutes(request, None)
    assert "minutes=1200 reads it 16 times" in caplog.text


@pytest.mark.parametrize(
    ("methods", "fitting"),
    [(["none", "yarn"], [64, 512]), (["none", "temperature"], [64]), (["yarn+dope"], [64])],
)
def test_lengths_must_fit_validation_text_only_where_a_method_is_fitted_on_it(methods, fitting):
    tokens = EvaluationConfig(methods=methods, tokens=[64, 512, 4096])
    config = SimpleNamespace(evaluation=tokens, training_length=64)
    corpus = SimpleNamespace(test=held_out(range(600)), validation=held_out(range(100)))
    request = SimpleNamespace(config=config, evaluates=True)
    assert recalibrate.lengths_that_fit(request, corpus) == fitting


def test_a_short_text_is_refused_before_the_run_directory_is_made(place, llama, capsys):
    (place / "short.txt").write_text(TEXT[:300])
    (said,) = refused(capsys, *words_for(llama, "text=short.txt"))
    assert said.startswith("data: too few different documents")
    lines = (json.dumps({"text": one}) + "\n" for one in TEXT[:9000].split("\n\n"))
    (place / "few.jsonl").write_text("".join(lines))
    (said,) = refused(capsys, *words_for(llama, "text=few.jsonl", "evaluation.lengths=[100]"))
    assert said.startswith("text: ")
    assert "fewer than the shortest evaluated length of 3,200" in said
    assert not (place / "runs").exists()


def test_missing_packages_are_named_with_their_extras(place, llama, capsys, monkeypatch):
    monkeypatch.setattr(recalibrate, "find_spec", lambda _: None)
    (said,) = refused(capsys, *words_for(llama))
    assert "pip install -c requirements.lock 'unrope[transformers]'" in said
    (place / "m.gguf").write_text("")
    (said,) = refused(capsys, *words_for(place / "m.gguf", f"text={llama.parent}/a.txt"))
    assert "pip install -c requirements.lock 'unrope[gguf,transformers]'" in said


def test_several_processes_are_refused(place, llama, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (said,) = refused(capsys, *words_for(llama))
    assert "this command uses one process, and 2 were started" in said


def test_what_has_no_rotation_is_refused(done, llama, capsys):
    with standing_in(done):
        (said,) = refused(
            capsys,
            *words_for(done / "runs/llama-drope/export", f"text={llama.parent}/a.txt", "name=b"),
        )
    assert said.endswith("has no RoPE, so there is nothing to drop.")


def test_a_run_of_other_choices_is_kept(done, llama, capsys):
    run = done / "runs/llama-drope"
    before = (run / "config.yaml").read_text()
    with standing_in(done):
        other = llama.parent / "b.txt"
        other.write_text(TEXT)
        (said,) = refused(capsys, *words_for(llama, f"text={other}"))
        assert f"was begun with '{llama.parent}/a.txt', this command has '{other}'" in said
        (said,) = refused(capsys, *words_for(llama, "minutes=2"))
        assert said.startswith("minutes: the run in 'runs/llama-drope' was begun with 0.05")
        said = refused(capsys, *words_for(llama, "optimizer.lr=1e-4"))
        assert said[0].startswith("optimizer.lr: the run in 'runs/llama-drope' has 0.0003")
        shutil.copytree(run, done / "runs/other")
        (done / "runs/other/recalibrate.json").unlink()
        (said,) = refused(capsys, *words_for(llama, "name=other"))
        assert said.startswith("run_dir: 'runs/other' holds a run that recalibrate did not begin")
    assert (run / "config.yaml").read_text() == before


def test_a_run_of_this_program_is_a_model(finished):
    before = f"{finished[0].run_dir}/checkpoints/before-drop"
    assert recalibrate.source_of(before) == "from_run"
    facts = recalibrate.facts_of(before)
    assert facts.context == finished[0].data.sequence_length
    assert facts.layout.rotates


def test_a_step_that_does_not_fit_a_gpu_is_halved(llama, monkeypatch):
    tried = []

    def fits_512(config, layout, shape, **options):
        tried.append(shape)
        if shape[0] * shape[1] > 512:
            raise torch.OutOfMemoryError
        return Times(1.0, 0.0)

    monkeypatch.setattr(recalibrate, "measure_step", fits_512)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    speed = recalibrate.measured(recalibrate.facts_of(str(llama)), 1.0, "auto", 1)
    assert tried == [(n, CONTEXT) for n in (512, 256, 128, 64, 32, 16)]
    assert speed.device == "NVIDIA H100 (one of 8)"
    assert (speed.precision, speed.pass_tokens, speed.is_gpu) == ("bf16", 512, True)


@pytest.mark.parametrize(
    ("is_fast", "chosen", "tried"),
    [
        (False, None, ["fp32"]),
        (True, None, ["fp32", "bf16"]),
        (True, "fp32", ["fp32"]),
        (False, "bf16", ["bf16"]),
    ],
)
def test_only_precisions_that_may_be_chosen_are_measured(
    llama, monkeypatch, is_fast, chosen, tried
):
    measured = []

    def step(config, layout, shape, *, precision, **options):
        measured.append(precision)
        return Times(1.0, 1.0)

    monkeypatch.setattr(recalibrate, "measure_step", step)
    monkeypatch.setattr(recalibrate, "multiplies_bf16_fast", lambda threads: is_fast)
    speed = recalibrate.measured(recalibrate.facts_of(str(llama)), 1.0, "cpu", 1, chosen)
    assert measured == tried
    assert speed.precision == tried[0]
