"""Dtypes as text, for other processes: pickles would run code, and NumPy's own text drops types."""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.errors import HandleError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLAIN = re.compile(r"[<>|][biufcmMSUV]\d+(\[\d*(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_EXTENSION = "ml_dtypes"
_MAX_DEPTH = 32
_MAX_AXES = getattr(np, "MAXDIMS", 64)  # NumPy 2 has no name for it


def dump(dtype: np.dtype[Any]) -> str:
    """Return the text from which `load` makes the dtype, by its fields, or by name of ml_dtypes.

    Raises `UnsupportedError` if it is of another library, or holds Python objects.
    """
    if dtype.isbuiltin == 1 and not dtype.hasobject:  # in a tenth of the time of the others
        return f'"{dtype.str}"'
    return json.dumps(_as_json(dtype))


@functools.lru_cache(256)
def load(text: str) -> np.dtype[Any]:
    """Return the dtype of a text that another process may have made up.

    Raises `HandleError` if the text is no dtype, or that of Python objects, or of ml_dtypes where
    it is not installed.
    """
    try:
        dtype = _from_json(json.loads(text))
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError):
        raise HandleError(f"{text[:100]!r} is no dtype") from None
    except ModuleNotFoundError:
        raise HandleError(f"{text[:100]} needs {_EXTENSION}, which is not installed here") from None
    if dtype.hasobject:
        raise HandleError(f"dtype {dtype} holds Python objects")
    return dtype


def can_be_array(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether NumPy can make an array of this shape, which another process may have made up.

    NumPy counts an extent of 0 as 1 where it checks whether the number of bytes fits into a word.
    """
    nbytes = math.prod(max(extent, 1) for extent in shape) * max(itemsize, 1)
    return len(shape) <= _MAX_AXES and min(shape, default=0) >= 0 and nbytes < 1 << 62


def _as_json(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        return [_as_json(dtype.subdtype[0]), dtype.shape]
    if dtype.names is not None and dtype.fields is not None:
        return _compound_as_json(dtype, [dtype.fields[name] for name in dtype.names])
    if dtype.isbuiltin != 2 and _PLAIN.fullmatch(dtype.str):
        return dtype.str
    if dtype.type is getattr(sys.modules.get(_EXTENSION), dtype.name, None):
        return f"{_EXTENSION}.{dtype.name}"
    raise UnsupportedError(
        f"dtype {dtype} is of a library that other processes may not have. Share its bytes: "
        "view them as 'u1'."
    )


def _compound_as_json(dtype: np.dtype[Any], fields: Sequence[Any]) -> dict[str, Any]:
    return {
        "names": dtype.names,
        "formats": [_as_json(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "record": dtype.type is np.record,
    }


def _from_json(data: Any, depth: int = _MAX_DEPTH) -> np.dtype[Any]:
    if not depth:
        raise ValueError(data)
    if isinstance(data, str):
        library, _, name = data.rpartition(".")
        if library == _EXTENSION:
            found: np.dtype[Any] = np.dtype(getattr(importlib.import_module(library), name))
            return found
        if not _PLAIN.fullmatch(data):
            raise ValueError(data)
        plain = np.dtype(data)
        if plain.str[1:] != data[1:]:  # NumPy 1.26 takes an itemsize modulo 2^32
            raise ValueError(data)
        return plain
    if isinstance(data, list):
        base, shape = data
        return np.dtype((_from_json(base, depth - 1), tuple(shape)))
    return _compound_from_json(data, [_from_json(each, depth - 1) for each in data["formats"]])


def _compound_from_json(data: Any, formats: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    is_record = data.pop("record")
    if not all(title is None or isinstance(title, str) for title in data["titles"]):
        raise TypeError(data)
    dtype = np.dtype(data | {"formats": formats})
    return np.dtype((np.record, dtype)) if is_record else dtype
