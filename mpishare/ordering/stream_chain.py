"""The chain of one object: what is called on it comes in order, on whatever streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from mpishare.backends import Backend


class StreamChain:
    """Puts the calls on one object in order where the stream changes between them.

    Parameters
    ----------
    backend : Backend
        Whose streams they are.
    name : str
        The object's, for errors.

    Attributes
    ----------
    number : int or None
        The stream of the last call.
    is_kept : bool
        Whether it is sure to live until the next one.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._enter = backend.enter
        self._is_current = backend.is_current
        self._name = name
        self.number: int | None = None
        self._owner: Any = None
        self.is_kept = True
        self._event: Any = None

    def enter(self, call: str, stream: Any) -> int:
        """Return the stream's number, after what was put on the object's last stream.

        Raises
        ------
        UnsupportedError
            If the stream is being captured.
        TypeError
            If it is no stream.
        """
        number = self.number
        if stream is None and number is not None and self.is_kept and self._is_current(number):
            return number  # as most calls: there is nothing to follow
        number, owner, is_kept = self._enter(stream, self._name, call)
        self.follow(number, owner, is_kept=is_kept)
        return number

    def follow(self, number: int, owner: Any, *, is_kept: bool) -> None:
        """Put a stream after the object's last one, and remember it as that.

        Parameters
        ----------
        number : int
            The stream.
        owner : object
            What keeps it alive.
        is_kept : bool
            Whether that is sure to.
        """
        if number != self.number or not self.is_kept:
            self._follow(number)
            self.number = number
        # Held, so that the stream is not destroyed before the next one has followed it.
        self._owner, self.is_kept = owner, is_kept

    def leave(self) -> None:
        """Remember what was put on the stream, where it may be destroyed before the next call."""
        if not self.is_kept and self.number is not None:
            self._record(self.number)

    def is_over(self) -> bool:
        """Whether all that was put on streams is over. Local."""
        if self.number is None:
            return True
        if self.is_kept:
            return self._backend.is_done(self.number)
        return self._event is None or self._backend.is_event_done(self._event)

    def end(self) -> None:
        """Let go of the stream and of the event."""
        self._owner = self.number = None
        if self._event is not None:
            self._backend.close_events([self._event])
            self._event = None

    def _follow(self, number: int) -> None:
        if self.number is None:
            return
        if self.is_kept:
            self._record(self.number)
        # None where the one call that there was raised before it had put anything on the stream.
        if self._event is not None:
            self._backend.wait_event(self._event, number)

    def _record(self, number: int) -> None:
        if self._backend.is_capturing(number):
            raise UnsupportedError(
                f"{self._name}: it was used on a stream that is being captured into a graph now, "
                "and is called on another stream: what is there cannot be waited for. Call it on "
                "the stream of the capture, or after its end."
            )
        if self._event is None:
            self._event = self._backend.local_event()
        self._backend.record(self._event, number)
