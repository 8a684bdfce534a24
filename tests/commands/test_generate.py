"""The generate command writes what the model does, and says what is wrong with a request."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from trainer.commands import generate as command
from trainer.commands.hydra.composing import compose_words
from trainer.commands.hydra.running import run_command
from trainer.common.errors import UserError
from trainer.data.tokenizer import END_OF_TEXT, train_tokenizer
from trainer.model.generate import generate
from trainer.workflows import generate as workflow
from trainer.workflows.requests import GenerationRequest

TOKENIZER = train_tokenizer(["the text of a small tokenizer, 中文 and 🙂 in it"], 280, [])
END = TOKENIZER.token_to_id(END_OF_TEXT)


@pytest.fixture
def model(tiny_decoder):
    return tiny_decoder(model={"vocab_size": 280, "tie_word_embeddings": False})


def candidate(model, tokenizer, given="runs/x"):
    from trainer.runs.config import RunConfig
    from trainer.runs.models import Candidate

    path = Path(given) / "checkpoints" / "step-000009"
    shape = model.config, model.layout
    return Candidate(given, "tiny", path, tokenizer, *shape, "", RunConfig(), lambda *_: model)


@pytest.fixture
def say(model, monkeypatch, capsys, tmp_path):
    """Runs the command with a checkpoint of ``model``; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/x").mkdir(parents=True)
    monkeypatch.setattr(
        workflow, "find_candidate", lambda given: candidate(model, TOKENIZER, given)
    )

    def run(*words):
        run_command(
            command.COMMAND, ["checkpoint=runs/x", "threads=1", "max_new_tokens=30", *words]
        )
        return capsys.readouterr()

    return run


def continuation(model, prompt, **options):
    ids = [END, *TOKENIZER.encode(prompt).ids]
    return TOKENIZER.decode(generate(model, [ids], 30, end_tokens={END}, **options)[0])


@pytest.mark.parametrize("prompt", ["the text", "a = {b}, [c] (d): 'e' \"f\" 100%", ""])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_the_continuation_is_printed(say, model, prompt, stream):
    said = say(f"prompt={prompt}", f"stream={stream}")
    assert said.out == continuation(model, prompt) + "\n"
    assert said.err.startswith("tiny, step-000009\n")
    assert ("tokens read" if prompt else "1 token read") in said.err
    assert "30 written" in said.err


def test_several_prompts_are_printed_with_their_continuations(say, model):
    said = say("prompt=the", "prompt=a small text")
    texts = [f"{p}{continuation(model, p)}\n\n" for p in ("the", "a small text")]
    assert said.out == "".join(texts)


def test_prompts_of_a_configuration_come_before_those_of_the_command_line(say, model):
    said = say("prompts=[the]", "prompt=a small text")
    assert said.out == say("prompt=the", "prompt=a small text").out


def test_text_ends_before_a_stop_string(say, model):
    free = continuation(model, "the")
    stop = next(letter for letter in free[3:] if letter.isalnum())
    assert say("prompt=the", f'stop=["{stop}"]').out == free[: free.index(stop)] + "\n"


def test_a_newline_can_be_a_stop_string():
    composed = compose_words(["checkpoint=x", r'stop=["\n"]'], "generate")
    assert command.COMMAND.read(replace(composed, verbatim=("y",))).stop == ["\n"]


def test_draws_repeat_with_their_seed(say):
    options = ("prompt=the", "temperature=1", "top_p=0.9")
    assert say(*options).out == say(*options).out
    assert say(*options).out != say(*options, "seed=1").out


def test_a_tokenizer_that_begins_sequences_itself_is_left_to_it(model):
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END)]
    )
    request = GenerationRequest("x", ["the"], max_new_tokens=30)
    bos_token = candidate(model, tokenizer).bos_token
    done = workflow.write(model, tokenizer, bos_token, request, show=lambda text: None)
    assert done.texts[0].replace("\r", "\n") == continuation(model, "the")


def test_all_mistakes_are_reported_at_once():
    words = ["prompt=x", "max_new_token=3", "temperature=-1", "top_p=2", "threads=0", "seed=one"]
    with pytest.raises(UserError) as error:
        run_command(command.COMMAND, words)
    said = "\n".join(map(str, error.value.problems))
    assert "Did you mean 'max_new_tokens'" in said
    for key in ("checkpoint", "temperature", "top_p", "threads", "seed"):
        assert f"{key}: " in said
    assert len(error.value.problems) == 6


def test_nothing_to_continue_is_a_mistake():
    with pytest.raises(UserError, match="prompt: give prompt="):
        run_command(command.COMMAND, ["checkpoint=x"])


def test_a_temperature_that_was_fitted_for_the_checkpoint_is_used(say, model, tmp_path):
    from trainer.runs.fitted_temperature import keep_temperature

    step = tmp_path / "checkpoints" / "step-000009"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    keep_temperature(
        step,
        {"coefficient": 0.5, "per": "sequence", "lengths": [64], "text": "of mine", "tokens": 9},
    )
    said = say(f"checkpoint={tmp_path}", "prompt=the")
    assert "logits times 1 + 0.5 ln(n / 32) beyond" in said.err
    (spectrum,) = model.layout.spectra
    assert spectrum.temperature.coefficient == 0.5


def test_a_temperature_of_every_head_writes_what_one_of_all_heads_does(say, model, tmp_path):
    """If all coefficients are equal, which gives query heads spectra of their own all the same."""
    from trainer.runs.fitted_temperature import keep_temperature

    step, layers = tmp_path / "checkpoints" / "step-000009", len(model.layout.layers)
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    heads = [[0.5] * model.config.num_attention_heads] * layers
    kept = {"coefficient": 0.5, "per": "sequence", "lengths": [64], "text": "of mine", "tokens": 9}
    said, before = [], model.layout
    for more in ({}, {"heads": heads}):
        keep_temperature(step, kept | more)
        model.layout = before
        said.append(say(f"checkpoint={tmp_path}", "prompt=the", "max_new_tokens=40"))
    assert "logits of each head times" in said[1].err
    assert said[0].out == said[1].out


def test_a_text_is_seen_while_it_grows(say, monkeypatch):
    class Terminal(io.StringIO):
        seen = 0

        def flush(self):
            self.seen = len(self.getvalue())

        def write(self, text):
            if text.strip():
                assert self.seen == len(self.getvalue()), "more is said before this was seen"
                pieces.append(text)
            return super().write(text)

    pieces = []
    monkeypatch.setattr(sys, "stdout", Terminal())
    say("prompt=the text")
    assert len(pieces) > 5
