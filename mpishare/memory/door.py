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
import io
import json
import math
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

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
# But not so soon after a file was lent: the ranks that borrow it stand in one row with the others.
_HURRY_S = 5.0
# Keys of requests that are remembered; see `Opening.leases`.
_MARKS = ("attaches", "maps", "wants_host_copies")


@dataclass(eq=False)
class Visitor:
    """A connection to an opening, and the lease that it stands for."""

    connection: socket.socket
    pid: int
    asked: dict[str, Any] = field(default_factory=dict)


class Door:
    """The addresses at which this process answers, all served by one thread, which the first
    starts.

    Methods do not block, but for `close`.
    """

    def __init__(self) -> None:
        # An answer may read the leases. It is notified when these change.
        self._changed = threading.Condition(threading.RLock())
        self._openings: list[Opening] = []
        self._strangers = 0
        self._thread: threading.Thread | None = None  # None: it holds no descriptors yet
        self._selector: selectors.EpollSelector
        self._end: int  # of a pipe, into whose `_ender` the end is written
        self._ender: int
        self._spare: io.FileIO  # closed where another thread has taken the last descriptor
        self._is_closed = False
        self._lending: Opening | None = None  # while anything is lent
        self._lent: dict[str, int] = {}  # by key
        self._lent_at = -math.inf  # seconds: the newest
        _doors.add(self)

    def open(
        self,
        name: str,
        answer: Answer,
        left: Left = lambda _: None,
        *,
        most: int | None = None,
    ) -> Opening:
        """Answer at a new address from now on.

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
            if self._thread is None:
                self._begin()
        except BaseException:
            listener.close()
            raise
        opening = Opening(self, address, listener, answer, left, most)
        with self._changed:
            self._openings.append(opening)
            accept = partial(self._accept, opening)
            self._selector.register(listener, selectors.EVENT_READ, accept)
        return opening

    def _begin(self) -> None:
        """Take the descriptors of an open door, and start its thread."""
        with contextlib.ExitStack() as undo:
            # A wait of epoll sees what others register meanwhile.
            self._selector = undo.enter_context(selectors.EpollSelector())
            self._end, self._ender = os.pipe()
            undo.callback(os.close, self._end)
            undo.callback(os.close, self._ender)
            self._spare = undo.enter_context(io.FileIO(os.devnull))
            self._selector.register(self._end, selectors.EVENT_READ)
            thread = threading.Thread(target=self._serve, name="mpishare-door", daemon=True)
            thread.start()
            undo.pop_all()
        self._thread = thread

    def lend(self, fd: int) -> str:
        """Return a token with which other ranks `borrow` this descriptor, until `take_back`."""
        if self._lending is None:
            self._lending = self.open("rank", lambda asked, _: ({}, [self._lent[asked["key"]]]))
        key = os.urandom(8).hex()
        self._lent[key] = fd
        self._lent_at = time.monotonic()
        return f"{self._lending.address}/{key}"

    def take_back(self, token: str) -> None:
        """Stop lending it, once every rank has borrowed it or failed to. The caller closes it."""
        del self._lent[token.rpartition("/")[2]]
        if not self._lent and self._lending is not None:
            self._lending.shut()
            self._lending = None

    def close(self) -> None:
        """Shut all addresses, and end the thread, once it has given its present answer."""
        if self._is_closed:
            return  # in a fork
        with self._changed:
            while self._openings:
                self._openings[-1].shut()
            self._is_closed = True
        if self._thread is not None:
            os.write(self._ender, b"0")
            self._thread.join()
            self._close_own()

    def _close_own(self) -> None:
        self._selector.close()
        os.close(self._end)
        os.close(self._ender)
        self._spare.close()

    def _close_copies(self) -> None:
        """In a fork: close its copies of the sockets, so that the parent's end with the parent."""
        self._changed = threading.Condition(threading.RLock())  # its holder is not in this process
        self._is_closed = True
        if self._thread is None:
            return
        for key in self._selector.get_map().values():
            # Not unregistered: the selector's file is the parent's.
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._close_own()

    def _serve(self) -> None:
        while True:
            ready = self._selector.select()
            with self._changed:
                if self._is_closed:
                    return
                for key, _ in ready:
                    key.data()
            if self._strangers >= _STRANGERS:
                self._strangers = 0
                if time.monotonic() - self._lent_at > _HURRY_S:
                    time.sleep(_REST_S)

    def _accept(self, opening: Opening) -> None:
        listener, most = opening._listener, opening._most
        if listener is None:
            return  # shut since
        try:
            connection, _ = listener.accept()
        except OSError as error:  # the visitor is gone, or this process has no descriptor left
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._strangers += 1  # of any user: it costs as much
                self._turn_away(listener)
            return
        if self._spare.closed:
            self._take_spare()
        pid, uid = peer_of(connection)
        if uid != os.getuid():
            self._strangers += 1
            connection.close()
            return
        self._strangers = 0
        n_counted = sum(len(each._visitors) for each in self._openings if each._most is not None)
        if most is not None and n_counted >= most:
            _refuse(connection, f"it has {most} visitors already")
            return
        connection.setblocking(False)
        opening._admit(Visitor(connection, pid))

    def _turn_away(self, listener: socket.socket) -> None:
        """Accept with the spare descriptor and hang up; else the selector would report it again."""
        self._spare.close()
        with contextlib.suppress(OSError):
            _refuse(listener.accept()[0], "its process has no descriptor left (ulimit -n)")
        self._take_spare()

    def _take_spare(self) -> None:
        with contextlib.suppress(OSError):  # another thread was faster: at the next visitor
            self._spare = io.FileIO(os.devnull)


@dataclass(eq=False)
class Opening:
    """An address at which a door answers, until it is shut, and the visitors there."""

    _door: Door
    address: str
    _listener: socket.socket | None  # None once it is withdrawn
    _answer: Answer
    _left: Left
    _most: int | None
    _visitors: list[Visitor] = field(default_factory=list)

    def leases(self, asked: str = "") -> list[int]:
        """Return the process identifiers of the visitors that hold a lease.

        With `asked`, one of `_MARKS`: only of visitors whose last request with that key had a true
        value.
        """
        with self._door._changed:
            return [each.pid for each in self._visitors if not asked or each.asked.get(asked)]

    def end_leases(self, timeout_s: float, asked: str = "") -> list[int]:
        """Notify all visitors; return the processes that hold a lease after some time. Blocks.

        `asked` as in `leases`. A visitor with a full socket misses the message.
        """
        text = json.dumps({"is_over": True, UNASKED: True}).encode()
        with self._door._changed:
            for visitor in self._visitors:
                with contextlib.suppress(OSError):
                    visitor.connection.send(text, socket.MSG_DONTWAIT)
            self._door._changed.wait_for(lambda: not self.leases(asked), timeout_s)
            return self.leases(asked)

    def withdraw(self) -> None:
        """Stop answering; the leases go on. May be repeated."""
        with self._door._changed:
            if self._listener is not None and not self._door._is_closed:
                self._door._selector.unregister(self._listener)
                self._listener.close()
                self._listener = None
                self._answer, self._left = _withdrawn, lambda _: None

    def shut(self) -> None:
        """Stop answering, and end the leases. May be repeated."""
        with self._door._changed:
            if self in self._door._openings and not self._door._is_closed:
                self.withdraw()
                while self._visitors:
                    self._end(self._visitors[-1])
                self._door._openings.remove(self)

    def _admit(self, visitor: Visitor) -> None:
        self._visitors.append(visitor)
        reply = partial(self._reply, visitor)
        self._door._selector.register(visitor.connection, selectors.EVENT_READ, reply)

    def _reply(self, visitor: Visitor) -> None:
        if visitor not in self._visitors:
            return  # shut since
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
            reply, fds = self._answer(request, visitor)
            visitor.asked |= {mark: request[mark] is True for mark in _MARKS if mark in request}
            self._door._changed.notify_all()
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
        self._door._selector.unregister(visitor.connection)
        visitor.connection.close()
        self._door._changed.notify_all()
        self._left(visitor)


def _withdrawn(*_: object) -> NoReturn:
    raise HandleError("the address is withdrawn")


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
