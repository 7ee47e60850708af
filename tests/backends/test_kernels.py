"""Every CUDA source compiles for every architecture we name. NVRTC needs no GPU for that."""

import numpy as np
import pytest

from mpishare.memory.numbers import NUMBERS
from mpishare.plans.exchange.cuda.records import RECORDS, SIZE_OPTIONS, SLIDE_OPTION, SLIDE_RECORD
from mpishare.plans.gpu.sources import source
from mpishare.plans.wire import WIRES
from mpishare.reduction.cuda.records import options
from mpishare.reduction.exact import ExactOperation
from tests.helpers.launch import ROOT
from tests.helpers.nvrtc import ARCHITECTURES, check_compiles, compile_cuda

pytestmark = pytest.mark.timeout(600)  # with every option of a kernel at once it takes a minute

FOLDERS = ROOT / "mpishare", ROOT / "benchmarks"
SOURCES = sorted(path for folder in FOLDERS for path in folder.rglob("*.cu"))
SOURCES.append(ROOT / "scripts" / "applications" / "poisson.cu")


def test_there_are_kernels():
    assert SOURCES


# What includes work_items.cuh is compiled in the forms in which it is used, each form of a source
# on one architecture: no code depends on both.
IN_FORMS = [path for path in SOURCES if "DEPTH" in source(path)]
ROUNDED = [*enumerate(NUMBERS[name].kernel for name in WIRES)]
FORMS = [
    *((path, "DEPTH=1", each) for path in SOURCES for each in ARCHITECTURES),
    *((path, "DEPTH=4", ARCHITECTURES[n % 4]) for n, path in enumerate(IN_FORMS)),
    *((path, f"TILED={1 << n}", ARCHITECTURES[n % 4]) for path in IN_FORMS for n in range(5)),
    *((path, f"ADDING={1 << n}", ARCHITECTURES[n % 4]) for path in IN_FORMS for n in range(8)),
    *((path, "GIVING=1", each) for path in IN_FORMS for each in ARCHITECTURES),
    *((path, f"WIRE={each}", ARCHITECTURES[n % 4]) for path in IN_FORMS for n, each in ROUNDED),
    *(
        (path, f"{o}=1", a)
        for path in IN_FORMS
        for a in ARCHITECTURES
        for o in ("SCALED", "SLIDING")
    ),
]


@pytest.mark.parametrize(
    ("path", "option", "architecture"), FORMS, ids=[f"{p.name}-{o}-{each}" for p, o, each in FORMS]
)
def test_compiles(path, option, architecture):
    given = [f"-D{option}", *SIZE_OPTIONS, SLIDE_OPTION]
    if option == "GIVING=1":
        given.append("-DADDING=255")
    check_compiles(source(path), architecture, *given)


FOLDING = [path for path in SOURCES if "#ifdef EXACT" in source(path)]


@pytest.mark.parametrize("path", FOLDING, ids=lambda path: path.name)
@pytest.mark.parametrize("dtype", ["float64", "complex64", "float16"])
def test_exact_sums_compile(path, dtype):
    given = options(ExactOperation("sum", np.dtype(dtype)), 3, "ROW")
    check_compiles(source(path), "sm_90", *given)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_broken_source_does_not(architecture):
    code, log = compile_cuda('extern "C" __global__ void f(int *p) { *p = missing; }', architecture)
    assert code == b""
    assert "missing" in log


WITH_ALL = "-DSCALED=1", "-DADDING=1"  # the forms of which some records are
WITH_RECORDS = [path for path in SOURCES if "Item_nbytes" in source(path)]


def with_offsets(text: str, moved: int = 0, records: dict = RECORDS) -> str:
    """The source with an assertion for each field of a NumPy record."""
    asserted = (
        f'static_assert(__builtin_offsetof({name}, {field}) == {at + moved}, "{name}.{field}");'
        for name, record in records.items()
        if f"{name}_nbytes" in text
        for field, (_, at, *_) in record.fields.items()
    )
    return "\n".join([text, *asserted])


@pytest.mark.parametrize("path", WITH_RECORDS, ids=lambda path: path.name)
def test_records_have_the_offsets_of_their_structs(path):
    code, log = compile_cuda(with_offsets(source(path)), "sm_90", *WITH_ALL, *SIZE_OPTIONS)
    assert code, log


def test_the_record_of_a_slide_has_the_offsets_of_its_struct():
    (path,) = (path for path in SOURCES if path.name == "slides.cu")
    text = with_offsets(source(path), records={"Slide": SLIDE_RECORD})
    code, log = compile_cuda(text, "sm_90", SLIDE_OPTION)
    assert code, log


@pytest.mark.parametrize("path", WITH_RECORDS, ids=lambda path: path.name)
def test_a_record_of_another_layout_does_not_compile(path):
    """The NumPy records tell the compiler their sizes: each wrong one is refused, and offset."""
    wrong = [f"-D{name}_nbytes={record.itemsize + 8}" for name, record in RECORDS.items()]
    code, log = compile_cuda(with_offsets(source(path), 8), "sm_90", *WITH_ALL, *wrong)
    assert code == b""
    records = {name: record for name, record in RECORDS.items() if f"{name}_nbytes" in source(path)}
    for name, record in records.items():
        for said in (f"size of {name}", *(f"{name}.{field}" for field in record.fields)):
            assert f'failed with "{said}"' in log, log


def test_every_kernel_of_the_halo_asserts_its_records():
    assert {path.name for path in WITH_RECORDS} == {"fused.cu", "fused_ll.cu", "streamed.cu"}
