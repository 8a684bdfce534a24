"""``python -m trainer +experiment=NAME key=value ...``: train, evaluate, report."""

from __future__ import annotations

import os
import sys
from typing import Any

from trainer.commands.configuration import compose_values, config_directory
from trainer.errors import UserError
from trainer.runs.config import RunConfig
from trainer.runs.parsing import parse_config


def run(words: list[str]) -> None:
    """Check everything, then train; options such as ``--help`` and ``--multirun`` go to Hydra."""
    if any(word.startswith("-") for word in words):
        _with_hydra(words)
    else:
        _train(read_config(words))


def read_config(words: list[str]) -> RunConfig:
    """The checked configuration of a command line.

    Raises:
        UserError: with all problems of keys, types and values together.
    """
    return parse_config(*compose_values(words))


def _train(config: RunConfig) -> None:
    from trainer.commands.console import print_report, set_up_console

    set_up_console(quiet=os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0")
    from trainer.workflows.experiment import run_experiment

    if (outcome := run_experiment(config)) is not None:
        report, existing = outcome
        print_report(report, config.run_dir, existing)


def _with_hydra(words: list[str]) -> None:
    import hydra
    from omegaconf import DictConfig, OmegaConf

    @hydra.main(version_base=None, config_path=str(config_directory()), config_name="config")
    def job(composed: DictConfig) -> None:
        values: Any = OmegaConf.to_container(composed, resolve=True)
        try:
            _train(parse_config(values))
        except UserError as error:
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr)
            sys.exit(2)

    sys.argv = ["unrope", *words]
    job()
