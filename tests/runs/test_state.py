"""The tensors of a run: what is saved of them, and what comes back."""

from __future__ import annotations

import pytest
import torch

from trainer.common.errors import UserError
from trainer.runs.state import (
    check_shapes,
    load,
    random_states,
    read_metadata,
    restore,
    save,
    tensors_of,
)


@pytest.fixture
def trained(tiny_decoder):
    """A model after a step of AdamW, and its optimizer."""
    model = tiny_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(10)[None]
    model(ids).square().mean().backward()
    optimizer.step()
    return model, optimizer


def untrained(build, **options):
    model = build(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_names_say_whose_tensors_they_are(trained):
    model, optimizer = trained
    tensors = tensors_of(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    moments = ("step", "exp_avg", "exp_avg_sq")
    assert tensors.keys() == {
        "rng.cpu.0", *(f"model.{n}" for n in names),
        *(f"optimizer.{n}.{key}" for n in names for key in moments),
    }  # fmt: skip
    assert not any(value.requires_grad for value in tensors.values())
    assert torch.equal(tensors["rng.cpu.0"], torch.get_rng_state())
    assert random_states(3).keys() == {"rng.cpu.3"}


def test_what_was_saved_comes_back_into_a_model_and_an_optimizer(trained, tiny_decoder, tmp_path):
    torch.manual_seed(5)
    before = {name: value.clone() for name, value in tensors_of(*trained).items()}
    save(tensors_of(*trained), tmp_path, None)
    torch.manual_seed(6)
    model, optimizer = untrained(tiny_decoder)
    optimizer.state[model.norm.weight] = {"else": torch.ones(1)}
    restore(model, optimizer, tmp_path)
    after = tensors_of(model, optimizer)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
        assert after[name].dtype == value.dtype
    assert all(p.requires_grad for p in model.parameters())
    of_optimizer = [x for state in optimizer.state.values() for x in state.values()]
    assert of_optimizer
    assert not any(x.requires_grad for x in of_optimizer)


def test_a_checkpoint_without_a_state_of_generators_leaves_them(trained, tiny_decoder, tmp_path):
    tensors = {n: t for n, t in tensors_of(*trained).items() if not n.startswith("rng")}
    save(tensors, tmp_path, None)
    torch.manual_seed(6)
    state = torch.get_rng_state()
    model, optimizer = untrained(tiny_decoder)
    torch.set_rng_state(state)
    restore(model, optimizer, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"optimizer.nobody.step": torch.ones(1)},
            "holds 'optimizer.nobody.step' of no parameter.",
        ),
        (
            {"rng.cpu.0": torch.full_like(torch.get_rng_state(), 255)},
            "holds no state of a generator in 'rng.cpu.0'.",
        ),
    ],
)
def test_what_belongs_to_nothing_is_refused(trained, tiny_decoder, tmp_path, more, message):
    save(tensors_of(*trained) | more, tmp_path / "a", None)
    with pytest.raises(UserError) as error:
        restore(*untrained(tiny_decoder), tmp_path / "a")
    assert str(error.value) == f"checkpoint: 'a' {message}"


def test_a_state_of_generators_of_another_size_is_refused_for_good(trained, tiny_decoder, tmp_path):
    save(tensors_of(*trained) | {"rng.cpu.0": torch.ones(3)}, tmp_path / "a", None)
    with pytest.raises(UserError, match=r"'rng\.cpu\.0' is \(3,\) in 'a', but") as error:
        restore(*untrained(tiny_decoder), tmp_path / "a")
    assert type(error.value) is UserError  # no disk's, after which a job is started again


def test_weights_that_do_not_fit_are_counted(tmp_path):
    save({"model.a": torch.ones(2, 3), "model.b": torch.ones(4)}, tmp_path, None)
    saved = read_metadata(tmp_path)
    assert saved.keys() == {"model.a", "model.b"}
    check_shapes({"model.a": torch.zeros(2, 3)}, saved, "x")
    for wanted, message in (
        ({"model.a": torch.zeros(3, 2)}, "'a' is (2, 3) in 'x', but (3, 2) in the model."),
        ({"model.c": torch.zeros(1)}, "'x' has no parameter 'c'."),
        (
            {"model.c": torch.zeros(1), "model.a": torch.zeros(1), "model.b": torch.zeros(1)},
            "'x' has no parameter 'c'; 2 others do not fit either.",
        ),
    ):
        with pytest.raises(UserError) as error:
            check_shapes(wanted, saved, "x")
        assert str(error.value) == f"checkpoint: {message}"


def test_files_that_are_not_as_their_index_says_may_be_read_another_time(tmp_path):
    save({"a": torch.ones(4)}, tmp_path / "x", None)
    out = {"a": torch.zeros(4)}
    load(out, tmp_path / "x")
    assert out["a"].tolist() == [1.0] * 4
    for file in (tmp_path / "x").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match=r"^checkpoint: 'x' cannot be read: ") as error:
        load(out, tmp_path / "x")
    assert "\n" not in str(error.value)
