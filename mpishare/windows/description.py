"""What a job tells of a named window, and the one place where that is checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.errors import HandleError
from mpishare.memory import dtypes
from mpishare.memory.visit import printable
from mpishare.windows.page import is_dense

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

VERSION = 2
"""Of what doors, descriptions and pages say."""

MAX_FDS = 200
"""Descriptors in one reply: the kernel takes 253."""

_MAX_RANKS = 1 << 20
_TOKEN = re.compile(r"([0-9a-f]{128})?")


class Segment(NamedTuple):
    """The part of one rank: how it lies in memory, on which GPU, and the driver's handle of it."""

    rank: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    nbytes: int
    uuid: str = ""
    token: str = ""


@dataclass(frozen=True)
class Description:
    """A named window as its job describes it.

    Attributes
    ----------
    backend : str
        ``"cuda"`` or ``"host"``.
    size : int
        How many ranks the node has.
    segments : tuple of Segment
        Of the ranks that have one, in order.
    why_not_live : str
        Why its memory cannot be mapped by others, if it cannot.
    pid : int
        The leader of the node.
    since : int or None, ns
        When the leader had opened the door, on the clock that all processes of the machine share.
    viewers : tuple of int
        Processes that have attached.
    """

    backend: str
    dtype: np.dtype[Any]
    size: int
    segments: tuple[Segment, ...]
    why_not_live: str
    pid: int
    since: int | None = None
    viewers: tuple[int, ...] = ()

    @property
    def n_files(self) -> int:
        """Descriptors that come with it: of the page, and on the host of the segments."""
        return 1 if self.why_not_live or self.backend == "cuda" else 1 + len(self.segments)

    def pack(self) -> dict[str, Any]:
        """Return what travels."""
        return {
            **vars(self),
            "version": VERSION,
            "dtype": dtypes.dump(self.dtype),
            "segments": [segment._asdict() for segment in self.segments],
        }

    @classmethod
    def parse(cls, told: dict[str, Any]) -> Description:
        """Check what a process said that may be no job of mpishare, or of another version.

        Raises
        ------
        HandleError
            With what is wrong.
        """
        if told.get("version") != VERSION:
            raise HandleError(
                f"the job's mpishare speaks version {printable(told.get('version'))} of the "
                f"protocol, this one {VERSION}. Use the same mpishare."
            )
        dtype = dtypes.load(_take(told, "dtype", _is_text))
        size = _take(told, "size", lambda value: _is_count(value) and 0 < value <= _MAX_RANKS)
        segments = _take(told, "segments", _are_dicts)
        described = cls(
            _take(told, "backend", lambda value: value in ("cuda", "host")),
            dtype,
            size,
            tuple(_segment(each, dtype.itemsize) for each in segments),
            _take(told, "why_not_live", _is_text),
            _take(told, "pid", _is_count),
            _take(told, "since", lambda value: value is None or _is_count(value)),
            tuple(_take(told, "viewers", _is_counts)),
        )
        ranks = [segment.rank for segment in described.segments]
        if ranks != sorted({*ranks}) or ranks[-1] >= size:
            raise HandleError(f"the job told of segments of ranks {printable(ranks)} of {size}")
        return described


def _segment(told: dict[str, Any], itemsize: int) -> Segment:
    shape = tuple(_take(told, "shape", _is_counts))
    strides = _take(told, "strides", lambda value: value is None or _is_counts(value))
    is_known = strides is None or (
        len(strides) == len(shape) and is_dense(shape, strides, itemsize)
    )
    if not dtypes.can_be_array(shape, itemsize) or not is_known:
        raise HandleError(
            f"the job told of a segment of shape {printable(shape)}, strides {printable(strides)}"
        )
    return Segment(
        _take(told, "rank", _is_count),
        shape,
        None if strides is None else tuple(strides),
        math.prod(shape) * itemsize,
        _take(told, "uuid", _is_text),
        _take(told, "token", lambda value: isinstance(value, str) and _TOKEN.fullmatch(value)),
    )


def _take(told: dict[str, Any], key: str, is_right: Callable[[Any], object]) -> Any:
    if key not in told or not is_right(told[key]):
        raise HandleError(f"the job told of {key} {printable(told.get(key, 'nothing'))}")
    return told[key]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _are_dicts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))
