"""Tiny models and runs, and the reference: a Llama whose rotation function returns its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.models.llama import modeling_llama

IDS = torch.arange(3, 35)[None]
AT = 3  # updates before the drop
QUIET = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_steps": 6,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 1,
    "save_strategy": "no",
}


def llama(layers: int = 1, width: int = 32) -> LlamaForCausalLM:
    """Return a Llama whose logits depend much on positions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(4)
    return model


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """Return the logits of fixed ids."""
    is_training = model.training
    result = model.eval()(input_ids=IDS, use_cache=False).logits
    model.train(is_training)
    return result


def as_they_are(q: Tensor, k: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Return queries and keys."""
    return q, k


@contextmanager
def without_rotation() -> Iterator[None]:
    """Let no Llama rotate for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", as_they_are)
        yield


def reference_logits(model: nn.Module) -> Tensor:
    """Return the logits of a Llama that does not rotate."""
    with without_rotation():
        return logits(model)


class Reference(TrainerCallback):
    """Lets no Llama rotate from an update on, and forgets the optimizer's moments there."""

    def __init__(self, at: int = AT) -> None:
        self.at = at
        self.rotation = modeling_llama.apply_rotary_pos_emb

    def on_step_begin(self, args, state, control, optimizer, **kwargs) -> None:
        if state.global_step >= self.at:
            modeling_llama.apply_rotary_pos_emb = as_they_are
        if state.global_step == self.at:
            optimizer.state.clear()

    def on_train_end(self, *args, **kwargs) -> None:
        modeling_llama.apply_rotary_pos_emb = self.rotation


class ReferenceOfOneModel(Reference):
    """Does so for the trained model alone: others rotate."""

    def on_step_begin(self, args, state, control, model, optimizer, **kwargs) -> None:
        if state.global_step != self.at:
            return
        optimizer.state.clear()

        def stop(*_: Any) -> None:
            modeling_llama.apply_rotary_pos_emb = as_they_are

        def go_on(*_: Any) -> None:
            modeling_llama.apply_rotary_pos_emb = self.rotation

        decoder = next(part for part in model.modules() if isinstance(part, LlamaForCausalLM)).model
        decoder.register_forward_pre_hook(stop)
        decoder.register_forward_hook(go_on)


def rows(count: int = 24, length: int = 16) -> list[dict[str, list[int]]]:
    """Return samples of ids."""
    ids = torch.randint(3, 60, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, with a chat template that marks the assistant's."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", *map(str, range(61))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}"
        "{% else %}{% generation %} {{ message['content'] }} </s>{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        chat_template=template,
    )  # fmt: skip


def words(count: int, seed: int) -> str:
    """Return random words of the tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(map(str, torch.randint(0, 60, (count,), generator=generator).tolist()))


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether all parameters are equal, bit for bit."""
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


def checkpoint(folder: Path, step: int) -> str:
    """Return the directory of a checkpoint of transformers' Trainer."""
    return str(folder / f"checkpoint-{step}")
