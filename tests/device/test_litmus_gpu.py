"""The memory model of mpishare.cuh: what its orders forbid never comes.

`MPISHARE_LITMUS` is the number of rounds.
"""

import os
from pathlib import Path

import numpy as np
import pytest

import mpishare

ROUNDS = int(os.environ.get("MPISHARE_LITMUS", "20000"))
NAMES = ("message", "reuse", "buffering")


def count(node, name):
    """The forbidden outcomes on all ranks."""
    import cupy

    if node.report().time_sliced_gpus:
        pytest.skip("ranks share a GPU without MPS, where kernels that wait are refused")
    code = Path(__file__).with_name("litmus.cu").read_text()
    options = ("--std=c++17", *mpishare.device.include())
    kernel = cupy.RawModule(code=code, options=options).get_function(name)
    with node.allocate_each(64 * 1056, "u4", fill=0, signals=4) as window:
        wrong = cupy.zeros(1, "u8")
        for _ in range(10):
            node.launch(kernel, (1,), (1,), (window.device, np.int64(ROUNDS // 10), wrong))
        node.synchronize()
        total = node.comm.allreduce(int(wrong[0]))
        node.barrier()
    return total


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", NAMES)
def test_what_the_order_forbids_never_comes(node, name):
    assert count(node, name) == 0
