"""A run on a GPU: no host sync, the CPU's numbers, the same bits after a kill, memory of a save."""

from __future__ import annotations

import signal
import time

import lightning as L
import pytest
import torch

from tests.comparing import checkpoint_of, contents_of
from tests.lightning.test_drop import RandomSamples, ours
from tests.program import Started
from tests.program import run as run_program
from trainer.checkpoint import Writer
from trainer.data.corpus import prepare_corpus
from trainer.lightning import DropPositions, TokenData
from trainer.runs.directory import read_metrics
from trainer.runs.parsing import merged, parse
from trainer.training.fit import train

FIRST, LAST = 5, 25


class NoSync(L.Callback):
    """Makes torch raise at a host sync from the start of update 5 to the end of update 25."""

    def __init__(self) -> None:
        self.updates = 0

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == FIRST:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, *_):
        self.updates += torch.cuda.get_sync_debug_mode() == 2
        if trainer.global_step == LAST:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *_):
        torch.cuda.set_sync_debug_mode("default")

    def on_train_end(self, *_):
        assert self.updates >= LAST - FIRST


VARIANTS = {
    "AdamW": {"trainer": {"batch_size": 128}},  # over 3,072 tokens: torch sorts them for embeddings
    "compiled": {"trainer": {"compile": True}},
    "Muon": {"optimizer": {"name": "muon"}},
    "accumulation": {"trainer": {"micro_batch_size": 2}},
    "documents": {"data": {"document_mask": True}, "trainer": {"compile": True}},
    "windows": {"positional": {"windows": [8, None]}},
    "fp32": {"trainer": {"precision": "fp32"}},
}


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", VARIANTS)
def test_twenty_steps_without_a_host_sync(base, tmp_path, name):
    """After a drop too: it is at step 3, before the strict steps."""
    changes = {
        "run_dir": str(tmp_path),
        "callbacks": {"strict": {"_target_": f"{__name__}.NoSync"}},
        "drop": {"at": 3},
        "trainer": {
            "max_steps": LAST + 1,
            "log_every": 100,
            "checkpoint_every": 100,
            "compile": False,
        },
    }
    trained = parse(merged(merged(base, changes), VARIANTS[name]))
    config = trained.config
    train(trained, prepare_corpus(config.data, config.tokenizer))


DEMO = [
    "+experiment=drope_demo",
    "trainer.max_steps=24",
    "drop.at=12",
    "trainer.checkpoint_every=6",
    "trainer.log_every=2",
    "trainer.batch_size=8",
    "evaluation.enabled=false",
    "controls={}",
]


def words_of(run_dir, *changes):
    return "-m", "trainer", *DEMO, f"run_dir={run_dir}", *changes


@pytest.mark.slow
def test_float32_has_the_losses_of_the_cpu(device, tmp_path):
    """With AdamW: Muon's iteration is in bfloat16, see test_kernels.py."""
    metrics = {}
    for name in ("cpu", device):
        accelerator = "gpu" if name == "cuda" else "cpu"
        changes = [
            *(f"trainer.accelerator={accelerator}", "trainer.precision=fp32"),
            *("optimizer=adamw", "optimizer.lr=3e-3"),
        ]
        ended = run_program(*words_of(tmp_path / name, *changes, "overwrite=true"), cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        metrics[name] = read_metrics(tmp_path / name / "metrics.csv")
    assert len(metrics[device]) == 12
    for row, expected in zip(metrics[device], metrics["cpu"], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert row["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-3)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(device, tmp_path):
    accelerator = "gpu" if device == "cuda" else "cpu"
    changes = f"trainer.accelerator={accelerator}", "trainer.deterministic=true"

    def program(name):
        return Started(*words_of(tmp_path / name, *changes), cwd=tmp_path)

    ended = program("whole").finish()
    assert ended.returncode == 0, ended.stderr
    with program("killed") as process:
        reached = tmp_path / "killed" / "checkpoints" / "step-000006"
        deadline = time.monotonic() + 200
        while process.running() and not reached.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.running(), process.said("stderr")
        process.signal(signal.SIGKILL)
    ended = program("killed").finish()
    assert ended.returncode == 0, ended.stderr
    for step in ("step-000018", "step-000024"):
        whole, killed = (
            contents_of(tmp_path / name / "checkpoints" / step) for name in ("whole", "killed")
        )
        assert whole.keys() == killed.keys()
        for name, value in whole.items():
            assert torch.equal(value, killed[name]), f"{step}: {name}"


@pytest.mark.slow
def test_a_deterministic_run_follows_another_in_one_process(device, tmp_path):
    """torch reads the configuration of cuBLAS at the first product of a process."""
    accelerator = "gpu" if device == "cuda" else "cpu"
    ended = run_program(
        *("-m", "trainer", "--multirun", *DEMO, f"trainer.accelerator={accelerator}"),
        "trainer.deterministic=false,true",
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("  ran ") == 2


class Validated(TokenData):
    """Samples, of which the first are validation text, too."""

    def val_dataloader(self):
        batches = [RandomSamples().__getitems__(range(8))]
        return torch.utils.data.DataLoader(batches, batch_size=None)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(("precision", "rel"), [("32-true", 1e-4), ("bf16-mixed", 2e-2)])
def test_a_script_of_ones_own_has_the_losses_of_the_cpu(device, precision, rel):
    """Lightning's trainer validates before a training with a drop, and within it."""
    losses = {}
    for name in ("cpu", device):
        module, data = ours(), Validated("", 32, 8, workers=0, samples=RandomSamples())
        trainer = L.Trainer(
            accelerator="gpu" if name == "cuda" else "cpu",
            devices=1,
            precision=precision,
            max_steps=8,
            val_check_interval=4,
            callbacks=[DropPositions(4)],
            logger=False,
            enable_checkpointing=False,
        )
        before = trainer.validate(module, data)[0]["val_loss"]
        trainer.fit(module, data)
        losses[name] = before, trainer.callback_metrics["val_loss"].item()
        assert not module.model.layout.rotates
    assert losses[device] == pytest.approx(losses["cpu"], rel=rel)


@pytest.mark.gpu
def test_a_save_takes_no_memory_of_the_gpu(gpu, tmp_path):
    tensors = {f"model.{i}": torch.randn(2**22, device=gpu) for i in range(16)}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    writer = Writer(tmp_path, keep=1)
    writer.save(tmp_path / "step-000001", tensors, {"step": 1})
    for tensor in tensors.values():  # the next step may change what is being written
        tensor.zero_()
    writer.wait()
    writer.close()
    assert torch.cuda.max_memory_allocated() - before < 2**20
    saved = contents_of(tmp_path / "step-000001")
    assert all(value.std() > 0.9 for value in saved.values())


@pytest.mark.slow
def test_fsdp2_on_one_device_has_the_numbers_of_one(device, base, tmp_path):
    from tests.training.test_distributed import launch

    accelerator = {"accelerator": "gpu" if device == "cuda" else "cpu"}
    names = {"single": "single", "sharded": "fsdp2"}
    jobs = {
        name: (
            {
                "strategy": {"name": strategy},
                "trainer": {"log_every": 1, "precision": "fp32"} | accelerator,
            },
            None,
            None,
        )
        for name, strategy in names.items()
    }
    runs = launch(base, tmp_path, 1, jobs)
    rows = {name: read_metrics(tmp_path / name / "metrics.csv") for name in names}
    for row, expected in zip(rows["sharded"], rows["single"], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    sharded, single = (contents_of(checkpoint_of(runs[name])) for name in ("sharded", "single"))
    assert sharded.keys() == single.keys()
