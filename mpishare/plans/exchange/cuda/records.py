"""The structs of work_items.cuh, as NumPy records; the compiler asserts that their sizes agree."""

from __future__ import annotations

import struct

import numpy as np

AXES = 8
PACK, PACK_AND_ZERO, LOCAL, UNPACK, PUT_LL, GET_LL, READY, PUT_LL_AND_ZERO, ADD, SWAP_LL = range(10)

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
        ("next", "<u4"),
        ("more", "<u4"),
        ("unused", "V8"),
    ]
)
ITEM = struct.Struct(f"<{PART_RECORD.itemsize}sQqQQQIIiiiiII8x")

GHOSTS_RECORD = np.dtype([("part", PART_RECORD), ("field", "<u8"), ("ready", "<u8")])

SOURCE_RECORD = np.dtype(
    [
        ("part", PART_RECORD),
        ("packed", "<u8"),
        ("parity_offset", "<i8"),
        ("flags", "<u8"),
        ("stalled_on", "<u8"),
        ("chunk_nbytes", "<u4"),
        ("flag_nbytes", "<u4"),
    ]
)

SCALED = 256
"""Added to the `element` of an item whose `target` has factors behind its part."""
FACTORS_RECORD = np.dtype(
    [("scale", "V16"), ("offset", "V16"), ("element", "<i8"), ("has", "<i4", 2)]  # of the two
)

SLIDE_RECORD = np.dtype(
    [
        ("places", "<u8"),
        ("start", "<i8"),
        ("length", "<i8"),
        ("wanted", "<i8"),
        ("first", "<i8"),
        ("extent", "<i8"),
        ("shift", "<i4"),
        ("is_source", "<i4"),
        ("room", "<i8"),
    ]
)

SLIDE_OPTION = f"-DSlide_nbytes={SLIDE_RECORD.itemsize}"

RECORDS = {
    "Part": PART_RECORD,
    "Item": ITEM_RECORD,
    "Ghosts": GHOSTS_RECORD,
    "Factors": FACTORS_RECORD,
    "Source": SOURCE_RECORD,
}
SIZE_OPTIONS = tuple(f"-D{name}_nbytes={record.itemsize}" for name, record in RECORDS.items())
