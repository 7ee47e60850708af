"""Replays of one graph with other numbers of rows in each, which the host never sees, beside NumPy.

In each step rows go to the next rank, to the last one or nowhere, as their ids and the step tell.
Then every rank sends its rows on, some to one side and the others to the other one.
"""

import numpy as np
import pytest

import mpishare
from mpishare import Migration, RowExchange
from tests.helpers.counted import Counted

SOURCE = r"""
typedef unsigned long long Word;
__device__ unsigned mix(Word id, Word step) {
  return unsigned(id * 2654435761 + step * 40503) >> 13;
}
extern "C" {
__global__ void aim(const Word* id, int* to, const Word* count, int rank, int size,
                    const Word* step) {
  for (unsigned i = threadIdx.x; i < *count; i += blockDim.x)
    to[i] = (rank + size + int(mix(id[i], *step) % 3) - 1) % size;
}
__global__ void part(Word* low, Word* came, const Word* count, int rank, const Word* step) {
  *low = mix(rank + 1, *step) % (*count + 1), *came = 0;
}
// A sum in which each row has the weight of its place; of what came, another one.
__global__ void add(const double* x, const Word* id, const Word* count, const Word* far,
                    const Word* came, Word* total, Word* errors) {
  __shared__ Word sum;
  if (threadIdx.x == 0) sum = *count;
  __syncthreads();
  for (unsigned i = threadIdx.x; i < *count; i += blockDim.x) {
    if (x[i] != 0.5 * id[i]) atomicAdd(errors, 1ULL);
    atomicAdd(&sum, (i + 1) * id[i]);
  }
  for (unsigned i = threadIdx.x; i < *came; i += blockDim.x) atomicAdd(&sum, 7 * (i + 1) * far[i]);
  __syncthreads();
  if (threadIdx.x == 0) *total = *total * 1099511628211ULL + sum;
}
}
"""
NROWS = 40  # of a rank, at first
LOW, HIGH = (0, -1), (0, 1)


def mix(ids, step):
    return (ids * 2654435761 + step * 40503 & 0xFFFFFFFF) >> 13


def moved(rows, step, stable):
    """The ids of all ranks after a migration, in its order."""
    size = len(rows)
    goals = [(mix(ids, step) % 3 + (r + size - 1)) % size for r, ids in enumerate(rows)]
    found = []
    for rank, (ids, goal) in enumerate(zip(rows, goals, strict=True)):
        stays = (goal == rank).nonzero()[0]
        holes = (goal[: len(stays)] != rank).nonzero()[0]
        order = np.arange(len(stays))
        order[holes] = stays[len(stays) - len(holes) :][::-1]
        sources = dict.fromkeys([(rank - 1) % size, (rank + 1) % size])
        came = [rows[each][goals[each] == rank] for each in sources if each != rank]
        found.append(np.concatenate([ids[stays if stable else order], *came]))
    return found


def totals(size, steps, stable):
    """What each rank has in the end, and its sum."""
    rows, sums = [np.arange(NROWS, dtype="u8") + NROWS * rank for rank in range(size)], [0] * size
    weights = np.arange(1, size * NROWS * 2 + 1, dtype="u8")
    for step in range(1, steps + 1):
        rows = moved(rows, step, stable)
        lows = [mix(r + 1, step) % (len(ids) + 1) for r, ids in enumerate(rows)]
        for rank, ids in enumerate(rows):
            before, after = (rank - 1) % size, (rank + 1) % size
            far = np.concatenate([rows[before][lows[before] :], rows[after][: lows[after]]])
            total = len(ids) + int(weights[: len(ids)] @ ids) + 7 * int(weights[: len(far)] @ far)
            sums[rank] = (sums[rank] * 1099511628211 + total) % 2**64
    return rows, sums


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("replays", "stable"),
    [
        *((20, False), (20, True)),  # for compute-sanitizer
        (3000, True),
        pytest.param(100_000, False, marks=pytest.mark.whole),
    ],
)
def test_replays(node, stream, cupy, replays, stable):
    size, rank, most = node.size, node.rank, NROWS * node.size
    kernels = Counted(SOURCE, "aim", "part", "add")
    kernels.forget()
    ids, to = cupy.zeros(most, "u8"), cupy.zeros(most, "i4")
    ids[:NROWS] = cupy.arange(NROWS) + NROWS * rank
    x, count = 0.5 * ids, cupy.array(NROWS, "i8")
    low, came, far = cupy.zeros((), "i8"), cupy.zeros((), "i8"), cupy.zeros(2 * most, "u8")
    far_x = 0.5 * far
    total, ranks = cupy.zeros(1, "u8"), (np.int32(rank), np.int32(size))
    with RowExchange(node.comm, ["f8", "u8"], most, dims=[size], periods=True, node=node) as swap:
        move = Migration(swap, stable=stable)

        def advance():
            kernels._aim((1,), (128,), (ids, to, count, *ranks, kernels.step))
            move.migrate([x, ids], to, count)
            kernels._part((1,), (1,), (low, came, count, ranks[0], kernels.step))
            swap.start([x, ids], {LOW: (0, low), HIGH: (low, count)})
            swap.wait([far_x, far], at="append", count=came)
            kernels._add((1,), (128,), (x, ids, count, far, came, total, kernels.errors))
            kernels.go_on()

        move.migrate([x, ids], cupy.full(most, rank, "i4"), count)  # has its memory from here on
        step = mpishare.capture(node, advance)
        for _ in range(replays):
            step()
        node.synchronize(stream)
        move.check()
        rows, sums = totals(size, replays, stable)
        assert ids[: int(count)].get().tolist() == rows[rank].tolist()
        assert int(total[0]) == sums[rank]
        assert kernels.is_right_after(replays)
        step.close()
