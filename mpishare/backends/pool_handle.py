"""The handle of a pool's array: its block and its layout there."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numpy as np

from mpishare.backends import BlockLayout
from mpishare.backends.pool_blocks import Block
from mpishare.errors import HandleError

_DIGEST_NBYTES = 16


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(extent, 1)
    return tuple(reversed(strides))


def is_inside(layout: BlockLayout, nbytes: int) -> bool:
    """Whether all bytes of an array lie in its block."""
    if 0 in layout.shape:
        return True
    reach = [(n - 1) * step for n, step in zip(layout.shape, layout.strides, strict=True)]
    first = layout.offset + sum(r for r in reach if r < 0)
    end = layout.offset + sum(r for r in reach if r > 0) + layout.dtype.itemsize
    return first >= 0 and end <= nbytes


def pack(key: bytes, block: Block, token: bytes, layout: BlockLayout) -> bytes:
    """Return a handle: a digest and a pickle."""
    place = block.nbytes, block.slot, block.generation, token
    # A dtype's name takes a tenth of the time of the dtype; one with fields has none.
    dtype = layout.dtype if layout.dtype.kind == "V" else layout.dtype.str
    body = pickle.dumps((key, place, layout.offset, layout.shape, layout.strides, dtype))
    return _digest(body) + body


def unpack(key: bytes, handle: Any) -> tuple[Block, BlockLayout]:
    """Return the block and the layout of a handle; `HandleError` if it is not of this pool."""
    if not isinstance(handle, bytes | bytearray | memoryview):
        raise TypeError(f"a handle of a pool is bytes, not {type(handle).__name__}")
    digest, body = bytes(handle[:_DIGEST_NBYTES]), bytes(handle[_DIGEST_NBYTES:])
    if digest != _digest(body):
        raise HandleError("the handle was damaged on its way: its digest does not match")
    # From a rank of the same job: a forged handle reaches no further than the job itself.
    found, place, offset, shape, strides, dtype = pickle.loads(body)  # noqa: S301
    if found != key:
        raise HandleError("the handle is of another pool, or of another job")
    nbytes, slot, generation, token = place
    block = Block(0, nbytes, slot, generation, token)
    return block, BlockLayout(offset, shape, strides, np.dtype(dtype))


def _digest(body: bytes) -> bytes:
    # Against damage and mix-ups, not against an attacker: ranks of one job trust each other.
    return hashlib.blake2b(body, digest_size=_DIGEST_NBYTES).digest()
