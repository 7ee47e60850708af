"""The handle of an array of a pool: the address of the pool's door, a block, and a layout in it.

A handle may go through a file or a queue that others can write. So it begins with a digest that
requires the key of the pool, and is parsed only after that matches. The ranks of the node have the
key; the door gives it to processes of the same user. They read the address alone before that: what
is in there cannot be trusted, but they ask the kernel whose process answers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from typing import Any

from mpishare.errors import HandleError
from mpishare.memory.memory import ArrayLayout
from mpishare.windows.pool_blocks import Block

_DIGEST_NBYTES = 16
_ADDRESS = re.compile(rb"(mpishare/\d{1,10}/pool/[\w-]{6})\0")


def pack(key: bytes, address: str, block: Block, token: bytes, layout: ArrayLayout) -> bytes:
    """Return a handle: a digest, the address of the door, and the description of the array."""
    facts = block.nbytes, block.slot, block.generation, token.hex(), layout.pack()
    body = f"{address}\0{json.dumps(facts)}".encode()
    return _digest(key, body) + body


def address_of(handle: Any) -> str:
    """Return the address of the door in a handle, which may be forged."""
    found = _ADDRESS.match(_raw(handle), _DIGEST_NBYTES)
    if found is None:
        raise HandleError("these bytes are no handle of a pool, or were damaged on their way")
    return found[1].decode()


def unpack(key: bytes, handle: Any) -> tuple[Block, ArrayLayout]:
    """Return the block and the layout of a handle; `HandleError` if it is not of this pool."""
    raw = _raw(handle)
    digest, body = raw[:_DIGEST_NBYTES], raw[_DIGEST_NBYTES:]
    if not hmac.compare_digest(digest, _digest(key, body)):
        raise HandleError(
            "the handle is of another pool or of another job, or was damaged on its way: its "
            "digest does not match"
        )
    nbytes, slot, generation, token, layout = json.loads(body.partition(b"\0")[2])
    return Block(0, nbytes, slot, generation, bytes.fromhex(token)), ArrayLayout.unpack(layout)


def _raw(handle: Any) -> bytes:
    if not isinstance(handle, bytes | bytearray | memoryview):
        raise TypeError(f"a handle of a pool is bytes, not {type(handle).__name__}")
    return bytes(handle)


def _digest(key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_NBYTES, key=key).digest()
