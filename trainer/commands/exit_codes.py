"""How the program ends: what a person can mend is one line each, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import REQUEUE_EXIT_CODE, PreemptedError, TransientError, UserError
from trainer.runs.job_files import say_mistake, tell_torchrun


@contextmanager
def exit_codes() -> Iterator[None]:
    """Exit with 2 for a mistake of the user's, 85 when stopped to be continued, 130 when
    interrupted."""
    try:
        yield
    except UserError as error:
        if not tell_torchrun(error.problems):
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr)
        if not isinstance(error, TransientError):
            say_mistake()
        sys.exit(2)
    except PreemptedError as stop:
        print(f"{stop} The same command goes on from there.", file=sys.stderr)
        sys.exit(REQUEUE_EXIT_CODE)
    except KeyboardInterrupt:
        print(
            "Interrupted; the same command goes on from what was kept, if anything.",
            file=sys.stderr,
        )
        sys.exit(130)
