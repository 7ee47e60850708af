"""Windows inside kernels: puts, signals, waits and barriers, called and replayed, and refusals.

`MPISHARE_PUTS` is the number of puts of the long ring; a million take some ten seconds.
"""

import functools
import os
from pathlib import Path

import numpy as np
import pytest

import mpishare
from mpishare import ClosedError, UnsupportedError
from tests.helpers.captures import captured

PUTS = int(os.environ.get("MPISHARE_PUTS", "20000"))
DELAY_NS = 3000


@functools.cache
def module():
    import cupy

    code = Path(__file__).with_name("kernels.cu").read_text()
    return cupy.RawModule(code=code, options=("--std=c++17", *mpishare.device.include()))


@pytest.fixture
def kernels(node):
    if node.report().time_sliced_gpus:
        pytest.skip("ranks share a GPU without MPS, where kernels that wait are refused")
    return module()


def zeros(count, dtype="u8"):
    import cupy

    return cupy.zeros(count, dtype)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 1000, 100_003])
@pytest.mark.parametrize("group", ["thread", "warp", "block"])
@pytest.mark.parametrize(("size", "starts"), [(1, [(0, 0), (1, 1), (3, 5)]), (8, [(0, 0), (1, 2)])])
def test_every_group_puts_from_anywhere_to_anywhere(node, kernels, group, count, size, starts):
    import cupy

    if group == "thread":
        count = min(count, 1000)
    kernel = kernels.get_function(f"send_{group}" + ("_8" if size == 8 else ""))
    kind = np.dtype("u1" if size == 1 else "f8")
    with node.allocate_each(count + 16, kind, fill=7, signals=1) as window:
        source = cupy.arange(count + 16).astype(kind) + kind.type(node.rank)
        failed, left = zeros(1, "i4"), (node.rank - 1) % node.size
        for number, (begin, to) in enumerate(starts, start=1):
            window.array.fill(7)
            node.synchronize()
            node.barrier()
            args = window.device, source[begin:], np.int64(to), np.int64(count), np.uint64(number)
            node.launch(kernel, (1,), (32 if group == "warp" else 96,), (*args, failed))
            node.synchronize()
            node.barrier()
            right = np.full(count + 16, 7, kind)
            right[to : to + count] = (np.arange(count + 16).astype(kind) + kind.type(left))[
                begin : begin + count
            ]
            assert (window.array.get() == right).all()
            assert int(failed[0]) == 0
            node.barrier()


def test_elements_of_twelve_bytes(node, kernels):
    import cupy

    with node.allocate_each((101, 3), "i4", signals=1) as window:
        source = cupy.arange(303, dtype="i4") + 1000 * node.rank
        failed = zeros(1, "i4")
        args = window.device, source, np.int64(1), np.int64(100), np.uint64(1), failed
        node.launch(kernels.get_function("send_block_12"), (1,), (64,), args)
        node.synchronize()
        left = (node.rank - 1) % node.size
        assert (window.array.get().reshape(-1)[3:] == np.arange(300) + 1000 * left).all()
        node.barrier()


class Ring:
    """Rounds of puts through one buffer, with two slots for each of a few blocks."""

    def __init__(self, node, kernels, *, blocks=2, count=300, rounds=10, delay=DELAY_NS):
        self.node, self.blocks = node, blocks
        self.window = node.allocate_each(blocks * count, "u4", signals=2 * blocks)
        self.kernel = kernels.get_function("ring")
        self.epoch, self.errors = zeros(1), zeros(1)
        self.args = (
            self.window.device,
            zeros(blocks * count, "u4"),
            np.int64(count),
            np.int64(rounds),
            np.uint32(delay),
            self.epoch,
            self.errors,
        )
        node.synchronize()

    def run(self, stream=None):
        self.node.launch(self.kernel, (self.blocks,), (128,), self.args, stream)

    def is_right_after(self, launches):
        self.node.synchronize()
        return (int(self.epoch[0]), int(self.errors[0])) == (launches, 0)


def test_epochs_of_more_blocks_than_are_resident(node, kernels):
    """Such a kernel waits for nobody, and is launched without the node."""
    kernel, errors = kernels.get_function("count"), zeros(1)
    with node.allocate_each(1, "f8", signals=1) as window:
        here = np.uint64(int(window.device["self"]))
        for launch, blocks in enumerate([3, (1 << 20) + 2, 1 << 22, 1], start=1):
            kernel((blocks,), (32,), (here, np.uint64(launch), errors))
        node.synchronize()
        assert int(errors[0]) == 0


def test_no_put_is_stale_and_no_signal_lost(node, kernels):
    ring = Ring(node, kernels, rounds=PUTS // 10)
    for _ in range(10):
        ring.run()
    assert ring.is_right_after(10)
    ring.window.close()


def test_calls_and_replays_are_the_same_text(node, kernels, stream):
    ring = Ring(node, kernels)
    ring.run()
    graphs = []
    with captured(stream, graphs):
        ring.run()
        ring.run()
    ring.run()
    for _ in range(50):
        graphs[0].launch()
    ring.run()
    assert ring.is_right_after(103)
    ring.window.close()


def test_two_windows_beside_a_plan_on_streams_in_turn(node, kernels, streams):
    """Launches follow each other; all kernels that wait are in one order on each GPU."""
    import cupy

    rings = [Ring(node, kernels, blocks=1) for _ in range(2)]
    x = cupy.ones(100)
    total = mpishare.Allreduce(node.comm, x, node=node)
    node.synchronize()
    for step in range(40):
        for at, ring in enumerate(rings):
            ring.run(streams[(at + step // 2) % 2])
        total.reduce(x)
        x.fill(1)
    for stream in streams:
        node.synchronize(stream)
    assert all(ring.is_right_after(40) for ring in rings)
    total.close()
    for ring in rings:
        ring.window.close()


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_barrier_orders_all_stores_before_it(node, kernels, blocks):
    with node.allocate_each(blocks * node.size, "u4", signals=blocks) as window:
        errors, kernel = zeros(1), kernels.get_function("meet")
        args = window.device, np.int64(500), np.uint32(DELAY_NS), errors
        for _ in range(4):
            node.launch(kernel, (blocks,), (64,), args)
        node.synchronize()
        assert int(errors[0]) == 0
        node.barrier()


def test_words_come_with_their_epochs(node, kernels):
    with node.allocate_each(1, signals=2) as window:
        errors, kernel = zeros(1), kernels.get_function("words")
        for _ in range(4):
            node.launch(kernel, (1,), (1,), (window.device, np.int64(1000), errors))
        node.synchronize()
        assert int(errors[0]) == 0
        node.barrier()


def test_remote_atomics_add_up(node, kernels):
    with node.allocate_each(1000, "u4", fill=0, signals=1) as window:
        node.launch(kernels.get_function("add"), (1,), (256,), (window.device, np.int64(1000)))
        node.synchronize()
        assert (window.array.get() == node.size).all()
        node.barrier()


def test_the_record_by_one_pointer(node, kernels):
    with node.allocate_each(1, signals=1) as window:
        ended, kernel = zeros(1, "i4"), kernels.get_function("by_pointer")
        kernel((1,), (1,), (np.uint64(window.device["self"]), np.uint64(1), ended))
        node.synchronize()
        assert int(ended[0]) == 1
        node.barrier()


def test_the_record_tells_the_rank_and_cannot_be_written(node):
    with node.allocate_each(1, signals=3) as window:
        device = window.device
        assert (device["rank"], device["size"], device["slots"]) == (node.rank, node.size, 3)
        with pytest.raises(ValueError, match="read-only"):
            device["rank"] = 5


def test_more_blocks_than_run_at_once_are_refused(node, kernels):
    with node.allocate_each(1, signals=1) as window:
        args = window.device, np.int64(1), np.uint32(0), zeros(1)
        with pytest.raises(UnsupportedError, match=r"run at once on this GPU.* Launch fewer"):
            node.launch(kernels.get_function("meet"), (100_000,), (64,), args)


def test_a_gpu_that_ranks_share_by_turns_is_refused(node):
    if not node.report().time_sliced_gpus:
        pytest.skip("no ranks share a GPU by turns")
    with node.allocate_each(1, signals=1) as window:
        args = window.device, np.int64(1), np.uint32(0), zeros(1)
        with pytest.raises(UnsupportedError, match="without the Multi-Process"):
            node.launch(module().get_function("meet"), (1,), (64,), args)
        node.barrier()


def test_a_launch_without_a_window_is_refused(node, kernels):
    kernel = kernels.get_function("meet")
    with pytest.raises(ValueError, match=r"no window\.device"):
        node.launch(kernel, (1,), (64,), (np.int64(1),))
    window = node.allocate_each(1, signals=1)
    device = window.device
    window.close()
    with pytest.raises(ValueError, match="closed"):
        node.launch(kernel, (1,), (64,), (device, np.int64(1), np.uint32(0), zeros(1)))
    with pytest.raises(ClosedError):
        _ = window.device


def test_a_replay_behind_the_end_of_its_window_is_refused(node, kernels):
    ring = Ring(node, kernels)
    step = mpishare.capture(node, ring.run)
    for _ in range(4):
        step()
    assert ring.is_right_after(4)
    ring.window.close()
    with pytest.raises(ClosedError, match=r"its graph uses .* now closed"):
        step()
    step.close()


def test_a_launch_beside_the_captured_stream_is_refused(node, kernels, streams):
    ring = Ring(node, kernels)

    def step():
        ring.run(streams[0])

    step()
    captured_step = mpishare.capture(node, step)
    captured_step()
    with pytest.raises(UnsupportedError, match="not the captured one"):
        captured_step()
    for stream in streams:
        node.synchronize(stream)
    node.barrier()
    captured_step.close()
    ring.window.close()
