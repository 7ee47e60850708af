"""Windows inside kernels of Numba: puts, signals, waits and barriers, launched again and again."""

import numpy as np
import pytest

numba = pytest.importorskip("numba.cuda", reason="Numba-CUDA is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Grid size"),  # one block is enough
    pytest.mark.skipif(
        not hasattr(np, "row_stack"), reason="Numba-CUDA 0.30 cannot compile with NumPy 2.5"
    ),
]


def rounds_of(device):
    """A kernel that passes its numbers on in a ring, with an answer before the next message."""

    def ring(d, source, mine, n, rounds, errors):
        rank, size = device.rank(d), device.size(d)
        right, left = (rank + 1) % size, (rank + size - 1) % size
        before = (device.epoch(d, 0) - 1) * rounds
        for k in range(rounds):
            number = before + k + 1
            for i in range(numba.threadIdx.x, n, numba.blockDim.x):
                source[i] = 1000 * number + 100 * rank + i
            numba.syncthreads()
            if number > 1 and not device.wait_block(d, right, 1, number - 1):
                return
            device.put_signal_block(d, right, 1, source[:n], 0, number)
            if not device.wait_block(d, left, 0, number):
                return
            for i in range(numba.threadIdx.x, n, numba.blockDim.x):
                if mine[1 + i] != 1000 * number + 100 * left + i:
                    numba.atomic.add(errors, 0, 1)
            numba.syncthreads()
            if numba.threadIdx.x == 0:
                device.signal(d, left, 1, number)
        if not device.barrier_block(d, 2):
            errors[0] = -1

    return numba.jit(ring)


def test_a_ring_of_puts(node):
    import cupy

    from mpishare.device import numba as device

    if node.report().time_sliced_gpus:
        pytest.skip("ranks share a GPU without MPS, where kernels that wait never end")
    n, rounds, launches = 200, 50, 4
    ring, errors = rounds_of(device), cupy.zeros(1, "i4")
    with node.allocate_each(n + 1, "f8", signals=3) as window:
        source, d = cupy.zeros(n), int(window.device["self"])
        stream = numba.external_stream(cupy.cuda.get_current_stream().ptr)
        for _ in range(launches):
            ring[1, 64, stream](d, source, window.array, n, rounds, errors)
        node.synchronize()
        assert int(errors[0]) == 0
        left, last = (node.rank - 1) % node.size, rounds * launches
        assert (window.array[1:] == 1000.0 * last + 100 * left + cupy.arange(n)).all()
        node.barrier()
