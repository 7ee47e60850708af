"""NCCL: the few functions that messages between nodes need, by ctypes.

It is the library that CuPy, PyTorch or JAX loads anyway. CuPy's own binding has no communicators
that are made without blocking, and destroys them in a finalizer, where a graph may still need them.
"""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.errors import MpiShareError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    Move = tuple[int, int, int]
    """Bytes of a message: address, number, rank of the other end."""

OLDEST = 21800
"""The first version whose communicators are made and split without blocking."""
ANY_NBYTES = 16 << 10
"""The most bytes that NCCL takes out of any memory alike in captures and calls.

In captures it may map the memory of more into the other process, which both ends must know.
"""
_LEAVES_MEMORY_SINCE = 22403
_BYTES = 1  # ncclUint8
_KINDS = {"i1": 0, "u1": 1, "i4": 2, "u4": 3, "i8": 4, "u8": 5, "f2": 6, "f4": 7, "f8": 8}
_OPERATIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3}
_IN_PROGRESS = 7
_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF


def combines(dtype: np.dtype[Any], name: str, nranks: int) -> bool:
    """Whether NCCL combines elements to the bits that the order of the ranks gives.

    Integers in any order, numbers of two ranks in both; NaN is not the largest number for it.
    """
    is_number = dtype.kind == "f" and nranks == 2 and name in ("sum", "prod")
    is_known = dtype.str[1:] in _KINDS and name in _OPERATIONS
    return is_known and (is_number or dtype.kind in "iu")


class NcclError(MpiShareError):
    """A call of NCCL has failed."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("data", c_char * 128),)


class _Config(ctypes.Structure):
    """What NCCL 2.18 knows of a communicator; later ones take what `size` covers."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_void_p),
        ("split_share", c_int),
        ("unused", c_int),
    )


_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)],
    "ncclCommSplit": [c_void_p, c_int, c_int, POINTER(c_void_p), POINTER(_Config)],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclCommAbort": [c_void_p],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}


class Library:
    """The functions of NCCL. Made by `load`."""

    ncclGroupStart: Callable[[], int]  # noqa: N815  NCCL's names
    ncclGroupEnd: Callable[[], int]  # noqa: N815

    def __init__(self, library: ctypes.CDLL, version: int) -> None:
        self.version = version
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            setattr(self, name, function)
        self._text_of = library.ncclGetErrorString
        self._text_of.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raise `NcclError` unless it has done, or begun, its work."""
        self.require(name, getattr(self, name)(*arguments))

    def require(self, name: str, result: int) -> None:
        """Raise `NcclError` for a result that is an error."""
        if result not in (0, _IN_PROGRESS):
            raise NcclError(f"{name}: {self._text_of(result).decode()}")

    def unique_id(self) -> str:
        """Return the name of a new communicator, which its ranks meet by."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", byref(made))
        return bytes(made).hex()


@functools.cache
def load() -> Library:
    """Return NCCL, or raise `UnsupportedError` with the reason why there is none."""
    reason = "libnccl.so.2 is not found"
    for path in _paths():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            reason = str(error)
            continue
        version = c_int()
        library.ncclGetVersion(byref(version))
        if version.value >= OLDEST:
            return Library(library, version.value)
        reason = f"{path} is of version {version.value}, older than {OLDEST}"
    raise UnsupportedError(
        f"no NCCL: {reason}. Install one: pip install "
        "nvidia-nccl-cu13, or nvidia-nccl-cu12 for CUDA 12"
    )


def most_captured_alone() -> float:
    """Return the most bytes of a message that one rank may capture where the other calls.

    Out of memory of ``cudaMalloc`` at both ends. Since 2.24.3 NCCL maps that only where it is asked
    to, which may be in its own file nccl.conf: it adds that to the process's variables.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    is_asked = getenv(b"NCCL_LEGACY_CUDA_REGISTER") is not None
    return ANY_NBYTES if is_asked or load().version < _LEAVES_MEMORY_SINCE else math.inf


def _paths() -> Iterator[str]:
    """Yield the names of NCCL: that of the linker, then those of packages."""
    yield "libnccl.so.2"
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from map(str, Path(folder).glob("nccl/lib/libnccl.so.2"))


class Communicator:
    """A communicator of NCCL: one GPU per rank, here the current one."""

    def __init__(self, library: Library, handle: c_void_p, size: int, rank: int) -> None:
        self._library, self._handle = library, handle
        self.size, self.rank = size, rank

    @classmethod
    def begin(cls, size: int, rank: int, unique_id: str) -> Communicator:
        """Begin to make one, with all ranks; it may be used once `is_ready`."""
        library, handle = load(), c_void_p()
        name = _UniqueId.from_buffer_copy(bytes.fromhex(unique_id))
        config = _config(blocking=False)
        library.call("ncclCommInitRankConfig", byref(handle), size, name, rank, byref(config))
        return cls(library, handle, size, rank)

    def begin_child(self) -> Communicator:
        """Begin to make one of the same ranks, whose groups are launched by the calling thread.

        Groups of this one, which does not block, are launched by another thread: nothing may
        follow on the stream before that thread is done. The child may be used once this one is
        ready.
        """
        handle, config = c_void_p(), _config(blocking=True)
        split = "ncclCommSplit", self._handle, 0, self.rank, byref(handle), byref(config)
        self._library.call(*split)
        return Communicator(self._library, handle, self.size, self.rank)

    def is_ready(self) -> bool:
        """Whether what was begun is done; raises `NcclError` if it has failed. Any thread."""
        state = c_int()
        self._library.call("ncclCommGetAsyncError", self._handle, byref(state))
        self._library.require("a communicator of NCCL", state.value)
        return state.value != _IN_PROGRESS

    def bind(self, sends: Sequence[Move], recvs: Sequence[Move]) -> Callable[[int], None]:
        """Return the function that enqueues messages on a stream, as one kernel.

        Those between two ranks match in order.
        """
        library = self._library
        start, end = library.ncclGroupStart, library.ncclGroupEnd
        calls = []  # as NCCL takes them: to convert them takes longer than the calls
        for name, moves in (("ncclSend", sends), ("ncclRecv", recvs)):
            for address, nbytes, peer in moves:
                message = c_void_p(address), c_size_t(nbytes), c_int(_BYTES), c_int(peer)
                calls.append((getattr(library, name), (*message, self._handle), name))

        def group(stream: int) -> None:
            handle = c_void_p(stream)
            library.require("ncclGroupStart", start())
            try:
                for function, arguments, name in calls:
                    library.require(name, function(*arguments, handle))
            finally:
                library.require("ncclGroupEnd", end())

        return group

    def bind_reduction(self, kind: str, name: str, count: int) -> Callable[[int, int], None]:
        """Return the function that combines so many elements at an address, on a stream."""
        library = self._library
        rest = count, c_int(_KINDS[kind]), c_int(_OPERATIONS[name]), self._handle

        def reduce(address: int, stream: int) -> None:
            library.call("ncclAllReduce", address, address, *rest, stream)

        return reduce

    def abort(self) -> None:
        """End it, and release streams that wait in it.

        Returns once no graph has it any more: for a thread that no one waits for.
        """
        self._library.call("ncclCommAbort", self._handle)


def _config(*, blocking: bool) -> _Config:
    unset = _UNDEFINED
    size = ctypes.sizeof(_Config)
    return _Config(size, _MAGIC, OLDEST, blocking, unset, unset, unset, None, unset, unset)
