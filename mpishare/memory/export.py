"""Memory of a window in a form that programs without Python open: see ``mpishare_open.h``."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpishare.errors import HandleError, UnsupportedError
from mpishare.memory.kinds import Kind

if TYPE_CHECKING:
    from mpishare.memory.handle import Handle

HANDLE_NBYTES = 64
_IDENTITY = struct.Struct("=QQ")  # of a file: device and inode
_WAY = {Kind.ALLOCATION: "cuda-ipc", Kind.BLOCK: "cuda-ipc", Kind.POOL: "cuda-fd"}
_WHY_NOT = {
    Kind.CHUNKS: "its memory is mapped in chunks (PyTorch's expandable segments), each of which "
    "has a descriptor. Share a copy: copy=True",
}
_WHY_NO_FILE = {
    Kind.ALLOCATION: "without a name it keeps no file open. Make the window with name='...'",
    Kind.FILE: "its file has no name and no descriptor. Export memory that keeps its file",
}


@dataclass(frozen=True)
class Export:
    """One segment of a window, for programs in C and C++. Made by `Window.export`.

    ``str`` of it is one line of text without quotes, which ``mpishare_parse`` reads.

    Attributes
    ----------
    kind : str
        ``"cuda-ipc"``: `handle` is a ``CUipcMemHandle``; ``"cuda-fd"``: it is a
        ``CUmemPoolPtrExportData``, and `path` the address of the pool's descriptor;
        ``"host-file"``: it begins with the device and the inode of the file of `path`.
    handle : bytes
        Of 64 bytes.
    offset, nbytes : int, bytes
        The segment's place in the allocation or file. Strides may leave gaps in it.
    uuid : str
        Of the GPU; empty on the host backend.
    path : str
        ``/proc/PID/fd/N`` on the host; empty for ``"cuda-ipc"``.
    """

    kind: str
    handle: bytes
    offset: int
    nbytes: int
    uuid: str
    path: str

    def __str__(self) -> str:
        """Return the line that ``mpishare_parse`` reads."""
        numbers = f"{self.kind} {self.offset} {self.nbytes} {self.uuid or '-'}"
        return f"mpishare-export 1 {numbers} {self.handle.hex()} {self.path or '-'}"


def make_export(call: str, handle: Handle, path: str) -> Export:
    """Return an export; `path` leads to an allocation of the host. Raises `UnsupportedError`."""
    kind, token = _WAY.get(Kind(handle.kind), ""), handle.token
    if handle.backend == "host" and handle.kind != Kind.WINDOW:
        kind = "host-file"
        if handle.kind == Kind.FILE:
            path = json.loads(token)[1]
    if why := _why_not(handle, kind, path):
        raise UnsupportedError(f"{call} failed: {why}.")
    if kind == "host-file":
        token = _identity(call, path).hex()
    path, _, token = token.rpartition(":") if handle.kind == Kind.POOL else (path, "", token)
    raw = bytes.fromhex(token.rpartition(":")[2])
    return Export(kind, raw, handle.offset, handle.nbytes, handle.uuid, path)


def _identity(call: str, path: str) -> bytes:
    """Return the identity of a file of any rank, as another process compares it."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise HandleError(
            f"{call} failed: {path} cannot be seen: {error.strerror}. The rank that owns it has "
            "ended, or is in another PID namespace: let it call export()"
        ) from None
    return _IDENTITY.pack(found.st_dev, found.st_ino).ljust(HANDLE_NBYTES, b"\0")


def _why_not(handle: Handle, kind: str, path: str) -> str:
    if not handle.nbytes:
        return "it has no elements"
    if handle.kind == Kind.WINDOW:
        return f"it is a part of window {handle.token.partition(':')[0]}: export that one"
    if kind == "host-file":
        return "" if path else _WHY_NO_FILE[Kind(handle.kind)]
    return _WHY_NOT.get(Kind(handle.kind), "")
