"""What the README.md of an exported model says."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from tests.report.examples import report
from trainer.common.files import write_atomically
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Cell
from trainer.interchange.export.plan import make_plan
from trainer.model.config import SoftmaxConfig
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum, Temperature
from trainer.runs.config import RunConfig, TrainerConfig
from trainer.workflows import export
from trainer.workflows.export import _padding, describe, model_card, renewed_card

NOPE, ALIBI = Spectrum(), Spectrum(alibi=True)
ROPE = Spectrum((1.0, 0.001))
GROWING = Temperature(0.1)
GROWING_ROPE = Spectrum((1.0, 0.001), GROWING)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([LayerEncoding.of_heads((NOPE,))], "layer 0: none (NoPE)"),
        ([LayerEncoding.of_heads((ALIBI,))] * 3, "layers 0 to 2: ALiBi"),
        (
            [LayerEncoding.of_heads((ROPE,))] * 2 + [LayerEncoding.of_heads((NOPE,))] * 2,
            "layers 0 to 1: rotation of 4 channels, wavelengths 6.3 to 6,283 tokens; layers 2 to "
            "3: none (NoPE)",
        ),
        (
            [LayerEncoding(((ROPE, 1), (NOPE, 3)), 16, qk_norm=True)],
            "layer 0: rotation of 4 channels, wavelengths 6.3 to 6,283 tokens (1 key-value heads), "
            "none (NoPE) (3 key-value heads), a window of 16 tokens, QK-norm",
        ),
        (  # A pair that does not turn is no wave.
            [LayerEncoding.of_heads((Spectrum((0.5, 0.0), GROWING),))],
            "layer 0: rotation of 2 channels, wavelengths 12.6 to 13 tokens, temperature that "
            "grows with the length",
        ),
    ],
)
def test_encodings_in_words(layers, said):
    assert describe(Layout(32, tuple(layers))) == said


@pytest.mark.parametrize(
    ("spectra", "told"),
    [((ROPE,), False), ((GROWING_ROPE, ROPE), True), ((ROPE, GROWING_ROPE), True)],
)
def test_padding_is_told_of_where_anything_follows_the_length(spectra, told):
    layout = Layout(32, tuple(LayerEncoding.of_heads((spectrum,)) for spectrum in spectra))
    assert bool(_padding(SimpleNamespace(is_native=False), layout)) is told
    assert not _padding(SimpleNamespace(is_native=True), layout)


@pytest.fixture
def card(tmp_path):
    """The card of the last step of a run of four, of which a report may tell."""

    def write(config, model, *cells, step=4, difference=None, tokens=True, **state):
        path = tmp_path / "tiny" / "checkpoints" / f"step-{step:06}"
        path.mkdir(parents=True)
        config = replace(config, name="tiny", trainer=TrainerConfig(max_steps=4))
        if cells:
            environment = {"corpus": "0123456789abcdef"}
            told = report(*cells, training_length=32, environment=environment)
            told.write(path.parents[1] / "report.json")
        state |= {"step": step, "config": asdict(config)} | ({"tokens": 51_200} if tokens else {})
        plan = make_plan(model.config, model.layout)
        return model_card(path, state, model, plan, difference)

    return write


def cells(*rows):
    for model, method, length, share, loss in rows:
        own = {"method": method, "length": length, "factor": length / 32}
        scores = (1.0,) * round(8 * share) + (0.0,) * round(8 - 8 * share)
        yield Cell(model, task=STATEMENTS, scores=scores, **own)
        if not math.isnan(loss):
            yield Cell(model, task=PERPLEXITY, last_loss=loss, **own)


def test_a_model_that_transformers_has(card, tiny_decoder):
    model = tiny_decoder()
    rows = cells(
        ("RoPE", "none", 32, 0.75, 3.25), ("RoPE", "none", 64, 0.25, math.nan),
        ("RoPE", "yarn", 64, 0.5, 3.5), ("RoPE-ID", "none", 64, 1, 3.0),
    )  # fmt: skip
    versions = {"unrope": "1.2", "torch": "2.9"}
    text = card(RunConfig(), model, *rows, difference=1.26e-7, versions=versions)
    assert text.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n")
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        *("# tiny", "## Evaluation", "## Loading", "## Engines", "## Licence"),
    ]
    lines = text.splitlines()
    tables = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \w", line)]
    assert tables[: tables.index(["method", "length", "retrieval", "loss", "effective"])] == [
        ["parameters", f"{sum(p.numel() for p in model.parameters()):,}"],
        [
            "positional encoding",
            "layers 0 to 1: rotation of 8 channels, wavelengths 6.3 to 6,283 tokens",
        ],
        ["dropped", "never"],
        ["steps", "4"],
        ["tokens", "51,200"],
        ["training length", "32 tokens"],
        ["program", "unrope 1.2, torch 2.9"],
        ["hash of the text", "0123456789abcdef"],
    ]
    for line in (
        "| RoPE | 32 | 0.750 | 3.250 | 32 |",
        "| RoPE | 64 | 0.250 |  | 32 |",
        "| RoPE + YaRN | 64 | 0.500 | 3.500 |  |",
        'model = AutoModelForCausalLM.from_pretrained("PATH")',
        "| llama.cpp | yes |  |",
    ):
        assert f"\n{line}\n" in text
    assert "| RoPE-ID |" not in text
    assert "The model is a `LlamaForCausalLM` and needs no code of its own. Its logits were" in text
    assert "they differ by 1.3e-07 of the largest at most, in float32." in text


def test_a_model_with_its_own_code_that_dropped_its_encoding(card, tiny_decoder, caplog):
    """Of an earlier step than the report tells of, by a version that kept less."""
    softmax = SoftmaxConfig(sinks=True, softcap=30.0)
    model = tiny_decoder(model={"softmax": softmax})
    growing = LayerEncoding.of_heads((Spectrum(temperature=GROWING), ROPE))
    model.layout = Layout(32, (growing,) * 2)
    config = replace(RunConfig(), drop=replace(RunConfig().drop, at=2))
    config = replace(config, model=replace(config.model, from_pretrained="/home/me/SmolLM2"))
    rows = cells(("DroPE", "none", 64, 1, 3.0))
    said = card(config, model, *rows, step=3, tokens=False)
    told = said.splitlines()
    assert told[told.index("| | |") + 2 : told.index("## Loading") - 1] == [
        f"| parameters | {sum(p.numel() for p in model.parameters()):,} |",
        "| positional encoding | layers 0 to 1: none (NoPE), temperature that grows with the "
        "length (1 key-value heads), rotation of 4 channels, wavelengths 6.3 to 6,283 tokens (1 "
        "key-value heads) |",
        "| dropped | after step 2 |",
        "| steps | 3 |",
        "| tokens | 0 |",
        "| training length | 32 tokens |",
        "| program | unrope ?, torch ? |",
        "| softmax | sinks=True, softcap=30.0 |",
        "| began with | SmolLM2 |",
        "| hash of the text | 0123456789abcdef |",
    ]
    assert 'from_pretrained("PATH", trust_remote_code=True)' in said
    (reason,) = (line for line in told if line.startswith("The model comes with its code"))
    refusals = make_plan(model.config, model.layout).refusals.values()
    assert f"has a place for {', '.join(dict.fromkeys(refusals))}. Its logits were not" in reason
    assert reason.endswith(
        "before a prompt. What attention does follows the length of the text, which the model "
        "counts in the `attention_mask`: pass the tokenizer's with every batch that is padded, on "
        "either side; without one padding counts as text."
    )
    assert not caplog.records


def test_a_report_without_its_models_or_that_is_damaged_gives_no_figures(
    card, tiny_decoder, tmp_path, caplog
):
    said = card(RunConfig(), tiny_decoder(), *cells(("DroPE", "none", 64, 1, 3.0)))
    assert "hash of the text" in said
    assert "## Evaluation" not in said
    (tmp_path / "tiny" / "report.json").write_text("{")
    (tmp_path / "tiny" / "checkpoints" / "step-000004").rmdir()
    assert "hash of the text" not in card(RunConfig(), tiny_decoder())
    (warned,) = caplog.records
    assert warned.getMessage().endswith(" The card has no figures of it.")
    assert "report.json" in warned.getMessage()


def test_own_code_that_does_not_follow_the_length_needs_no_mask(card, tiny_decoder):
    said = card(RunConfig(), tiny_decoder(layers=["alibi"]))
    assert "positional encoding | layers 0 to 1: ALiBi |" in said
    assert "trust_remote_code" in said
    assert said.count("before a prompt.\n") == 1


CARD = "# Mine\n\nAbout.\n\n## Engines\n\nold\n\n## Licence\n\nMIT\n"


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        (CARD, "# Mine\n\nAbout.\n\n", "\n\n## Licence\n\nMIT\n"),
        (
            CARD.replace("Engines\n\nold\n\n## ", ""),
            "# Mine\n\nAbout.\n\n",
            "\n\n## Licence\n\nMIT\n",
        ),
        ("# Mine\n", "# Mine\n\n", "\n"),
        ("", "# again\n\n", "\n"),
    ],
)
def test_a_card_is_renewed_where_it_speaks_of_engines(tiny_decoder, text, before, after):
    model = tiny_decoder(layers=["alibi"])
    renewed = renewed_card(text, "again", make_plan(model.config, model.layout))
    assert renewed.startswith(before + "## Engines\n\n| engine |")
    assert renewed.endswith("goes beyond." + after)
    assert "| vLLM | no | it has no ALiBi |" in renewed
    assert "old" not in renewed


def test_a_fitted_temperature_is_said_to_be_no_part_of_an_export(
    card, tiny_decoder, caplog, monkeypatch
):
    model = tiny_decoder()
    fitted = {"coefficient": 0.25, "per": "sequence", "lengths": [64], "text": "0", "tokens": 9}
    read = export.with_fitted_temperature

    def with_a_file(layout, path, stored_length):
        write_atomically(path / "temperature.json", json.dumps(fitted))
        return read(layout, path, stored_length)

    monkeypatch.setattr(export, "with_fitted_temperature", with_a_file)
    text = card(RunConfig(), model)
    assert "(logits times 1 + 0.25 ln(n / 32) beyond) is no part of it" in text
    assert "is not exported" in caplog.text
