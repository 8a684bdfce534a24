"""Words of a command line to plain values, with Hydra.

Keys and defaults stand once, in :mod:`trainer.config`; ``ConfigStore`` hands them to Hydra, so that
``conf/`` holds only what differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from trainer import config as schema
from trainer.commands.help import GROUPS, config_directory
from trainer.common.plugins import load_plugins
from trainer.positional.encodings import ENCODINGS, parameters

OF_OTHER_TASKS = (
    *("dynamic_ntk", "longrope", "choice", "dope", "weighted_rope"),
    *("ruler", "longbench", "many_shot"),
)
"""Keys of an evaluation that come with another option than that of a run."""


@dataclass(frozen=True)
class Composed:
    """Configuration that the words of one job stand for."""

    values: dict[str, Any]
    choices: dict[str, str]
    """The chosen option of each group."""
    words: tuple[str, ...]
    """The overrides."""

    @classmethod
    def of(cls, config: DictConfig, choices: Mapping[Any, Any], words: Sequence[str]) -> Composed:
        """Return the plain values of a composed configuration without Hydra's own."""
        keys = [str(key) for key in config if key != "hydra"]
        masked = OmegaConf.masked_copy(config, keys)
        values: Any = OmegaConf.to_container(masked, resolve=True, throw_on_missing=True)
        return cls(values, {str(k): str(v) for k, v in choices.items()}, tuple(words))

    @classmethod
    def from_hydra(cls, config: DictConfig) -> Composed:
        """Return the configuration that Hydra hands to a job."""
        job = HydraConfig.get()
        return cls.of(config, job.runtime.choices, list(job.overrides.task))


def register_schema() -> None:
    """Hand keys and defaults to Hydra.

    The three kinds of evaluation have keys of their own, which the options of ``evaluation`` start
    from.
    """
    OmegaConf.register_new_resolver("sum", lambda *numbers: sum(numbers), replace=True)
    store = ConfigStore.instance().store
    run, evaluation = asdict(schema.RunConfig()), asdict(schema.EvaluationConfig())
    store("run_schema", {k: v for k, v in run.items() if k != "evaluation"} | {"run_dir": "???"})
    at_the_end = {k: v for k, v in evaluation.items() if k not in OF_OTHER_TASKS}
    store("run_evaluation_schema", at_the_end, group="evaluation")
    for kind in (schema.EvaluationConfig, schema.MultipleChoiceConfig, schema.HarnessConfig):
        values = asdict(kind())
        store(f"{values['kind']}_schema", values, group="evaluation")
    models = asdict(schema.EvaluationRequest())
    for name, values in {
        "evaluate_schema": {k: v for k, v in models.items() if k != "evaluation"},
        "analyze_schema": asdict(schema.AnalysisRequest()),
        "generate_schema": asdict(schema.GenerationRequest()),
        "export_schema": asdict(schema.ExportRequest()),
        "compare_schema": asdict(schema.CompareRequest()),
        "plan_schema": asdict(schema.PlanKeys()),
        "recalibrate_schema": asdict(schema.RecalibrateKeys()),
    }.items():
        store(name, values)


def register_encodings(words: Sequence[str]) -> None:
    """Run the plugins among the words, and make options of ``positional`` of their encodings."""
    plugins = ""
    for word in words:  # Hydra takes the last, too
        if re.match(r"\+?plugins=", word):
            plugins = word.partition("=")[2]
    load_plugins([path for path in re.split(r"[\[\],'\" ]+", plugins) if path])
    directory = config_directory() / "positional"
    for name in ENCODINGS if plugins else ():
        if not (directory / f"{name}.yaml").exists():
            values = {"layers": [name], "encodings": {name: parameters(name)}}
            ConfigStore.instance().store(f"{name}.yaml", values, group="positional")


def overrides_of(words: Sequence[str]) -> list[str]:
    """Return the words as Hydra reads them.

    ``+evaluation=NAME`` becomes ``evaluation=NAME``, whether a command has a default for that group
    or not. Names are text, and digits with underscores too: Hydra would read a number.
    """
    return [_override_of(word) for word in words]


def _override_of(word: str) -> str:
    plain = re.sub(rf"^\+({'|'.join(GROUPS)})=", r"\1=", word)
    if re.fullmatch(r"name=[\w.+-]+", plain):
        return f"name={plain[5:]!r}"
    if re.search(r"['\"$]|^prompt=", plain):
        return plain
    return re.sub(r"(?<![\w./+-])\d+(_\d+)+(?![\w./+-])", r"'\g<0>'", plain)


def compose_words(
    words: Sequence[str], root: str = "config", config_dir: str | None = None
) -> Composed:
    """Compose overrides such as ``+experiment=drope_demo data.files=[a.txt]``.

    ``root``: the file of ``conf/`` that the command starts from. ``config_dir``: a directory with
    more options.
    """
    register_schema()
    register_encodings(words)
    more = [] if config_dir is None else [f"hydra.searchpath=[{Path(config_dir).absolute()}]"]
    GlobalHydra.instance().clear()  # recalibrate composes within its own job
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        given = overrides_of(words)
        config = compose(root, [*given, *more], return_hydra_config=True)
    return Composed.of(config, config.hydra.runtime.choices, given)


def explain(error: BaseException) -> str:
    """Return the message of an error as lines, with the nearest key or option if one is unknown."""
    cause: BaseException = error
    while isinstance(cause, HydraException) and cause.__cause__ is not None:
        cause = cause.__cause__
    choices: list[str] = []
    word, text = "", str(cause) or type(cause).__name__
    if isinstance(cause, MissingConfigException):
        choices, text = list(cause.options or ()), text.splitlines()[0]
        word = Path(str(cause.missing_cfg_file)).stem
    elif isinstance(cause, ConfigKeyError | ConfigAttributeError):
        parent = cause.parent_node
        choices = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
        word = str(cause.key)
    elif isinstance(cause, KeyError):
        text = f"KeyError: {text}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(cause, OmegaConfBaseException):  # the other lines name the key and its type
        lines = [", ".join(line for line in lines if not line.startswith("object_type"))]
    if near := get_close_matches(word, choices, 1):
        lines[-1] += f"; the nearest is {near[0]!r}"
    return "\n".join(lines)
