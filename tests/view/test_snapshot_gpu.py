"""Snapshots on streams, viewers without a GPU, and what a viewer on the GPU lets go of."""

import select
import time
import warnings

import pytest

from mpishare import UnsupportedError
from mpishare.view import snapshots
from tests.helpers.held import gpu_free
from tests.helpers.latch import Latch, within
from tests.helpers.viewer import viewing

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
# Runs in a viewer, whose driver does not map the memory of the last of so many ranks.
WALL = """
from mpishare.backends.cuda import CudaBackend
opened, really_open = [], CudaBackend.open
def wall(*given):
    opened.append(given)
    if len(opened) == {}:
        raise mpishare.CudaError("no such memory.", call="", code=1, name="")
    return really_open(*given)
CudaBackend.open = wall
"""


@pytest.fixture
def view_without_gpu(node):
    with viewing(node, NO_GPU) as view:
        yield view
        view.reset()


def snapshot_until(node, window, view, source, count=200):
    """Take snapshots, each with its number as the values, until the viewer answers with a value.

    Return their number, and the value.
    """
    for step in range(1, count):
        window.array.fill(step)
        window.snapshot()
        view.begin(source)
        told = view.told()
        if told.get("error") != "PeerTimeout":
            return step, told.get("value", told)
        time.sleep(0.01)
    raise AssertionError(f"no frame after {count} snapshots: {told}")


def check_host_frames(node, view, why):
    window = node.allocate_each((64, 64 + node.rank), name="hidden")
    view("there = attach('hidden')")
    view.raises("UnsupportedError", "there.array", why)
    source = (
        "(lambda f: [type(f.array).__module__, f.number]"
        " + [np.unique(f.segment(r)).tolist() for r in there.ranks])(there.latest(0.05))"
    )
    _, (kind, number, *values) = snapshot_until(node, window, view, source)
    assert kind == "numpy"
    assert values == [[float(number)]] * node.size
    shapes = view("[there.latest().segment(r).shape for r in there.ranks]")
    assert shapes == [[64, 64 + rank] for rank in range(node.size)]
    window.close()
    view.raises("ClosedError", "there.latest()")


def test_a_viewer_without_a_gpu_gets_frames_through_host_memory(node, view_without_gpu):
    check_host_frames(node, view_without_gpu, "no GPU is visible")


def test_a_viewer_without_cupy_gets_frames_through_host_memory(node):
    with viewing(node) as view:
        view("sys.modules['cupy'] = None")
        check_host_frames(node, view, "CuPy")


LOOK = """
torn, missed, seen = 0, 0, set()
end = time.time() + 4
while time.time() < end:
    try:
        f = there.latest(0.2)
    except TimeoutError:
        missed += 1
        continue
    seen.add(f.number)
    torn += any(bool((f.segment(r) != f.number).any()) for r in there.ranks)
"""


def watched(node, view, name, pause_s):
    """Take snapshots while the viewer looks whether all values of a frame are one."""
    window = node.allocate_each(4 << 20, "i4", name=name)
    view(f"there = attach('{name}')")
    # Before the time runs memory is pinned, and the viewer compiles the kernels of LOOK.
    look = "(lambda f: not bool((f.segment(0) != f.number).any()))(there.latest(0.05))"
    step, is_whole = snapshot_until(node, window, view, look)
    assert is_whole
    view.send(LOOK)
    begin = time.monotonic()
    while node.comm.bcast(time.monotonic() - begin < 5, 0):
        for _ in range(20):
            step += 1
            window.array.fill(step)
            window.snapshot()
            if pause_s:
                node.synchronize()
                time.sleep(pause_s)
        node.synchronize()
        window.fence()
    view.answer()
    seen, torn, missed = view("len(seen), torn, missed")
    if node.rank == 0:
        print(f"\n{name}: {step} snapshots, {seen} frames seen, {torn} torn, {missed} timeouts")
    assert torn == 0
    return seen


@pytest.mark.parametrize("pause_s", [0, 0.002])
def test_no_frame_is_torn(node, view, pause_s):
    seen = watched(node, view, f"on-gpu-{pause_s}", pause_s)
    # With nothing else on the GPU three copies are over before one has been read.
    assert seen > 20 or not pause_s


@pytest.mark.parametrize("pause_s", [0, 0.002])
def test_no_frame_through_host_memory_is_torn(node, view_without_gpu, pause_s):
    """Copies to the host run behind and are overtaken: no torn one may be taken for whole."""
    assert watched(node, view_without_gpu, f"on-host-{pause_s}", pause_s) > 20


def test_a_snapshot_is_taken_in_the_order_of_its_stream(node, view, cupy):
    window = node.allocate_each(1 << 16, "i4", fill=1, name="order")
    window.snapshot()
    node.synchronize()
    view("there = attach('order'); f = there.latest()")
    stream = cupy.cuda.Stream(non_blocking=True)
    with Latch() as latch:
        latch.hold(stream.ptr)
        with stream:
            window.array.fill(2)
            window.snapshot()
            window.array.fill(3)
        if view.viewer:
            assert view.viewer("there.latest().number") == 1
        node.barrier()
        latch.release()
        node.synchronize(stream)
    node.barrier()
    view("f = there.latest()")
    assert view("f.number, np.unique(host(f.array)).tolist()") == [2, [2]]
    with stream:
        window.snapshot(stream=stream)


def test_frames_of_a_channel_are_seen_in_the_order_of_their_stream(node, view, streams):
    """Those that are held on the producer's stream are not there yet, and are whole then."""
    channel = node.channel(1 << 16, "i4", name="streamed", lag=8)
    view("there = attach('streamed'); it = iter(there)")

    def put(*values):
        if node.rank == channel.producer:
            for value in values:
                with channel.put(streams[0]) as slot, streams[0]:
                    slot.fill(value)

    put(4)  # kernels' first uses wait for what is queued
    node.synchronize(streams[0])
    seen = "[(f.number, np.unique(host(f.array)).tolist()) for f in (next(it) for _ in range(%d))]"
    assert view(seen % 1) == [[1, [4]]]
    with Latch() as latch:
        latch.hold(streams[0].ptr)
        put(5, 6, 7)
        view.send(seen % 3)
        if view.viewer:
            answered, _, _ = select.select([view.viewer.process.stdout], [], [], 0.5)
            assert not answered
        latch.release()
        assert view.answer() == [[2, [5]], [3, [6]], [4, [7]]]
    node.synchronize(streams[0])
    channel.close()


def test_a_viewer_on_the_gpu_lets_go_when_the_window_closes(node, view):
    free = []
    for _ in range(5):
        window = node.allocate_each(32 << 20, "u1", fill=1, name="let-go")
        window.snapshot()
        view("there = attach('let-go'); f = there.latest(); del f")
        begin = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            window.close()
        assert time.monotonic() - begin < 2
        view("import cupy; cupy.get_default_memory_pool().free_all_blocks()")
        free.append(gpu_free())
    assert free[-1] > free[1] - (16 << 20), free


def test_an_array_that_is_dropped_ends_the_lease(node, view):
    """Else the window could not be freed, and its job would be warned."""
    window = node.allocate_each(1 << 20, "u1", fill=1, name="dropped")
    view("there = attach('dropped'); live = there.array; there.close()")
    view("del live")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        window.close()


@pytest.mark.parametrize("way", ["each", "in place", "of the other"])
def test_a_viewer_that_sees_one_of_two_gpus(node, way):
    """CUDA_VISIBLE_DEVICES hides a GPU, not its memory: it is mapped as between ranks."""
    uuids, last = node._context.uuids, node.size - 1
    if uuids[0] == uuids[last]:
        pytest.skip("the first and the last rank share one GPU")
    with viewing(node, {"CUDA_VISIBLE_DEVICES": uuids[0]}) as view:
        if way == "of the other":
            window = node.allocate(100, "i4", fill=7, owner=last, name="half-seen")
            right = [[7]]
        else:
            name = None if way == "in place" else "half-seen"
            window = node.allocate_each(100, "i4", fill=node.rank + 1, name=name)
            right = [[rank + 1] for rank in range(node.size)]
        if way == "in place":
            window = node.share_each(window.array, copy=False, name="half-seen")
        window.snapshot()
        view(f"there = attach('{window.name}'); f = there.latest()")
        for array in ("there.segment(r)", "f.segment(r)")[way == "in place" :]:
            assert view(f"[np.unique(host({array})).tolist() for r in there.ranks]") == right
        assert view("hasattr(f.array, 'get')")  # of CuPy, not through the host
        window.close()


@pytest.mark.ranks(min=2)
def test_a_viewer_that_cannot_map_the_memory_of_one_rank(node):
    """As where a control group hides a GPU: frames by the host, and no live memory."""
    window = node.allocate_each(100, "i4", fill=node.rank + 1, name="walled")
    with viewing(node) as view:
        view(WALL.format(node.size))
        view("there = attach('walled')")
        words = f"cannot be mapped here: no such memory (rank {node.size - 1})"
        view.raises("UnsupportedError", "there.array", words)
        source = "(lambda f: [type(f.array).__module__, f.number, f.segment(there.ranks[-1])[0]])("
        _, (kind, number, value) = snapshot_until(
            node, window, view, f"[str(x) for x in {source}there.latest(0.05))]"
        )
        assert (kind, value) == ("numpy", number)
        window.close()


def test_copies_to_the_host_end_with_their_viewers(node, view_without_gpu):
    window = node.allocate_each(100, fill=0, name="wanted")
    view_without_gpu("there = attach('wanted')")
    header = window._publication._page.header
    assert header["wanted"] == 1
    snapshot_until(node, window, view_without_gpu, "there.latest(0.05).number")
    view_without_gpu("there.close()")
    assert within(5, lambda: header["wanted"] == 0)
    window.snapshot()
    view_without_gpu("there = attach('wanted')")
    assert header["wanted"] == 1


def test_no_room_on_the_host_is_told_to_the_viewer_and_not_to_the_job(
    node, view_without_gpu, monkeypatch, caplog
):
    def refuse(page):
        raise UnsupportedError("no room")

    monkeypatch.setattr(snapshots.Slot, "reserve", refuse)
    window = node.allocate_each(100, fill=0, name="roomless")
    view_without_gpu("there = attach('roomless')")
    window.snapshot()
    _, told = snapshot_until(node, window, view_without_gpu, "there.latest(0.05)")
    assert told["error"] == "UnsupportedError"
    assert "no room in host memory" in told["text"]
    assert within(5, lambda: "no snapshots in host memory for viewers" in caplog.text)
    window.close()
