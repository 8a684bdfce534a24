"""``python -m trainer [command] key=value ...``, also installed as ``unrope``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import trainer
from trainer.commands.help import COMMANDS, Command, config_directory, help_text, split_words
from trainer.common.errors import REQUEUE_EXIT_CODE, PreemptedError

MISTAKE, STOPPED, INTERRUPTED = 1, 143, 130
"""Exit codes: an error, a SIGTERM after which nothing is kept, Ctrl-C."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command; exit with 0, with 1 for an error, with 85 if stopped to be resumed."""
    words = sys.argv[1:] if arguments is None else arguments
    if "--version" in words:
        print(f"unrope {trainer.__version__}")
        return
    name = words[0] if words and words[0] in COMMANDS else "train"
    words = words[1:] if words[:1] == [name] else words
    if {"--help", "-h", "help"} & {*words}:
        print(help_text(name))
        return
    with leaving_ranks(), exit_codes():
        run_command(name, COMMANDS[name], words)


def run_command(name: str, command: Command, words: Sequence[str]) -> None:
    """Let Hydra compose the words, and run the command with them: once, or for each job of
    ``--multirun``."""
    import hydra
    from omegaconf import DictConfig

    from trainer.commands.composing import (
        Composed,
        overrides_of,
        register_encodings,
        register_schema,
    )

    register_schema()
    register_encodings(words)
    flags, overrides, prompts = split_words(overrides_of(words), command.bare)
    run: Callable[[Composed], None] | None = None
    if name == "recalibrate":  # before Hydra, so that --cfg shows the chosen keys
        from trainer.commands.run import with_chosen_keys

        overrides, run = with_chosen_keys(overrides)
    errors: list[Exception] = []
    process = os.getpid()

    def job(config: DictConfig) -> None:
        from trainer.commands.run import EXECUTE  # torch-free, but slow for --cfg

        try:
            composed = Composed.from_hydra(config)
            if prompts:
                composed.values["prompts"] += prompts
            with ending_when_preempted():
                (run or EXECUTE[name])(composed)
        except Exception as error:
            if os.getpid() != process:  # a job of a launcher
                raise
            errors.append(error)  # if it were raised here, Hydra would print another line

    argv, sys.argv = sys.argv, ["unrope", *flags, *overrides]
    shows_traceback = os.environ.get("HYDRA_FULL_ERROR", "")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors
    try:
        directory = str(config_directory())
        hydra.main(version_base="1.3", config_path=directory, config_name=command.root)(job)()
    finally:
        sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, shows_traceback
    if errors:
        raise errors[0]


@contextmanager
def ending_when_preempted() -> Iterator[None]:
    """Exit with the code of a job that was asked to stop, also in the middle of a sweep."""
    try:
        yield
    except PreemptedError as stop:
        print(stop, file=sys.stderr)
        if not stop.is_resumable:
            sys.exit(STOPPED)
        from trainer.common.processes import is_first_process, requeue

        if stop.requeues and is_first_process():
            requeue()
        sys.exit(REQUEUE_EXIT_CODE)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Print an error of the command line, of files or of libraries in a line and exit with its
    code; ``HYDRA_FULL_ERROR=1`` shows the traceback. Any other error shows it."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        from trainer.commands.composing import explain

        of_user = ValueError, OSError, KeyError, ImportError, HydraException, OmegaConfBaseException
        if os.environ.get("HYDRA_FULL_ERROR") or not isinstance(error, of_user):
            raise
        print(
            *(f"error: {line}" for line in explain(error).splitlines()), sep="\n", file=sys.stderr
        )
        sys.exit(MISTAKE)


@contextmanager
def leaving_ranks() -> Iterator[None]:
    """End the process immediately if an error leaves its process group open: at an ordinary exit
    threads may wait for other ranks forever."""
    try:
        yield
    except BaseException as error:
        group = sys.modules.get("torch.distributed")  # not imported for every command
        if group is None or not group.is_initialized():
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


if __name__ == "__main__":
    main()
