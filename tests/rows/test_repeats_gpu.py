"""Calls on GPUs with the arrays of earlier calls, which are not looked at again."""

import numpy as np
import pytest

from mpishare import Migration, RowExchange
from tests.helpers.random_rows import Oracle

LOW, HIGH = (0, -1), (0, 1)
NROWS = 60


class Program:
    """Calls with the same arrays and other numbers in each step, beside the oracle."""

    def __init__(self, node, swap, rng):
        self.xp, self.swap, self.rng = node.xp, swap, rng
        self.oracle, self.rank = Oracle(node.comm, swap), node.rank
        self.move = Migration(swap)
        zeros = self.xp.zeros
        self.columns = [zeros(2 * NROWS), zeros(2 * NROWS, "i8")]
        self.into = {side: [zeros(NROWS), zeros(NROWS, "i8")] for side in swap.peers}
        self.all = [zeros(2 * NROWS + 9), zeros(2 * NROWS + 9, "i8")]
        self.to, self.count, self.n = zeros(2 * NROWS, "i4"), zeros((), "i8"), zeros((), "i4")
        self.numbers = self.xp.arange(NROWS)[::-1].copy()

    def fill(self):
        ids = self.rng.integers(0, 1000, 2 * NROWS)
        self.columns[0][...], self.columns[1][...] = map(self.xp.asarray, (0.5 * ids, ids))
        return ids

    def start(self, most):
        """Rows by two ints to one side, by numbers that the GPU counts to the other."""
        ids, (a, b, n) = self.fill(), np.sort(self.rng.integers(0, most + 1, 3))
        self.n.fill(n)
        self.swap.start(self.columns, {LOW: (int(a), int(b)), HIGH: (self.numbers, self.n)})
        sent = {LOW: [ids[a:b]], HIGH: [ids[np.arange(NROWS)[::-1][:n]]]}
        return {side: rows[0] for side, rows in self.oracle.exchange(sent).items()}

    def exchange(self, most, *, counts):
        came = self.start(most)
        if counts:
            assert self.swap.counts() == {side: len(rows) for side, rows in came.items()}
        self.swap.wait(self.into)
        for side, rows in came.items():
            assert self.into[side][1][: len(rows)].get().tolist() == rows.tolist()
            assert self.into[side][0][: len(rows)].get().tolist() == (0.5 * rows).tolist()

    def append(self, most):
        came = np.concatenate([*self.start(most).values()])
        self.count.fill(9)
        assert self.swap.wait(self.all, at="append", count=self.count) is self.count
        assert int(self.count) == 9 + len(came)
        assert self.all[1][9 : 9 + len(came)].get().tolist() == came.tolist()

    def migrate(self, most):
        """As many rows leave, and all come in the end."""
        ids = self.fill()[:NROWS]
        goals = np.full(2 * NROWS, self.rank, "i4")
        goals[:most] = (self.rank + 1) % self.oracle.comm.size
        self.to[...] = self.xp.asarray(goals)
        self.count.fill(NROWS)
        for _ in range(9):
            assert self.move.migrate(self.columns, self.to, self.count) is self.count
        self.move.check()
        comm, here = self.oracle.comm, self.columns[1][: int(self.count)].get()
        before, after = (np.concatenate(comm.allgather(each)) for each in (ids, here))
        assert sorted(before) == sorted(after)


@pytest.fixture
def program(node, cupy):
    with RowExchange(node.comm, ["f8", "i8"], 8, dims=[node.size], periods=True, node=node) as swap:
        program = Program(node, swap, np.random.default_rng(node.rank))
        cupy.cuda.get_current_stream().synchronize()  # the tests use others
        yield program


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(node, program, streams, seed):
    """In any order, on streams in turn, and with more rows than room from the middle on."""
    rng = np.random.default_rng(seed)
    for step in range(40):
        most = int(rng.integers(0, 9 if step < 20 else NROWS))
        with streams[int(rng.integers(0, 5) == 0)]:
            match rng.integers(4):
                case 0:
                    program.append(most)
                case 1:
                    program.migrate(most)
                case counts:
                    program.exchange(most, counts=counts == 2)
            node.synchronize()


def test_nothing_is_looked_at_again(program, stream, monkeypatch):
    """Until a column has another shape."""

    def step():
        program.exchange(8, counts=True)
        program.append(8)
        program.migrate(8)

    step()
    with monkeypatch.context() as patch:
        for name in ("start", "place", "append"):
            patch.delattr(type(program.swap._engine), name)
        patch.delattr(type(program.move._engine), "migrate")
        for _ in range(3):
            step()
    rows = {LOW: (0, 1), HIGH: (program.numbers, program.n)}
    program.columns[0].shape = -1, 1
    with pytest.raises(ValueError, match="column 0 has float64"):
        program.swap.start(program.columns, rows)


def test_bounds_that_are_wrong_later(program, stream):
    """They are refused as those of a first call, and nothing has been sent."""
    for _ in range(3):
        program.exchange(8, counts=False)
    columns = program.columns
    with pytest.raises(TypeError, match="start failed: column 1 is not an array"):
        program.swap.start([columns[0], object()], {LOW: (3, 5)})
    with pytest.raises(ValueError, match="start failed: rows 5 to 3 of 120"):
        program.swap.start(columns, {LOW: (5, 3), HIGH: (program.numbers, program.n)})
    program.exchange(8, counts=False)
