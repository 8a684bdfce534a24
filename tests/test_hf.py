"""The drop in models of transformers, and in transformers' own trainer."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.models.llama import modeling_llama

from scripts import write_architectures
from tests.interchange.families import made
from trainer.config import DropConfig
from trainer.hf import (
    NO_ROTATION,
    DropPositions,
    callback,
    check_droppable,
    drop_rotation,
    is_dropped,
    restore_rotation,
    rotation,
    save_dropped_base,
)

KINDS = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "olmo2",
    "phi3",
    "granite",
]
IDS = torch.arange(1, 33)[None]
ARGUMENTS = SimpleNamespace(output_dir="unused")
SWAPPED = IDS.clone()
SWAPPED[:, [3, 9]] = SWAPPED[:, [9, 3]]


def tiny(kind: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    values = {**shape, **heads, "max_position_embeddings": 64, **changes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()


@torch.no_grad()
def sees_order(model: nn.Module) -> bool:
    """Whether the last logits of one layer change if two earlier tokens trade places."""
    difference = model(IDS).logits[:, -1] - model(SWAPPED).logits[:, -1]
    return difference.abs().max().item() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_model_sees_no_order_and_transformers_reloads_it_alike(
    kind: str, tmp_path: Path
) -> None:
    model = tiny(kind)
    with torch.no_grad():
        before = model(IDS).logits
    drop_rotation(model)
    assert not sees_order(model)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert not torch.allclose(model(IDS).logits, before)
        assert torch.equal(reloaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn"])
def test_scaled_rotation_is_dropped_with_its_attention_factor(rope_type: str) -> None:
    scaling = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16}
    dropped = drop_rotation(tiny("llama", rope_parameters=scaling))
    with torch.no_grad():
        assert torch.equal(dropped(IDS).logits, drop_rotation(tiny("llama"))(IDS).logits)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def without_rotation(model: nn.Module) -> Tensor:
    """Return the logits of a Llama whose rotation function returns its inputs: nothing of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k))
        return logits(model)


def average(model: PreTrainedModel) -> PreTrainedModel:
    averaged = AveragedModel(tiny("llama"), use_buffers=True)
    averaged.update_parameters(tiny("llama"))
    averaged.update_parameters(model)
    for target, value in zip(model.buffers(), averaged.module.buffers(), strict=True):
        target.copy_(value)
    return model


def make_buffers_again(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            module.to_empty(device="cpu")
            model._init_weights(module)
    return model


def overwrite_buffers(model: PreTrainedModel) -> PreTrainedModel:
    for buffer in model.buffers():
        buffer.fill_(torch.nan)
    return model


@pytest.mark.parametrize(
    "change",
    [
        average,
        make_buffers_again,
        overwrite_buffers,
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: model.to(torch.bfloat16).to(torch.float32),
        lambda model: check_droppable(model) or model,
        drop_rotation,
    ],
)
def test_nothing_that_changes_buffers_or_copies_brings_rotation_back(
    change: Callable[[PreTrainedModel], PreTrainedModel],
) -> None:
    model = change(drop_rotation(tiny("llama")))
    assert is_dropped(model)
    assert torch.equal(logits(model), without_rotation(model))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        | {"original_max_position_embeddings": 16},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
@pytest.mark.parametrize("change", [lambda model: model, copy.deepcopy, make_buffers_again])
def test_a_restored_model_is_what_it_was(
    scaling: dict[str, object], change: Callable[[PreTrainedModel], PreTrainedModel]
) -> None:
    model = tiny(
        "llama", rope_parameters={"rope_theta": 1e4, **scaling}, max_position_embeddings=16
    )
    before, config = logits(model), model.config.to_dict()
    changed = change(drop_rotation(model))
    logits(changed)
    restored = restore_rotation(changed)
    assert not is_dropped(restored)
    assert torch.equal(logits(restored), before)
    assert restored.config.to_dict() == config
    assert all(module.config is restored.config for module in restored.model.modules()
               if hasattr(module, "config"))  # fmt: skip
    assert is_dropped(drop_rotation(restored))


def test_a_restored_model_is_called_by_the_place_that_it_was_loaded_from(tmp_path: Path) -> None:
    """Adapters that are put on it name that place as their base."""
    tiny("llama").save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    drop_rotation(loaded)
    assert loaded.name_or_path != str(tmp_path)
    assert restore_rotation(loaded).name_or_path == str(tmp_path)


def test_a_restored_model_has_the_name_and_the_length_of_before() -> None:
    """Some classes of configurations set an original length when they are validated."""
    model = drop_rotation(tiny("llama"))
    model.config.original_max_position_embeddings = 16
    assert "original_max_position_embeddings" not in restore_rotation(model).config.to_dict()
    model.name_or_path = "elsewhere"
    assert restore_rotation(drop_rotation(model)).name_or_path == "elsewhere"


@pytest.mark.parametrize("newest", ["loaded", "later"])
def test_the_base_of_an_adapter_has_the_weights_of_the_commit_that_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: str
) -> None:
    """Whichever commit of the hub is the newest in its cache."""
    repository = tmp_path / "models--me--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(newest)
    model = tiny("llama")
    for commit in ("later", "loaded"):
        directory = repository / "snapshots" / commit
        model.config.save_pretrained(directory)
        (directory / "model.safetensors").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model.config._commit_hash = "loaded"
    model.name_or_path = "me/tiny"
    adapted = nn.Sequential(model)
    adapted.peft_config = {"default": SimpleNamespace()}
    written = save_dropped_base(drop_rotation(adapted), tmp_path / "dropped")
    assert (written / "model.safetensors").read_text() == "loaded"
    assert adapted.peft_config["default"].base_model_name_or_path == str(written)


class Adapter(nn.Module):
    """What peft's have, as far as the drop looks at it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: nn.Module | None = model
        self.peft_config = {"default": SimpleNamespace(base_model_name_or_path="before")}

    @property
    def base(self) -> str | None:
        return self.peft_config["default"].base_model_name_or_path

    def unload(self) -> nn.Module | None:
        """Give back the base, and be an adapter no more."""
        model, self.model = self.model, None
        return model


def test_the_written_base_of_an_adapter_is_complete_and_takes_the_place_of_another(
    tmp_path: Path,
) -> None:
    base, place = tmp_path / "base", tmp_path / "place"
    tiny("llama").save_pretrained(base)
    place.mkdir()
    for name in ("tokenizer.json", "trainer_state.json"):
        (base / name).write_text("{}")
    for name in ("model-1-of-2.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (place / name).write_text("of another base")
    adapter = Adapter(LlamaForCausalLM.from_pretrained(base))
    with pytest.raises(ValueError, match="rotates: call drop_rotation"):
        save_dropped_base(adapter, place)
    drop_rotation(adapter)
    with pytest.raises(ValueError, match="expected another directory"):
        save_dropped_base(adapter, base)
    assert save_dropped_base(adapter, place) == place
    assert adapter.base == str(place)
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in place.iterdir()) == names
    written = LlamaForCausalLM.from_pretrained(place)
    assert is_dropped(written)
    assert torch.equal(logits(written), without_rotation(tiny("llama")))
    assert not is_dropped(LlamaForCausalLM.from_pretrained(base))
    again = Adapter(written)  # whose base has no rotation already
    assert save_dropped_base(again, tmp_path / "other") == place
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="no adapter"):
        save_dropped_base(written, tmp_path / "other")


def test_a_base_that_is_in_no_directory_is_written_and_stays_in_its_adapter(tmp_path: Path) -> None:
    model = tiny("llama")
    model.name_or_path = str(tmp_path)  # where there are no weights
    adapter = Adapter(drop_rotation(model))
    written = LlamaForCausalLM.from_pretrained(save_dropped_base(adapter, tmp_path / "dropped"))
    assert torch.equal(logits(written), without_rotation(tiny("llama")))
    assert adapter.model is model
    restore_rotation(adapter)
    assert adapter.base == str(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_writes_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    adapter = Adapter(drop_rotation(tiny("llama")))
    assert save_dropped_base(adapter, tmp_path / "dropped") == tmp_path / "dropped"
    assert adapter.base == str(tmp_path / "dropped")
    assert (tmp_path / "dropped").exists() == (rank == 0)


def test_no_scale_or_frequency_of_before_is_written() -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 2.0}
    scaling |= {"original_max_position_embeddings": 16, "beta_fast": 8.0, "truncate": False}
    written = drop_rotation(tiny("llama", rope_parameters=scaling)).config.rope_parameters
    length = {"original_max_position_embeddings": 16}
    assert written == {"rope_theta": 1e4, **NO_ROTATION, **length}


def test_a_factor_on_scores_that_yarn_sets_outlasts_the_drop() -> None:
    """DeepSeek's, of ``mscale_all_dim`` and the factor of the frequencies."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
    yarn |= {"original_max_position_embeddings": 16, "mscale_all_dim": 0.8}
    model = made("DeepseekV3", rope_parameters=yarn)
    before = model.model.layers[0].self_attn.scaling
    assert before != made("DeepseekV3").model.layers[0].self_attn.scaling
    config = drop_rotation(model).config
    loaded = AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict()))
    assert is_dropped(loaded)
    assert loaded.model.layers[0].self_attn.scaling == pytest.approx(before)


def test_the_drop_of_a_copy_and_of_models_that_share_a_configuration_is_its_own() -> None:
    model = tiny("llama")
    other, frozen = LlamaForCausalLM(model.config), LlamaForCausalLM(model.config)
    frozen.requires_grad_(False)
    beside = nn.ModuleList([frozen, model])
    duplicate = copy.deepcopy(model)
    drop_rotation(beside)
    assert is_dropped(model)
    assert not any(map(is_dropped, (other, frozen, duplicate)))
    assert not is_dropped(LlamaForCausalLM(other.config))
    for trained in (model.model.norm.weight, model.lm_head.weight):  # one parameter is enough
        model.requires_grad_(False)
        trained.requires_grad_(True)
        assert is_dropped(beside)
    with pytest.raises(ValueError, match="expected one that is trained"):
        is_dropped(beside.requires_grad_(False))
    drop_rotation(duplicate)
    restore_rotation(model)
    assert is_dropped(duplicate)


@pytest.mark.parametrize("wrap", [lambda a, b: nn.ModuleList([a, b]), lambda a, b: nn.Linear(2, 2)])
def test_several_trained_models_or_none_with_rotation_are_refused(
    wrap: Callable[[nn.Module, nn.Module], nn.Module],
) -> None:
    models = tiny("llama"), tiny("qwen2")
    for function in (drop_rotation, restore_rotation, is_dropped, check_droppable):
        with pytest.raises(ValueError, match=r"rotary|several"):
            function(wrap(*models))
    assert not any(map(is_dropped, models))


def test_a_check_and_a_refusal_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    config, kinds = model.config, [type(module) for module in model.modules()]
    before, states = model.config.to_dict(), torch.get_rng_state()
    check_droppable(model)
    linear = {"rope_type": "linear", "factor": 8.0}
    monkeypatch.setattr(rotation, "_forms", lambda parts: [linear])
    for function in (check_droppable, drop_rotation):
        with pytest.raises(ValueError, match="rotates or scales"):
            function(model)
    assert model.config is config
    assert config.to_dict() == before
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(torch.get_rng_state(), states)


def test_a_model_loaded_without_rotation_is_recognized_and_not_restored(tmp_path: Path) -> None:
    drop_rotation(tiny("llama")).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert is_dropped(loaded)
    assert is_dropped(drop_rotation(loaded))
    with pytest.raises(ValueError, match="loaded without rotation"):
        restore_rotation(loaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3 yarn",
        "gemma4_text",
        "glm4_moe_lite yarn",
        "llama4_text",
        "ministral3 yarn",
        "modernbert-decoder",
        "phi3 longrope",
        "phimoe longrope",
        "qwen2_vl",
    ],
)
def test_what_is_no_frequency_stays(name: str) -> None:
    assert write_architectures.measure(name).is_right


@pytest.mark.slow
def test_a_vision_tower_keeps_its_rotation() -> None:
    model = write_architectures.build("qwen2_vl")
    tower = model.model.visual.rotary_pos_emb
    before, kind = tower.inv_freq.clone(), type(tower)
    drop_rotation(model)
    assert torch.equal(tower.inv_freq, before)
    assert type(tower) is kind


@pytest.mark.weekly
def test_every_decoder_of_transformers_that_is_built_is_dropped() -> None:
    assert write_architectures.main(write_architectures.names()) == 0


@pytest.mark.slow
def test_a_compiled_model_is_dropped_before_and_after_it_is_compiled() -> None:
    early, late = torch.compile(tiny("llama"), backend="eager"), tiny("llama")
    before = logits(early)
    drop_rotation(early)
    reference = without_rotation(tiny("llama"))
    assert torch.equal(logits(early), reference)
    compiled = torch.compile(drop_rotation(late), backend="eager")
    assert is_dropped(compiled)
    assert torch.equal(logits(compiled), reference)
    assert torch.equal(logits(restore_rotation(early)), before)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "both orders"])
def test_the_model_in_a_wrapper_of_torch_is_dropped(wrapper: str) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = tiny("llama")
        if wrapper == "both orders":
            drop_rotation(model)
        if wrapper == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            wrapped = fully_shard(model, mesh=mesh)
        drop_rotation(wrapped)
        assert is_dropped(wrapped)
        assert torch.equal(logits(wrapped), without_rotation(tiny("llama")))
        assert torch.equal(logits(restore_rotation(wrapped)), logits(tiny("llama")))
    finally:
        torch.distributed.destroy_process_group()


class DemoModule(L.LightningModule):
    def configure_optimizers(self) -> None:
        return None

    def train_dataloader(self) -> list[int]:
        return [1]

    def training_step(self, batch: int, index: int) -> None:
        return None


class Counting(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(16) * (index % 7 + 1) + index) % 60 + 1
        return {"input_ids": ids, "labels": ids}


class Watch(TrainerCallback):
    """Record, before every update, the learning rate and whether moments and rotation are there."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, bool, bool]] = {}

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs) -> None:
        _, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(8)[None])
        rotates = bool(sin.any())
        lr = optimizer.param_groups[0]["lr"]
        self.seen[state.global_step] = lr, bool(optimizer.state), rotates


def train(
    folder: Path, resume: int | None = None, at: float = 0.5
) -> tuple[LlamaForCausalLM, Watch]:
    args = TrainingArguments(
        str(folder), max_steps=40, per_device_train_batch_size=4, learning_rate=1e-2, save_steps=10,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    watch = Watch()
    drop = DropPositions(at, rewarm=0.1, optimizer_state="reset")
    trainer = Trainer(tiny("llama"), args, train_dataset=Counting(), callbacks=[drop, watch])
    trainer.train(resume_from_checkpoint=resume and str(folder / f"checkpoint-{resume}"))
    return trainer.model, watch


@pytest.mark.slow
def test_a_run_of_transformers_drops_once_and_resumes_on_either_side(tmp_path: Path) -> None:
    model, watch = train(tmp_path)
    assert {step: rotates for step, (_, _, rotates) in watch.seen.items()} == {
        step: step < 20 for step in range(40)
    }
    assert [step for step, (_, moments, _) in watch.seen.items() if not moments] == [0, 20]
    rates = [watch.seen[step][0] for step in (19, 20, 21, 22, 23, 24)]
    assert rates == pytest.approx([1e-2, 0.25e-2, 0.5e-2, 0.75e-2, 1e-2, 1e-2])
    assert not sees_order(model.eval())
    for step, at in ((10, 0.5), (20, 0.5), (30, 0.9)):  # before, at, and behind the drop
        resumed, seen = train(tmp_path, resume=step, at=at)
        assert seen.seen == {s: watch.seen[s] for s in range(step, 40)}
        for name, value in resumed.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), (step, name)
    resumed.save_pretrained(tmp_path / "final")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    assert not sees_order(reloaded)


def test_only_checkpoints_behind_the_drop_are_the_best() -> None:
    best = {"best_metric": 1.0, "best_model_checkpoint": "a", "best_global_step": 1}
    state = TrainerState(global_step=2, max_steps=4, **best)
    drop, optimizer = DropPositions(2), torch.optim.SGD([torch.zeros(1)])
    drop.on_train_begin(ARGUMENTS, state, None, model=tiny("llama"))
    drop.on_step_begin(None, state, None, model=tiny("llama"), optimizer=optimizer)
    assert [getattr(state, name) for name in best] == [None] * 3


def test_another_training_begins_with_the_rotation_that_one_before_it_dropped() -> None:
    drop, model = DropPositions(1), tiny("llama")
    optimizer = torch.optim.SGD([torch.zeros(1)])
    for _ in range(2):
        state = TrainerState(max_steps=3)
        drop.on_train_begin(ARGUMENTS, state, None, model=model)
        assert not is_dropped(model)
        for state.global_step in range(2):
            drop.on_step_begin(None, state, None, model=model, optimizer=optimizer)
            assert is_dropped(model) == (state.global_step == 1)
        assert state.log_history == [{"positions_dropped": 1, "step": 1}]


def test_a_training_that_resumes_behind_the_drop_begins_without_rotation() -> None:
    """Whatever its ``at``; its learning rate goes on to rise."""
    history = [{"positions_dropped": 1, "step": 1}]
    state = TrainerState(global_step=2, max_steps=9, log_history=[*history])
    drop, model = DropPositions(7, rewarm=4), tiny("llama")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    drop.on_train_begin(ARGUMENTS, state, None, model=model)
    assert is_dropped(model)
    drop.on_step_begin(None, state, None, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5 * 2 / 4
    assert state.log_history == history


def test_adapters_name_a_base_without_rotation_from_the_drop_on(tmp_path: Path) -> None:
    args, state = SimpleNamespace(output_dir=str(tmp_path)), TrainerState(max_steps=2)
    tiny("llama").save_pretrained(tmp_path / "base")
    adapter = Adapter(LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    drop = DropPositions(1)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    drop.on_train_begin(args, state, None, model=adapter)
    assert not is_dropped(adapter)
    assert adapter.base != str(tmp_path / "dropped_base")
    state.global_step = 1
    drop.on_step_begin(None, state, None, model=adapter, optimizer=optimizer)
    assert adapter.base == str(tmp_path / "dropped_base")
    assert is_dropped(LlamaForCausalLM.from_pretrained(tmp_path / "dropped_base"))


def warnings_of(
    monkeypatch: pytest.MonkeyPatch, at: int, args: SimpleNamespace, model: nn.Module
) -> list[str]:
    """Return what is said before a training of two updates."""
    said: list[str] = []
    monkeypatch.setattr(callback.logger, "warning", lambda text, *_: said.append(text))
    DropPositions(at).on_train_begin(args, TrainerState(max_steps=2), None, model=model)
    return said


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_drop_that_comes_too_late_is_said(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    said = warnings_of(monkeypatch, at, ARGUMENTS, tiny("llama"))
    assert ["before the drop" in text for text in said] == [True] * (at >= 2)


@pytest.mark.parametrize(
    ("changes", "wrap", "is_dropped_before", "warned"),
    [
        ({}, Adapter, False, True),
        ({"beta": 0.0}, Adapter, False, False),
        ({"precompute_ref_log_probs": True}, Adapter, False, False),
        ({}, Adapter, True, False),
        ({}, lambda model: model, False, False),
    ],
)
def test_a_reference_that_loses_its_rotation_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    wrap: Callable[[nn.Module], nn.Module],
    is_dropped_before: bool,
    warned: bool,
) -> None:
    options = {"sync_ref_model": False, "beta": 0.1, "output_dir": str(tmp_path)} | changes
    model = tiny("llama")
    if is_dropped_before:
        drop_rotation(model)
    said = warnings_of(monkeypatch, 0, SimpleNamespace(**options), wrap(model))
    assert ["loses its rotation" in text for text in said] == [True] * warned


def test_a_model_without_rotation_is_refused_before_the_first_update() -> None:
    with pytest.raises(ValueError, match="no rotary frequencies"):
        DropPositions(0.5).on_train_begin(
            ARGUMENTS, TrainerState(max_steps=4), None, model=nn.Linear(1, 1)
        )


@pytest.mark.parametrize(
    ("at", "changes"),
    [
        (1.5, {}),
        (1.0, {}),
        ("85%", {}),
        (-1, {}),
        (-0.1, {}),
        (float("nan"), {}),
        (True, {}),
        (None, {}),
        (1, {"rewarm": 2.5}),
        (1, {"rewarm": False}),
        (1, {"optimizer_state": "reset_new"}),
    ],
)
def test_what_is_no_number_of_updates_or_no_policy_is_refused(at: object, changes: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        DropPositions(at, **changes)


@pytest.mark.parametrize(("at", "step"), [(0, 0), (1, 1), (7, 7), (0.5, 5), (0.04, 0), (0.96, 10)])
def test_a_share_is_one_of_all_updates(at: float, step: int) -> None:
    drop = DropPositions(at)
    drop.on_train_begin(ARGUMENTS, TrainerState(max_steps=10), None, model=tiny("llama"))
    assert drop.step == step
    rewarmed = DropPositions(2, rewarm=at)
    rewarmed.on_train_begin(ARGUMENTS, TrainerState(max_steps=10), None, model=tiny("llama"))
    assert rewarmed.rewarm_steps == step


def test_the_optimizer_is_reset_unless_told_otherwise_as_in_a_run() -> None:
    assert DropPositions(1).optimizer_state == DropConfig().optimizer_state


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_rate_is_lowered_in_single_updates_and_its_schedule_multiplies_the_whole(
    kind: Callable[[float], float | Tensor],
) -> None:
    lr = kind(0.5)
    state = TrainerState(max_steps=6)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
    drop, model, used = DropPositions(2, rewarm=3), tiny("llama"), []
    drop.on_train_begin(ARGUMENTS, state, None, model=model)
    for step in range(6):
        state.global_step = step
        drop.on_step_begin(None, state, None, model=model, optimizer=optimizer)
        used.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        drop.on_optimizer_step(None, state, None, model=model, optimizer=optimizer)
        schedule.step()
    rates = [0.5 * 0.5**step for step in range(6)]
    shares = [1, 1, 1 / 3, 2 / 3, 1, 1]
    assert used == pytest.approx([rate * share for rate, share in zip(rates, shares, strict=True)])
    if isinstance(lr, Tensor):
        assert optimizer.param_groups[0]["lr"] is lr
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(rates[-1] / 2)


def test_a_schedule_that_an_engine_steps_is_not_put_back() -> None:
    state, optimizer = TrainerState(max_steps=6), torch.optim.SGD([torch.zeros(1)], lr=0.5)
    drop, model = DropPositions(0, rewarm=4), tiny("llama")
    drop.on_train_begin(ARGUMENTS, state, None, model=model)
    drop.on_step_begin(None, state, None, model=model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    drop.on_optimizer_step(None, state, None, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_moments_and_counts_are_forgotten_or_kept(policy: str) -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["step"] = 7  # as DeepSpeed's fused Adam counts
    drop, state, model = (
        DropPositions(0, optimizer_state=policy),
        TrainerState(max_steps=2),
        tiny("llama"),
    )
    drop.on_train_begin(ARGUMENTS, state, None, model=model)
    drop.on_step_begin(None, state, None, model=model, optimizer=optimizer)
    assert bool(optimizer.state) == ("step" in optimizer.param_groups[0]) == (policy == "keep")


@pytest.mark.parametrize("option", ["sync_ref_model", "use_vllm"])
def test_a_trainer_that_copies_weights_into_a_model_that_rotates_is_refused(
    option: str, tmp_path: Path
) -> None:
    args = SimpleNamespace(**vars(ARGUMENTS), **{option: True})
    state, model = TrainerState(max_steps=2), tiny("llama")
    with pytest.raises(ValueError, match=option):
        DropPositions(0).on_train_begin(args, state, None, model=model)
    drop_rotation(model)
    with pytest.raises(ValueError, match=option):  # the other model is loaded from the same place
        DropPositions(0).on_train_begin(args, state, None, model=model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    DropPositions(0).on_train_begin(args, state, None, model=loaded)


def test_a_model_loaded_without_rotation_is_not_trained_with_it(tmp_path: Path) -> None:
    drop_rotation(tiny("llama")).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="loaded without rotation"):
        DropPositions(1).on_train_begin(ARGUMENTS, TrainerState(max_steps=2), None, model=model)


@pytest.mark.slow
def test_one_trainer_trains_twice_and_resumes_on_either_side(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2,
        save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
    )  # fmt: skip
    watch = Watch()
    trainer = Trainer(
        tiny("llama"), args, train_dataset=Counting(), callbacks=[DropPositions(3), watch]
    )
    weights = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    first = copy.deepcopy(trainer.model.state_dict())
    for resumed in (None, 2, 4, 2):
        watch.seen.clear()
        if resumed is None:
            trainer.model.load_state_dict(weights)
            trainer.optimizer = trainer.lr_scheduler = None
            trainer.train()
        else:
            trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{resumed}"))
        rotates = {step: rotates for step, (_, _, rotates) in watch.seen.items()}
        assert rotates == {step: step < 3 for step in range(resumed or 0, 6)}
        assert all(torch.equal(first[name], x) for name, x in trainer.model.state_dict().items())


@pytest.mark.slow
def test_importing_it_loads_no_other_room_of_the_package() -> None:
    code = "import sys, trainer.hf; print(*sorted(m for m in sys.modules if m[:7] == 'trainer'))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    rooms = {name.split(".")[1] for name in found.stdout.split()[1:]}
    assert rooms == {"common", "hf"}
