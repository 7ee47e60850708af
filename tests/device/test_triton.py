"""The functions for Triton without a GPU: they compile, and in the promised order."""

import importlib.util
import re
import sys

import pytest

import mpishare.device
from tests.helpers.launch import ROOT
from tests.helpers.ptx import ACQUIRE, RELEASE, orders_of

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
FILE = mpishare.device.Path(mpishare.device.__file__).with_name("triton.py")

# The elements that go to windows have 2 bytes, as nothing else of these kernels.
KINDS = {
    r"st\.global\.b16": "put",
    r"ld\.global\.b16": "got",
    r"((?:st|ld)\.(?:release|acquire|relaxed)[\w.]*)": None,
    r"((?:bar|barrier|fence|membar)\.[\w.]+)": None,
}
MEET, JOIN = "bar.sync", "barrier.red.and.pred"
PROMISED = {
    "put_signal": [MEET, "got", "put", MEET, RELEASE],
    "wait": [ACQUIRE, JOIN, "got", "put"],
    "barrier": ["got", "put", MEET, RELEASE, ACQUIRE, JOIN, "got", "put"],
    "words": ["st.relaxed.sys.global.u64", "ld.relaxed.sys.global.u64", JOIN],
    "epoch": [MEET],
}


def kernels_of(device):
    @triton.jit
    def put_signal(d, to):
        device.put_signal(d, 1, 0, to, 3, 1, 5)

    @triton.jit
    def wait(d, to):
        i = tl.arange(0, 128)
        if device.wait(d, 1, 1, 5):
            tl.store(to + i, tl.load(device.at(d, device.rank(d), tl.float16) + i))

    @triton.jit
    def barrier(d, to):
        i = tl.arange(0, 128)
        tl.store(device.at(d, 1, tl.float16) + i, tl.load(to + i))
        if device.barrier(d, 1):
            tl.store(to + i, tl.load(device.at(d, device.rank(d), tl.float16) + i))

    @triton.jit
    def words(d, to):
        device.put_word(d, 1, 2, 1.0, 3)
        ok, word = device.get_word(d, 1, 2, 3, tl.float32)
        if ok:
            tl.store(tl.cast(to, tl.pointer_type(tl.float32)), word)

    @triton.jit
    def epoch(d, to):
        tl.store(tl.cast(to, tl.pointer_type(tl.int64)), device.epoch(d, 0))

    return {each.__name__: each for each in (put_signal, wait, barrier, words, epoch)}


def compiled(kernel, capability=90, kind="*fp16"):
    d, to = kernel.arg_names[:2]
    source = triton.compiler.ASTSource(kernel, {d: "i64", to: kind}, {})
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target).asm


def device_from(file, name):
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    return device


@pytest.fixture(autouse=True)
def an_empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", PROMISED)
def test_the_compiled_order_is_the_promised_one(name, capability):
    from mpishare.device import triton as device

    code = compiled(kernels_of(device)[name], capability)
    assert code["cubin"].startswith(b"\x7fELF")
    assert orders_of(code["ptx"], KINDS) == {name: PROMISED[name]}


def test_the_constants_are_those_of_the_header():
    header, text = FILE.with_name("mpishare.cuh").read_text(), FILE.read_text()
    for name, mask in (("POLLS_PER_LOOK", "0xff;"), ("POLLS_PER_HOST_LOOK", "0x3fff;")):
        (power,) = re.findall(rf"\b{name} = 1 << (\d+)", header)
        assert (1 << int(power)) - 1 == int(mask[:-1], 16)
        assert mask in text
    assert "enum Why : Word { UNTOLD, LATE, OVERWRITTEN }" in header
    assert text.count("[LATE], 1") == text.count("[LATE], 2") == 1


def test_the_kernel_of_the_page_compiles(tmp_path):
    page = (ROOT / "docs" / "device.md").read_text()
    (code,) = re.findall(r"(@triton\.jit\n.*?)\nshift\[", page, re.DOTALL)
    imports = "import triton\nfrom mpishare.device import triton as device\n"
    (tmp_path / "page.py").write_text(imports + code)
    shift = device_from(tmp_path / "page.py", "triton_of_the_page").shift
    source = triton.compiler.ASTSource(shift, {"d": "i64", "source": "*fp64", "n": "i32"}, {})
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    assert triton.compile(source, target=target).asm["cubin"]
