"""Inference engines that compute an exported model, derived from its ``config.json``.

Each engine builds its rotation from the same file in its own way, and may ignore some keys. Its way
is written here as the rope parameters with which transformers would rotate alike, as read in the
engines' sources in November 2026. They are compared with the parameters of the file, from which
transformers computes the logits that the export gate checks:

- vLLM: ``model_executor/layers/rotary_embedding``, ``model_executor/models/transformers``
- SGLang: ``srt/layers/rotary_embedding/factory.py``, ``srt/models/transformers.py``
- llama.cpp: ``conversion/``, ``src/models/``, ``src/llama-context.cpp``

Tokenizers are not covered: llama.cpp's converter knows them by a hash and refuses all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from trainer.interchange.export.custom.serving_unrope import serving_problem
from trainer.interchange.hf_config import ARCHITECTURES
from trainer.interchange.hf_rope import STILL, Parameters, spectrum_from_rope_parameters
from trainer.positional.spectrum import Spectrum

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

    ``values``: the keys of its ``config.json``. ``architecture``: the class that the file names.
    """
    if architecture not in ARCHITECTURES:
        return _of_own_code(values)
    needs = OLDEST_TRANSFORMERS.get(values["rope_parameters"]["rope_type"], "5.0")
    answers = [Verdict("transformers", True, f"{needs} to {NEWEST_TRANSFORMERS} tried")]
    intended = rotations(values, architecture)
    for engine in ENGINES:
        try:
            theirs = rotations(values, architecture, engine)
        except RefusedError as refused:
            answers.append(Verdict(engine, False, str(refused)))
        else:
            answers.append(_compared(engine, theirs, intended))
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


def _compared(engine: str, theirs: Sequence[Spectrum], intended: Sequence[Spectrum]) -> Verdict:
    if all(_alike(a, b) for a, b in zip(theirs, intended, strict=True)):
        return Verdict(engine, True)
    if engine == "llama.cpp" and not any(spectrum.rotates for spectrum in intended):
        return Verdict(engine, False, "rotates unless run with --rope-freq-scale 1e-30")
    return Verdict(engine, False, "would rotate by other frequencies, without an error")


def _alike(a: Spectrum, b: Spectrum) -> bool:
    def close(x: float, y: float) -> bool:
        return math.isclose(x, y, rel_tol=CLOSE, abs_tol=STILL)

    pairs = zip_longest(a.inv_freq, b.inv_freq, fillvalue=0.0)
    # Channels that do not rotate still affect the scores through their scale.
    return close(a.rotary_scale, b.rotary_scale) and all(close(x, y) for x, y in pairs)


def rotations(values: Values, architecture: str, engine: str | None = None) -> list[Spectrum]:
    """Return the rotation of every layer in short sequences; ``engine``: None for transformers.

    Raises:
        RefusedError: the engine does not load the model.
    """
    rope, depth = values["rope_parameters"], values["num_hidden_layers"]
    rotates = values.get("no_rope_layers")
    if engine is not None:
        rope = ENGINES[engine](values, architecture)
    if engine == "llama.cpp":
        rotates = [(index + 1) % LLAMA_CPP_STEP != 0 for index in range(depth)]
    length = values["max_position_embeddings"]
    spectrum = spectrum_from_rope_parameters(rope, values["head_dim"], length)
    if not ARCHITECTURES[architecture].nope_layers or rotates is None:
        return [spectrum] * depth
    return [spectrum if turns else Spectrum() for turns in rotates]


def _plain(rope: Values) -> Parameters:
    return {"rope_type": "default", "rope_theta": rope["rope_theta"]}


def _check_yarn(rope: Values) -> None:
    """Check that YaRN has its own attention factor: not every engine reads another."""
    if "attention_factor" in rope:
        raise RefusedError("has only YaRN's own attention factor")


def _vllm(values: Values, architecture: str) -> Parameters:
    windows = {*values.get("layer_types", ())}
    if architecture.startswith("Qwen") and len(windows) > 1:
        raise RefusedError("has no Qwen with sliding windows in some layers only")
    return _served(values["rope_parameters"], architecture)


def _sglang(values: Values, architecture: str) -> Parameters:
    rope = values["rope_parameters"]
    is_smollm3 = architecture == "SmolLM3ForCausalLM"
    if values.get("sliding_window") and not is_smollm3:
        raise RefusedError("has no sliding windows in this architecture")
    if rope["rope_type"] == "proportional" and not is_smollm3:  # the share is not read from there
        return _plain(rope)
    return _served(rope, architecture)


def _served(rope: Parameters, architecture: str) -> Parameters:
    """Return the parameters as vLLM's layers read them, which SGLang has taken over."""
    if architecture == "SmolLM3ForCausalLM":  # through transformers' class
        return rope
    kind = rope["rope_type"]
    if kind == "yarn":
        _check_yarn(rope)
    if kind == "proportional":
        if rope.get("partial_rotary_factor", 1.0) <= 0:
            raise RefusedError("refuses a share of 0 of rotated channels")
        return rope | {"factor": None}  # it is not read
    if kind == "dynamic":
        raise RefusedError("stretches dynamic frequencies for the longest length at once")
    if kind == "longrope":
        raise RefusedError("decides between short and long factors once, by its longest length")
    return rope


def _llama_cpp(values: Values, architecture: str) -> Parameters:
    rope, original = values["rope_parameters"], "original_max_position_embeddings"
    if values.get("sliding_window"):
        raise RefusedError("has no sliding windows in this architecture")
    kind = rope["rope_type"]
    if kind == "linear":
        return rope
    if kind == "yarn":
        _check_yarn(rope)
        return rope | {"truncate": True}
    if kind in ("dynamic", "longrope"):
        raise RefusedError("keeps the frequencies of short sequences in long ones")
    if kind == "llama3" and architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        return rope | {original: values.get(original, LLAMA_CPP_LENGTH)}
    return _plain(rope)


ENGINES: dict[str, Callable[[Values, str], Parameters]] = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "llama.cpp": _llama_cpp,
}
"""The rope parameters of each engine; raises RefusedError where it does not load the model."""
