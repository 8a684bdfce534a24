"""Names of runs in reports, and what reports say about task and environment."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import trainer
from trainer.cores import cores
from trainer.data.corpus import Corpus
from trainer.data.needles import NAMES, WORDS
from trainer.runs.config import RunConfig

ENCODING_TITLES = {
    "rope": "RoPE",
    "half_rope": "HalfRoPE",
    "high_frequency": "High-frequency RoPE",
    "rope_id": "RoPE-ID",
    "p_rope": "p-RoPE",
    "hope": "HoPE",
    "hope_published": "HoPE (published)",
    "nope": "NoPE",
    "alibi": "ALiBi",
}


def reference_first(role: str | None) -> int:
    """A key that sorts roles as tables are read: RoPE, what was made of it, everything else."""
    return {"rope": 0, "drope": 1}.get(role or "", 2)


def is_dropped(config: RunConfig, step: int) -> bool:
    """Whether a run has dropped its encoding in the state after ``step`` steps.

    The drop comes before the first batch of its phase: the checkpoint of that very step is of
    before.
    """
    return config.drop_step is not None and step > config.drop_step


def role(config: RunConfig, dropped: bool | None = None) -> str:
    """What a run is in comparisons: ``drope`` once its encoding is dropped, else its encoding.

    ``dropped``: None for a finished run.
    """
    if config.drop_step is not None if dropped is None else dropped:
        return "drope"
    positional = config.positional
    used = dict.fromkeys([*_of_layers(config), *positional.heads])
    kinds = [str(positional.encodings.get(name, {}).get("type", name)) for name in used]
    name = "_".join(kinds) + ("_heads" if positional.heads else "")
    windows = positional.windows[: config.model.num_hidden_layers]
    return f"{name}_window" if any(windows) else name


def label(config: RunConfig, dropped: bool | None = None) -> str:
    """The name of a run in tables."""
    name = role(config, dropped)
    # Before its drop a run is not yet what its label says.
    if config.label and (config.drop_step is None or dropped is not False):
        return config.label
    if name == "drope":
        return "DroPE"
    return ENCODING_TITLES.get(name) or encodings(config)


def encodings(config: RunConfig) -> str:
    """Those that the layers of a run begin with."""
    return " + ".join(dict.fromkeys(_of_layers(config)))


def _of_layers(config: RunConfig) -> list[str]:
    """Of a pattern that is repeated over the depth, or does not come to its end."""
    return config.positional.layers[: config.model.num_hidden_layers]


def checkpoint_label(config: RunConfig, step: int, name: str) -> str:
    """The name of a run's checkpoint in tables; adds ``name`` where it is not the last one."""
    called = label(config, is_dropped(config, step))
    return called if step == config.trainer.max_steps else f"{called} ({name})"


def describe_task(training_share: float, needles: int) -> dict[str, Any]:
    """What the retrieval trials are, for the report's text.

    Args:
        training_share: of the training sequences that carried such statements.
        needles: statements in a trial.
    """
    return {
        "needles": needles,
        "chance": 1 / (len(WORDS) - len(NAMES)),
        "chance_listed": 1 / needles,
        "training_share": training_share,
    }


def without_home(value: Any) -> Any:
    """Plain values with ``~`` for the user's home directory, so that reports can be shared."""
    if isinstance(value, dict):
        return {key: without_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_home(item) for item in value]
    return value.replace(str(Path.home()), "~") if isinstance(value, str) else value


def environment(corpus: Corpus) -> dict[str, Any]:
    """Versions and hardware; nothing that identifies a person or a machine."""
    return {
        "unrope": trainer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "corpus": corpus.fingerprint,
        "training_text_tokens": len(corpus.train),
        "held_out_text_tokens": len(corpus.validation) + len(corpus.test),
    }
