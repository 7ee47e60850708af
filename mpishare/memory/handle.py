"""The handle: the value object that travels between ranks and stands for one allocation."""

from __future__ import annotations

import json
from typing import NamedTuple

from mpishare.memory.kinds import Kind


class Handle(NamedTuple):
    """A part of an allocation, in the form that travels between ranks."""

    backend: str
    token: str  # for the driver or the system: 128 hexadecimal digits, or a file name
    offset: int
    nbytes: int
    capacity: int  # bytes of the whole allocation
    uuid: str  # of the GPU; empty on the host backend
    nonce: str  # of the owner's process, whose identifier can be reused, or equal in containers
    kind: str = Kind.ALLOCATION

    def pack(self) -> str:
        return json.dumps(self)

    @classmethod
    def unpack(cls, text: str) -> Handle:
        """Return the handle of a text that another rank has packed and sent in an agreed step."""
        return cls(*json.loads(text))
