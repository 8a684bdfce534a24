"""Ranks that end together: when one fails, is stopped or dies, all of them end.

Rank 0 listens, and every rank keeps a connection to it. The kernel closes the connections of a
process that dies, whatever it was doing, and keepalive finds a lost machine. So nothing is polled,
and a rank that computes for minutes without the interpreter does not count as dead.
"""

import json
import os
import platform
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, Queue
from secrets import token_hex
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal

from trainer.common.errors import STOP_REASONS
from trainer.common.processes import current_ranks, requeue

if TYPE_CHECKING:
    from torch.distributed import Store

START = 300.0
"""Seconds within which all ranks must have started."""
SETTLE = 1.0
"""Seconds in which rank 0 hears how others end before it names the first, and after which ranks
without an error of their own exit."""
LATECOMERS = 15.0
"""The same if some ranks have not started yet, which would wait for rank 0 otherwise."""
FAREWELL = 20.0
"""Longest time in seconds that a rank waits for the answer of rank 0, or for its end."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3}
"""A lost machine is noticed after 10 + 3 * 4 seconds."""
SILENT = "ended without an error of its own: killed, out of memory, or its machine is lost"


@dataclass(frozen=True)
class End:
    """The end of a rank, or in rank 0's answer the end that all ranks share.

    ``rank``: as an answer, the rank that tells the user. ``code``: exit code. ``reason``: of a
    stop, one of :data:`STOP_REASONS`. ``text``: what no rank can say of itself.
    """

    rank: int
    kind: Literal["done", "died", "failed", "stopped"]
    code: int = 1
    reason: str = ""
    text: str = ""


class Watch:
    """A rank's connection to rank 0, which ends this process soon after another rank's early end.

    ``store``: in which rank 0 says where it listens.
    """

    def __init__(self, store: "Store") -> None:
        ranks = current_ranks()
        self.rank = ranks.rank
        if self.rank == 0:
            Hub(ranks.world_size, store).start()
        host, port, token = json.loads(store.get("watch"))
        self._socket = socket.create_connection((host, port), timeout=START)
        self._socket.settimeout(None)
        _keep_alive(self._socket)
        os.register_at_fork(after_in_child=self._socket.close)
        process = f"{platform.node()}, process {os.getpid()}"
        _send(self._socket, {"token": token, "rank": self.rank, "process": process})
        self._is_leaving = False
        self._answer: End | None = None
        self._is_answered = Event()
        Thread(target=self._listen, name="watch", daemon=True).start()

    def leave(self, end: End, text: str = "") -> int:
        """Say how this rank ends, and return the exit code of all ranks.

        ``text``: printed unless another rank ended first. A rank that is done ends alone, except
        rank 0, after which nobody watches any more.
        """
        self._is_leaving = True
        with suppress(OSError):  # rank 0 has ended, which is then the answer
            _send(self._socket, asdict(end))
        if end.kind == "done" and self.rank:
            return end.code
        self._is_answered.wait(FAREWELL)
        answer = self._answer or end
        if answer.kind == "done":  # rank 0 did not wait for this rank
            answer = end
        self._tell(answer, text)
        return answer.code

    def _listen(self) -> None:
        """Hear rank 0's answer; end this process, whose main thread may wait, unless it ends."""
        with self._socket.makefile("rb") as lines:
            answer = _received(lines)
        self._answer = End(**answer) if answer else End(1, "died", text=f"rank 0 {SILENT}")
        self._is_answered.set()
        if self._is_leaving or self._answer.kind == "done":
            return
        self._tell(self._answer)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._answer.code)

    def _tell(self, answer: End, text: str = "") -> None:
        """Print the error if it is this rank's to tell; otherwise let that rank do it first, since
        a launcher that sees a rank end may kill the others."""
        if answer.rank != self.rank:
            time.sleep(SETTLE)
            return
        text = f"error: {answer.text}" if answer.text else text
        if text:
            print(text, file=sys.stderr, flush=True)


class Hub(Thread):
    """A thread of rank 0 that hears how each rank ends, and answers how all of them do.

    After a stop it requeues the job first.
    """

    def __init__(self, world_size: int, store: "Store") -> None:
        super().__init__(name="watch-hub", daemon=True)
        self.world_size = world_size
        self.token = token_hex(16)
        self.server, host = _listening()
        store.set("watch", json.dumps([host, self.server.getsockname()[1], self.token]))
        self.connections: dict[int, socket.socket] = {}
        self.events: Queue[int | End] = Queue()
        """Ranks that have connected, and ends."""
        os.register_at_fork(after_in_child=self._close)
        Thread(target=self._accept, name="watch-accept", daemon=True).start()

    def run(self) -> None:
        """Answer all ranks as soon as it is known how they end."""
        answer = self._first_end()
        if answer.kind == "stopped":
            requeue(answer.reason)
        for rank in sorted(self.connections, reverse=True):  # rank 0 last: it ends with its answer
            with suppress(OSError):
                _send(self.connections[rank], asdict(answer))

    def _first_end(self) -> End:
        """Wait until a rank ends early, rank 0 ends, or the time to connect is over."""
        missing, running = {*range(self.world_size)}, {*range(self.world_size)}
        early: list[End] = []
        deadline = time.monotonic() + START
        while running:
            timeout = None
            if missing or early:
                timeout = max(deadline - time.monotonic(), 0)
            try:
                event = self.events.get(timeout=timeout)
            except Empty:
                break
            if isinstance(event, int):
                missing.discard(event)
                if early and not missing:
                    deadline = time.monotonic() + SETTLE
            else:
                running.discard(event.rank)
                if event.kind != "done":
                    if not early:  # ranks that still start would wait for this one
                        patience = LATECOMERS if missing else SETTLE
                        deadline = time.monotonic() + patience
                    early.append(event)
            if not (0 in running or missing or early):  # all have found rank 0, which is done
                return End(0, "done", 0)
        if early:
            return first_of(early, self.world_size)
        names = ", ".join(map(str, sorted(missing)))
        text = f"ranks: of {self.world_size}, {names} did not start within {START / 60:g} minutes"
        return End(0, "failed", text=text)

    def _accept(self) -> None:
        """Let a thread hear each process that connects, until the socket is closed."""
        with suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        """Read who connects, and how it ends; strangers are ignored."""
        _keep_alive(connection)
        with connection.makefile("rb") as lines:
            hello = _received(lines)
            if hello is None or hello.get("token") != self.token:
                connection.close()
                return
            rank = hello["rank"]
            self.connections[rank] = connection
            self.events.put(rank)
            end = _received(lines)
            if end is None:
                text = f"rank {rank} ({hello['process']}) {SILENT}"
                self.events.put(End(rank, "died", text=text))
            else:
                self.events.put(End(**end))

    def _close(self) -> None:
        """Close this process's ends of the connections, which a fork would keep open."""
        for connection in (self.server, *self.connections.values()):
            connection.close()


def first_of(early: list[End], world_size: int) -> End:
    """Return the answer to early ends: a death counts before errors, which may follow from it, and
    an error before stops.

    Of several reasons of a stop the first in :data:`STOP_REASONS` counts. Ranks that died cannot
    tell: the lowest one that lives does.
    """
    dead = [end for end in early if end.kind == "died"]
    if dead:
        living = {*range(world_size)} - {end.rank for end in dead}
        return End(min(living, default=0), "died", text="; ".join(end.text for end in dead))
    failed = [end for end in early if end.kind == "failed"]
    if failed:
        return failed[0]
    return min(early, key=lambda end: (STOP_REASONS.index(end.reason), end.rank))


def _listening() -> tuple[socket.socket, str]:
    """Return a listening socket of rank 0, and this machine's address for the other ranks: that of
    the interface towards MASTER_ADDR, or MASTER_ADDR itself if it is this machine."""
    master = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    family, _, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect(address)  # sends nothing
        host = route.getsockname()[0]
    is_loopback = host == "::1" or host.startswith("127.")
    return server, master if is_loopback else host


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out when the other machine is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # macOS has other names
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, values: dict[str, Any]) -> None:
    """Send values as a line of JSON."""
    connection.sendall(json.dumps(values).encode() + b"\n")


def _received(lines: Any) -> dict[str, Any] | None:
    """Return the values of a line of JSON; None if the other end has closed, or sent none."""
    with suppress(OSError, ValueError):
        values = json.loads(lines.readline())
        if isinstance(values, dict):
            return values
    return None
