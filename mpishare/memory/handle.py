"""The handle: the value object that travels between ranks and stands for one allocation."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

from mpishare.errors import HandleError
from mpishare.memory.kinds import Kind


@functools.cache
def boot_id() -> str:
    """Return an identifier of this running kernel, the same for all ranks of a machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Handle:
    """A part of an allocation, in the form that travels between ranks."""

    VERSION: ClassVar[int] = 1

    backend: str
    token: str  # for the driver or the system: 128 hexadecimal digits, or a file name
    offset: int
    nbytes: int
    capacity: int  # bytes of the whole allocation
    uuid: str  # of the GPU; empty on the host backend
    nonce: str  # of the owner's process, whose identifier can be reused, or equal in containers
    boot: str  # the running kernel of the owner
    kind: str = Kind.ALLOCATION

    def pack(self) -> str:
        """Return the text that travels: version, digest, fields."""
        body = json.dumps(asdict(self), sort_keys=True)
        return f"{self.VERSION}:{_digest(body)}:{body}"

    @classmethod
    def unpack(cls, text: str, *, backend: str, nonce: str, nbytes: int) -> Handle:
        """Check a received text and return the handle.

        `backend` and `nonce` are known by another way. Raises `HandleError` if the text is damaged,
        of another version, process or machine, or stands for less memory than `nbytes`, which the
        receiver is about to map.
        """
        handle = cls._parse(text)
        for what, got, wanted in (
            ("backend", handle.backend, backend),
            ("process", handle.nonce, nonce),
            ("machine", handle.boot, boot_id()),
        ):
            if got != wanted:
                raise HandleError(f"a handle of {what} {got!r} was received, not of {wanted!r}")
        if handle.nbytes < nbytes:
            raise HandleError(
                f"a handle of {handle.nbytes} bytes was received where {nbytes} bytes are needed"
            )
        if handle.offset < 0 or handle.offset + handle.nbytes > handle.capacity:
            raise HandleError(
                f"a handle of bytes {handle.offset} to {handle.offset + handle.nbytes} exceeds "
                f"its allocation of {handle.capacity} bytes"
            )
        return handle

    @classmethod
    def _parse(cls, text: str) -> Handle:
        """Return the handle of a text that `pack` made; `HandleError` for any other text."""
        version, _, rest = text.partition(":")
        digest, _, body = rest.partition(":")
        if version != str(cls.VERSION):
            raise HandleError(
                f"a handle of version {version[:8]!r} was received, this is version {cls.VERSION}. "
                "All ranks must run the same mpishare."
            )
        if digest != _digest(body):
            raise HandleError("a handle was damaged on its way: its digest does not match")
        received = json.loads(body)
        kinds = {field.name: field.type for field in fields(cls)}
        if {name: type(received[name]).__name__ for name in received} != kinds:
            raise HandleError("a handle of other fields was received")
        return cls(**received)


def _digest(body: str) -> str:
    # Against damage and mix-ups, not against an attacker: it travels by agreements of the node
    # alone, in memory and messages of its ranks, and never through the hands of the user.
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
