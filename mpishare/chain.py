"""The chain of one object: what is called on it comes in order, on whatever streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpishare.backends import Backend


class Chain:
    """Puts the calls on one object in order where the stream changes between them.

    Parameters
    ----------
    backend : Backend
        Whose streams they are.
    name : str
        The object's, for errors.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._enter = backend.enter
        self._name = name
        self._number: int | None = None
        self._owner: Any = None

    def enter(self, call: str, stream: Any) -> int:
        """Return the stream's number, after what was put on the object's last stream.

        Raises
        ------
        UnsupportedError
            If the stream is being captured.
        TypeError
            If it is no stream.
        """
        number, owner = self._enter(stream, self._name, call)
        if number != self._number:
            if self._number is not None:
                self._backend.follow(number, self._number)
            self._number = number
        # Held, so that the stream is not destroyed before the next one has followed it.
        self._owner = owner
        return number

    def end(self) -> None:
        """Let go of the stream."""
        self._owner = None
