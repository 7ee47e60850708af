"""The records of rows in Python have the layout of the structs of rows.cu. NVRTC needs no GPU."""

import ctypes
from pathlib import Path

from mpishare.plans.gpu.flags import Host
from mpishare.plans.gpu.sources import source
from mpishare.rows import records
from tests.helpers.launch import ROOT
from tests.helpers.nvrtc import check_compiles, compile_cuda

PATH = Path(ROOT, "mpishare", "rows", "rows.cu")
STRUCTS = [
    each
    for each in vars(records).values()
    if isinstance(each, type) and issubclass(each, ctypes.Structure)
]
STRUCTS.append(Host)
ARRAYS = {
    "came": records.CAME,
    "sent": records.SENT,
    "stuck": records.STUCK,
    "at": records.AT,
    "scale": records.SCALES,
}
HEADER = ("COUNT", "CREDIT", "WANTED", "ROWS", "SCALE")
WORDS = ("left", "strangers", "kept", "cut", "beyond", "outside", "epoch")
CONSTANTS = (
    *("MAX_KEYS", "MAX_LANES", "GOALS", "DROPPED", "STRANGER", "WARPS", "AT_ONCE"),
    *("HEADER_NBYTES", "OFFER_NBYTES", "GOES"),
    *("NO_ROUNDS", "ROUNDS", "LAST_ROUNDS", "MIGRATION"),
)


def asserted(moved: int = 0) -> str:
    sizes = {each.__name__: ctypes.sizeof(each) for each in STRUCTS}
    offsets = {
        (each.__name__, name): getattr(each, name).offset
        for each in STRUCTS
        for name, *_ in each._fields_
    }
    offsets |= {("Results", each): 8 * getattr(records, each.upper()) for each in WORDS}
    offsets |= {("Results", each): 8 * at for each, at in ARRAYS.items()}
    offsets |= {("Header", each.lower()): 8 * getattr(records, each) for each in HEADER}
    offsets |= {("Table", name): at for name, (_, at) in records.TABLE.fields.items()}
    facts = [f"sizeof({name}) == {size + moved}" for name, size in sizes.items()]
    facts += [f"__builtin_offsetof({s}, {f}) == {at + moved}" for (s, f), at in offsets.items()]
    facts += [f"sizeof(Results) == {8 * records.RESULTS + moved}"]
    facts += [f"sizeof(Table) == {records.TABLE.itemsize + moved}"]
    facts += [f"sizeof(Device) <= {records.DEVICE_NBYTES - 10 * moved}"]
    for name in CONSTANTS:
        facts.append(f"{name} == {getattr(records, name) + moved}")
    return "\n".join(f'static_assert({fact}, "{fact}");' for fact in facts)


def test_records_have_the_layout_of_their_structs():
    assert len(STRUCTS) == 8
    check_compiles(f"{source(PATH)}\n{asserted()}", "sm_90")


def test_records_of_another_layout_do_not_compile():
    code, log = compile_cuda(f"{source(PATH)}\n{asserted(8)}", "sm_90")
    assert code == b""
    assert log.count("static assertion failed") == len(asserted().splitlines())
