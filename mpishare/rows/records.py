"""Records of rows: arguments of the kernels, as the structs of rows.cu."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

MAX_KEYS, MAX_LANES, GOALS = 32, 64, 34
DROPPED, STRANGER = MAX_KEYS, MAX_KEYS + 1  # goals behind those of the keys
HEADER_NBYTES, OFFER_NBYTES, DEVICE_NBYTES = 128, 512, 4352
NO_ROUNDS, ROUNDS, LAST_ROUNDS, MIGRATION = range(4)  # kinds of `take_rows`
ALL_KEYS = (1 << 32) - 1
WARPS, THREADS = 16, 512  # of a block
AT_ONCE = 4  # words of a row that a thread moves at once
NO_SET = -1
_U32, _U64, _I32, _I64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64


def _struct(name: str, **fields: Any) -> Any:
    """Return a struct of rows.cu, which tells what its fields are."""
    return type(name, (ctypes.Structure,), {"_fields_": [*fields.items()]})


Lane = _struct("Lane", column=_U64, slot=_U32, at=_U32, stride=_U32, nbytes=_U32)
Lanes = _struct("Lanes", of=Lane * (MAX_LANES + 1), count=_U32)
LANE = np.dtype(Lane)
Into = _struct("Into", set=_I32 * MAX_KEYS, capacity=_U64 * MAX_KEYS)
Bound = _struct("Bound", at=_U64, value=_I64, nbytes=_I32, unused=_I32)
Span = _struct("Span", low=Bound, high=Bound, numbers=_U64, nbytes=_I32, most=_I32)
Spans = Span * MAX_KEYS
Sizes = _struct("Sizes", table=_U64, needed=_U64, nkeys=_I32, room=_U32, slot=_U64)
Scratch = _struct("Scratch", listed=_U64, gone=_U64, goes_to=_U64, of_blocks=_U64, shifted=_U64)

_KEY = [(name, "<u8") for name in ("theirs", "mine", "mine_rows", "rows", "there")]
TABLE = np.dtype(
    [
        *((name, "<u8") for name in ("kept", "most", "begun", "done")),
        ("keys", [*_KEY, ("peer", "<i4"), ("scale", "<u4"), ("odd", "<u8")], MAX_KEYS),
    ]
)

# Words of a header, and of what a rank offers a peer: the first is what its GPU needs.
COUNT, CREDIT, WANTED, ROWS, SCALE = range(5)
NEEDED, OFFERED, TAKEN, WHERE, NBYTES, HANDLE = range(6)
GOES = WHERE  # rows that went to another node, for which there are no offers

# Words of int64 for the host.
CAME, SENT, STUCK, AT, SCALES = range(0, 5 * MAX_KEYS, MAX_KEYS)
LEFT, STRANGERS, KEPT, CUT, BEYOND, OUTSIDE, EPOCH, RESULTS = range(5 * MAX_KEYS, 5 * MAX_KEYS + 8)


def word_of(nbytes: int, address: int = 0) -> int:
    """Return the bytes of the widest word in which rows of this size can be copied."""
    return min(16, (nbytes | address) & -(nbytes | address))
