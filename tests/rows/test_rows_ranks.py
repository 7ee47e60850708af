"""Rows and migrations against NumPy, on either backend, and what is refused."""

import numpy as np
import pytest

import mpishare
from mpishare import CapacityError, EpochError, Migration, PeerError, RowExchange
from mpishare.rows import slots
from tests.helpers.halos import on_host
from tests.helpers.random_rows import check_exchanges, check_migrations

TWO = pytest.mark.ranks(min=2)
SEEDS = range(30)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_exchanges(node, seed):
    check_exchanges(node, node.comm, seed).close()


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_random_exchanges_in_numpy(python_node, seed):
    check_exchanges(python_node, python_node.comm, seed).close()


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_random_exchanges_by_messages(node, seed, monkeypatch):
    monkeypatch.setenv("MPISHARE_ROUTE", "mpi")
    for check in (check_exchanges, check_migrations):
        with check(node, node.comm, seed) as swap:
            assert {*swap.routes.values()} <= {"mpi"}


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_migrations(node, seed, stable):
    check_migrations(node, node.comm, seed, stable=stable).close()


def columns_of(node, nrows, value=0.0):
    return [node.xp.full(nrows, float(node.rank + value)), node.xp.arange(nrows)]


@pytest.fixture
def ring(node):
    """An exchange along a ring: both sides may be the same rank."""
    with RowExchange(node.comm, ["f8", "i8"], 8, dims=[node.size], periods=True, node=node) as swap:
        yield swap


def test_numbers_with_gaps(node, ring):
    """On hosts they are copied; on GPUs they are refused."""
    numbers = node.xp.arange(6)[::2]
    if node.backend == "cuda":
        with pytest.raises(ValueError, match="not contiguous"):
            ring.start(columns_of(node, 6), {(0, 1): numbers})
        numbers = numbers.copy()
    ring.start(columns_of(node, 6), {(0, 1): numbers})
    ring.wait()
    assert on_host(ring.received((0, -1))[1]).tolist() == [0, 2, 4]


def test_a_column_that_has_its_own_row_numbers(node):
    with RowExchange(node.comm, ["i4"], peers=[node.rank], node=node) as swap:
        x = node.xp.asarray([2, 0, 1, 1], "i4")
        swap.start([x], {node.rank: x})
        swap.wait()
        assert on_host(swap.received(node.rank)[0]).tolist() == [1, 2, 0, 0]
        to = node.xp.full(4, node.rank, "i4")
        assert int(Migration(swap).migrate([to], to, 4)) == 4


def test_columns_are_held_until_wait(node, ring):
    columns = columns_of(node, 3)
    ring.start(iter(columns), {(0, 1): (0, 3)})
    assert [*map(id, ring._open)] == [*map(id, columns)]
    ring.wait()
    assert ring._open is None


def test_rows_on_the_host_outlive_larger_slots_and_the_plan(host_node):
    """They may be others by then, but they are no fault of memory."""
    views = []
    with RowExchange(host_node.comm, ["f8"], 1, node=host_node) as swap:
        for count in (1, 100, 100_000):
            swap.start([np.full(count, 7.0)], dict.fromkeys(swap.peers, (0, count)))
            swap.wait()
            views += [swap.received(peer)[0] for peer in swap.peers]
    assert all((each == 7).all() for each in views)


def test_no_row_is_written_into_arrays_that_are_too_short(node, ring):
    short = {(0, -1): [node.xp.zeros(2), node.xp.zeros(2, "i8")]}
    ring.start(columns_of(node, 3), {(0, 1): (0, 3)})
    if node.backend == "cuda":
        ring.wait(short)
        with pytest.raises(CapacityError, match="1 rows came beyond"):
            ring.counts()
    else:
        with pytest.raises(CapacityError, match="3 rows into arrays of 2"):
            ring.wait(short)
        assert not short[0, -1][0].any()
        ring.wait()
    assert on_host(ring.received((0, -1))[1]).tolist() == [0, 1, 2]


def test_more_rows_than_room(node, ring, caplog):
    """They all come; the two ranks make a larger slot for the next call, and tell so."""
    caplog.set_level("INFO", "mpishare.rows")
    before = ring.staging_nbytes
    for count in (20, 7, 41, 1000):
        ring.start(columns_of(node, count), {(0, 1): (0, count)})
        assert ring.counts() == {(0, -1): count, (0, 1): 0}
        ring.wait()
        assert on_host(ring.received((0, -1))[1]).tolist() == [*range(count)]
    assert len([each for each in caplog.messages if "from now on" in each]) == 3
    ring.start(columns_of(node, 1), {})
    ring.wait()
    assert ring.staging_nbytes > before + 2 * 1000 * 16


@TWO
def test_rows_that_found_the_arrays_full_come_first_at_the_next_call(node, ring):
    """Rank 1 has no place for two rows of rank 0, and room for these and for another one then."""
    move, me, here = Migration(ring), node.rank, node.xp.full(3, node.rank, "i4")
    columns, to = columns_of(node, 3), here.copy()
    if me == 0:
        to[:2] = 1
    count = move.migrate(columns, to, 3)
    assert int(count) == (1 if me == 0 else 3)
    assert int(move.left) == (2 if me == 1 else 0)
    if me == 1:
        with pytest.raises(CapacityError, match="2 rows that came into full arrays"):
            move.check()
    else:
        move.check()
    columns, to = columns_of(node, 9), node.xp.full(9, me, "i4")
    if me == 0:
        to[5] = 1
    count = move.migrate(columns, to, 6)
    move.check()
    assert int(count) == {0: 5, 1: 9}.get(me, 6)
    if me == 1:
        assert on_host(columns[0]).tolist() == [1.0] * 6 + [0.0] * 3
        assert on_host(columns[1]).tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 5]


@TWO
def test_no_row_is_lost_where_arrays_stay_full(node, ring):
    """Rank 0 has a hundred rows for rank 1, which takes none for as long as it can."""
    move, me, xp = Migration(ring), node.rank, node.xp
    ids, goal = xp.arange(100) + 100 * me, 1 if me == 0 else me
    columns, to = [ids * 0.5, ids], xp.full(100, goal, "i4")
    count = xp.asarray(100, "i8")
    for _ in range(15):
        move.migrate(columns, to, count)
    assert node.comm.allreduce(int(move.left)) == 100
    assert node.comm.allreduce(int(count)) <= 100 * node.size
    n = int(count)
    longer = [xp.zeros(200), xp.zeros(200, "i8"), xp.full(200, goal, "i4")]
    for new, old in zip(longer, (*columns, to), strict=True):
        new[:n] = old[:n]
    for _ in range(20):  # eight a call on GPUs
        move.migrate(longer[:2], longer[2], count)
    move.check()
    n = int(count)
    assert n == {0: 0, 1: 200}.get(me, 100)
    if me == 1:
        assert sorted(on_host(longer[1]).tolist()) == [*range(200)]
        assert (on_host(longer[0]) == 0.5 * on_host(longer[1])).all()


def test_goals_that_are_no_peers(node):
    with RowExchange(node.comm, ["f8"], peers=[node.rank], node=node) as swap:
        move = Migration(swap)
        to = node.xp.asarray([node.size, node.rank, -1], "i4")
        x = node.xp.arange(3.0)
        count = move.migrate([x], to, 3)
        assert (int(count), int(move.left)) == (2, 1)
        with pytest.raises(ValueError, match="1 rows whose goals are no peers"):
            move.check()


def test_calls_out_of_order(node, ring):
    columns = columns_of(node, 3)
    with pytest.raises(EpochError, match="counts failed: nothing was started"):
        ring.counts()
    with pytest.raises(EpochError, match="nothing was started"):
        ring.wait()
    ring.start(columns, {})
    with pytest.raises(EpochError, match="an exchange of rows is open"):
        ring.start(columns, {})
    with pytest.raises(EpochError, match="an exchange of rows is open"):
        Migration(ring).migrate(columns, node.xp.zeros(3, "i4"), 3)
    ring.wait()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c, r: (c[:1], r), "1 fields given"),
        (lambda c, r: ([c[0], c[0]], r), "column 1 has float64"),
        (lambda c, r: ([c[0][:2], c[1]], r), "columns have"),
        (lambda c, r: ([c[0][::2], c[1][::2]], r), "not contiguous"),
        (lambda c, r: (c, {(1, 1): (0, 1)}), "are no peers"),
        (lambda c, r: (c, {(0, 1): (0, 7)}), "rows 0 to 7 of 6"),
        (lambda c, r: (c, {(0, 1): (3, 2)}), "rows 3 to 2 of 6"),
        (lambda c, r: (c, {(0, 1): c[0]}), "row numbers are an array of int32 or int64"),
        (lambda c, r: (c, {(0, 1): c[0][:0]}), "row numbers are an array of int32 or int64"),
        (lambda c, r: (c, {(0, 1): c[1].reshape(2, 3)}), "row numbers are .* one axis"),
        (lambda c, r: (c, {(0, 1): 3}), "rows are .low, high., or an array"),
        (lambda c, r: (c, {(0, 1): (0.0, 1)}), "low is an int"),
        (lambda c, r: (c, [(0, 1)]), "a dict by peer is needed"),
    ],
)
def test_what_a_call_refuses(node, ring, change, said):
    columns, rows = change(columns_of(node, 6), {})
    with pytest.raises((TypeError, ValueError), match=said):
        ring.start(columns, rows)
    ring.start(columns_of(node, 6), {})
    ring.wait()


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ([], {}, "columns must be dtypes"),
        (["O"], {}, "Python objects"),
        (["f8"], {"room": 0}, "room must be"),
        (["f8"], {"room": 10**9}, "room must be an int from 1 to 134217728, which is 1 GiB"),
        (["f8"], {"peers": [-1]}, "peers must be ranks"),
        (["f8"], {"periods": True}, "periods= is for dims="),
        (["f8"], {"dims": [0], "peers": [0]}, "are both given"),
        (["f8"], {"dims": [0], "periods": [True, True]}, "is for 2 of 1 axes"),
        (["f8"], {"dims": [1009]}, "do not fit"),
    ],
)
def test_what_a_plan_refuses(node, columns, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        RowExchange(node.comm, columns, node=node, **options)


def wrong_counts(node):
    yield -1, ValueError, "count is -1"
    for kind in ("i4", "f8"):
        yield node.xp.ones((), kind), TypeError, r"count is .*int64 of shape \(\)"
    if node.backend == "host":
        yield np.broadcast_to(np.int64(1), ()), ValueError, "count is read-only"


def test_counts_that_cannot_be_updated(node, ring):
    """They are refused before any row moves."""
    columns, to = columns_of(node, 6), node.xp.full(6, node.rank, "i4")
    move = Migration(ring)
    for count, kind, said in wrong_counts(node):
        with pytest.raises(kind, match=rf"migrate failed: .*{said}"):
            move.migrate(columns, to, count)
        ring.start(columns_of(node, 1, 50), {(0, 1): (0, 1)})
        with pytest.raises(kind, match=rf"wait failed: .*{said}"):
            ring.wait(columns, at="append", count=count)
        assert (columns[0] == node.rank).all()
        ring.wait()


@TWO
def test_columns_that_differ(node):
    with pytest.raises(PeerError, match="columns"):
        RowExchange(node.comm, ["f4" if node.rank else "f8"], node=node)


def test_one_migration_for_each_exchange(ring):
    Migration(ring)
    with pytest.raises(ValueError, match="has a Migration"):
        Migration(ring, stable=True)


def test_a_plan_that_is_closed_amid_a_call(node):
    swap = RowExchange(node.comm, ["f8", "i8"], 8, node=node)
    swap.start(columns_of(node, 3), {0: (0, 3)})
    with pytest.warns(ResourceWarning, match="closed after start"):
        swap.close()
    with pytest.raises(mpishare.ClosedError):
        swap.counts()


@pytest.mark.parametrize("call", ["start", "wait"])
def test_a_handler_of_a_signal_is_refused_amid_a_call_on_the_host(host_node, monkeypatch, call):
    """The call itself goes on."""
    name = {"start": "send", "wait": "open"}[call]
    make, refused = getattr(slots.SlotPair, name), []

    def handled(*arguments):
        with pytest.raises(EpochError, match="a handler of a signal called mpishare amid a call"):
            swap.counts()
        refused.append(name)
        return make(*arguments)

    monkeypatch.setattr(slots.SlotPair, name, handled)
    swap = RowExchange(host_node.comm, ["f8"], node=host_node)
    with swap:
        swap.start([np.arange(3.0)], {host_node.rank: (1, 3)})
        swap.wait()
        assert refused == [name] * host_node.size
        assert swap.received(host_node.rank)[0].tolist() == [1, 2]
