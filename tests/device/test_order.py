"""The order of mpishare.cuh in its PTX: each store, fence and load that docs/device.md promises."""

import pytest

import mpishare.device
from tests.helpers.nvrtc import compile_cuda
from tests.helpers.ptx import ACQUIRE, RELEASE, orders_of

KERNELS = """#include <mpishare.cuh>
using namespace mpishare;
extern "C" __global__ void put_signal_GROUP(Device d, const double* from) {
    put_signal<mpishare::GROUP>(d, 1, 0, from, 3, 1, 5);
}
extern "C" __global__ void wait_GROUP(Device d, double* to) {
    if (wait<mpishare::GROUP>(d, 1, 1, 5)) *to = *at<double>(d, d.rank);
}
extern "C" __global__ void barrier_GROUP(Device d, double* to) {
    *at<double>(d, 1) = *to;
    if (barrier<mpishare::GROUP>(d, 1)) *to = *at<double>(d, d.rank);
}"""
WORDS = """
extern "C" __global__ void words(Device d, float* to) {
    put_word(d, 1, 2, 1.0f, 3);
    get_word(d, 1, 2, 3, to);
}"""
SOURCE = KERNELS.replace("GROUP", "thread") + WORDS
for name in ("warp", "block"):
    SOURCE += "".join(KERNELS.replace("GROUP", name).splitlines(keepends=True)[2:])

# How the threads of a group meet before a signal, and after a wait.
MEET = {"thread": [], "warp": ["bar.warp.sync"], "block": ["bar.sync"]}
JOIN = {
    "thread": [],
    "warp": ["vote.sync.all.pred", "bar.warp.sync"],
    "block": ["bar.red.and.pred"],
}
PROMISED = {"words": ["st.relaxed.sys.global.u64", "ld.relaxed.sys.global.u64"]}
for name in MEET:
    PROMISED[f"put_signal_{name}"] = ["put", *MEET[name], RELEASE]
    PROMISED[f"wait_{name}"] = [ACQUIRE, *JOIN[name], "got"]
    PROMISED[f"barrier_{name}"] = ["put", *MEET[name], RELEASE, ACQUIRE, *JOIN[name], "got"]

KINDS = {
    r"st\.(?:v4\.[bu]32|[bf]64)": "put",  # into windows; the results of the kernels go by st.global
    r"ld\.[bf]64": "got",
    r"((?:st|ld)\.(?:release|acquire|relaxed)[\w.]*)": None,
    r"((?:bar|vote|fence|membar)\.[\w.]+)": None,
}


def orders(folder, architecture="compute_90"):
    """By kernel: its accesses of windows, and what orders them, without repetitions."""
    ptx, log = compile_cuda(SOURCE, architecture, f"-I{folder}")
    assert ptx, log
    return orders_of(ptx.decode(), KINDS)


@pytest.mark.parametrize("architecture", ["compute_75", "compute_80", "compute_90", "compute_100"])
def test_the_compiled_order_is_the_promised_one(architecture):
    folder = mpishare.device.include()[0].removeprefix("-I")
    assert orders(folder, architecture) == PROMISED
