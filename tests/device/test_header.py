"""mpishare.cuh without a GPU: it compiles, alone, and Python's record is its struct."""

import re

import pytest

import mpishare.device
from mpishare.windows.window_device import RECORD
from tests.helpers.launch import ROOT
from tests.helpers.nvrtc import ARCHITECTURES, check_compiles, compile_cuda

OPTIONS = mpishare.device.include()
FOLDER = ROOT / "tests" / "device"
FILES = [*sorted(FOLDER.glob("*.cu")), ROOT / "benchmarks" / "kernels.cuh"]
SOURCES = {path.name: path.read_text() for path in FILES}
for path in sorted((ROOT / "scripts" / "examples").glob("*.py")):
    if (found := re.search('r"""(.*?)"""', path.read_text(), re.DOTALL)) is not None:
        SOURCES[path.stem] = found[1]
(SOURCES["device.md"],) = re.findall(
    "```c\\+\\+\n(.*?)```", (ROOT / "docs" / "device.md").read_text(), re.DOTALL
)
ASSERTED = [
    *(
        f'static_assert(__builtin_offsetof(mpishare::Device, {name}) == {at}, "{name}");'
        for name, (_, at, *_) in RECORD.fields.items()
    ),
    f'static_assert(sizeof(mpishare::Device) == {RECORD.itemsize}, "whole");',
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SOURCES)
def test_every_call_compiles_without_a_warning(name, architecture):
    check_compiles(SOURCES[name], architecture, *OPTIONS)


def test_the_record_is_the_struct():
    check_compiles("\n".join(["#include <mpishare.cuh>", *ASSERTED]), "sm_90", *OPTIONS)


def test_words_have_four_bytes():
    text = """#include <mpishare.cuh>
    __global__ void f(mpishare::Device d) { mpishare::put_word(d, 0, 0, 1.0, 1); }"""
    code, log = compile_cuda(text, "sm_90", *OPTIONS)
    assert code == b""
    assert "a word has 4 bytes" in log


def test_the_header_twice_is_the_header_once():
    check_compiles("#include <mpishare.cuh>\n" * 2, "sm_90", *OPTIONS)


def test_another_header_has_other_options(tmp_path, monkeypatch):
    """CuPy's cache of compiled kernels looks at the options, and into no included file."""
    before = mpishare.device.include()
    header = mpishare.device.Path(mpishare.device.__file__).with_name("mpishare.cuh")
    (tmp_path / "mpishare.cuh").write_text(header.read_text() + "// another\n")
    monkeypatch.setattr(mpishare.device, "__file__", str(tmp_path / "__init__.py"))
    after = mpishare.device.include()
    assert after[0] == f"-I{tmp_path}"
    assert before[1] != after[1]
