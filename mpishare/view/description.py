"""The description of a named window that its job sends, and its validation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.errors import HandleError
from mpishare.memory import dtypes
from mpishare.memory.fd_client import printable
from mpishare.memory.memory import ArrayLayout
from mpishare.view.page import BUFFERS, Places
from mpishare.windows.publisher import MOST_LAG

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from mpishare.memory.fd_client import FdClient

# Version of the messages of doors, of descriptions and of pages.
VERSION = 4

# Descriptors in one reply: the kernel takes 253.
MAX_FDS = 200

_TOKEN = re.compile(r"([0-9a-f]{128})?")


class Segment(NamedTuple):
    """One rank's part: its layout in memory, its GPU, and the driver's handle of it."""

    rank: int
    layout: ArrayLayout
    uuid: str = ""
    token: str = ""

    def pack(self) -> dict[str, Any]:
        shape, _, strides, _ = self.layout
        where = {"uuid": self.uuid, "token": self.token}
        return {"rank": self.rank, "shape": shape, "strides": strides, **where}


@dataclass(frozen=True)
class Description:
    """A named window as its job describes it; `segments` in the order of their ranks."""

    backend: str
    segments: tuple[Segment, ...]
    why_not_live: str  # empty if other processes can map its memory
    pid: int  # of the leader of the node
    since: int | None = None  # ns on the machine's clock, when the door had been opened
    viewers: tuple[int, ...] = ()  # processes that have attached
    lag: int = 0  # of a channel: frames that a viewer may be behind

    def places(self) -> Places:
        sizes = [segment.layout.nbytes for segment in self.segments]
        return Places(sizes, self.lag + 1 if self.lag else BUFFERS)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.segments[0].layout.dtype

    @property
    def n_files(self) -> int:
        """Descriptors that come with it: of the page, and on the host of the segments."""
        return 1 if self.why_not_live or self.backend == "cuda" else 1 + len(self.segments)

    def pack(self) -> dict[str, Any]:
        return {
            **vars(self),
            "version": VERSION,
            "dtype": dtypes.dump(self.dtype),
            "segments": [segment.pack() for segment in self.segments],
        }

    @classmethod
    def ask(cls, visit: FdClient, **request: Any) -> Description:
        """Return what a window's door answers. Raises as `FdClient.ask` and `parse`."""
        return cls.parse(visit.ask({"version": VERSION, **request})[0])

    @classmethod
    def parse(cls, received: dict[str, Any]) -> Description:
        """Check a description that may be of another version, or not of mpishare at all.

        Raises `HandleError` with the reason.
        """
        if received.get("version") != VERSION:
            raise HandleError(
                f"the job's mpishare speaks version {printable(received.get('version'))} of the "
                f"protocol, this one {VERSION}. Use the same mpishare."
            )
        found = _checked(received, _WINDOW)
        dtype = dtypes.load(found.pop("dtype"))
        segments = tuple(_segment(each, dtype) for each in found["segments"])
        described = cls(**found | {"segments": segments})
        ranks = [segment.rank for segment in segments]
        if ranks != sorted({*ranks}):
            raise HandleError(f"the job told of segments of ranks {printable(ranks)}")
        return described


def _segment(received: dict[str, Any], dtype: np.dtype[Any]) -> Segment:
    found = _checked(received, _SEGMENT)
    shape, strides = found.pop("shape"), found.pop("strides")
    layout = ArrayLayout(shape, dtype, strides)
    is_known = strides is None or (len(strides) == len(shape) and layout.is_dense)
    if not dtypes.can_be_array(shape, dtype.itemsize) or not is_known:
        raise HandleError(
            f"the job told of a segment of shape {printable(shape)}, strides {printable(strides)}"
        )
    return Segment(**found, layout=layout)


def _checked(
    received: dict[str, Any], checks: Mapping[str, Callable[[Any], object]]
) -> dict[str, Any]:
    """Return the fields for which there are checks, if they pass them; lists become tuples."""
    for key, is_right in checks.items():
        if key not in received or not is_right(received[key]):
            raise HandleError(f"the job told of {key} {printable(received.get(key, 'nothing'))}")
    found = {key: received[key] for key in checks}
    return {key: tuple(each) if isinstance(each, list) else each for key, each in found.items()}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_list(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_right, value))


_WINDOW: dict[str, Callable[[Any], object]] = {
    "backend": lambda value: value in ("cuda", "host"),
    "dtype": _is_text,
    "segments": lambda value: value and _is_list(value, lambda each: isinstance(each, dict)),
    "why_not_live": _is_text,
    "pid": _is_count,
    "since": lambda value: value is None or _is_count(value),
    "viewers": lambda value: _is_list(value, _is_count),
    "lag": lambda value: _is_count(value) and value <= MOST_LAG,
}
_SEGMENT: dict[str, Callable[[Any], object]] = {
    "rank": _is_count,
    "shape": lambda value: _is_list(value, _is_count),
    "strides": lambda value: value is None or _is_list(value, _is_count),
    "uuid": _is_text,
    "token": lambda value: isinstance(value, str) and _TOKEN.fullmatch(value),
}
