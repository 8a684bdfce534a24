"""Evaluations, fits, generation and exports have the CPU's values."""

from __future__ import annotations

import os

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.clients.tiny import IDS, as_they_are, llama
from tests.program import run as run_program
from trainer.hf import drop_rotation
from trainer.model.generate import generate
from trainer.runs.models import find_model

pytestmark = pytest.mark.slow

WORDS = (
    "evaluation.tasks=[perplexity,standard,statements]",
    "evaluation.methods=[none,yarn,temperature,dope]",
    "evaluation.lengths=[2,4]",
    "evaluation.needles.trials=4",
    "evaluation.windows=4",
    "evaluation.fit_windows=2",
)


def evaluated(run_dir, output, device, dtype):
    """Rows of ``evaluate`` in a process that sees no GPU, or all of them, by their cells."""
    devices = "" if device == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    ended = run_program(
        *("-m", "trainer", "evaluate", run_dir, *WORDS),
        *(f"evaluation.dtype={dtype}", f"output={output}"),
        cwd=output.parent,
        CUDA_VISIBLE_DEVICES=devices,
    )
    assert ended.returncode == 0, ended.stderr
    rows = pd.read_csv(output / "results.csv")
    return rows.set_index(["model", "method", "task", "length"])["value"]


@pytest.fixture(scope="module")
def on_the_cpu(trained, tmp_path_factory):
    return evaluated(trained, tmp_path_factory.mktemp("cpu") / "report", "cpu", "fp32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a short run of the demo's model, trained on the CPU."""
    place = tmp_path_factory.mktemp("trained")
    ended = run_program(
        *("-m", "trainer", "+experiment=drope_demo", "trainer.max_steps=40", "drop.at=20"),
        *("evaluation.enabled=false", "controls={}", "trainer.batch_size=8"),
        *("trainer.accelerator=cpu", f"run_dir={place / 'run'}"),
        cwd=place,
    )
    assert ended.returncode == 0, ended.stderr
    return place / "run"


def test_perplexity_needles_and_fits_in_float32(device, trained, on_the_cpu, tmp_path):
    rows = evaluated(trained, tmp_path / "report", device, "fp32")
    assert len(rows) == len(on_the_cpu) > 20
    for cell, value in on_the_cpu.items():
        assert rows[cell] == pytest.approx(value, rel=1e-3), cell


def test_perplexity_in_bfloat16(device, trained, on_the_cpu, tmp_path):
    """But for DoPE's: the heads that it masks are chosen by their entropy."""
    rows = evaluated(trained, tmp_path / "report", device, "bf16")
    expected = {
        cell: value
        for cell, value in on_the_cpu.items()
        if cell[2] == "perplexity" and "dope" not in cell[1]
    }
    assert len(expected) >= 6
    assert {cell: rows[cell] for cell in expected} == pytest.approx(expected, rel=2e-2)


@pytest.mark.usefixtures("exact_products")
def test_generation_is_greedy_by_whole_forward_passes(device, trained):
    saved = find_model(str(trained))
    prompts = [[5, 9, 200, 31], [7, 8, 9, 10, 11, 12, 13]]
    model = saved.for_inference(device, "fp32")
    written = generate(model, prompts, 24, end_tokens=())
    exact = saved.load("cpu", "fp32").double().eval()
    for prompt, tokens in zip(prompts, written, strict=True):
        assert len(tokens) == 24
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = exact(ids)[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.amax(dim=1) - chosen).max() < 1e-4


@pytest.mark.usefixtures("exact_products")
def test_an_export_has_the_logits_of_its_run(device, trained, tmp_path):
    ended = run_program(
        *("-m", "trainer", "export", trained, f"to={tmp_path / 'exported'}"), cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    ids = torch.arange(20, 220)[None]
    ours = find_model(str(trained)).load(device, "fp32").eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").to(device).eval()
    with torch.no_grad():
        expected = theirs(ids.to(device)).logits
        found = ours(ids.to(device))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_dropped_llama_of_transformers(device, monkeypatch, dtype):
    """Dropped before it moves to the device and changes its dtype."""
    from transformers.models.llama import modeling_llama

    reference, dropped = llama(2), llama(2)
    drop_rotation(dropped)
    dropped.to(device, dtype)
    reference.to(device, dtype)
    ids = IDS.to(device)
    with torch.no_grad():
        found, rotated = dropped(ids).logits, reference(ids).logits
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", as_they_are)
        expected = reference(ids).logits
    assert torch.equal(found, expected)
    assert (rotated - expected).abs().max() > 0.1
