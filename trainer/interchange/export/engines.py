"""Inference engines that compute an exported model, derived from its ``config.json``.

Each engine builds its rotation from the same file in its own way, and may ignore unknown keys. The
relevant lines of each are reimplemented here, as read in the engines' sources in November 2026, and
compared with the rotation of transformers, whose logits the export gate checks:

- vLLM: ``model_executor/layers/rotary_embedding``, ``model_executor/models/transformers``
- SGLang: ``srt/layers/rotary_embedding/factory.py``, ``srt/models/transformers.py``
- llama.cpp: ``conversion/``, ``src/models/``, ``src/llama-context.cpp``

Tokenizers are not covered: llama.cpp's converter knows them by a hash and refuses all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.interchange.export.custom.serving_unrope import serving_problem
from trainer.interchange.hf_config import ARCHITECTURES
from trainer.interchange.hf_rope import STILL, spectrum_from_rope_parameters
from trainer.positional.encodings import geometric

CLOSE = 1e-6
"""Relative difference below which two frequencies are one."""
OLDEST_TRANSFORMERS = {"proportional": "5.5", "dynamic": "5.15.1"}
"""Version from which transformers has a rope type, or computes it without an error: up to 5.12.1
``dynamic`` gives other logits than its own formula (those between were not tried)."""
NEWEST_TRANSFORMERS = "5.24"
"""Newest version with which exports were loaded."""
LLAMA_CPP_STEP = 4
"""llama.cpp's SmolLM3 rotates all but every fourth layer; no key of its files can change that."""
LLAMA_CPP_LENGTH = 8192
"""Original length for ``llama3`` where it stands only among the rope parameters."""

Values = Mapping[str, Any]


class RefusedError(Exception):
    """The engine refuses the model; the message is the reason."""


@dataclass(frozen=True)
class Rotation:
    """Radians per token of each channel pair of a head, and the scale of the rotated channels."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """Whether an engine computes the model; ``note`` says why not, or what it needs."""

    engine: str
    loads: bool
    note: str = ""

    def __str__(self) -> str:
        answer = f"{self.engine}: {'loads' if self.loads else 'no'}"
        return f"{answer} ({self.note})" if self.note else answer


def verdicts(values: Values, architecture: str) -> list[Verdict]:
    """Return the verdicts on transformers, vLLM, SGLang and llama.cpp for a model.

    Args:
        values: the keys of its ``config.json``.
        architecture: the class that the file names.
    """
    if architecture not in ARCHITECTURES:
        return _of_own_code(values)
    needs = OLDEST_TRANSFORMERS.get(values["rope_parameters"]["rope_type"], "5.0")
    answers = [Verdict("transformers", True, f"{needs} to {NEWEST_TRANSFORMERS} tried")]
    for engine, replay in ENGINES.items():
        try:
            rotations = replay(values, architecture)
        except RefusedError as refused:
            answers.append(Verdict(engine, False, str(refused)))
        else:
            intended = transformers_rotations(values, architecture)
            answers.append(_compared(engine, rotations, intended))
    return answers


def _of_own_code(values: Values) -> list[Verdict]:
    problem = serving_problem(dict(values))
    served = problem or "through its Transformers backend, with the model's code"
    return [
        Verdict(
            "transformers", True, f"with trust_remote_code=True, 5.0 to {NEWEST_TRANSFORMERS} tried"
        ),
        *(Verdict(engine, problem is None, served) for engine in ("vLLM", "SGLang")),
        Verdict("llama.cpp", False, "its converter has no such class"),
    ]


def _compared(engine: str, theirs: Sequence[Rotation], intended: Sequence[Rotation]) -> Verdict:
    if all(_alike(a, b) for a, b in zip(theirs, intended, strict=True)):
        return Verdict(engine, True)
    if engine == "llama.cpp" and not any(f for layer in intended for f in layer.inv_freq):
        return Verdict(engine, False, "rotates unless run with --rope-freq-scale 1e-30")
    return Verdict(engine, False, "would rotate by other frequencies, without an error")


def _alike(a: Rotation, b: Rotation) -> bool:
    def close(x: float, y: float) -> bool:
        return math.isclose(x, y, rel_tol=CLOSE, abs_tol=STILL)

    # Channels that do not rotate still affect the scores through their scale.
    return close(a.scale, b.scale) and all(map(close, a.inv_freq, b.inv_freq))


def transformers_rotations(values: Values, architecture: str) -> list[Rotation]:
    """Return the rotation of every layer in transformers."""
    rope, head_dim = values["rope_parameters"], values["head_dim"]
    length = values["max_position_embeddings"]
    spectrum = spectrum_from_rope_parameters(rope, head_dim, length)
    still = (0.0,) * (head_dim // 2 - len(spectrum.inv_freq))
    rotation = Rotation(spectrum.inv_freq + still, spectrum.rotary_scale)
    return _by_layer(values, architecture, rotation, values.get("no_rope_layers"))


def _by_layer(
    values: Values, architecture: str, rotation: Rotation, rotates: Sequence[int] | None
) -> list[Rotation]:
    """Return the rotation of every layer.

    ``rotates``: 1 for each rotating layer, if the architecture supports layers without rotation.
    """
    depth = values["num_hidden_layers"]
    if not ARCHITECTURES[architecture].nope_layers or rotates is None:
        return [rotation] * depth
    still = Rotation((0.0,) * len(rotation.inv_freq))
    return [rotation if turns else still for turns in rotates]


def _plain(values: Values) -> tuple[float, ...]:
    return geometric(values["rope_parameters"]["rope_theta"], values["head_dim"] // 2)


def _llama3(values: Values, original: float) -> Rotation:
    """Return the frequencies of Llama 3.1's rescaling from a given original length."""
    rope = values["rope_parameters"]
    low, high, factor = (rope[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))

    def slowed(f: float) -> float:
        turns = original * f / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return f * (share + (1 - share) / factor)

    return Rotation(tuple(map(slowed, _plain(values))))


def _yarn(values: Values, *, truncate: bool, scale: float) -> Rotation:
    """Return YaRN's frequencies, with a ramp from ``beta_slow`` to ``beta_fast`` turns."""
    rope, plain = values["rope_parameters"], _plain(values)
    theta, head_dim = rope["rope_theta"], values["head_dim"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]

    def pair(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(rope.get("beta_fast", 32)), pair(rope.get("beta_slow", 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 * (low == high)
    slowed = [min(max((m - low) / (high - low), 0), 1) for m in range(len(plain))]
    inv_freq = (f * (1 - s) + f / factor * s for f, s in zip(plain, slowed, strict=True))
    return Rotation(tuple(inv_freq), scale)


def _usual_yarn_scale(rope: Values) -> float:
    """Return YaRN's own attention factor.

    Raises:
        RefusedError: another is given, which not every engine reads.
    """
    if "attention_factor" in rope:
        raise RefusedError("has only YaRN's own attention factor")
    return 0.1 * math.log(rope["factor"]) + 1


def _vllm(values: Values, architecture: str) -> list[Rotation]:
    windows = {*values.get("layer_types", ())}
    if architecture.startswith("Qwen") and len(windows) > 1:
        raise RefusedError("has no Qwen with sliding windows in some layers only")
    if architecture == "SmolLM3ForCausalLM":  # through transformers' class
        return transformers_rotations(values, architecture)
    return [_served(values)] * values["num_hidden_layers"]


def _sglang(values: Values, architecture: str) -> list[Rotation]:
    rope = values["rope_parameters"]
    if architecture == "SmolLM3ForCausalLM":
        return transformers_rotations(values, architecture)
    if values.get("sliding_window"):
        raise RefusedError("has no sliding windows in this architecture")
    if rope["rope_type"] == "proportional":  # the share is not read from there
        return [Rotation(_plain(values))] * values["num_hidden_layers"]
    return [_served(values)] * values["num_hidden_layers"]


def _served(values: Values) -> Rotation:
    """Return what ``get_rope`` of vLLM and SGLang computes."""
    rope, head_dim = values["rope_parameters"], values["head_dim"]
    kind, plain = rope["rope_type"], _plain(values)
    if kind == "default":
        return Rotation(plain)
    if kind == "linear":
        return Rotation(tuple(f / rope["factor"] for f in plain))
    if kind == "llama3":
        return _llama3(values, rope["original_max_position_embeddings"])
    if kind == "yarn":
        scale = _usual_yarn_scale(rope)
        return _yarn(values, truncate=rope.get("truncate", True), scale=scale)
    if kind == "proportional":
        share = rope.get("partial_rotary_factor", 1.0)
        if share <= 0:
            raise RefusedError("refuses a share of 0 of rotated channels")
        turning = int(head_dim * share) // 2  # the factor is not read
        return Rotation(plain[:turning] + (0.0,) * (len(plain) - turning))
    if kind == "dynamic":
        raise RefusedError("stretches dynamic frequencies for the longest length at once")
    raise RefusedError("decides between short and long factors once, by its longest length")


def _llama_cpp(values: Values, architecture: str) -> list[Rotation]:
    rope, depth = values["rope_parameters"], values["num_hidden_layers"]
    if values.get("sliding_window"):
        raise RefusedError("has no sliding windows in this architecture")
    kind, rotation = rope["rope_type"], Rotation(_plain(values))
    if kind == "linear":
        rotation = Rotation(tuple(f / rope["factor"] for f in rotation.inv_freq))
    elif kind == "yarn":
        rotation = _yarn(values, truncate=True, scale=_usual_yarn_scale(rope))
    elif kind in ("dynamic", "longrope"):
        raise RefusedError("keeps the frequencies of short sequences in long ones")
    elif kind == "llama3" and architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        key = "original_max_position_embeddings"
        rotation = _llama3(values, values.get(key, LLAMA_CPP_LENGTH))
    rotates = [int((index + 1) % LLAMA_CPP_STEP != 0) for index in range(depth)]
    return _by_layer(values, architecture, rotation, rotates)


ENGINES: dict[str, Callable[[Values, str], list[Rotation]]] = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "llama.cpp": _llama_cpp,
}
"""How each engine rotates the layers of a model; raises RefusedError where it does not load it."""
