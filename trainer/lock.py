"""One process at a time works in a directory; the system lets go of it however a process ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trainer.common.errors import UserError

log = logging.getLogger(__name__)

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What file systems answer that know no locks, such as Lustre mounted without them."""


def try_lock(file: IO[str]) -> bool | None:
    """Lock an open file for this process: True; another has it: False; the file system knows no
    locks: None."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return None
    return True


@contextmanager
def locked(path: Path, key: str, doing: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock on a file, which stays; where the file system knows none, a warning says so.

    Args:
        path: the file, which a killed process may have left behind: that locks nothing.
        key: the configuration key that an error about the lock names.
        doing: what the process that holds it does, such as ``packs 'DIRECTORY'``.
        wait: until it lets go.

    Raises:
        UserError: another process holds the lock, and there is no waiting.
    """
    with path.open("a+") as file:
        held = try_lock(file)
        if held is None:
            log.warning("%s cannot be locked on this file system; start nothing twice", path)
        elif not held:
            file.seek(0)
            message = f"{file.read().strip() or 'another process'} {doing}"
            if not wait:
                raise UserError.at(key, f"{message}.")
            log.info("Waiting: %s", message)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {os.uname().nodename}")
        file.flush()
        yield
