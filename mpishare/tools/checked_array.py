"""Arrays of windows that note which of their elements NumPy has read and written, for the checker.

Seen are indices, ufuncs, and the methods and functions that are listed here; not a copy of such an
array that loses its class (`np.asarray`), nor what other libraries do by the buffer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.memory.memory import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

# Frames of these files are passed over: an access is named by the line of the program.
_PASSED_OVER = tuple(f"{Path(each).parent}/" for each in (np.__file__, __file__))
_READERS = (
    "__bool__", "__complex__", "__contains__", "__copy__", "__deepcopy__", "__float__",
    "__format__", "__index__", "__int__", "__repr__", "__str__", "argmax", "argmin",
    "argpartition", "argsort", "astype", "byteswap", "choose", "copy", "dot", "flatten", "nonzero",
    "repeat", "tobytes", "tofile", "tolist", "trace",
)  # fmt: skip
_WRITERS = "fill", "partition", "sort"
_SELECTING = "compress", "item", "take"
_READING = {
    np.allclose, np.array_equal, np.concatenate, np.copy, np.dot, np.einsum, np.inner,
    np.linalg.norm, np.save, np.tensordot, np.vdot, np.where,
}  # fmt: skip


class Segment:
    """A segment of a window, and which elements this rank has touched, by kind and line.

    Nothing is noted while there is a plan `under_way`, which accesses memory on its own.
    """

    def __init__(self, name: str, array: Any, under_way: Collection[int]) -> None:
        self.name = name  # on all ranks
        self.touched: dict[tuple[bool, str], np.ndarray[Any, Any]] = {}
        self._begin, self._nbytes = address_of(array), array.nbytes
        self._granule = _granule(array.dtype)
        self._under_way = under_way

    def note(
        self, array: np.ndarray[Any, Any], select: Callable[[Any], Any], *, is_write: bool
    ) -> None:
        """Note an access to what is selected of an array, if that is in the segment."""
        at = address_of(array) - self._begin
        if self._under_way or not array.size or not 0 <= at < self._nbytes:
            return
        how = is_write, _line()
        if how not in self.touched:
            self.touched[how] = np.zeros(-(-self._nbytes // self._granule), bool)
        elements = self.touched[how]
        places = np.array(at)
        for extent, stride in zip(array.shape, array.strides, strict=True):
            places = places[..., None] + stride * np.arange(extent)
        for byte in (*range(0, array.itemsize, self._granule), array.itemsize - 1):
            elements[(select(places) + byte) // self._granule] = True


class CheckedArray(np.ndarray[Any, Any]):
    """An array of a window, or a view of one; copies have the class too, and note nothing."""

    segment: Segment | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.segment = getattr(source, "segment", None)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        touched, rest = self._touched(found, key)
        if touched is not found:  # what a view is for, it will note itself
            _note(touched, is_write=False, key=rest)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, _plain(value))
        _note(value, is_write=False)
        touched, rest = self._touched(super().__getitem__(key), key)
        _note(touched, is_write=True, key=rest)

    def _touched(self, found: Any, key: Any) -> tuple[Any, Any]:
        """Return a view of what a key has `found`; where there is none, this array and the key.

        Of one element, too: its place in the whole would need the places of all.
        """
        if not isinstance(found, np.ndarray):
            found = super().__getitem__((*(key if isinstance(key, tuple) else (key,)), ...))
        return (found, ...) if np.may_share_memory(found, self) else (self, key)

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any
    ) -> Any:
        given_out = {"out": tuple(map(_plain, out))} if out else {}
        plain = {name: _plain(value) for name, value in options.items()}
        found = getattr(ufunc, method)(*map(_plain, inputs), **plain, **given_out)
        if method == "at":
            _note(inputs[0], is_write=True, key=inputs[1])
        elif options.get("where", True) is True:  # else only some elements are touched
            for each in inputs:
                _note(each, is_write=False)
            for each in out:
                _note(each, is_write=True)
        if not out:
            return found
        given = [
            made if each is None else each
            for each, made in zip(out, found if isinstance(found, tuple) else (found,), strict=True)
        ]
        return given[0] if len(given) == 1 else tuple(given)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        found = super().__array_function__(function, types, args, options)
        if function is np.copyto and "where" not in options:
            _note(args[0], is_write=True)
            _note(args[1], is_write=False)
        elif function in _READING:
            for each in (*args, *options.values()):
                for one in each if isinstance(each, list | tuple) else [each]:
                    _note(one, is_write=False)
        return found


def _method(name: str, *, is_write: bool) -> Any:
    inner = getattr(np.ndarray, name)

    def call(array: CheckedArray, *args: Any, **options: Any) -> Any:
        found = inner(array, *args, **options)
        if name in _SELECTING:  # the same of their places
            chosen = {each: value for each, value in options.items() if each != "out"}
            _note_selected(array, lambda places: getattr(places, name)(*args, **chosen))
        else:
            _note(array, is_write=is_write)
        return found

    return call


for _name in (*_READERS, *_SELECTING, *_WRITERS):
    setattr(CheckedArray, _name, _method(_name, is_write=_name in _WRITERS))


def _note(array: Any, *, is_write: bool, key: Any = ...) -> None:
    _note_selected(array, lambda places: places[key], is_write=is_write)


def _note_selected(array: Any, select: Callable[[Any], Any], *, is_write: bool = False) -> None:
    if isinstance(array, CheckedArray) and array.segment is not None:
        array.segment.note(array, select, is_write=is_write)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, CheckedArray) else value


def _granule(dtype: np.dtype[Any]) -> int:
    """Return the bytes of the smallest number that two ranks may write independently."""
    if dtype.kind == "c":
        return dtype.itemsize // 2
    return dtype.itemsize if dtype.kind in "biufmM" else 1


def _line() -> str:
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
