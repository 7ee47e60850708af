"""Pass file descriptors between processes of one user: a door at an abstract Unix socket.

MPI carries bytes; a file descriptor travels through the kernel alone (``SCM_RIGHTS``, unix(7)). An
abstract socket leaves nothing on disk and is gone with its process. The connection is kept: while
it is open, the peer holds what it was given (a lease), and the kernel ends it with the peer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import selectors
import socket
import struct
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from mpishare.errors import HandleError, PeerTimeout, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Answer = Callable[[dict[str, Any]], tuple[dict[str, Any], Sequence[int]]]
    """Given a request, returns the reply and the file descriptors that go with it. Runs in the
    door's thread: it must not block, and call neither MPI nor CUDA."""

_NBYTES = 1 << 17  # of a message; the kernel's default socket buffer is larger
_MAX_FDS = 250  # of a message: the kernel takes 253
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LONGEST = 107  # bytes of a name, the first zero included: sockaddr_un
_UNASKED = "unasked"  # marks what a door says on its own account: it is the answer to nothing
_MAX_LEASES = 256  # of a door: visitors must not use up the descriptors of this process


@dataclass(eq=False)
class _Lease:
    name: str
    connection: socket.socket
    pid: int
    asked: dict[str, Any] = field(default_factory=dict)


class Door:
    """The names at which this process answers. One thread, started by the first, serves them all.

    All methods are local and do not block, except where said.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an answer may ask for the leases
        self._selector = selectors.DefaultSelector()
        self._answers: dict[str, tuple[socket.socket, Answer, Callable[[], object]]] = {}
        self._leases: list[_Lease] = []
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        _doors.add(self)

    def open(self, name: str, answer: Answer, left: Callable[[], object] = lambda: None) -> None:
        """Answer at a name from now on.

        Parameters
        ----------
        left : callable, optional
            Called in the door's thread when a visitor has left who came to the name.

        Raises
        ------
        HandleError
            If a process of this machine answers there already.
        ValueError
            If the name is too long.
        """
        address = _address(name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            listener.bind(address)
            listener.listen(64)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise HandleError(f"the name {name!r} is taken on this machine") from None
            raise
        with self._lock:
            self._answers[name] = listener, answer, left
            self._selector.register(listener, selectors.EVENT_READ, name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpishare-door", daemon=True)
            self._thread.start()
        self._wake_writer.send(b"w")

    def leases(self, name: str, asked: str = "") -> list[int]:
        """Return the process identifiers of those who came to a name and still hold on.

        Parameters
        ----------
        asked : str, optional
            A key: only of those whose requests held a true value of it.
        """
        with self._lock:
            leases = [lease for lease in self._leases if lease.name == name]
            return [lease.pid for lease in leases if not asked or lease.asked.get(asked)]

    def tell(self, name: str, message: dict[str, Any]) -> None:
        """Send a message to all that hold a lease of a name; who does not read it misses it."""
        with self._lock:
            connections = [lease.connection for lease in self._leases if lease.name == name]
            text = json.dumps(message | {_UNASKED: True}).encode()
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(text, socket.MSG_DONTWAIT)

    def withdraw(self, name: str, kept_as: str) -> None:
        """Answer no more at a name; its leases go on under another, which nobody can visit."""
        with self._lock:
            self._stop(name)
            for lease in self._leases:
                if lease.name == name:
                    lease.name = kept_as

    def shut(self, name: str) -> None:
        """Answer no more at a name, and end its leases."""
        with self._lock:
            self._stop(name)
            for lease in [lease for lease in self._leases if lease.name == name]:
                self._end(lease)

    def close(self) -> None:
        """Shut all names, and end the thread. Waits for the answer that is being given."""
        if self._is_closed:
            return  # in a fork
        for name in {*self._answers, *(lease.name for lease in self._leases)}:
            self.shut(name)
        self._is_closed = True
        self._wake_writer.send(b"w")
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
        os.close(self._spare)

    def _close_copies(self) -> None:
        """In a fork: close its copies of the sockets, so that those of its parent end with that."""
        self._lock = threading.RLock()  # the thread that held it is not here
        self._is_closed = True
        # Nothing is unregistered: the selector's file is the parent's.
        self._selector.close()
        for listener, _, _ in self._answers.values():
            listener.close()
        for lease in self._leases:
            lease.connection.close()
        self._answers, self._leases = {}, []
        self._wake_reader.close()
        self._wake_writer.close()
        os.close(self._spare)

    def _serve(self) -> None:
        while not self._is_closed:
            ready = self._selector.select()
            with self._lock:
                for key, _ in ready:
                    if key.fileobj is self._wake_reader:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_reader.recv(64)
                    elif isinstance(key.data, str):
                        self._accept(key.data)
                    elif key.data in self._leases:
                        self._reply(key.data)

    def _accept(self, name: str) -> None:
        if name not in self._answers:
            return  # shut since
        try:
            connection, _ = self._answers[name][0].accept()
        except OSError as error:  # who knocked is gone, or this process has no descriptor left
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away(name)
            return
        pid, uid = _peer(connection)
        is_full = len(self._leases) >= _MAX_LEASES
        if uid != os.getuid() or is_full:
            why = f"it has {_MAX_LEASES} visitors already" if is_full else "another user"
            with contextlib.suppress(OSError):
                connection.send(json.dumps({"refused": why}).encode())
            connection.close()
            return
        connection.setblocking(False)
        lease = _Lease(name, connection, pid)
        self._leases.append(lease)
        self._selector.register(connection, selectors.EVENT_READ, lease)

    def _turn_away(self, name: str) -> None:
        """Accept with the spare descriptor and hang up; else the selector would report it again."""
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._answers[name][0].accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _stop(self, name: str) -> None:
        if name in self._answers:
            listener, _, _ = self._answers.pop(name)
            self._selector.unregister(listener)
            listener.close()

    def _reply(self, lease: _Lease) -> None:
        try:
            text = lease.connection.recv(_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        if not text:
            self._end(lease)
            return
        fds: Sequence[int] = ()
        try:
            request = json.loads(text)
            reply, fds = self._answers[lease.name][1](request)
            lease.asked |= request
        except Exception as error:  # whatever was asked: the job goes on, the asker is told
            reply = {"refused": f"{type(error).__name__}: {error}"}
        try:
            socket.send_fds(lease.connection, [json.dumps(reply).encode()], list(fds))
        except OSError:
            self._end(lease)

    def _end(self, lease: _Lease) -> None:
        self._leases.remove(lease)
        self._selector.unregister(lease.connection)
        lease.connection.close()
        if lease.name in self._answers:
            self._answers[lease.name][2]()


class Visit:
    """A connection to a door, and the lease that it stands for. Local; ends with `close`.

    Parameters
    ----------
    name : str
        As given to `Door.open`.
    timeout_s : float, s
        For each answer.

    Raises
    ------
    HandleError
        If no process of this machine (or of this network namespace) answers there.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        address = _address(name)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(timeout_s)
        try:
            self._connection.connect(address)
        except TimeoutError:
            self._connection.close()
            raise self._late() from None
        except OSError as error:
            self._connection.close()
            raise HandleError(
                f"nobody answers at {name!r} on this machine ({error.strerror}): the process has "
                "ended, or it is in another network namespace"
            ) from None
        if (owner := _peer(self._connection)[1]) != os.getuid():
            self._connection.close()
            raise HandleError(f"{name!r} is answered by a process of another user, {owner}")

    def is_over(self) -> bool:
        """Whether the door has ended the connection, or said something on its own account."""
        return bool(self._wait(0))

    def wait_until_over(self) -> None:
        """Block until `is_over`, or until another thread calls `hang_up`."""
        self._wait(None)

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

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for what the door says on its own account."""
        return self._connection.fileno()

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Return the reply to a request, and the file descriptors that came with it. Blocks.

        Raises
        ------
        UnsupportedError
            If the door refuses, with its words.
        PeerTimeout
            If it does not answer in time.
        HandleError
            If the process ended, or ends the visit: what it says on its own account.
        """
        try:
            self._connection.send(json.dumps(request).encode())
            text, fds, _, _ = socket.recv_fds(self._connection, _NBYTES, _MAX_FDS)
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            text, fds = self._last_words(), []
            if not text:
                raise self._gone(error.strerror or "") from None
        if not text:
            raise self._gone("the connection was closed")
        for fd in fds:
            os.set_inheritable(fd, False)
        reply = json.loads(text)
        if _UNASKED in reply:
            raise self._gone("it ended the visit")
        if "refused" in reply:
            for fd in fds:
                os.close(fd)
            raise UnsupportedError(f"{self._name!r} was refused: {reply['refused']}")
        return reply, fds

    def _last_words(self) -> bytes:
        """Return what a door said before it hung up: that it refuses, and why."""
        try:
            return self._connection.recv(_NBYTES)
        except OSError:
            return b""

    def close(self) -> None:
        """End the connection, and with it the lease. May be repeated."""
        self._connection.close()

    def __enter__(self) -> Self:
        """Return the visit."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()

    def _late(self) -> PeerTimeout:
        return PeerTimeout(
            f"no answer from {self._name!r} within {self._timeout_s:g} s: its process is stopped",
            ranks=[],
            timeout_s=self._timeout_s,
        )

    def _gone(self, why: str) -> HandleError:
        return HandleError(f"the process that answered at {self._name!r} is gone ({why})")


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _after_fork() -> None:
    for door in _doors:
        if not door._is_closed:
            door._close_copies()


os.register_at_fork(after_in_child=_after_fork)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _address(name: str) -> bytes:
    """Return the abstract address of a name: one per user, so that nobody takes another's name."""
    address = f"\0mpishare/{os.getuid()}/{name}".encode()
    if len(address) > _LONGEST:
        raise ValueError(f"the name {name!r} is too long by {len(address) - _LONGEST} bytes")
    return address
