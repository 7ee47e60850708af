"""The functions for Numba without a GPU: they compile, and kernels call them as they are."""

import importlib
import re

import pytest

from tests.helpers.launch import ROOT
from tests.helpers.nvrtc import ARCHITECTURES, check_compiles, compile_cuda

numba = pytest.importorskip("numba.cuda", reason="Numba-CUDA is not installed")
device = pytest.importorskip("mpishare.device.numba")

GROUPS = "thread", "warp", "block"


class SomeGpu:
    compute_capability = (9, 0)


@pytest.fixture(autouse=True)
def a_gpu_that_is_never_used(monkeypatch):
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: SomeGpu)


def compiled(function, *kinds):
    return numba.compile(function, numba.types.void(*kinds), cc=(9, 0), device=False, abi="numba")[
        0
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_source_compiles_without_a_warning(architecture):
    check_compiles(device.SOURCE, architecture, "-rdc=true")


def signatures(ptx):
    """By name, the sizes of the result and of the parameters of functions."""
    found = re.findall(r"\.func\s*\(\.param \.(b\d+) \w+\)\s*(mpishare_\w+)\s*\(([^)]*)\)", ptx)
    return {name: [size, *re.findall(r"\.param \.(b\d+)", more)] for size, name, more in found}


@pytest.mark.parametrize("group", GROUPS)
def test_a_kernel_calls_what_the_source_defines(group):
    put, put_signal = getattr(device, f"put_{group}"), getattr(device, f"put_signal_{group}")
    wait, barrier = getattr(device, f"wait_{group}"), getattr(device, f"barrier_{group}")

    def kernel(d, source, n, ended):
        launch = device.epoch(d, 0)
        right = (device.rank(d) + 1) % device.size(d)
        put(d, right, 3, source)
        put_signal(d, right, n, source[1:n], 1, 2 * launch - 1)
        if wait(d, right, 1, launch) and barrier(d, 2):
            device.signal(d, right, 3, launch)
            ended[0] = 1

    kinds = numba.types
    calls = compiled(kernel, kinds.int64, kinds.float64[::1], kinds.int64, kinds.int32[::1])
    ptx, log = compile_cuda(device.SOURCE, "compute_90", "-rdc=true")
    assert ptx, log
    called, defined = signatures(calls), signatures(ptx.decode())
    assert len(called) == 8
    assert called == {name: defined.get(name) for name in called}


def test_the_kernel_of_the_page_compiles(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "device.md").read_text()
    (code,) = re.findall(r"(@numba\.cuda\.jit\n.*?)\nshift\[", page, re.DOTALL)
    imports = "import numba.cuda\nfrom mpishare.device import numba as device\n"
    (tmp_path / "numba_of_the_page.py").write_text(imports + code)
    monkeypatch.syspath_prepend(tmp_path)
    shift, kinds = importlib.import_module("numba_of_the_page").shift, numba.types
    assert compiled(shift.py_func, kinds.int64, kinds.float64[::1], kinds.int64)


def test_a_source_with_gaps_is_refused():
    def kernel(d, source):
        device.put_block(d, 0, 0, source)

    kinds = numba.types
    compiled(kernel, kinds.uint64, kinds.float64[:, ::1])
    with pytest.raises(Exception, match="not a contiguous array"):
        compiled(kernel, kinds.uint64, kinds.float64[:])
