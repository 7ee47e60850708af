"""mpishare.cuh without a GPU: it compiles, alone, and Python's record is its struct."""

import re

import pytest

import mpishare.device
from mpishare.device.window_device import RECORD
from tests.backends.test_kernels import ARCHITECTURES, compile_cuda
from tests.helpers.launch import ROOT

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


def compiles(text, architecture="sm_90", *options):
    return compile_cuda(text, architecture, *mpishare.device.include(), *options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SOURCES)
def test_every_call_compiles_without_a_warning(name, architecture):
    code, log = compiles(SOURCES[name], architecture)
    assert code.startswith(b"\x7fELF"), log
    assert log.strip("\0\n ") == ""


def test_the_record_is_the_struct():
    text = "\n".join(["#include <mpishare.cuh>", *ASSERTED])
    code, log = compiles(text)
    assert code.startswith(b"\x7fELF"), log


@pytest.mark.parametrize("name", [*RECORD.fields, "whole"])
def test_another_record_would_not_compile(name):
    wrong = [each.replace(" == ", " == 8 + ") for each in ASSERTED if f'"{name}"' in each]
    code, log = compiles("\n".join(["#include <mpishare.cuh>", *wrong]))
    assert code == b""
    assert name in log


def test_words_have_four_bytes():
    text = """#include <mpishare.cuh>
    __global__ void f(mpishare::Device d) { mpishare::put_word(d, 0, 0, 1.0, 1); }"""
    code, log = compiles(text)
    assert code == b""
    assert "a word has 4 bytes" in log


def test_the_header_twice_is_the_header_once():
    code, log = compiles("#include <mpishare.cuh>\n#include <mpishare.cuh>\n")
    assert code.startswith(b"\x7fELF"), log


def test_another_header_has_other_options(tmp_path, monkeypatch):
    """CuPy's cache of compiled kernels looks at the options, and into no included file."""
    before = mpishare.device.include()
    header = mpishare.device.Path(mpishare.device.__file__).with_name("mpishare.cuh")
    (tmp_path / "mpishare.cuh").write_text(header.read_text() + "// another\n")
    monkeypatch.setattr(mpishare.device, "__file__", str(tmp_path / "__init__.py"))
    after = mpishare.device.include.__wrapped__()
    assert after[0] == f"-I{tmp_path}"
    assert before[1] != after[1]
