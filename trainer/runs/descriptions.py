"""Names of runs in reports, and descriptions of environment and origin of a page."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import trainer
from trainer.common.processes import cores
from trainer.config import SAME, ChangeConfig, RunConfig
from trainer.runs.directory import RECORD, saved_config
from trainer.runs.phases import phases_of

if TYPE_CHECKING:
    from trainer.data.corpus import Corpus

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
    """Sort key of roles in tables: RoPE, models derived from it, everything else."""
    return {"rope": 0, "drope": 1}.get(role or "", 2)


def lacks_schedule_control(runs: Sequence[str]) -> bool:
    """Whether runs with and without a drop stand beside each other without a run that restarts its
    learning rate as the drop does and drops nothing.

    ``runs``: directories; those without a configuration do not count.
    """
    records = (Path(run, RECORD) for run in runs)
    found = [yaml.safe_load(path.read_text("utf-8")) for path in records if path.is_file()]
    configs = [saved_config(values) for values in found]
    controls = [c.get("drop") or {} for config in configs for c in config.controls.values()]
    targets = [c.drop.to for c in configs] + [drop.get("to") for drop in controls]
    return len({c.drop_step is None for c in configs}) == 2 and SAME not in targets


def is_dropped(config: RunConfig, step: int) -> bool:
    """Whether a run has dropped its encoding after ``step`` steps.

    A drop comes before the first batch of its phase: the checkpoint of that very step precedes it.
    """
    return config.drop_step is not None and step > config.drop_step


def name_and_role(config: RunConfig, step: int | None = None) -> tuple[str, str | None]:
    """Return the name of a run in tables and its role in the papers' claims.

    The role is ``drope`` if the run has dropped all of its encodings, otherwise its encoding, with
    ``_window`` if it has windows; None for variants. ``step``: number of steps trained; None: all.
    """
    dropped = is_dropped(config, config.trainer.max_steps if step is None else step)
    partial = _partial_drops(config) if dropped else []
    if dropped and not partial:
        return "DroPE", "drope"
    encoding, variants = _encoding(config), []
    if config.model.from_run is not None and encoding == "nope":
        variants.append("continued")
    for change in partial:
        windows = " and windows" if change.windows else ""
        variants.append(f"drop{change.of_what} to {change.to}{windows}")
    if config.drop.to == SAME and config.drop.at is not None:
        variants.append("schedule of a drop")
    title = ENCODING_TITLES.get(encoding or "", encodings(config))
    return ", ".join([title, *variants]), None if variants else encoding


def encodings(config: RunConfig) -> str:
    """Describe the encodings that the layers of a run begin with."""
    return " + ".join(dict.fromkeys(config.positional.layers[: config.model.num_hidden_layers]))


def _encoding(config: RunConfig) -> str | None:
    """Return the types of the layers' encodings as one word; None if heads of a layer differ."""
    positional, depth = config.positional, config.model.num_hidden_layers
    if positional.heads:
        return None
    named = dict.fromkeys(positional.layers[:depth])
    kinds = dict.fromkeys(str(positional.encodings.get(n, {}).get("type", n)) for n in named)
    return "_".join(kinds) + ("_window" if any(positional.windows[:depth]) else "")


def _partial_drops(config: RunConfig) -> list[ChangeConfig]:
    """List the drops that leave some layers or heads, or put anything in their place."""
    known, partial = config.positional.encodings, []
    for change in (phase.settings.drop for phase in phases_of(config)):
        if change is None:
            continue
        kind = known.get(change.to, {}).get("type", change.to)
        if kind != "nope" or change.of_what or change.windows:
            partial.append(change)
    return partial


def without_home(value: Any) -> Any:
    """Replace the user's home directory by ``~`` in plain values, so that reports can be shared."""
    return json.loads(json.dumps(value, ensure_ascii=False).replace(str(Path.home()), "~"))


def environment(corpus: Corpus) -> dict[str, Any]:
    """Return versions and hardware, without anything that identifies a person or a machine."""
    import torch  # names of runs are needed without it

    return {
        "unrope": trainer.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "corpus": corpus.fingerprint,
        "training_text_tokens": sum(len(part.train) for part in corpus.parts),
        "held_out_text_tokens": len(corpus.validation) + len(corpus.test),
    }
