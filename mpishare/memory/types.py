"""The types of what users give, for type checkers alone: no module imports this one as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike as DTypeLike


class Array(Protocol):
    """An array of NumPy, CuPy, PyTorch or another library; a window or a `Layout` in its place."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


class _ArrayOfNumPyOrCuPy(np.ndarray[Any, np.dtype[Any]]):
    @property
    def data(self) -> Any: ...

    def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, index: Any) -> Any: ...


class _StreamOfCuPy(Protocol):
    @property
    def ptr(self) -> int: ...


class _StreamOfPyTorch(Protocol):
    @property
    def cuda_stream(self) -> int: ...


class _StreamOfAny(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...


class _DeviceOfCuPy(Protocol):
    @property
    def id(self) -> int: ...


AnyArray: TypeAlias = _ArrayOfNumPyOrCuPy | Any  # which fits where CuPy's or a tensor is wanted
GivenArray = TypeVar("GivenArray", bound=Array)
Fields: TypeAlias = Array | Sequence[Array]
Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
Order: TypeAlias = Literal["C", "F"]
Index: TypeAlias = tuple[slice | EllipsisType, ...]
Width: TypeAlias = SupportsIndex | Sequence[SupportsIndex | Sequence[SupportsIndex]]
Widths: TypeAlias = Width | Sequence[Width]
Stream: TypeAlias = int | _StreamOfCuPy | _StreamOfPyTorch | _StreamOfAny
GivenDevice: TypeAlias = int | str | _DeviceOfCuPy
BackendName: TypeAlias = Literal["cuda", "host"]
RouteName: TypeAlias = Literal["fused", "copy", "pinned", "nccl", "host", "mpi-gpu", "mpi"]
WireName: TypeAlias = Literal["float32", "float16", "bfloat16"]
OperationName: TypeAlias = Literal[
    "sum", "max", "min", "prod", "maxloc", "minloc", "land", "lor", "lxor", "band", "bor", "bxor"
]
