"""``python -m trainer [command] key=value ...``, also installed as ``unrope``."""

from trainer.common import spinning  # noqa: F401 - before anything that may load torch

# isort: split
import os
import signal
import sys
import traceback

import trainer
from trainer.common.errors import REQUEUE_EXIT_CODE, PreemptedError, UserError, nearest
from trainer.common.processes import current_ranks, requeue, stop_on_signals
from trainer.common.watch import End, Watch

SHOWS_TRACEBACK = "HYDRA_FULL_ERROR"


def main(arguments: list[str] | None = None) -> None:
    """Run a command; several ranks end together.

    An error of the command line, of files or of libraries is printed in a line and the exit code is
    1; ``HYDRA_FULL_ERROR=1`` shows the traceback, as any other error does. A command that is asked
    to stop exits with the code by which its job is requeued.
    """
    words = sys.argv[1:] if arguments is None else arguments
    stop_on_signals()  # while training, its own handlers save first
    watch: Watch | None = None
    try:
        if current_ranks().world_size > 1:
            from trainer.common.ranks import meeting_store  # imports torch

            watch = Watch(meeting_store())
        run(words)
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, SystemExit) else None
        end(cause or error, words, watch)
    if watch is not None:
        sys.exit(watch.leave(End(watch.rank, "done", 0)))


def run(words: list[str]) -> None:
    """Run the command that the words name."""
    # Slow imports; a signal may come during them.
    from trainer.commands import COMMANDS, help_text, run_command

    name = command_of(words)
    words = words[1:] if words[:1] == [name] else words
    if name not in COMMANDS:
        expected = f"expected a command of {', '.join(COMMANDS)}"
        raise UserError(f"{expected}, got {name!r}{nearest(name, COMMANDS)}")
    if "--version" in words:
        print(f"unrope {trainer.__version__}")
        return
    if {"--help", "-h"} & {*words}:
        print(help_text(name))
        return
    before = os.environ.get(SHOWS_TRACEBACK, "")
    os.environ[SHOWS_TRACEBACK] = "1"  # Hydra raises errors
    try:
        run_command(name, words)
    finally:
        os.environ[SHOWS_TRACEBACK] = before


def command_of(words: list[str]) -> str:
    """Return the name of the command: the first word, or ``train``."""
    return words[0] if words and words[0].isalpha() else "train"


def end(error: BaseException, words: list[str], watch: Watch | None) -> None:
    """Print the error, unless another rank has ended first, and exit; without other ranks an
    unexpected one is raised.

    Ranks with an open process group exit immediately: its threads may wait for others.
    """
    rank = 0 if watch is None else watch.rank
    ended, text = outcome(error, words, rank)
    if text is None and watch is None:
        raise error
    if text is None:
        text = "".join(traceback.format_exception(error)).rstrip()
    if watch is None:
        if text:
            print(text, file=sys.stderr)
        requeue(ended.reason)
        sys.exit(ended.code)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    code = watch.leave(ended, text)
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.modules["torch.distributed"].is_initialized():
        os._exit(code)
    sys.exit(code)


def outcome(error: BaseException, words: list[str], rank: int) -> tuple[End, str | None]:
    """Return how a command ends with an error, and the text to print; None: its traceback."""
    from trainer.commands import RESUMABLE, explain, is_of_user

    if isinstance(error, KeyboardInterrupt):
        error = PreemptedError("Stopped (SIGINT).", "SIGINT")
    if isinstance(error, PreemptedError):
        code = 130 if error.reason == "SIGINT" else REQUEUE_EXIT_CODE
        resumes = " The same command resumes." if command_of(words) in RESUMABLE else ""
        return End(rank, "stopped", code, error.reason), f"{error}{resumes}"
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        if error.code:
            return End(rank, "failed", error.code), ""
        return End(rank, "done", 0), ""
    failed = End(rank, "failed", 1)
    if isinstance(error, SystemExit):  # with a message, as for Python
        return failed, str(error.code)
    if os.environ.get(SHOWS_TRACEBACK) or not is_of_user(error):
        return failed, None
    return failed, explain(error)


if __name__ == "__main__":
    main()
