"""The structs of work_items.cuh, as NumPy records; the compiler asserts that their sizes agree."""

from __future__ import annotations

import struct

import numpy as np

AXES = 8
PACK, PACK_AND_ZERO, LOCAL, UNPACK, PUT_LL, GET_LL, READY = range(7)

PART_RECORD = np.dtype(
    [
        ("first", "<i8"),
        ("step", "<i8", AXES),
        ("places", "<u8"),
        ("extent", "<u4", AXES),
        ("axes", "<i4"),
        ("along", "<i4"),
        ("field", "<i4"),
        ("unit", "<i4"),
    ]
)
CELLS, FIELD = struct.Struct(f"<q{AXES}qQ{AXES}I2i"), struct.Struct("<2i")
"""The same record, faster to pack in Python: the cells of a part, then its field and unit."""

ITEM_RECORD = np.dtype(
    [
        ("part", PART_RECORD),
        ("packed", "<u8"),
        ("parity_offset", "<i8"),
        ("flag", "<u8"),
        ("stalled_on", "<u8"),
        ("target", "<u8"),
        ("first", "<u4"),
        ("nunits", "<u4"),
        ("kind", "<i4"),
        ("element", "<i4"),
        ("log_rows", "<i4"),
        ("log_columns", "<i4"),
    ]
)
ITEM = struct.Struct(f"<{PART_RECORD.itemsize}sQqQQQIIiiii")

GHOSTS_RECORD = np.dtype([("part", PART_RECORD), ("field", "<u8"), ("ready", "<u8")])

RECORDS = {"Part": PART_RECORD, "Item": ITEM_RECORD, "Ghosts": GHOSTS_RECORD}
SIZE_OPTIONS = tuple(f"-D{name}_nbytes={record.itemsize}" for name, record in RECORDS.items())
