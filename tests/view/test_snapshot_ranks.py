"""Named windows seen from outside the job: live memory, snapshots, names, and nothing left."""

import gc
import pickle

import numpy as np
import pytest

from mpishare import ClosedError, UnsupportedError
from tests.helpers.held import held
from tests.helpers.viewer import viewing
from tests.helpers.windows import values_of


def shape_of(rank):
    return (3, 4 + rank)


def values(rank, step):
    return np.full(shape_of(rank), 100.0 * rank + step)


def take(node, window, step):
    window.array[...] = node.xp.asarray(values(node.rank, step))
    window.snapshot()


def test_a_viewer_sees_the_segments_of_all_ranks(node, view):
    window = node.allocate_each(shape_of(node.rank), name="density")
    assert window.name == "density"
    take(node, window, 1)
    view("there = attach('density')")
    assert view("there.shape, str(there.dtype), there.ranks") == [
        [3, 4],
        "float64",
        list(range(node.size)),
    ]
    view("f = there.latest()")
    assert view("f.number") == 1
    for rank in range(node.size):
        assert view(f"host(f.segment({rank}))") == values(rank, 1).tolist()
        assert view(f"host(there.segment({rank}))") == values(rank, 1).tolist()
    assert view("host(f.array)") == values(0, 1).tolist()
    assert view("'mpi4py.MPI' in sys.modules") is False
    view.raises("ValueError", "f.segment(99)")
    view.raises("ValueError", "there.segment(99)")
    view("there.close()")


def test_a_frame_stays_while_live_memory_moves_on(node, view):
    window = node.allocate_each(shape_of(node.rank), name="moving")
    take(node, window, 1)
    view("there = attach('moving'); old = there.latest(); live = there.array")
    window.array[...] = 7.0
    assert view("host(live)") == np.full(shape_of(0), 7.0).tolist()
    assert view("host(there.latest().array)") == values(0, 1).tolist()
    take(node, window, 2)
    assert view("host(there.latest().array)") == values(0, 2).tolist()
    assert view("host(old.array)") == values(0, 1).tolist()
    assert view("there.latest().number") == 2


@pytest.mark.ranks(min=2)
def test_numbers_count_the_calls_also_where_one_raises(node, view):
    """Else the second of one rank would be seen beside the first of another."""
    window = node.allocate_each(shape_of(node.rank), name="counted")
    if node.rank == node.size - 1:
        with pytest.raises(TypeError, match="is no number"):
            window.snapshot(time="late")
    else:
        take(node, window, 1)
    take(node, window, 2)
    view("there = attach('counted'); f = there.latest()")
    assert view("f.number") == 2
    for rank in range(node.size):
        assert view(f"host(f.segment({rank}))") == values(rank, 2).tolist()


@pytest.mark.ranks(min=2)
def test_a_frame_is_whole_on_all_ranks(node, view):
    window = node.allocate_each(shape_of(node.rank), name="whole")
    last = node.size - 1
    if node.rank != last:
        take(node, window, 1)
    view("there = attach('whole', timeout_s=0.2)")
    words = "latest failed: timeout_s must be a positive number"
    view.raises("ValueError", "there.latest(float('nan'))", words)
    words = f"rank {last}: 0; the job has to call window.snapshot()"
    view.raises("PeerTimeout", "there.latest()", words)
    take(node, window, 1 if node.rank == last else 2)
    assert view("there.latest().number") == 1
    assert view(f"host(there.latest().segment({last}))") == values(last, 1).tolist()


def test_the_window_of_one_rank(node, view):
    owner = node.size - 1
    window = node.allocate((2, 3), "i4", fill=5, owner=owner, name="of-one")
    window.snapshot()
    view("there = attach('of-one')")
    assert view("there.ranks, there.shape, str(there.dtype)") == [[owner], [2, 3], "int32"]
    assert view("host(there.latest().array)") == [[5] * 3] * 2
    shared = node.share(lambda: np.arange(6, dtype="u2"), name="shared.1")
    shared.snapshot()
    assert view("host(attach('shared.1').latest().array)") == list(range(6))
    assert view("host(attach('shared.1').array)") == list(range(6))


@pytest.mark.parametrize("shape", [(), (0,), (5, 0, 2), (1000, 300)], ids=str)
def test_shapes(node, view, shape):
    window = node.allocate_each(shape, "f4", fill=2.0, name="shapes")
    window.snapshot()
    view("there = attach('shapes')")
    expected = np.full(shape, 2.0).tolist()
    assert view(f"host(there.latest().segment({node.size - 1}))") == expected
    assert view("host(there.array)") == expected


def test_dtypes_of_numpy_alone(host_node):
    """Structures, and bfloat16 where it is installed."""
    node = host_node
    dtype = np.dtype([("place", "f8", (3,)), ("id", "i4"), ("name", "S5")])
    records = node.share(np.zeros(4, dtype), name="records")
    records.snapshot()
    with viewing(node) as view:
        view("there = attach('records')")
        assert view("repr(there.dtype) == repr(there.latest().array.dtype)") is True
        fields = [["place", "<f8", [3]], ["id", "<i4"], ["name", "|S5"]]
        assert view("there.dtype.descr") == fields
        half = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
        window = node.allocate(4, half, fill=1.5, name="halves")
        window.snapshot()
        view("there = attach('halves'); f = there.latest().array")
        assert view("str(there.dtype), str(f.dtype)") == ["bfloat16"] * 2
        assert view("(there.array + f).astype('f4').tolist()") == [3.0] * 4
    shared = node.share_each(np.full(3, 2.5, half))
    assert shared.dtype == half
    assert (shared.segment(node.size - 1) == 2.5).all()


def test_a_viewer_that_came_first(node, view):
    view.begin("host(attach('awaited', wait_s=float('inf')).array)")
    window = node.allocate(3, fill=6.0, name="awaited")
    assert view.answer() == [6.0] * 3
    window.close()


def test_a_viewer_is_told_when_the_window_closes(node, view):
    window = node.allocate_each(shape_of(node.rank), name="closing")
    take(node, window, 1)
    view("there = attach('closing'); f = there.latest()")
    window.close()
    for call in ("there.array", "there.latest()"):
        view.raises("ClosedError", call, "has closed the window")
    assert view("host(f.array)") == values(0, 1).tolist()
    view("there.close()")
    view.raises("ClosedError", "there.latest()")
    view.raises("HandleError", "attach('closing')")
    with pytest.raises(ClosedError):
        window.snapshot()


def test_pickling_gives_an_attached_window_that_can_be_written(node, view):
    window = node.allocate_each(4, "i8", fill=3, name="pickled")
    with pytest.raises(TypeError, match=r"cannot be pickled.*Give it a name"):
        pickle.dumps(node.allocate(2))
    data = pickle.dumps(window).hex()
    data = node.comm.bcast(data, 0)
    view(f"import pickle\nthere = pickle.loads(bytes.fromhex('{data}'))")
    assert view("host(there.array)") == [3] * 4
    view(f"there.segment({node.size - 1})[2:] = 9")
    if node.backend == "cuda":
        view("import cupy; cupy.cuda.Device().synchronize()")
    expected = [3, 3, 9, 9] if node.rank == node.size - 1 else [3] * 4
    assert values_of(window.array).tolist() == expected
    if node.backend == "host":
        view.raises("ValueError", "attach('pickled').array[0] = 1", "read-only")


def test_a_readonly_window_is_one_where_it_is_unpickled(node, view):
    window = node.share(node.xp.arange(4), readonly=True, name="table")
    data = node.comm.bcast(pickle.dumps(window).hex(), 0)
    view(f"import pickle\nthere = pickle.loads(bytes.fromhex('{data}'))")
    assert view("host(there.array)") == [0, 1, 2, 3]
    if node.backend == "host":
        view.raises("ValueError", "there.array[0] = 1", "read-only")
    view("del there")
    window.close()


def test_a_name_is_taken_once_on_all_ranks(node):
    gc.collect()  # what tests before this one have left
    before = held()
    first = node.allocate(2, name="taken")
    for call in (node.allocate, node.allocate_each, node.channel):
        with pytest.raises(ValueError, match="'taken' is taken by another window of job"):
            call(3, name="taken")
    first.close()
    gc.collect()
    assert held() == before
    node.allocate(2, name="taken").close()


def test_nothing_is_left(node, view):
    def once():
        window = node.allocate_each(100_000, name="leak")
        window.snapshot()
        view("there = attach('leak'); f = there.latest(); there.close()")
        window.close()

    once()
    gc.collect()
    view("files = lambda: len(os.listdir('/proc/self/fd'))")
    before, viewers = held(), view("files()")
    for _ in range(3):
        once()
    gc.collect()
    assert held() == before
    if node.backend == "host":  # the driver opens files of its own when it likes
        assert view("files()") == viewers


def test_a_held_array_of_the_viewer_stays_valid(node, view):
    """On CUDA the job keeps the memory then, and says who holds it."""
    window = node.allocate_each(4, fill=1.5, name="kept")
    view("there = attach('kept'); live = there.array")
    is_kept = node.backend == "cuda"
    if is_kept and node.rank == 0:
        with pytest.warns(ResourceWarning, match="outside the job map it"):
            window.close()
    else:
        window.close()
    assert view("host(live)") == [1.5] * 4
    view("del live; there.close(); del there")


def test_info_lists_what_is_there_without_mpi(node, view):
    held = node.allocate_each(shape_of(node.rank), "i4", name="listed")
    view("there = attach('listed')")
    view(
        "import subprocess\n"
        "command = [sys.executable, '-X', 'importtime', '-m', 'mpishare.info', '--attachable']\n"
        "done = subprocess.run(command, capture_output=True, text=True)\n"
        "asjson = subprocess.run([*command, '--json'], capture_output=True, text=True).stdout"
    )
    assert view("done.returncode") == 0
    assert view("'mpi4py.MPI' in done.stderr") is False
    text, job = view("done.stdout"), view("there.job")  # other jobs may have one of that name
    line = next(line for line in text.splitlines() if line.startswith(f"listed  job {job}"))
    assert "int32, (3, 4) of rank 0" in line
    mine = "(w['name'], w['job']) == ('listed', there.job)"
    window = view(f"[w for w in json.loads(asjson) if {mine}][0]")
    assert window["ranks"] == list(range(node.size))
    assert window["shapes"] == [list(shape_of(rank)) for rank in range(node.size)]
    assert window["viewers"] == view("[os.getpid()]")
    assert not held.is_closed


def test_a_window_in_place_has_snapshots_alone(node, view):
    whole = node.allocate_each(shape_of(node.rank))
    window = node.share_each(whole.array, copy=False, name="frames-only")
    take(node, window, 1)
    view("there = attach('frames-only')")
    words = "it was shared in place. Snapshots are there"
    view.raises("UnsupportedError", "there.array", words)
    last = node.size - 1
    assert view(f"host(there.latest().segment({last}))") == values(last, 1).tolist()


def test_an_array_with_gaps_has_no_name(node):
    """One in Fortran's order has none, and comes as it is."""
    whole = node.allocate_each((3, 8))
    with pytest.raises(UnsupportedError, match="leaves gaps"):
        node.share_each(whole.array[:, :4], copy=False, name="gaps")
    node.share_each(whole.array.T, copy=False, name="transposed").close()
