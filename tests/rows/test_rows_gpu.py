"""Rows on GPUs: captured, replayed, with numbers that only the GPU knows, on several streams."""

import numpy as np
import pytest

import mpishare
from mpishare import CapacityError, Migration, RowExchange, UnsupportedError
from tests.helpers.captures import captured


def test_a_captured_exchange_by_the_gpus_bounds(node, stream, cupy):
    """The rows of a step are counted by the GPU, and appended where it says."""
    x, numbers = cupy.arange(100.0), cupy.arange(100, dtype="i4")[::-1].copy()
    low, high, n = (cupy.array(each, "i8") for each in (3, 5, 7))
    out, count = [cupy.zeros(400)], cupy.zeros((), "i8")
    sides = {(0, -1): (low, high), (0, 1): (numbers, n)}
    seen = cupy.zeros(2, "i8")
    with RowExchange(node.comm, ["f8"], 64, dims=[node.size], periods=True, node=node) as swap:

        def advance():
            swap.start([x], sides)
            swap.wait(out, at="append", count=count)
            cupy.add(seen, swap.device_counts, out=seen)
            cupy.add(high, 1, out=high)

        step = mpishare.capture(node, advance)
        for _ in range(5):
            step()
        assert swap.counts() == {(0, -1): 7, (0, 1): 6}
        assert swap.sent() == {(0, -1): 6, (0, 1): 7}
        assert swap.received((0, 1))[0].get().tolist() == [*range(3, 9)]
        assert seen.get().tolist() == [35, 20]
        right = [each for k in range(5) for each in (*range(99, 92, -1), *range(3, 5 + k))]
        assert out[0][: int(count)].get().tolist() == right
        step.close()


def test_captured_rounds(node, stream, cupy):
    """In a graph slots do not grow, and all rows come: those for which there is no room, later."""
    x, n, total = cupy.arange(100.0), cupy.array(0, "i8"), cupy.zeros((), "i8")
    out = {(0, -1): [cupy.zeros(100)], (0, 1): [cupy.zeros(100)]}
    with RowExchange(node.comm, ["f8"], 7, dims=[node.size], periods=True, node=node) as swap:

        def advance():
            swap.start([x], {(0, -1): (0, n), (0, 1): (n, 100)})
            swap.wait(out)
            cupy.add(total, swap.device_counts.sum(), out=total)
            cupy.add(n, 10, out=n)

        step = mpishare.capture(node, advance)
        for at in range(0, 101, 10):
            for (array,) in out.values():
                array.fill(-1)
            step()
            node.synchronize(stream)
            right = [*range(at), *[-1] * (100 - at)], [*range(at, 100), *[-1] * at]
            assert out[0, 1][0].get().tolist() == right[0]
            assert out[0, -1][0].get().tolist() == right[1]
        assert int(total) == 1100
        step.close()


def test_rows_without_a_place(node, cupy):
    """Rows that a slot has no room for, and `wait` no arrays: both ranks learn it, and go on."""
    peer = (node.rank + 1) % node.size
    with RowExchange(node.comm, ["f8"], 4, dims=[node.size], periods=True, node=node) as swap:
        swap.start([cupy.arange(50.0) + peer], {(0, 1): (0, 50)})
        swap.wait()
        with pytest.raises(CapacityError, match="more rows came or went than a slot of room=4"):
            swap.counts()
        for _ in range(3):
            swap.start([cupy.arange(50.0) + peer], {(0, 1): (0, 50)})
            swap.counts()
            swap.wait()
            assert (swap.received((0, -1))[0].get() == np.arange(50) + node.rank).all()


def test_bounds_beyond_the_columns(node, cupy):
    with RowExchange(node.comm, ["f8"], 8, peers=[node.rank], node=node) as swap:
        for rows in ((cupy.array(3), cupy.array(9)), cupy.array([0, 8]), cupy.array([-1])):
            swap.start([cupy.zeros(8)], {node.rank: rows})
            with pytest.raises(ValueError, match="outside of their arrays"):
                swap.counts()
            swap.wait()


def test_what_a_capture_leaves_out(node, stream, cupy):
    """More rows than room stay behind by a migration, and the next one takes them."""
    peer = (node.rank + 1) % node.size
    if peer == node.rank:
        pytest.skip("no other rank")
    to, count = cupy.full(40, node.rank, "i4"), cupy.array(20, "i8")
    to[:20] = peer
    columns = [cupy.arange(40.0) + 100 * node.rank]
    with RowExchange(node.comm, ["f8"], 8, node=node) as swap:
        move, graphs = Migration(swap), []
        move.migrate(columns, cupy.full(40, node.rank, "i4"), count)
        with captured(stream, graphs):
            move.migrate(columns, to, count)
        for left in (12, 4, 0):
            graphs[0].launch()
            node.synchronize(stream)
            assert int(move.left) == left
            assert int(count) == 20
            if left:
                with pytest.raises(CapacityError, match=f"{left} rows for {peer}"):
                    move.check()
        move.check()
        found = sorted(columns[0][:20].get())
        assert found == [100.0 * ((node.rank - 1) % node.size) + i for i in range(20)]


def test_what_a_capture_refuses(node, stream, cupy):
    x, to = [cupy.zeros(8)], cupy.full(8, node.rank, "i4")
    with RowExchange(node.comm, ["f8"], 8, node=node) as swap:
        move = Migration(swap)

        def refused(call, said):
            with pytest.raises(UnsupportedError, match=said), captured(stream):
                call()

        count = cupy.array(8)
        refused(lambda: move.migrate(x, to, count), "allocates memory")
        move.migrate(x, to, 8)
        refused(lambda: move.migrate(x, to, 8), "count is an int")


def test_calls_on_other_streams_follow_each_other(node, streams, cupy):
    x, to, count = cupy.arange(400.0), cupy.full(400, node.rank, "i4"), cupy.array(100, "i8")
    cupy.cuda.get_current_stream().synchronize()
    with RowExchange(node.comm, ["f8"], 100, node=node) as swap:
        move = Migration(swap)
        for at in range(20):
            move.migrate([x], to, count, stream=streams[at % 2])
        for stream in streams:
            node.synchronize(stream)
        move.check()
        assert int(count) == 100


def test_long_rows_and_many_peers_are_refused(node):
    with pytest.raises(UnsupportedError, match="rows of 65 words"):
        RowExchange(node.comm, [("f8", (65,))], node=node)
