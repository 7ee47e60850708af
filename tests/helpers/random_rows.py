"""Random rows and migrations against a program of messages in NumPy, on either backend."""

import numpy as np

import mpishare
from tests.helpers.halos import on_host

KINDS = ("f8", "f4", "u1", "i8", ("f4", (3,)), ("u2", (2, 2)), "c16")


def filled(rng, kind, count):
    """A column of random bytes that are no NaN."""
    dtype = np.dtype(kind)
    raw = rng.integers(0, 127, count * dtype.itemsize, np.uint8)
    return raw.view(dtype.base).reshape(count, *dtype.shape)


def is_same(one, other):
    return one.shape == other.shape and one.tobytes() == other.tobytes()


class Oracle:
    """What comes from each key, by one `alltoall` of all rows."""

    def __init__(self, comm, swap):
        self.comm, self.keys = comm, swap.peers
        self.ranks = dict(zip(self.keys, (key.rank for key in swap._form.keys), strict=True))

    def exchange(self, parts):
        """Parts by key, each the columns of its rows; those that come, by key."""

        def far(key):
            return (key[0], -key[1]) if isinstance(key, tuple) else self.comm.rank

        sent = [{} for _ in range(self.comm.size)]
        for key in self.keys:
            sent[self.ranks[key]][far(key)] = parts[key]
        came = self.comm.alltoall(sent)
        return {key: came[self.ranks[key]][key] for key in self.keys}

    def migrate(self, columns, to, sent, room):
        """The rows that stay, those that come, and how many are left, given how many went by key.

        The last columns are the goals.
        """
        me = self.comm.rank
        first_key = {}
        for key in self.keys:
            first_key.setdefault(self.ranks[key], key)
        leaves, parts = to == -1, {key: [c[:0] for c in columns] for key in self.keys}
        for rank, key in first_key.items():
            if rank != me:
                at = np.flatnonzero(to == rank)
                assert min(room, len(at)) <= sent[key] <= len(at)
                at = at[: sent[key]]
                leaves[at] = True
                parts[key] = [column[at] for column in columns]
        n = int((~leaves).sum())
        stays = np.flatnonzero(~leaves)
        holes = np.flatnonzero(leaves[:n])
        order = np.arange(len(to))
        order[holes] = stays[n - len(holes) :][::-1]
        left = int((to[stays] != me).sum())
        return order[:n], stays, self.exchange(parts), left


def random_plan(node, comm, seed, require):
    """A plan with random columns and peers, alike on all ranks as far as they must be."""
    rng, options = np.random.default_rng(seed), {"require": require}
    kinds = [KINDS[at] for at in rng.integers(0, len(KINDS), rng.integers(1, 5))]
    room = int(rng.choice([1, 3, 16, 200]))
    how = rng.integers(3)
    if how == 1:
        options["dims"] = [0] * int(rng.integers(1, 4))
        options["periods"] = [bool(wraps) for wraps in rng.integers(0, 2, len(options["dims"]))]
    elif how == 2:
        knows = rng.integers(0, 2, (comm.size, comm.size))
        options["peers"] = np.flatnonzero((knows | knows.T)[comm.rank]).tolist()
    return kinds, room, mpishare.RowExchange(comm, kinds, room, node=node, **options)


def random_rows(rng, xp, swap, nrows, most):
    """Rows for some peers as a call takes them, and their numbers for all."""
    given, numbers = {}, {key: np.empty(0, np.int64) for key in swap.peers}
    for key in swap.peers:
        how = rng.integers(4)
        if how == 1:
            low = int(rng.integers(0, nrows + 1))
            high = min(nrows, low + int(rng.integers(0, most + 1)))
            given[key] = (
                (low, high) if rng.integers(2) else (xp.asarray(low), xp.asarray(high, "i4"))
            )
            numbers[key] = np.arange(low, high)
        elif how > 1 and nrows:
            count = int(rng.integers(0, min(2 * nrows, most) + 1))
            at = rng.integers(0, nrows, count).astype("i4" if rng.integers(2) else "i8")
            used = count if how == 2 else int(rng.integers(0, count + 1))
            given[key] = xp.asarray(at) if how == 2 else (xp.asarray(at), used)
            numbers[key] = at[:used]
    return given, numbers


def check_exchanges(node, comm, seed, steps=6, *, require=None):
    """Random calls of a random plan, many with more rows than room."""
    xp = node.xp
    kinds, room, swap = random_plan(node, comm, seed, require)
    oracle = Oracle(comm, swap)
    rng = np.random.default_rng([seed, comm.rank])
    largest = int(np.random.default_rng(seed + 1).choice([0, 2, 20, 300]))
    is_cuda = node.backend == "cuda"
    for _ in range(steps):
        nrows = int(rng.integers(0, largest + 2))
        columns = [filled(rng, kind, nrows) for kind in kinds]
        given, numbers = random_rows(rng, xp, swap, nrows, 2 * largest)
        arrays = [*map(xp.asarray, columns)]
        swap.start(arrays, given)
        right = oracle.exchange({k: [c[at] for c in columns] for k, at in numbers.items()})
        counts = {key: len(rows[0]) for key, rows in right.items()}
        is_counted = bool(rng.integers(2))
        if is_counted:
            assert swap.counts() == counts
            assert swap.sent() == {key: len(at) for key, at in numbers.items()}
        if rng.integers(2):
            assert on_host(swap.device_counts).tolist() == [*counts.values()]
        # On GPUs rows beyond a slot have no place but arrays, unless the host knows their number.
        in_rounds = is_cuda and not is_counted
        check_placed(xp, swap, rng, kinds, right, takes_all=in_rounds)
        assert swap.counts() == counts
        for key, rows in right.items():
            try:
                received = swap.received(key)
            except mpishare.CapacityError:
                assert in_rounds
                assert len(rows[0]) > room
            else:
                assert all(map(is_same, map(on_host, received), rows))
    return swap


def check_placed(xp, swap, rng, kinds, right, *, takes_all):
    """End a call in one of its ways."""
    counts = {key: len(rows[0]) for key, rows in right.items()}
    if rng.integers(2):
        keys = [key for key in right if rng.integers(2) or takes_all]
        spare = {key: counts[key] + int(rng.integers(3)) for key in keys}
        before = {key: [filled(rng, kind, spare[key]) for kind in kinds] for key in keys}
        into = {key: [xp.array(each) for each in arrays] for key, arrays in before.items()}
        assert swap.wait(into) is None
        for key in keys:
            for array, old, rows in zip(into[key], before[key], right[key], strict=True):
                old[: len(rows)] = rows
                assert is_same(on_host(array), old)
        return
    first, total = int(rng.integers(0, 5)), sum(counts.values())
    before = [filled(rng, kind, first + total + 2) for kind in kinds]
    arrays = [xp.array(each) for each in before]
    count = xp.asarray(first, "i8") if rng.integers(2) else first
    found = swap.wait(arrays, at="append", count=count)
    assert int(found) == first + total
    assert found is count or isinstance(count, int)
    for at, (array, old) in enumerate(zip(arrays, before, strict=True)):
        old[first : first + total] = np.concatenate(
            [old[:0], *(each[at] for each in right.values())]
        )
        assert is_same(on_host(array), old)


def check_migrations(node, comm, seed, steps=4, *, stable=False, require=None):
    """Random migrations, with strangers and dropped rows, into arrays that are long enough.

    How many rows beyond `room` a call takes on GPUs depends on when slots have grown.
    """
    xp = node.xp
    kinds, room, swap = random_plan(node, comm, seed, require)
    oracle = Oracle(comm, swap)
    move = mpishare.Migration(swap, stable=stable)
    rng = np.random.default_rng([seed, comm.rank])
    largest = int(np.random.default_rng(seed + 1).choice([0, 2, 20, 3000]))
    for _ in range(steps):
        n = int(rng.integers(0, largest + 1))
        capacity = comm.allreduce(n) + int(rng.integers(3))
        columns = [filled(rng, kind, capacity) for kind in kinds]
        goals = rng.integers(-1, comm.size, capacity).astype("i4")
        goals[rng.random(capacity) < rng.choice([0, 0.8])] = comm.rank
        arrays, to = [*map(xp.array, columns)], xp.array(goals)
        count = xp.asarray(n, "i8")
        for _ in range(2):
            wanted = [*(column[:n] for column in columns), goals[:n]]
            assert move.migrate(arrays, to, count) is count
            least = room if node.backend == "cuda" else capacity
            order, stays, came, left = oracle.migrate(wanted, goals[:n], swap.sent(), least)
            kept = stays if stable else order
            right = [
                np.concatenate([each[kept], *(rows[at] for rows in came.values())])
                for at, each in enumerate(wanted)
            ]
            right[-1][len(kept) :] = comm.rank
            n, columns, goals = len(right[0]), right[:-1], right[-1]
            assert int(count) == n
            assert int(move.left) == left
            assert all(is_same(on_host(a)[:n], r) for a, r in zip(arrays, columns, strict=True))
            assert is_same(on_host(to)[:n], goals)
    return swap
