"""Route fused: faces of every size, by LL and by flags; what is pending; streams and captures."""

import numpy as np
import pytest
from mpi4py import MPI

import mpishare
from tests.helpers.captures import skip_unless_fused
from tests.helpers.halos import exchange_by, staging_buffers
from tests.helpers.rings import ring
from tests.helpers.rows import fill, wrong

TWO = pytest.mark.ranks(min=2)
KIB, MIB = 1 << 10, 1 << 20
# By LL; the largest part by LL, and the smallest with flags; many chunks; more chunks than are
# packed ahead; chunks of every size.
SIZES = (8, 4 * KIB, 128 * KIB, 128 * KIB + 16, MIB, 3 * MIB, 24 * MIB, 40 * MIB)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "shifted"])
@pytest.mark.parametrize(
    ("nbytes", "dtype"),
    [(nbytes, dtype) for nbytes in SIZES for dtype in ("f8", "f4", "i2", "u1") if nbytes < 8 * MIB]
    + [(nbytes, "f8") for nbytes in SIZES if nbytes > 8 * MIB],
)
def test_faces_of_every_size(node, nbytes, dtype, shift):
    """One plan by calls, by starts and waits, and by replays of its own graph, in turn."""
    xp = node.xp
    n = max(1, nbytes // np.dtype(dtype).itemsize)
    # Rank 0 alone is shifted by an element: the two ends move units of different bytes.
    begin = shift if node.rank == 0 else 0
    field = xp.zeros(4 * n + 1, dtype)[begin : begin + 4 * n].reshape(4, n)
    with ring(node, field, axes=0) as halo:
        for step in range(1, 8):
            fill(xp, field, node.rank, step)
            exchange_by(halo, field, halves=step in (3, 6))
            assert wrong(field, node.rank, node.size, step) == 0, step


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "shifted"])
@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16"])
def test_small_faces_of_odd_sizes(node, dtype, axis, shift):
    """By LL: the bytes of a part fill its words, whatever the units of the two ends."""
    xp = node.xp
    begin = shift if node.rank == 0 else 0
    for n in (1, 2, 3, 5, 7, 33, 1023, 4099):
        memory = xp.zeros(4 * n + 1, dtype)[begin : begin + 4 * n]
        field = memory.reshape(4, n) if axis == 0 else memory.reshape(n, 4)
        rows = field if axis == 0 else field.T
        with ring(node, field, axes=axis) as halo:
            for step in range(1, 6):
                fill(xp, rows, node.rank, step)
                halo.exchange(field)
                assert wrong(rows, node.rank, node.size, step) == 0, (n, step)


@TWO
def test_strided_faces_of_bytes_and_large_ones_in_one_plan(node):
    """Columns of single bytes, columns of numbers, and whole planes: every way in one launch."""
    xp = node.xp
    fields = [xp.zeros((6, 70_000), dtype) for dtype in ("u1", "f8", "c16")]
    with ring(node, fields, dims=(node.size, 1), corners=True) as halo:
        rows = (np.arange(6)[:, None] - 1 + 4 * node.rank) % (4 * node.size)
        places = (np.arange(70_000)[None, :] - 1) % 69_998
        for step in range(1, 5):
            right = [(rows * 5 + places * 3 + step * 11 + number) % 251 for number in range(3)]
            for numbers, field in zip(right, fields, strict=True):
                owned = np.zeros(field.shape, field.dtype)
                owned[1:-1, 1:-1] = numbers[1:-1, 1:-1]
                field[...] = xp.asarray(owned)
            halo.exchange(*fields)
            for numbers, field in zip(right, fields, strict=True):
                assert (field.copy().get() == numbers).all(), (step, field.dtype)


def test_another_gpu_is_refused(node):
    """Its default stream is not ordered with the fields; a stream of the node's GPU always is."""
    xp = node.xp
    others = [at for at in range(xp.cuda.runtime.getDeviceCount()) if at != node.device.ordinal]
    if node.comm.allreduce(len(others)) < node.size:
        pytest.skip("every rank needs a second GPU that it sees")
    field = xp.zeros((4, 8))
    stream = xp.cuda.Stream(non_blocking=True)
    with ring(node, field, axes=0) as halo:
        for step in range(1, 6):
            fill(xp, field, node.rank, step)
            node.synchronize()
            with xp.cuda.Device(others[0]):
                if step % 2:
                    with pytest.raises(ValueError, match="current GPU"):
                        halo.exchange(field)
                with xp.cuda.Device(node.device.ordinal), stream:
                    halo.exchange(field)
            stream.synchronize()
            assert wrong(field, node.rank, node.size, step) == 0
        with xp.cuda.Device(others[0]):
            strange = xp.zeros((4, 8))
        with pytest.raises(ValueError, match="device"):  # though the call before was fast
            halo.exchange(strange)
        halo.exchange(field)


@TWO
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("corners", [False, True], ids=["faces", "corners"])
def test_one_launch_whatever_the_neighbors_and_fields(node, corners, count):
    from cuda.bindings import driver

    xp = node.xp
    dims = MPI.Compute_dims(node.size, 3)
    fields = [xp.zeros((5, 5, 5)) for _ in range(count)]
    stream = xp.cuda.Stream(non_blocking=True)
    with stream, ring(node, fields, dims=dims, corners=corners) as halo:
        skip_unless_fused(node, halo)
        halo.exchange(*fields)
        stream.begin_capture()
        halo.exchange(*fields)
        graph = stream.end_capture()
        error, _, nodes = driver.cuGraphGetNodes(graph.graph)
        assert (error, nodes) == (driver.CUresult.CUDA_SUCCESS, 1)
        graph.launch(stream)
        node.synchronize()
        del graph


@TWO
def test_more_arrays_in_turn_than_graphs(node):
    """Each is launched as it comes, and none takes the graph of another at every turn."""
    xp = node.xp
    fields = [xp.zeros((4, 3)) for _ in range(40)]
    layout = mpishare.Layout(fields[0].shape)
    with ring(node, layout, axes=0) as halo:
        skip_unless_fused(node, halo)
        for step in range(4):
            for number, field in enumerate(fields):
                fill(xp, field, node.rank, step + number)
            for field in fields:
                halo.exchange(field)
            for number, field in enumerate(fields):
                assert wrong(field, node.rank, node.size, step + number) == 0, (step, number)
        for _ in range(300):
            halo.exchange(fields[20])
        fill(xp, fields[20], node.rank, 5)
        halo.exchange(fields[20])
        assert wrong(fields[20], node.rank, node.size, 5) == 0
        for field in fields[21:24]:  # started on the plan's own stream, new there
            fill(xp, field, node.rank, 6)
            halo.start(field)
            halo.wait()
            assert wrong(field, node.rank, node.size, 6) == 0


HOG = r"""
extern "C" __global__ void hog(unsigned long long ns) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < ns);
}
"""


@TWO
@pytest.mark.parametrize("buffers", [2, 1])
def test_cells_are_not_overwritten_before_they_are_unpacked(node, buffers):
    """Rank 1 unpacks slowly, and has answered before: nothing but the parity holds rank 0 back.

    It scatters cells, by the few blocks for which another kernel leaves room. The control has one
    buffer, and must lose cells.
    """
    xp, count = node.xp, 16 * MIB // 8
    if len(set(node.comm.allgather(node.device.uuid)[:2])) == 1:
        pytest.skip("ranks 0 and 1 share a GPU")
    hog, stream = xp.RawKernel(HOG, "hog"), xp.cuda.Stream(non_blocking=True)
    multiprocessors = xp.cuda.Device(node.device.ordinal).attributes["MultiProcessorCount"]
    blocks = 2 * multiprocessors - 1  # a multiprocessor holds two; leave room for one
    sends, recvs = ({1: [0]}, {}) if node.rank == 0 else ({}, {0: [1]} if node.rank == 1 else {})
    field = xp.zeros((2, count)) if node.rank == 0 else xp.zeros((32, count), order="F")[:2]
    wrong_cells = xp.zeros((), "i8")
    with (
        staging_buffers(buffers),
        mpishare.NeighborExchange(node.comm, sends, recvs, field, node=node) as halo,
    ):
        if node.comm.allreduce(node.rank < 2 and set(halo.routes.values()) != {"fused"}):
            pytest.skip("routes other than fused")
        for is_hogged in (False, True):
            node.barrier()
            if is_hogged and node.rank == 1:
                with stream:
                    hog((blocks,), (1024,), (np.uint64(100_000_000),))
            for step in range(1, 11):
                field[0] = step
                halo.exchange(field)
                if node.rank == 1:
                    wrong_cells += (field[1] != step).sum()
        node.synchronize()
        lost = node.comm.bcast(int(wrong_cells), root=1)
    assert bool(lost) == (buffers == 1), lost
