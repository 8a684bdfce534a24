"""One process at a time does a part of the work in a directory; the system lets go when it ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import UserError

log = logging.getLogger(__name__)

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What file systems answer that know no locks, such as Lustre mounted without them."""


@contextmanager
def locked(path: Path, work: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock on a file, which stays; where the file system knows none, a warning says so.

    ``wait``: until another process that ``work`` (as it stands in a sentence) lets go.

    Raises:
        UserError: another process holds it, and there is no waiting.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            if not wait:
                raise UserError(f"{holder} {work}; wait for it, or stop it.") from None
            log.info("Waiting: %s %s", holder, work)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            log.warning("%s cannot be locked here; start nothing twice", path)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {os.uname().nodename}")
        file.flush()
        yield
