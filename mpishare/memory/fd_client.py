"""The client of an `FdServer`: connects to it, sends requests, and holds the lease."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import socket
import struct
import time
from typing import Any, Self

from mpishare.errors import HandleError, PeerTimeout, UnsupportedError, escaped, late
from mpishare.memory.fd_server import NBYTES, UNASKED, peer_of

_TIMEVAL = struct.Struct("@ll")  # seconds, microseconds
_RETRY_S = 0.001
_SHOWN = 500  # characters of a text of another process


class FdClient:
    """A connection to an endpoint, and the lease that it stands for, until `close`.

    Errors call the endpoint by `name`. Each answer must come within `timeout_s`, and so must the
    connection unless `connect_s` is given. Raises `HandleError` if no process of this user answers
    there, on this machine and in this network namespace; `PeerTimeout` if the server takes no
    connection in time.
    """

    def __init__(
        self, address: str, name: str, timeout_s: float, connect_s: float | None = None
    ) -> None:
        self._name = name
        self._pid = os.getpid()
        self._connection = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._timeout_s = timeout_s
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            try:
                is_in = _connect(connection, address, timeout_s if connect_s is None else connect_s)
            except OSError as error:
                raise HandleError(
                    f"nobody answers for {name} on this machine ({error.strerror}): its process "
                    "has ended or has closed it, or is in another network namespace"
                ) from None
            if not is_in:
                raise self._late()
            if (owner := peer_of(connection)[1]) != os.getuid():
                raise HandleError(f"{name} is answered by a process of another user, {owner}")
            connection.settimeout(timeout_s)  # now: connecting needs a blocking socket
            undo.pop_all()

    def is_over(self) -> bool:
        """Whether the server has ended the connection, or sent a message without a request."""
        return bool(self._wait(0))

    def wait_until_over(self, timeout_s: float | None = None) -> None:
        """Block until `is_over`, another thread calls `hang_up`, or the time is up."""
        self._wait(None if timeout_s is None else math.ceil(1e3 * timeout_s))

    def _wait(self, timeout_ms: int | None) -> list[tuple[int, int]]:
        waiter = select.poll()  # not `select`, for descriptors above 1023; one cannot be shared
        waiter.register(self._connection, select.POLLIN)
        return waiter.poll(timeout_ms)

    def hang_up(self) -> None:
        """End the connection for both sides, and a wait of another thread; `close` follows.

        Not in a fork: the connection is its parent's.
        """
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def ask(self, request: dict[str, Any], *, n_files: int = 0) -> tuple[dict[str, Any], list[int]]:
        """Return the reply to a request, and so many file descriptors with it. Blocks.

        Raises `UnsupportedError` if the server refuses, with its text; `PeerTimeout` if it does not
        answer in time; `HandleError` if the process ended, ends the lease, or sends fewer files.
        """
        try:
            with contextlib.suppress(BrokenPipeError):  # it has hung up, and said why before that
                self._connection.send(json.dumps(request).encode())
            try:
                text, fds, _, _ = socket.recv_fds(self._connection, NBYTES, n_files)
            except ConnectionResetError:  # told once: it hung up amid the request, and said why
                text, fds, _, _ = socket.recv_fds(self._connection, NBYTES, n_files)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise self._gone(error.strerror or "") from None
        for fd in fds:
            os.set_inheritable(fd, False)
        try:
            return self._reply(text, n_files - len(fds)), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _reply(self, text: bytes, n_missing: int) -> dict[str, Any]:
        """Return a reply, unless it is the end of the lease, a refusal, or lacks files."""
        if not text:
            raise self._gone("the connection was closed")
        reply: dict[str, Any] = json.loads(text)
        if UNASKED in reply:
            raise self._gone("it ended the connection")
        if "refused" in reply:
            raise UnsupportedError(f"{self._name} was refused: {printable(reply['refused'])}")
        if n_missing > 0:
            raise HandleError(
                f"{n_missing} files of {self._name} did not arrive: it is of another mpishare, "
                "or this process has no descriptors left (ulimit -n)"
            )
        return reply

    def close(self) -> None:
        """End the connection, and with it the lease. May be repeated."""
        self._connection.close()

    def __del__(self) -> None:
        # Without the warning of a socket: objects need not be closed before the process ends.
        if hasattr(self, "_connection"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _late(self) -> PeerTimeout:
        return late(f"no answer from {self._name}", self._timeout_s, ": its process is stopped")

    def _gone(self, why: str) -> HandleError:
        return HandleError(f"the process that answered for {self._name} is gone ({why})")


def fetch_fd(rank: int, token: str, timeout_s: float) -> int:
    """Return this process's own descriptor for a file that another rank offers. Blocks.

    `token` is that of `FdServer.offer_fd`. Raises as `FdClient.ask`; `UnsupportedError` where that
    rank does not offer it.
    """
    address, _, key = token.rpartition("/")
    with FdClient(address, f"rank {rank}", timeout_s) as client:
        return client.ask({"key": key}, n_files=1)[1][0]


def _connect(connection: socket.socket, address: str, wait_s: float) -> bool:
    """Connect as soon as there is room; return False at the timeout.

    connect(2) waits for room in turn with others, for as long as a send may: with a timeout of
    Python's it would not wait at all, and another user could take each place that gets free.
    """
    end = time.monotonic() + wait_s
    while True:
        left_us = max(int(1e6 * (end - time.monotonic())), 1)
        timeval = _TIMEVAL.pack(*divmod(left_us, 1_000_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        try:
            connection.connect(f"\0{address}")
            connection.getpeername()  # Python returns from a connect that a signal interrupted
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOTCONN):
                raise
        else:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_RETRY_S)  # where the kernel does not wait, as gVisor's


def printable(text: Any) -> str:
    """Return text of another process as one short line, safe for a terminal."""
    shown = escaped(str(text)[:_SHOWN])
    return shown if len(str(text)) <= _SHOWN else f"{shown}..."
