"""Captured functions on a GPU: their memory, their streams, what they refuse, their loops."""

import threading

import numpy as np
import pytest

import mpishare
from mpishare import EpochError, UnsupportedError
from tests.helpers.captures import skip_where_ranks_take_turns, skip_without_graphs
from tests.helpers.latch import Latch, within
from tests.helpers.rings import ring
from tests.helpers.rows import fill, wrong

TWO = pytest.mark.ranks(min=2)
N = 1000


def launches(monkeypatch):
    from mpishare.graphs import cuda

    made = []
    launch = cuda.launch_graph
    monkeypatch.setattr(cuda, "launch_graph", lambda *a: (made.append(a), launch(*a)))
    return made


def test_a_step_is_run_once_captured_once_and_replayed(node, monkeypatch):
    """The function itself is called twice per arrangement; every later call is one launch."""
    field, made, calls = node.xp.zeros((4, N)), launches(monkeypatch), []
    with ring(node, field, axes=0) as halo:
        skip_without_graphs(halo)

        def exchange(field):
            calls.append(field)
            halo.exchange(field)

        step = mpishare.capture(node, exchange)
        for number in range(20):
            fill(node.xp, field, node.rank, number)
            step(field)
            assert wrong(field, node.rank, node.size, number) == 0
    assert len(calls) == 2
    assert len(made) == 19


def taken_anew(xp):
    """Arrays in the memory that a pool which is shared has given back."""
    xp.get_default_memory_pool().free_all_blocks()
    return [xp.full(size, 77.0) for size in (1, 10, 5000, 80_000, 1 << 18) for _ in range(20)]


def test_its_memory_stays_as_it_is(node):
    """What it allocates is its own, whatever is allocated and freed around it."""
    xp = node.xp
    x = xp.arange(5000.0)

    def norm(x):
        y = x * 3 + 1
        return (y * y).sum(), y[:10].copy()

    step = mpishare.capture(node, norm)
    for number in range(40):
        x.fill(number)
        total, first = step(x)
        noise = taken_anew(xp)
        step(x)
        assert all(bool((each == 77).all()) for each in noise)
        del noise
        assert float(total) == 5000 * (3 * number + 1) ** 2
        assert first.get().tolist() == [3 * number + 1] * 10


def test_a_pool_that_runs_out_frees_nothing_of_a_graph(node, cupy):
    """CuPy's pools free what they take to be unused before they give up."""
    x = node.xp.arange(1 << 18, dtype="f8")
    right = float(((x + 1) * 2).sum())
    step = mpishare.capture(node, lambda x: ((x + 1) * 2).sum())
    for _ in range(3):
        assert float(step(x)) == right
    free = cupy.cuda.runtime.memGetInfo()[0]
    greedy = mpishare.capture(node, lambda x: cupy.empty(2 * free, "u1"))
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        greedy(x)
    noise = taken_anew(cupy)
    assert float(step(x)) == right
    assert all(bool((each == 77).all()) for each in noise)


@TWO
def test_a_replay_waits_for_the_last_call_on_another_stream(node, cupy):
    """Held up there by a latch: the replay's own stream is free."""
    field = node.xp.zeros((4, N))
    one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with ring(node, field, axes=0) as halo:
        skip_without_graphs(halo)
        step = mpishare.capture(node, lambda field: halo.exchange(field))
        for _ in range(3):
            step(field)
        node.synchronize()
        node.barrier()
        with Latch() as latch:
            latch.hold(one.ptr)
            with one:
                halo.exchange(field)
            with two:
                step(field)
            assert not within(0.2, lambda: two.done)
        node.synchronize(two)


def test_streams_are_forked_and_joined_in_it(node, cupy):
    """start and wait around other work, and a stream of the user's own."""
    xp = node.xp
    field, work = xp.zeros((4, N)), xp.zeros(1 << 16)
    side, forked, joined = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()
    with ring(node, field, axes=0) as halo:
        skip_without_graphs(halo)

        def advance(field, work):
            forked.record()
            side.wait_event(forked)
            halo.start(field)
            with side:
                work += 1
            joined.record(side)
            halo.wait()
            cupy.cuda.get_current_stream().wait_event(joined)
            work *= 2

        step = mpishare.capture(node, advance)
        right = 0
        for number in range(30):
            fill(node.xp, field, node.rank, number)
            step(field, work)
            right = (right + 1) * 2
            assert wrong(field, node.rank, node.size, number) == 0
            assert float(work[-1]) == right


REFUSED = {
    "float": lambda node, x: float(x[0]),
    "print": lambda node, x: str(x),
    "synchronize": lambda node, x: node.synchronize(),
    "stream": lambda node, x: node.xp.cuda.get_current_stream().synchronize(),
    "device": lambda node, x: node.xp.cuda.Device().synchronize(),
    "upload": lambda node, x: node.xp.asarray(np.ones(1000)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_waits_for_the_gpu_is_refused(node, name):
    """By name, with nothing enqueued; the stream, the plan and the step go on."""
    field = node.xp.zeros((4, N))
    is_bad = True
    words = r"capture\(step_with\) failed.*capture"
    if name == "synchronize":
        words = r"Node\.synchronize failed inside capture\(step_with\)"

    def step_with(field):
        halo.start(field)
        if is_bad:
            REFUSED[name](node, field[0])
        halo.wait()

    with ring(node, field, axes=0) as halo:
        skip_without_graphs(halo)
        step = mpishare.capture(node, step_with)
        step(field)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=words):
                step(field)
        with pytest.raises(EpochError):
            halo.wait()  # what was started in the capture is forgotten
        fill(node.xp, field, node.rank, 1)
        halo.exchange(field)
        assert wrong(field, node.rank, node.size, 1) == 0
        is_bad = False
        for number in range(5):
            fill(node.xp, field, node.rank, number)
            step(field)
            assert wrong(field, node.rank, node.size, number) == 0


def is_refused(node, function, array, words):
    """The call that captures it; the first one runs the function."""
    step = mpishare.capture(node, function)
    step(array)
    with pytest.raises(UnsupportedError, match=words):
        step(array)


def test_what_no_replay_would_do_is_refused_by_name(node, cupy, monkeypatch):
    """Calls that the host orders, and work on other streams: it would be done once, now."""
    other, x = cupy.cuda.Stream(non_blocking=True), node.xp.zeros(3)
    window, event, forked = node.allocate_each(4, fill=0), node.event(), cupy.cuda.Event()
    inner = mpishare.capture(node, lambda x: x.fill(1))

    def unjoined(x):
        forked.record()
        other.wait_event(forked)
        with other:
            x.fill(1)

    def outer(x):
        with other:
            inner(x)

    order = event.record if node.is_leader else event.wait
    is_refused(node, lambda x: window.fence(), x, r"(?i)window \d+.*captured")
    is_refused(node, lambda x: order(), x, r"(?i)event \d+.*captured")
    is_refused(node, unjoined, x, "must be joined")
    is_refused(node, outer, x, r"capture\(<lambda>\) failed inside capture\(outer")
    field, on_host = node.xp.zeros((4, N)), np.zeros((4, 3))
    with ring(node, field, axes=0) as halo:
        skip_without_graphs(halo)
        words = "not the captured one"
        is_refused(node, lambda field: halo.exchange(field, stream=other), field, words)
        node.synchronize(other)
    with ring(node, on_host, axes=0, node=None) as halo:
        is_refused(node, lambda x: halo.exchange(on_host), x, "host memory")
    if node.size > 1:
        monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
        with ring(node, field, axes=0) as halo:
            is_refused(node, halo.exchange, field, "mpi")
            fill(node.xp, field, node.rank, 1)
            halo.exchange(field)
            assert wrong(field, node.rank, node.size, 1) == 0
    node.synchronize()


def test_another_stream_is_not_captured_by_calls_that_are_fast(node, cupy):
    """Those of arrays that they were given before, on the stream of the last call."""
    other, field, x = cupy.cuda.Stream(non_blocking=True), node.xp.zeros((4, N)), cupy.zeros(N)
    with ring(node, field, axes=0) as halo, mpishare.Allreduce(node.comm, x, node=node) as total:
        skip_without_graphs(halo)
        skip_where_ranks_take_turns(node)

        def split(field):
            halo.start(field)
            halo.wait()

        for call, array in ((halo.exchange, field), (split, field), (total.reduce, x)):

            def on_other(array, call=call):
                with other:
                    call(array)

            for _ in range(3):
                on_other(array)
            step = mpishare.capture(node, on_other)
            step(array)
            with pytest.raises(UnsupportedError, match="not the captured one"):
                step(array)
            on_other(array)
        node.synchronize(other)


def test_only_so_many_graphs_are_kept(node):
    x = node.xp.zeros(1)
    step = mpishare.capture(node, lambda x, by: x.__iadd__(by))
    total = 0
    for _ in range(3):
        for by in range(64 + 5):
            step(x, by)
            total += by
    assert float(x[0]) == total


def skip_without_loops():
    from mpishare.backends import cuda_graphs  # imports CuPy

    if why := cuda_graphs.why_no_loops():
        pytest.skip(why)


@pytest.fixture
def loops(node):
    skip_without_loops()
    field = node.xp.zeros((4, N))
    with ring(node, field, axes=0) as halo:
        if node.size > 1 and set(halo.routes.values()) != {"fused"}:
            pytest.skip("route fused alone has loops")
        yield halo


def test_a_loop_with_exchanges(node, loops, monkeypatch):
    """A call is one launch, in which the ranks stay in step: numbers go round all of them."""
    halo, xp, made_by, wanted = loops, node.xp, launches(monkeypatch), 3001
    field, left = xp.zeros((4, N)), xp.zeros(1, "i4")

    def iterate(field, left):
        halo.exchange(field)
        field[1:3] = field[:2] + 1
        left -= 1

    solve = mpishare.capture(node, iterate, until=lambda field, left: left <= 0, at_most=10**5)
    whole, mine = np.arange(2.0 * node.size), slice(2 * node.rank, 2 * node.rank + 2)
    for _ in range(4):
        field[1:3] = xp.asarray(whole[mine])[:, None]
        left.fill(wanted)
        made_by.clear()
        solve(field, left)
        assert int(solve.iterations[0]) == wanted
        assert len(made_by) == 1
        assert (field[1:3].get() == np.roll(whole, wanted)[mine, None] + wanted).all()
    fill(node.xp, field, node.rank, 5)
    halo.exchange(field)
    assert wrong(field, node.rank, node.size, 5) == 0


def test_a_loop_is_counted_while_the_stream_is_busy_on_which_it_was_made(node, cupy):
    busy, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    left = cupy.zeros(1, "i4")
    cupy.cuda.get_current_stream().synchronize()

    def body(left):
        left -= 1

    def make():
        return mpishare.capture(node, body, until=lambda left: left <= 0, at_most=99)

    with other:
        left.fill(5)
        make()(left)  # its kernels are loaded
        other.synchronize()
    with Latch() as latch:
        opening = threading.Timer(0.2, latch.release)  # were it to wait for the stream
        latch.hold(busy.ptr)
        opening.start()
        with busy:
            solve = make()
        with other:
            left.fill(5)
            solve(left)
            other.synchronize()
        opening.join()
        busy.synchronize()
    assert int(solve.iterations[0]) == 5


def test_a_loop_has_its_own_answers(node, loops):
    """Booleans and integers of every size are looked at."""
    xp = node.xp
    for dtype in ("?", "u1", "i2", "i4", "u8"):
        left, done = xp.full(1, 5, "i4"), xp.zeros(1, dtype)

        def body(left, done):
            left -= 1
            done[...] = left <= 0
            if done.dtype.itemsize > 1:
                done <<= 8 * done.dtype.itemsize - 2  # the highest byte alone

        solve = mpishare.capture(node, body, until=lambda left, done: done, at_most=99)
        for _ in range(2):
            left.fill(5)
            solve(left, done)
            assert int(solve.iterations[0]) == 5


def check_host_loop(node, caplog, why):
    """A loop of 30 exchanges, twice, with one warning; and the plan goes on."""
    left, field = node.xp.zeros(1, "i8"), node.xp.zeros((4, N))
    with ring(node, field, axes=0) as halo:

        def body(field, left):
            halo.exchange(field)
            left -= 1

        solve = mpishare.capture(node, body, until=lambda field, left: left <= 0, at_most=100)
        for number in (1, 2):
            left.fill(30)
            fill(node.xp, field, node.rank, number)
            solve(field, left)
            assert int(solve.iterations[0]) == 30
            assert wrong(field, node.rank, node.size, number) == 0
        left.fill(1000)
        solve(field, left)
        assert int(solve.iterations[0]) == 100
    told = [record.message for record in caplog.records if "until=" in record.message]
    assert len(told) == 1
    assert why in told[0]


def test_a_loop_where_the_driver_has_none(node, monkeypatch, caplog):
    """The host looks after every run, and says so."""
    from mpishare.backends import cuda_graphs  # imports CuPy

    real = cuda_graphs.driver.call

    def old(name, *arguments, **options):
        return 12030 if name == "cuDriverGetVersion" else real(name, *arguments, **options)

    monkeypatch.setattr(cuda_graphs.driver, "call", old)
    check_host_loop(node, caplog, "the driver is of CUDA 12.3")


@TWO
def test_a_loop_with_waits_of_streams(node, forced_route, caplog):
    """No loop in a graph may hold them."""
    skip_without_loops()
    check_host_loop(node, caplog, "waits of streams")


def test_torch_functions(node):
    """Its current stream, its memory, its tensors as fields."""
    torch = pytest.importorskip("torch")
    device = torch.device("cuda", node.device.ordinal)
    field = torch.zeros((4, N), dtype=torch.float64, device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), ring(node, field, axes=0) as halo:
        skip_without_graphs(halo)

        def advance(field):
            halo.exchange(field)
            mean = (field[:1] + field[3:]) * 0.5  # allocates
            many = mean.expand(copies, N) * 1.0  # as much as PyTorch gives back by itself
            return many.sum(dim=1)[:1]

        copies, noise = (24 << 20) // (8 * N), []
        step = mpishare.capture(node, advance)
        low, high = (node.rank - 1) % node.size, (node.rank + 1) % node.size
        for number in range(12):
            field.fill_(-1)
            field[1] = 1000 * number + 10 * node.rank
            field[2] = 1000 * number + 10 * node.rank + 1
            found = step(field)
            assert all(bool((each == 7).all()) for each in noise)
            noise.clear()
            torch.cuda.empty_cache()
            sizes = 1, 1000, 4000, copies * N
            noise += [torch.full((n,), 7.0, dtype=torch.float64, device=device) for n in sizes]
            right = N * (1000 * number + 5 * low + 5 * high + 0.5)
            assert abs(float(found[0]) - right) < 1e-6 * max(1, right), number
        torch.cuda.synchronize()


def test_a_stream_in_use_stays_current(node):
    """CuPy's own `with` forgets a stream that `use()` made current."""
    cuda = node.xp.cuda
    stream = cuda.Stream(non_blocking=True)
    field = node.xp.zeros(N)
    node.synchronize()  # the stream is not ordered after the one that zeroed it

    def add(field):
        field += 1

    stream.use()
    try:
        step = mpishare.capture(node, add)
        for count in range(1, 4):
            step(field)
            assert cuda.get_current_stream() == stream, count
        stream.synchronize()
        assert (field == 3).all()
    finally:
        cuda.Stream.null.use()
