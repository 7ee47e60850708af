"""Program order of the calls on one object, on any streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.backends import handle_of
from mpishare.coordination.recording import require_none
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from mpishare.backends import Backend, StreamInfo


class StreamChain:
    """Orders the calls on one object: when the stream changes, the new one waits for the last.

    `handle` is the stream of the last call, or None; `stays_alive` whether it certainly exists at
    the next one; `lasting` is None where it may not.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._has_streams = backend.has_streams
        self.is_current = backend.is_current
        self.name = name
        self.handle: int | None = None
        self.lasting: int | None = None
        self._owner: Any = None
        self.stays_alive = True
        self._event: Any = None

    @property
    def last(self) -> StreamInfo:
        """The stream of the last call."""
        return self.handle or 0, self._owner, self.stays_alive, False

    def enter(self, call: str, stream: Any) -> int:
        """Return the handle of a call's stream, ordered after the object's last stream."""
        if not self._has_streams:
            return 0 if stream is None else handle_of(stream)
        last = self.lasting
        if stream is None and last is not None and self.is_current(last):
            return last  # most calls: the stream has not changed
        handle, owner, stays_alive, is_captured = self._backend.enter(stream)
        if is_captured:
            raise UnsupportedError(
                f"{self.name}: {call} failed: the stream is being captured into a graph. The "
                "value that is waited for would be baked in, and the second replay would pass "
                "early. Call it outside of the capture."
            )
        require_none(f"{self.name}: {call}", "its stream is not the captured one")
        self.follow(handle, owner, stays_alive=stays_alive)
        return handle

    def follow(self, handle: int, owner: Any, *, stays_alive: bool) -> None:
        """Let a stream wait for the last one, and make it the last; `owner` keeps it alive."""
        if handle != self.handle or not self.stays_alive:
            self._follow(handle)
            self.handle = handle
        # Held, so that the stream is not destroyed before the next one waits for it.
        self._owner, self.stays_alive = owner, stays_alive
        self.lasting = handle if stays_alive else None

    def leave(self) -> None:
        """Record the end of a call, if its stream may be destroyed before the next call."""
        if not self.stays_alive and self.handle is not None:
            self._record(self.handle)

    def is_over(self) -> bool:
        """Whether all work enqueued by the object's calls is done."""
        if self.handle is None:
            return True
        if self.stays_alive:
            return self._backend.is_done(self.handle)
        return self._event is None or self._backend.is_event_done(self._event)

    def end(self) -> None:
        self._owner = self.handle = self.lasting = None
        if self._event is not None:
            self._backend.close_events([self._event])
            self._event = None

    def _follow(self, handle: int) -> None:
        if self.handle is None:
            return
        if self.stays_alive:
            self._record(self.handle)
        # None if the only call so far raised before it had enqueued any work.
        if self._event is not None:
            self._backend.wait_event(self._event, handle)

    def _record(self, handle: int) -> None:
        if self._backend.is_capturing(handle):
            raise UnsupportedError(
                f"{self.name}: its last call was on a stream that is being captured into a graph, "
                "which another stream cannot wait for. Call it on the stream of the capture, or "
                "after the capture has ended."
            )
        if self._event is None:
            self._event = self._backend.local_event()
        self._backend.record(self._event, handle)
