"""A model of transformers without its rotary encoding: a state that is set, asked for and undone.

While a model is dropped, the rotary modules of its text decoder return cosines of 1 and sines of 0.
They belong to a subclass of their class, so no buffer changes: what averages, moves, copies or
recomputes buffers brings no rotation back. The model's configurations, copies that it alone holds,
describe the same natively, so transformers loads what ``save_pretrained`` writes.
"""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Parameters = dict[str, Any]

FACTOR = 1e30
ORIGINAL_LENGTH = "original_max_position_embeddings"
# transformers has no rope_type for "no rotation". Llama 3's divides the frequencies of all
# wavelengths above original length / low_freq_factor by its factor. Every wavelength is above it,
# also for llama.cpp's converter, which takes 8192 for an original length that it does not find.
NO_ROTATION: Parameters = {
    "rope_type": "llama3",
    "factor": FACTOR,
    "low_freq_factor": 1e9,
    "high_freq_factor": 2e9,
    ORIGINAL_LENGTH: 2,
}
# Keys that say how fast heads rotate, or how that is scaled. All others stay.
FREQUENCY_KEYS = {
    "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "short_factor",
    "long_factor", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale",
}  # fmt: skip


def drop_rotation(model: Model) -> Model:
    """Remove the rotary encoding of the text decoder in ``model``, in place, and return the model.

    ``model`` may wrap the model of transformers: DDP, FSDP, a LightningModule, an adapter of peft,
    ``torch.compile``. Frozen models beside the trained one keep their rotation. Raise a ValueError
    if there is no rotary encoding, or transformers would load another model.
    """
    parts = find_parts(model)
    if not parts.is_dropped():
        copies = _written_configs(parts)
        original = deepcopy(parts.decoder.config)
        original.name_or_path = parts.top.name_or_path
        for module, config in parts.configs():
            module.config = copies[id(config)]
        for module in parts.rotary:
            kind: Any = type(module)
            module.config = original
            module.__class__ = _unrotated(kind)
        # The weights in that place rotate: what an adapter saves now must not load them.
        source = parts.top.name_or_path or "the base"
        name_base(model, f"{source} without rotation (see trainer.hf.save_dropped_base)")
    return model


def restore_rotation(model: Model) -> Model:
    """Undo :func:`drop_rotation`, in place, and return the model; raise a ValueError if it was
    loaded without rotation."""
    parts = find_parts(model)
    if parts.is_loaded_dropped():
        raise ValueError(
            f"{type(parts.top).__name__} was loaded without rotation: there is none to restore, or "
            "to drop later (DropPositions(at=0) trains it as it is)"
        )
    if not parts.is_dropped():
        return model
    original = parts.rotary[0].config
    for config in parts.text_configs():
        config.rope_parameters = deepcopy(original.rope_parameters)
        vars(config).pop(ORIGINAL_LENGTH, None)  # PhiMoE's sets it when it is validated
        if ORIGINAL_LENGTH in vars(original):
            setattr(config, ORIGINAL_LENGTH, getattr(original, ORIGINAL_LENGTH))
    for module in parts.rotary:
        module.config = parts.decoder.config
        module.__class__ = type(module).__bases__[1]
    name_base(model, original.name_or_path)
    return model


def name_base(model: nn.Module, name: str) -> None:
    """Set the base that the adapters in ``model`` name, also those that are added later."""
    find_parts(model).top.name_or_path = name
    for adapter in adapters_in(model):
        adapter.base_model_name_or_path = name or None


def is_dropped(model: nn.Module) -> bool:
    """Whether the text decoder in ``model`` has no rotation, by :func:`drop_rotation` or as loaded.
    Raise a ValueError if there is no rotary encoding."""
    return find_parts(model).is_dropped()


def check_droppable(model: nn.Module) -> None:
    """Raise what :func:`drop_rotation` would raise; change nothing."""
    rope_parameters_written(find_parts(model))


def without_rotation(angles: Any) -> Any:
    """Return complex numbers, or cosines and sines, that rotate nothing, in the shape of these."""
    if isinstance(angles, Tensor):
        return torch.ones_like(angles)
    cos, sin = angles
    return torch.ones_like(cos), torch.zeros_like(sin)


class Unrotated(nn.Module):
    """A rotary module of transformers that rotates nothing; precedes the module's own class."""

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return cosines of 1 and sines of 0, or complex ones, in the shape of the own class."""
        # Zeros as positions: dynamic types then do not grow their frequencies.
        angles = super().forward(x, torch.zeros_like(position_ids), *args, **kwargs)
        return without_rotation(angles)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the own class: this one has no name that can be imported."""
        return _new_unrotated, (type(self).__bases__[1],), self.__dict__


@cache
def _unrotated(kind: Any) -> type:
    """Return the subclass of a rotary class that rotates nothing."""
    return type(kind.__name__, (Unrotated, kind), {"__module__": kind.__module__})


def _new_unrotated(kind: type) -> Any:
    """Create an empty object for pickle."""
    return object.__new__(_unrotated(kind))


@dataclass(frozen=True)
class Parts:
    """A model of transformers, its text decoder, and the decoder's rotary modules."""

    top: Any
    decoder: Any
    rotary: list[Any]

    def is_dropped(self) -> bool:
        """Whether the rotary modules return no rotation."""
        return self.can_be_restored() or _describes_no_rotation(self.decoder.config)

    def is_loaded_dropped(self) -> bool:
        """Whether the model was dropped before it was loaded."""
        return self.is_dropped() and not self.can_be_restored()

    def loaded_from(self) -> str:
        """Return the name of the model with rotation, or as it was loaded; empty if it has none."""
        if self.can_be_restored():
            return self.rotary[0].config.name_or_path
        return self.top.name_or_path

    def can_be_restored(self) -> bool:
        """Whether the model was dropped in this process, not before it was loaded."""
        return all(isinstance(module, Unrotated) for module in self.rotary)

    def configs(self) -> Iterator[tuple[Any, PreTrainedConfig]]:
        """Yield the modules that hold a configuration, with it; rotary modules excepted."""
        rotary = set(self.rotary)
        for module in self.top.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig) and module not in rotary:
                yield module, config

    def text_configs(self) -> list[Any]:
        """Return the configurations that have the text decoder's rotary parameters."""
        inner = set(self.decoder.modules())
        configs = [config for module, config in self.configs() if module in inner]
        configs.append(self.top.config.get_text_config(decoder=True))
        distinct = {id(config): config for config in configs}.values()
        return [config for config in distinct if getattr(config, "rope_parameters", None)]


def find_parts(model: nn.Module) -> Parts:
    """Return the parts of the one model of transformers in ``model`` that is trained; raise a
    ValueError if it has no rotary encoding, or there are several."""
    models: list[Parts] = []
    seen: set[nn.Module] = set()
    for module in model.modules():
        if module in seen or not isinstance(module, PreTrainedModel):
            continue
        seen.update(module.modules())
        decoder = module.get_decoder()
        if not isinstance(decoder, PreTrainedModel):  # ModernBERT-decoder's is its output layer
            decoder = module.base_model
        rotary = [part for part in decoder.modules() if _has_frequencies(part)]
        if rotary:
            models.append(Parts(module, decoder, rotary))
    name = type(model).__name__
    if not models:
        raise ValueError(f"{name} has no rotary frequencies (inv_freq) of transformers")
    if len(models) > 1:
        models = [parts for parts in models if _is_trained(parts.top)]
    if len(models) != 1:
        raise ValueError(f"{name} holds several models: expected one that is trained")
    return models[0]


def _has_frequencies(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _describes_no_rotation(config: Any) -> bool:
    """Whether transformers builds a decoder without rotation from its configuration."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_rotating = [parameters]
    if _is_by_type(parameters):
        of_rotating = [value for value in parameters.values() if value]
    factors: set[Any] = set()
    for each in of_rotating:
        factors.update(each.get("short_factor") or [each.get("factor")])
    return factors == {FACTOR}


def adapters_in(model: nn.Module) -> list[Any]:
    """Return the configurations of peft's adapters of the model of transformers in ``model``."""
    top = find_parts(model).top
    configs: dict[int, Any] = {}
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        if isinstance(adapters, dict) and top in set(module.modules()):
            configs.update({id(adapter): adapter for adapter in adapters.values()})
    return list(configs.values())


def rope_parameters_written(parts: Parts) -> Parameters:
    """Return the rotary parameters that describe the model without rotation, or raise."""
    config = parts.decoder.config
    if not parts.is_dropped():
        config = _written_configs(parts)[id(config)]
    return deepcopy(config.rope_parameters)


def _is_by_type(parameters: Parameters) -> bool:
    """Whether each layer type has rotary parameters of its own; None: the type does not rotate."""
    return all(value is None or isinstance(value, dict) for value in parameters.values())


def _written_configs(parts: Parts) -> dict[int, Any]:
    """Return copies of the model's configurations that describe no rotation, by the originals' id:
    of the forms that some class of transformers takes, the first that fits its own classes."""
    problems = []
    for form in _forms(parts):
        copies: dict[int, Any] = {}
        for _, config in parts.configs():
            deepcopy(config, copies)  # one memo keeps shared objects shared
        for config in parts.text_configs():
            copy = deepcopy(config, copies)  # the one in the memo, or its own
            copy.rope_parameters = _with_form(form, config.rope_parameters)
        try:
            _check_form(parts, copies[id(parts.decoder.config)])
        except Exception as error:  # a configuration class raises any
            problems.append(f"{form['rope_type']}: {error!r}")
        else:
            return copies
    name = type(parts.top).__name__
    raise ValueError(f"{name} cannot be described without rotation: " + "; ".join(problems))


def _forms(parts: Parts) -> Iterator[Parameters]:
    """Yield parameters without rotation: Phi-3 takes LongRoPE alone, PhiMoE wants its mscales."""
    llama3 = {key: value for key, value in NO_ROTATION.items() if key != ORIGINAL_LENGTH}
    buffers = dict(parts.rotary[0].named_buffers(recurse=False))
    pairs = next(len(buffer) for name, buffer in buffers.items() if name.endswith("inv_freq"))
    longrope = {
        "rope_type": "longrope",
        "short_factor": [FACTOR] * pairs,
        "long_factor": [FACTOR] * pairs,
        "factor": 1.0,
        "attention_factor": 1.0,
    }
    mscales = {"short_mscale": 1.0, "long_mscale": 1.0}
    yield llama3
    yield longrope
    yield llama3 | mscales
    yield longrope | mscales


def _with_form(form: Parameters, old: Parameters) -> Parameters:
    """Return ``old`` with the frequencies of ``form``, in every layer type that rotates."""
    if _is_by_type(old):
        return old | {kind: _with_form(form, value) for kind, value in old.items() if value}
    parameters = {key: deepcopy(value) for key, value in old.items() if key not in FREQUENCY_KEYS}
    rope_type = old.get("rope_type", "default")
    if rope_type == "proportional":  # its frequencies are as many as a whole head's
        parameters.pop("partial_rotary_factor", None)
    # DeepSeek multiplies scores by (0.1 mscale_all_dim log(factor) + 1)^2, unless it is "default".
    if parameters.get("mscale_all_dim"):
        factor = old.get("factor") or 1.0
        log = 0.0 if rope_type == "default" else math.log(max(factor, 1.0))
        parameters["mscale_all_dim"] *= log / math.log(FACTOR)
    scales = {key: 1.0 for key in ("short_mscale", "long_mscale") if key in old}
    return {ORIGINAL_LENGTH: NO_ROTATION[ORIGINAL_LENGTH]} | parameters | scales | form


@torch.no_grad()
def _check_form(parts: Parts, config: Any) -> None:
    """Raise unless what transformers builds from ``config`` rotates nothing and differs in nothing
    else from what it builds from the model's own configuration."""
    old = _as_loaded(parts.decoder.config)
    new = _as_loaded(config)
    kinds = {_own_class(module) for module in parts.rotary}
    for kind in kinds:
        pairs = zip(_angles(kind(old), old), _angles(kind(new), new), strict=True)
        for (old_cos, _), (cos, sin) in pairs:
            if not (cos == 1).all() or sin.abs().max() > 1e-20:
                raise ValueError(f"{kind.__name__} rotates or scales")
            if cos.shape != old_cos.shape:
                raise ValueError(f"{kind.__name__} rotates other channels")
    with torch.device("meta"):
        rebuilt = dict(_own_class(parts.decoder)(new).named_modules())
        for name, module in _own_class(parts.decoder)(old).named_modules():
            if type(module) in kinds:
                continue
            for key, value in vars(module).items():
                other = vars(rebuilt[name])[key]
                if isinstance(value, float) and not math.isclose(value, other, rel_tol=1e-12):
                    raise ValueError(f"{name}.{key} becomes {other}, was {value}")


def _as_loaded(config: Any) -> Any:
    """Return a configuration as transformers reads it from a file."""
    return type(config).from_dict(config.to_dict())


def _own_class(module: nn.Module) -> Any:
    """Return the class of transformers that FSDP2 or the drop derived a class from."""
    classes = type(module).__mro__
    return next(kind for kind in classes if not issubclass(kind, FSDPModule | Unrotated))


def _angles(rotary: Any, config: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield cosines and sines at near and far positions, for each layer type."""
    positions = torch.tensor([[0, 1, 1000, 100_000]])
    if "mrope_section" in config.rope_parameters:  # time, height and width of images
        positions = positions.expand(3, 1, 4)
    kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else [None]
    for kind in kinds:
        layer_type = {} if kind is None else {"layer_type": kind}
        angles = rotary(torch.zeros(1), positions, **layer_type)
        if isinstance(angles, Tensor):
            yield angles.real, angles.imag
        else:
            yield angles
