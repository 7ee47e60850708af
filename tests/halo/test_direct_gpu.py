"""Large faces that go straight into the ghosts of a rank on the same GPU, and when they must not.

Where each rank has a GPU of its own, or takes turns on one, the same programs use staging.
"""

import dataclasses

import numpy as np
import pytest

import mpishare
from mpishare.plans.exchange.cuda import direction
from mpishare.plans.node_cache import context_of
from tests.helpers.captures import buffers_of
from tests.helpers.halos import exchange_by
from tests.helpers.latch import Latch, within
from tests.helpers.rings import ring
from tests.helpers.rows import fill, values, wrong

TWO = pytest.mark.ranks(min=2)
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def smaller_parts(monkeypatch):
    """So that the tests take less memory and time."""
    assert direction.MIN_NBYTES > MIB
    monkeypatch.setattr(direction, "MIN_NBYTES", MIB)


def goes_straight(node):
    """Whether all ranks share one GPU and run on it at the same time."""
    uuids = node.comm.allgather(node.device.uuid)
    return node.size > 1 and len(set(uuids)) == 1 and node.device.mps


def direct_parts(halo):
    return buffers_of(halo)._direction.direct.keys


@pytest.mark.parametrize("dtype", ["u1", "i2", "f8", "c16"])
@pytest.mark.parametrize("nbytes", [512 * KIB, MIB, MIB + 16, 9 * MIB])
def test_each_rank_uses_its_window_or_another_array(node, nbytes, dtype):
    """Whichever array a call is given, at each rank for itself, by all kinds of calls in turn."""
    check_calls(node, nbytes, dtype, is_direct=goes_straight(node) and nbytes >= MIB)


@TWO
# Under the tools arrays were seen to outlive the calls that they were given to.
@pytest.mark.filterwarnings("ignore:window .* was closed while arrays:ResourceWarning")
def test_parts_that_are_made_to_go_straight_to_another_gpu(node, monkeypatch):
    """The same kernel, for compute-sanitizer, which watches no client of MPS."""
    context = context_of(node)
    if any(pair.route != "fused" for pair in node.report().pairs if pair.origin != pair.target):
        pytest.skip("routes other than fused")
    device = dataclasses.replace(node.device, mps=True)
    monkeypatch.setattr(context.backend, "device", device)
    for name in ("uuids", "all_uuids"):
        monkeypatch.setattr(context, name, [device.uuid] * node.size)
    monkeypatch.setattr(direction, "MIN_NBYTES", 256 * KIB)
    check_calls(node, 256 * KIB, "f8", is_direct=True)


def check_calls(node, nbytes, dtype, *, is_direct):
    n = nbytes // np.dtype(dtype).itemsize
    with node.allocate_each((4, n), dtype) as window:
        private = node.xp.zeros((4, n), dtype)
        with ring(node, window.array, axes=0) as halo:
            assert bool(direct_parts(halo)) == is_direct
            for step in range(1, 13):
                field = window.array if (step + node.rank * (step // 4)) % 3 else private
                fill(node.xp, field, node.rank, step)
                exchange_by(halo, field, halves=step % 4 == 3)
                assert wrong(field, node.rank, node.size, step) == 0, step
                del field


@TWO
@pytest.mark.parametrize("axis", [0, 1])
def test_scattered_places_go_to_ghosts_in_a_row(node, axis):
    """The sender has no box, the receiver has one: both cut the part into the same chunks."""
    before, after, count = (node.rank - 1) % node.size, (node.rank + 1) % node.size, 2048
    places = np.random.default_rng(1).permutation(3 * count)[:count]
    ghosts = np.arange(3 * count, 4 * count)
    shape = (4 * count, 96) if axis == 0 else (96, 4 * count)
    cells = np.arange(float(4 * count * 96)).reshape(shape)
    with (
        node.allocate_each(shape) as window,
        mpishare.NeighborExchange(
            node.comm, {after: places}, {before: ghosts}, window.array, axis=axis, node=node
        ) as exchange,
    ):
        assert bool(direct_parts(exchange)) == goes_straight(node)
        for step in range(1, 5):
            window.array.set(cells * (node.rank + 1) + step)
            exchange.exchange(window.array)
            found = window.array.get().take(ghosts, axis)
            assert (found == (cells * (before + 1) + step).take(places, axis)).all(), step


@TWO
def test_strided_ghosts_in_a_window(node):
    """Faces of a 3-D field across each axis: the cells of both ends have steps of their own."""
    cells = (66, 258, 514)
    with node.allocate_each((3, *cells)) as window:
        fields = [window.array[axis] for axis in range(3)]
        before, after = (node.rank - 1) % node.size, (node.rank + 1) % node.size
        for axis, field in enumerate(fields):
            with ring(node, field, axes=axis) as halo:
                large = 8 * field.size // field.shape[axis] >= MIB
                assert bool(direct_parts(halo)) == (goes_straight(node) and large), axis
                places = np.arange(field.size).reshape(cells)
                for step in range(1, 4):
                    field.set(places * (node.rank + 1.0) + step)
                    halo.exchange(field)
                    found = np.moveaxis(field.get(), axis, 0)
                    rows = np.moveaxis(places, axis, 0)
                    assert (found[0] == rows[-2] * (before + 1.0) + step).all()
                    assert (found[-1] == rows[1] * (after + 1.0) + step).all()
        del fields, field


@TWO
def test_ghosts_are_not_written_while_their_rank_reads_them(node, stream):
    """Rank 0 has not come to its exchange: its neighbors' wait, and its ghosts stay."""
    n = MIB // 8
    with node.allocate_each((4, n)) as window:
        field = window.array
        kept = node.xp.zeros_like(field)
        with ring(node, field, axes=0) as halo:
            for step in (1, 2, 3):
                fill(node.xp, field, node.rank, step)
                field[1:3] += 1000  # each kernel is loaded before anything waits
                kept[...] = 0
                kept[...] = field
                fill(node.xp, field, node.rank, step)
                halo.exchange(field)
            node.synchronize()
            node.barrier()
            with Latch() as latch:
                if node.rank == 0:
                    latch.hold(stream.ptr)
                    kept[...] = 0
                    kept[...] = field
                field[1:3] += 1000
                halo.exchange(field)
                node.barrier()
                neighbors = {1, node.size - 1}
                passed = node.rank in neighbors and within(0.05, lambda: stream.done)
                node.barrier()
                latch.release()
                node.synchronize()
            assert not passed
            if node.rank == 0:
                assert wrong(kept, node.rank, node.size, 3) == 0
            low = values(field, (node.rank - 1) % node.size, 2, 3) + 1000
            assert (field[0].get() == low).all()
        del field


@TWO
def test_a_window_that_is_closed_before_its_plan(node):
    """It stays mapped on all ranks as long as the plan."""
    n = MIB // 8
    window = node.allocate_each((4, n))
    field = window.array
    with ring(node, field, axes=0) as halo:
        with pytest.warns(ResourceWarning, match=window.name):
            window.close()
        del window
        for step in range(1, 5):
            fill(node.xp, field, node.rank, step)
            halo.exchange(field)
            assert wrong(field, node.rank, node.size, step) == 0
    del field
