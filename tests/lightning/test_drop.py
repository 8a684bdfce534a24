"""The module, its data and the drop in a Lightning script of one's own."""

from __future__ import annotations

import subprocess
import sys
import warnings
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.program import run_ranks
from trainer.config import DataConfig, TokenizerConfig
from trainer.data.corpus import prepare_corpus
from trainer.data.tokenizer import vocabulary_size
from trainer.lightning import DropPositions, LanguageModule, TokenData, schedule
from trainer.lightning.datamodule import Batches
from trainer.lightning.drop import match_gains
from trainer.model.config import ModelConfig, QKNormConfig
from trainer.model.decoder import Decoder
from trainer.positional.encodings import rope
from trainer.positional.layout import drop, uniform


class RandomSamples:
    """Samples of 32 tokens, each drawn from its number."""

    def __getitems__(self, numbers):
        generators = [torch.Generator().manual_seed(number) for number in numbers]
        ids = torch.stack([torch.randint(64, (33,), generator=g) for g in generators])
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def decoder(seed=0):
    config = ModelConfig(32, 48, 2, 4, 2, None, 64, qk_norm=QKNormConfig(when="after_drop"))
    return Decoder(config, uniform(rope(8), layers=2, heads=2, training_length=32), seed)


class Llama(L.LightningModule):
    """A module with a model of transformers."""

    def __init__(self, vocab_size=64):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, _):
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def fit(module, *, steps=12, begin=None, save=None, callbacks=(), **options):
    """Train for ``steps`` updates with a drop after 6, from or to a checkpoint of Lightning."""
    L.seed_everything(0, verbose=False)
    probe = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(1))
    mine = isinstance(module, LanguageModule)
    more = {"gain": "matched", "probe": probe} if mine else {}
    dropping = DropPositions(6, rewarm=3, optimizer_state="reset", **more)
    options = {"limit_val_batches": 0, "logger": False, "devices": 1, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_steps=steps,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[dropping, *callbacks],
            **options,
        )
        data = TokenData("", 32, 8, workers=0, samples=RandomSamples())
        trainer.fit(module, data, ckpt_path=begin)
    if save is not None:
        trainer.save_checkpoint(save)
    return module


def ours(seed=0):
    return LanguageModule(decoder(seed), 1e-3, schedule=schedule(12, warmup=2))


@pytest.mark.parametrize("at", [4, 6, 9])
@pytest.mark.parametrize("make", [ours, Llama])
def test_lightnings_checkpoints_resume_bitwise_on_either_side_of_the_drop(tmp_path, make, at):
    whole = fit(make())
    fit(make(), steps=at, save=tmp_path / "a.ckpt")
    resumed = fit(make(), begin=tmp_path / "a.ckpt")
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), b in zip(whole.named_buffers(), resumed.buffers(), strict=True):
        assert torch.equal(a, b), name
    if make is ours:
        assert whole.model.layout == resumed.model.layout
        assert not whole.model.layout.rotates
        assert all(layer.qk_norm for layer in whole.model.layout.layers)
    else:
        assert whole.model.config.rope_parameters["factor"] == 1e30


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_and_resume_on_either_side_of_the_drop(tmp_path, strategy):
    """With Lightning's own strategies; one step's samples are split among the ranks."""
    script = Path(__file__).with_name("own_script.py")
    for rank in run_ranks(2, script, strategy, cwd=tmp_path):
        assert rank.returncode == 0, rank.stderr[-4000:]
    for make, file in ((ours, "ours"), (Llama, "ShardedLlama")):
        whole, *resumed = torch.load(tmp_path / f"{file}.pt")
        for name, parameter in fit(make()).named_parameters():
            torch.testing.assert_close(whole[name], parameter.detach(), rtol=0, atol=1e-6)
            for other in resumed:
                assert torch.equal(other[name], whole[name]), name


def test_accumulation_trains_as_whole_batches():
    whole, parts = fit(ours()), fit(ours(), accumulate_grad_batches=4)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_rewarming_lowers_an_update_once_after_a_sanity_check_too():
    """The second of four updates has half of the learning rate, which stays the schedule's; also
    in another fit with the same optimizer."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    dropping = DropPositions(0, rewarm=4)
    trainer = SimpleNamespace(optimizers=[optimizer], estimated_stepping_batches=4)
    weight.grad = torch.ones(1)
    for dropped_at, step, total in ((0, 1, -0.5), (0, 1, -1.0), (4, 0, -2.0)):
        dropping.on_sanity_check_start(trainer, ours())
        dropping.on_train_start(trainer, ours())
        dropping.dropped_at, trainer.global_step = dropped_at, step
        optimizer.step()
        assert weight.item() == total
        assert optimizer.param_groups[0]["lr"] == 1.0
        dropping.on_train_end(trainer, ours())
    optimizer.step()
    assert weight.item() == -3.0


def trainer_of(callback, **options):
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        **options,
    )


def test_a_share_counts_all_updates_of_the_epochs():
    dropping = DropPositions(0.5)
    samples = [RandomSamples().__getitems__([n])["input_ids"][0] for n in range(16)]
    batches = torch.utils.data.DataLoader([{"input_ids": ids} for ids in samples], batch_size=2)
    trainer_of(dropping, max_epochs=2).fit(Llama(), batches)
    assert dropping.dropped_at == 8


def test_one_callback_serves_two_trainings():
    dropping = DropPositions(2)
    for module in (Llama(), Llama()):
        batches = TokenData("", 32, 8, samples=RandomSamples())
        trainer_of(dropping, max_steps=1).fit(module, batches)
        assert module.model.model.rotary_emb.inv_freq.any()
        trainer_of(dropping, max_steps=3).fit(module, batches)
        assert not module.model.model.rotary_emb.inv_freq.any()


@pytest.mark.parametrize(
    ("module", "callback", "options"),
    [
        (ours, DropPositions(0.5), {"max_steps": -1}),
        (Llama, DropPositions(3, layers=[0]), {"max_steps": 4}),
        (
            lambda: LanguageModule(
                Decoder(
                    ModelConfig(32, 48, 2, 4, 2, None, 64),
                    uniform(rope(8), layers=2, heads=2, training_length=32),
                )
            ),
            DropPositions(3),
            {"max_steps": 4},
        ),
    ],
    ids=["share of nothing", "layers", "no norms"],
)
def test_what_cannot_be_dropped_is_refused_before_the_first_update(module, callback, options):
    module = module()
    with pytest.raises(ValueError, match=r"DropPositions|layout"):
        trainer_of(callback, **options).fit(module, TokenData("", 32, 8, samples=RandomSamples()))
    assert module.global_step == 0


def test_a_module_is_loaded_from_lightnings_checkpoint_with_its_encoding(tmp_path):
    trained = fit(ours(), save=tmp_path / "a.ckpt")
    loaded = LanguageModule.load_from_checkpoint(tmp_path / "a.ckpt", model=decoder(1))
    assert loaded.model.layout == trained.model.layout
    for a, b in zip(trained.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_effect_is_logged_just_before_and_after(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    fit(ours(), logger=logger, log_every_n_steps=1)
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "drop/loss_before" in text
    assert "drop/loss_after" in text
    assert "lr: 0.001" in next(tmp_path.rglob("hparams.yaml")).read_text()


@pytest.mark.parametrize("number", [0, 1])
def test_scripts_of_the_page_run_on_a_directory_of_prepared_text(number, base, tmp_path):
    """In small sizes; the model has lost its rotation."""
    corpus = prepare_corpus(DataConfig(**base["data"]), TokenizerConfig(**base["tokenizer"]))
    llama = Llama(vocab_size=vocabulary_size(corpus.tokenizer))
    llama.model.save_pretrained(tmp_path)
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    small = {
        "32_768": f"{vocabulary_size(corpus.tokenizer)}, **{shape}, num_key_value_heads=3",
        "layers=30": "layers=2",
        "corpus/": corpus.parts[0].directory,
        "HuggingFaceTB/SmolLM2-135M": tmp_path,
        **{"length=2048": "length=32", "batch_size=32": "batch_size=4, workers=0"},
        **{"10_000, warmup=500": "4, warmup=2", "10_000,\n": "4,\n", "8_500": "2", "2_000": "2"},
        "Recalibration(),": "module := Recalibration(),",
        "max_steps": f"logger=False, default_root_dir={str(tmp_path)!r}, max_steps",
    }
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    script = page.split("```python\n")[number + 1].split("```")[0]
    for old, new in small.items():
        script = script.replace(old, str(new))
    variables = {"__name__": "script"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(script, variables)
    if number == 0:
        assert not variables["model"].layout.rotates
    else:
        assert variables["module"].model.config.rope_parameters["factor"] == 1e30


@pytest.mark.slow
def test_importing_it_loads_few_of_our_files():
    """What somebody else's script takes along, beside model/, positional/ and what they import."""
    script = (
        "import sys, trainer.model.decoder, trainer.positional.encodings\n"
        "before = set(sys.modules)\n"
        "import trainer.lightning\n"
        "print(*sorted(m for m in set(sys.modules) - before if m.startswith('trainer')))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert len(out.stdout.split()) <= 8, out.stdout


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_any_ranks_and_parts_read_the_same_samples_in_the_same_order(ranks, parts):
    """Also of steps that begin at other samples than their numbers say."""
    for offset, expected in ((0, [*range(24, 40)]), (-20, [*range(4, 20)])):
        options = {"start": 3, "offset": offset, "micro_batches": parts, "ranks": ranks}
        of_ranks = [Batches(RandomSamples(), 8, rank=r, **options).numbers() for r in range(ranks)]
        micro_batches = [next(numbers) for _ in range(2 * parts) for numbers in of_ranks]
        assert [number for micro in micro_batches for number in micro] == expected


def test_workers_take_turns():
    batches = Batches(RandomSamples(), 4, micro_batches=2)
    loaders = (DataLoader(batches, batch_size=None, num_workers=n) for n in (0, 2))
    for alone, shared in islice(zip(*loaders, strict=True), 5):
        assert torch.equal(alone["input_ids"], shared["input_ids"])


def test_gains_of_several_batches_are_those_of_one():
    gains, probe = [], torch.arange(8).view(4, 2)
    for rows in (3, 4):
        model = decoder()
        match_gains(model, drop(model.layout, qk_norm=True), probe.split(rows))
        gains.append(model.layers[0].self_attn.q_norm.weight)
    torch.testing.assert_close(*gains)


def test_each_held_out_sequence_is_validated_by_one_rank(monkeypatch):
    """Lightning's sampler shares them among the ranks."""
    data, ids = TokenData("", 32, 8, held_out=16), torch.arange(16 * 33).view(16, 33)
    monkeypatch.setattr(data, "probe", lambda _: ids)
    data.trainer = SimpleNamespace(accumulate_grad_batches=1, world_size=2, global_rank=1)
    batches = [*data.val_dataloader()]
    assert [len(batch["input_ids"]) for batch in batches] == [4] * 4
    assert torch.equal(torch.cat([batch["labels"] for batch in batches]), ids[:, 1:])
