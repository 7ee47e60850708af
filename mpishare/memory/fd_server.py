"""Pass file descriptors to processes of the same user, at abstract Unix sockets.

MPI carries bytes; a file descriptor travels through the kernel alone (``SCM_RIGHTS``, unix(7)). An
abstract socket leaves no file on disk and is gone with its process. The connection is kept: while
it is open, the client holds the descriptors that it was given (a lease), and the kernel ends it
with the client.

Any user can bind any abstract address, and connect to all of them. So each ends in random
characters, which cannot be bound in advance, and both sides ask the kernel for the user at the
other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Given a request and its client, returns the reply and the descriptors that go with it. Runs
    # in the server's thread: it must not block, and call neither MPI nor CUDA.
    Answer = Callable[[dict[str, Any], "Client"], tuple[dict[str, Any], Sequence[int]]]
    # What is called when a client has left, in the server's thread.
    Left = Callable[["Client"], object]

NBYTES = 1 << 17  # of a message; the kernel's default socket buffer is larger
UNASKED = "unasked"  # marks a message that is no reply to a request
_OVER = {UNASKED: True}
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TOKEN_NBYTES = 4  # six characters
# The thread's pause after a connection of another user, who so gets a few percent of this process's
# time, however fast they connect.
_REST_S = 0.001
_CLOSING_S = 1.0  # the longest wait for the thread to close what is shut


@dataclass(eq=False)
class Client:
    """A connection to an endpoint, and the lease that it stands for."""

    connection: socket.socket
    pid: int
    marks: dict[str, bool] = field(default_factory=dict)  # of its requests, the last of each key


class FdServer:
    """The endpoints at which this process answers, all served by one thread, which runs as long as
    there are any.

    Methods do not block, but for an answer that is under way.
    """

    def __init__(self) -> None:
        # An answer may read the leases. It is notified when these change.
        self._changed = threading.Condition(threading.RLock())
        self._endpoints: list[Endpoint] = []
        self._selector: selectors.EpollSelector | None = None  # while the thread runs
        self._pid = os.getpid()
        self._offering: Endpoint | None = None  # while anything is offered
        self._offered: dict[str, int] = {}  # by key

    def open(
        self,
        name: str,
        answer: Answer,
        left: Left = lambda _: None,
        *,
        most: int | None = None,
    ) -> Endpoint:
        """Answer at a new address from now on.

        The address begins with `name`, as a mark in a list of sockets. `most` limits the clients
        there, to save the descriptors of this process; ranks of the job need no limit.
        """
        with self._changed, contextlib.ExitStack() as undo:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(listener.close)
            listener.setblocking(False)
            address = _bind(listener, name)
            listener.listen(64)
            endpoint = Endpoint(self, address, listener, answer, left, most)
            selector = self._selector or undo.enter_context(selectors.EpollSelector())
            # A wait of epoll sees what others register meanwhile.
            selector.register(listener, selectors.EVENT_READ, endpoint.accept)
            if self._selector is None:
                threading.Thread(
                    target=self._serve, args=[selector], name="mpishare-fds", daemon=True
                ).start()
                self._selector = selector
            self._endpoints.append(endpoint)
            undo.pop_all()
        return endpoint

    def offer_fd(self, fd: int) -> str:
        """Return a token with which other ranks `fetch_fd` this descriptor, until `withdraw`."""
        if self._offering is None:
            self._offering = self.open("rank", lambda asked, _: ({}, [self._offered[asked["key"]]]))
        key = os.urandom(8).hex()
        self._offered[key] = fd
        return f"{self._offering.address}/{key}"

    def withdraw(self, token: str) -> None:
        """Stop offering it, once every rank has fetched it or failed to. The caller closes it."""
        del self._offered[token.rpartition("/")[2]]
        if not self._offered and self._offering is not None:
            self._offering.shut()
            self._offering = None

    def close(self) -> None:
        """Shut all endpoints, and so end the thread."""
        for endpoint in list(self._endpoints):
            endpoint.shut()

    def _serve(self, selector: selectors.EpollSelector) -> None:
        while True:
            ready = selector.select()
            with self._changed:
                for key, _ in ready:
                    key.data(selector)
                if is_over := not selector.get_map():
                    selector.close()
                    self._selector = None
                self._changed.notify_all()
            if is_over:
                return


@dataclass(eq=False)
class Endpoint:
    """An address at which a server answers, until it is shut, and the clients there."""

    _server: FdServer
    address: str
    _listener: socket.socket
    _answer: Answer
    _left: Left
    _most: int | None
    _clients: list[Client] = field(default_factory=list)
    _is_ended: bool = False  # it answers no more
    _is_shut: bool = False  # and has no leases

    def leases(self, mark: str = "") -> list[int]:
        """Return the process identifiers of the clients that hold a lease.

        With `mark`: only of those whose last request with that key had the value True there.
        """
        with self._server._changed:
            clients = [] if self._is_shut else self._clients
            return [each.pid for each in clients if not mark or each.marks.get(mark)]

    def end_leases(self, timeout_s: float, mark: str = "") -> list[int]:
        """Stop answering, and notify all clients; return those that hold a lease after some time.

        `mark` as in `leases`. Blocks. A client with a full socket misses the message.
        """
        with self._server._changed:
            self._end()
            for client in self._clients:
                _send(client, _OVER)
            self._server._changed.wait_for(lambda: not self.leases(mark), timeout_s)
            return self.leases(mark)

    def shut(self) -> None:
        """Stop answering, and end the leases. May be repeated; does nothing in a fork.

        Returns when the descriptors are closed.
        """
        if os.getpid() != self._server._pid:
            return
        with self._server._changed:
            self._end()
            self._is_shut = True
            if self in self._server._endpoints:
                self._server._endpoints.remove(self)
            for client in self._clients:
                _hang_up(client.connection)
            self._server._changed.wait_for(self._is_gone, _CLOSING_S)

    def _is_gone(self) -> bool:
        """Whether the thread has closed all descriptors, its own too where it has no more to do."""
        server = self._server
        is_closed = self._listener.fileno() < 0 and not self._clients
        return is_closed and bool(server._endpoints or server._selector is None)

    def _end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            _hang_up(self._listener)

    # --- in the server's thread

    def accept(self, selector: selectors.EpollSelector) -> None:
        """Admit a client."""
        if self._is_ended:
            selector.unregister(self._listener)
            self._listener.close()
            return
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # the client is gone, or this process has no descriptor left
            time.sleep(_REST_S)
            return
        pid, uid = peer_of(connection)
        if uid != os.getuid():
            connection.close()
            time.sleep(_REST_S)
            return
        connection.setblocking(False)
        client = Client(connection, pid)
        if self._most is not None and len(self._clients) >= self._most:
            _send(client, {"refused": f"it has {self._most} visitors already"})
            connection.close()
            return
        self._clients.append(client)
        selector.register(connection, selectors.EVENT_READ, partial(self._reply, client))

    def _reply(self, client: Client, selector: selectors.EpollSelector) -> None:
        try:
            text = b"" if self._is_shut else client.connection.recv(NBYTES)
        except OSError:
            text = b""
        if not text or not self._send_answer(client, text):
            selector.unregister(client.connection)
            client.connection.close()
            self._clients.remove(client)
            self._left(client)

    def _send_answer(self, client: Client, text: bytes) -> bool:
        """Return whether the client is still there."""
        if self._is_ended:
            return _send(client, _OVER)
        try:
            request = json.loads(text)
            reply, fds = self._answer(request, client)
            client.marks |= {key: value for key, value in request.items() if value in (True, False)}
        except Exception as error:  # any error: the job goes on, the client gets it as the reply
            reply, fds = {"refused": f"{type(error).__name__}: {error}"}, ()
        return _send(client, reply, fds)


def _send(client: Client, message: dict[str, Any], fds: Sequence[int] = ()) -> bool:
    """Send a message; return whether the client took it."""
    try:
        socket.send_fds(client.connection, [json.dumps(message).encode()], fds)
    except OSError:
        return False
    return True


def _hang_up(connection: socket.socket) -> None:
    """End a connection, or a listener, in all processes that have copies of it, as forks do."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _bind(listener: socket.socket, name: str) -> str:
    """Bind a socket to an abstract address that begins with a name, and return it."""
    import secrets  # brings `random` and `base64`, and few programs pass descriptors

    address = f"mpishare/{os.getuid()}/{name}/{secrets.token_urlsafe(_TOKEN_NBYTES)}"
    listener.bind(f"\0{address}")
    return address
