"""Locks that let one process at a time work in a directory.

The system releases a lock when its process ends, however it ends.
"""

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
"""Errors of file systems without locks, such as Lustre mounted without them."""


def try_lock(file: IO[str]) -> bool | None:
    """Lock an open file for this process.

    Returns True if it is locked, False if another process holds it, None if the file system has no
    locks.
    """
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
    """Hold a lock on a file; warn if the file system has no locks. The file is not removed.

    A file that a killed process left behind is not locked. ``doing``: what the process that holds
    the lock does, such as ``packs 'DIRECTORY'``, for an error about ``key``.

    Raises:
        UserError: another process holds the lock, and ``wait`` is false.
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
