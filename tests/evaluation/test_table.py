"""The table: same trials and text for all methods, models left as they were."""

from __future__ import annotations

import json

import pytest

from trainer.data.config import DataConfig, NeedlesConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.table import Subject, evaluate, prepare_material
from trainer.evaluation.temperature import fit_temperature, fitting_batches

NEEDLES = NeedlesConfig(share=1.0, mentions=(2, 6))
CONFIG = EvaluationConfig(
    lengths=[1, 2], trials=6, loss_windows=3, fit_windows=2, temperature_grid=[0.0, 0.5]
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    path = directory / "a.jsonl"
    texts = (f"Sentence {i} of a text that is {i * i} long. " for i in range(900))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig(
        source="files", files=[str(path)], sequence_length=32, cache_dir=str(directory / "cache")
    )
    return prepare_corpus(config, TokenizerConfig(vocab_size=300))


@pytest.fixture
def subjects(tiny_decoder, corpus):
    size = {"vocab_size": corpus.tokenizer.get_vocab_size()}
    return [
        Subject("rope", "RoPE", tiny_decoder(model=size)),
        Subject("nope", "NoPE", tiny_decoder(model=size, layers=["nope"])),
    ]


def test_every_applicable_method_has_a_cell_at_every_length(subjects, corpus):
    before = [subject.model.layout for subject in subjects]
    measured = evaluate(subjects, corpus, NEEDLES, CONFIG)
    names = ["RoPE", "RoPE + PI", "RoPE + NTK-aware", "RoPE + YaRN", "NoPE", "NoPE + temperature"]
    assert [(c.method, c.length) for c in measured.table] == [
        (name, length) for name in names for length in (32, 64)
    ]
    assert [subject.model.layout for subject in subjects] == before
    assert list(measured.temperature) == ["NoPE + temperature"]
    by_name = {(c.method, c.length): c for c in measured.table}
    # At the training length every method is the model as it is: the same trials, the same text.
    for name in names[1:4]:
        assert by_name[name, 32].retrieval == by_name["RoPE", 32].retrieval
        assert by_name[name, 32].loss == by_name["RoPE", 32].loss
        assert by_name[name, 64].loss != by_name["RoPE", 64].loss


def test_without_needles_there_is_loss_and_no_retrieval(subjects, corpus):
    measured = evaluate(subjects[:1], corpus, NeedlesConfig(), CONFIG)
    assert all(cell.retrieval is None and cell.loss > 0 for cell in measured.table)


def test_trials_are_fixed_by_their_seed(corpus):
    material = [prepare_material(corpus, CONFIG, 32, needles=True) for _ in range(2)]
    for length in (32, 64):
        assert (material[0].trials[length].prompts == material[1].trials[length].prompts).all()


def test_fitted_temperature_has_the_least_validation_loss(subjects, corpus):
    """A model whose logits were made too flat wants the temperature that undoes it."""
    model = subjects[1].model
    batches = fitting_batches(corpus, NEEDLES, CONFIG, [64])
    grid = [0.0, 0.2, 0.4, 0.8]
    config = EvaluationConfig(temperature_grid=grid)
    from trainer.evaluation.methods import tempered

    plain, losses = model.layout, []
    for coefficient in grid:
        model.layout = tempered(plain, coefficient)
        batch = batches[0]
        token = model.token_losses(batch["input_ids"], batch["labels"])
        losses.append((token * batch["weights"]).sum().item() / batch["weights"].sum().item())
    model.layout = plain
    assert fit_temperature(model, batches, config) == grid[losses.index(min(losses))]
    assert model.layout is plain
