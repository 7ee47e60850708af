"""Pass file descriptors between processes of one user: a door at an abstract Unix socket.

MPI carries bytes; a file descriptor travels through the kernel alone (``SCM_RIGHTS``, unix(7)). An
abstract socket leaves no file on disk and is gone with its process. The connection is kept: while
it is open, the peer holds the descriptors that it was given (a lease), and the kernel ends it with
the peer.

Any user can bind any abstract address, and connect to all of them. So each ends in random
characters, which cannot be bound in advance, and both sides ask the kernel for the user at the
other end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.errors import HandleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Given a request and its visitor, returns the reply, None for no reply, and the descriptors
    # that go with it. Runs in the door's thread: it must not block, and call neither MPI nor CUDA.
    Answer = Callable[[dict[str, Any], "Visitor"], tuple[dict[str, Any] | None, Sequence[int]]]
    # What is called when a visitor has left, in the door's thread.
    Left = Callable[["Visitor"], object]

NBYTES = 1 << 17  # of a message; the kernel's default socket buffer is larger
UNASKED = "unasked"  # marks a message that is no reply to a request
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LONGEST = 106  # bytes of an address: sockaddr_un, without its first zero
_TOKEN_NBYTES = 4  # six characters
_TRIES = 16
_STRANGERS = 64
# After so many connections of other users in a row the door rests: they get a few percent of this
# process's time, however fast they connect.
_REST_S = 0.05
# Keys of requests that are remembered; see `Door.leases`.
_MARKS = ("attaches", "maps", "wants_host_copies")


@dataclass(eq=False)
class Visitor:
    """A connection to an address, and the lease that it stands for."""

    address: str
    connection: socket.socket
    pid: int
    is_counted: bool
    asked: dict[str, Any] = field(default_factory=dict)


class _Opening(NamedTuple):
    listener: socket.socket
    answer: Answer
    left: Left
    most: int | None


class Door:
    """The addresses at which this process answers, all served by one thread, which the first
    starts.

    Methods do not block, but for `close`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an answer may read the leases
        self._selector = selectors.DefaultSelector()
        self._openings: dict[str, _Opening] = {}
        self._visitors: list[Visitor] = []
        self._strangers = 0
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        _doors.add(self)

    def open(
        self,
        name: str,
        answer: Answer,
        left: Left = lambda _: None,
        *,
        most: int | None = None,
    ) -> str:
        """Answer at a new address from now on, and return it.

        The address begins with `name`, as a mark in a list of sockets. `most` limits the visitors
        of this process at all such addresses together, to save its descriptors; ranks of the job
        need no limit. Raises `HandleError` if no address is free, `ValueError` if the name is too
        long.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.setblocking(False)
            address = _bind(listener, name)
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
        with self._lock:
            self._openings[address] = _Opening(listener, answer, left, most)
            self._selector.register(listener, selectors.EVENT_READ, address)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpishare-door", daemon=True)
            self._thread.start()
        self._wake_writer.send(b"w")
        return address

    def leases(self, address: str, asked: str = "") -> list[int]:
        """Return the process identifiers of the visitors of an address that hold a lease.

        With `asked`, one of `_MARKS`: only of visitors whose last request with that key had a true
        value.
        """
        with self._lock:
            return [each.pid for each in self._at(address) if not asked or each.asked.get(asked)]

    def notify(self, address: str, message: dict[str, Any]) -> None:
        """Send a message to all leases of an address; a visitor with a full socket misses it."""
        with self._lock:
            text = json.dumps(message | {UNASKED: True}).encode()
            for visitor in self._at(address):
                with contextlib.suppress(OSError):
                    visitor.connection.send(text, socket.MSG_DONTWAIT)

    def withdraw(self, address: str) -> None:
        """Stop answering at an address; its leases go on."""
        with self._lock:
            self._stop(address)

    def shut(self, address: str) -> None:
        """Stop answering at an address, and end its leases."""
        with self._lock:
            self._stop(address)
            for visitor in self._at(address):
                self._end(visitor)

    def close(self) -> None:
        """Shut all addresses, and end the thread, once it has given its present answer."""
        if self._is_closed:
            return  # in a fork
        for address in {*self._openings, *(each.address for each in self._visitors)}:
            self.shut(address)
        self._is_closed = True
        self._wake_writer.send(b"w")
        if self._thread is not None:
            self._thread.join()
        self._close_own()

    def _at(self, address: str) -> list[Visitor]:
        return [visitor for visitor in self._visitors if visitor.address == address]

    def _close_own(self) -> None:
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
        os.close(self._spare)

    def _close_copies(self) -> None:
        """In a fork: close its copies of the sockets, so that the parent's end with the parent."""
        self._lock = threading.RLock()  # its holder is not in this process
        self._is_closed = True
        # Not unregistered: the selector's file is the parent's.
        self._close_own()
        for opening in self._openings.values():
            opening.listener.close()
        for visitor in self._visitors:
            visitor.connection.close()
        self._openings, self._visitors = {}, []

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
                    elif key.data in self._visitors:
                        self._reply(key.data)
            if self._strangers >= _STRANGERS:
                self._strangers = 0
                time.sleep(_REST_S)

    def _accept(self, address: str) -> None:
        if address not in self._openings:
            return  # shut since
        opening = self._openings[address]
        try:
            connection, _ = opening.listener.accept()
        except OSError as error:  # the visitor is gone, or this process has no descriptor left
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._strangers += 1  # of any user: it costs as much
                self._turn_away(opening.listener)
            return
        pid, uid = peer_of(connection)
        if uid != os.getuid():
            self._strangers += 1
            connection.close()
            return
        self._strangers = 0
        n_counted = sum(visitor.is_counted for visitor in self._visitors)
        if opening.most is not None and n_counted >= opening.most:
            _refuse(connection, f"it has {opening.most} visitors already")
            return
        connection.setblocking(False)
        visitor = Visitor(address, connection, pid, opening.most is not None)
        self._visitors.append(visitor)
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _turn_away(self, listener: socket.socket) -> None:
        """Accept with the spare descriptor and hang up; else the selector would report it again."""
        os.close(self._spare)
        with contextlib.suppress(OSError):
            _refuse(listener.accept()[0], "its process has no descriptor left (ulimit -n)")
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _stop(self, address: str) -> None:
        if address in self._openings:
            listener = self._openings.pop(address).listener
            self._selector.unregister(listener)
            listener.close()

    def _reply(self, visitor: Visitor) -> None:
        try:
            text = visitor.connection.recv(NBYTES)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        if not text:
            self._end(visitor)
            return
        fds: Sequence[int] = ()
        try:
            request = json.loads(text)
            reply, fds = self._answered(visitor, request)
            visitor.asked |= {mark: request[mark] is True for mark in _MARKS if mark in request}
        except Exception as error:  # any error: the job goes on, the visitor gets it as the reply
            reply = {"refused": f"{type(error).__name__}: {error}"}
        if reply is None:
            return
        try:
            socket.send_fds(visitor.connection, [json.dumps(reply).encode()], list(fds))
        except OSError:
            self._end(visitor)

    def _end(self, visitor: Visitor) -> None:
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        if visitor.address in self._openings:
            self._openings[visitor.address].left(visitor)

    def _answered(
        self, visitor: Visitor, request: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, Sequence[int]]:
        if visitor.address not in self._openings:
            raise HandleError("the address is withdrawn")
        return self._openings[visitor.address].answer(request, visitor)


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _after_fork() -> None:
    for door in _doors:
        if not door._is_closed:
            door._close_copies()


os.register_at_fork(after_in_child=_after_fork)


def _refuse(connection: socket.socket, why: str) -> None:
    """Hang up, on a visitor of this user with the reason."""
    with connection, contextlib.suppress(OSError):
        if peer_of(connection)[1] == os.getuid():
            connection.send(json.dumps({"refused": why}).encode(), socket.MSG_DONTWAIT)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _bind(listener: socket.socket, name: str) -> str:
    """Bind a socket to a free abstract address that begins with a name, and return it."""
    import secrets  # brings `random` and `base64`, and few programs open a door

    for _ in range(_TRIES):
        address = f"mpishare/{os.getuid()}/{name}/{secrets.token_urlsafe(_TOKEN_NBYTES)}"
        if (excess := len(address.encode()) - _LONGEST) > 0:
            raise ValueError(f"the name {name!r} is too long by {excess} bytes")
        try:
            listener.bind(f"\0{address}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return address
    raise HandleError(f"{_TRIES} random addresses of {name!r} in a row are taken on this machine")
