"""What tests of windows, channels and pools share: values, outcomes on all ranks, and leaks."""

import contextlib
import gc

import numpy as np

from tests.helpers.held import gpu_free, held
from tests.helpers.latch import within

MIB = 1 << 20


def values_of(array):
    """The array's values in host memory, when the GPU has come so far."""
    return np.asarray(array.get() if hasattr(array, "get") else array).copy()


def address_of(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def some(shape, dtype, seed=0):
    """Values that differ from element to element, where the dtype can hold that."""
    count = int(np.prod(shape, dtype=int))
    return ((np.arange(count) * 7 + seed) % 101).astype(dtype).reshape(shape)


def put(node, array, values):
    array[...] = node.xp.asarray(values)
    node.synchronize()


def send(channel, *values):
    """Put a frame of each value."""
    for value in values:
        with channel.put() as slot:
            slot[...] = value


def on_every_rank(node, work):
    """Call `work`; return the exception of every rank, by its name."""
    try:
        work()
    except Exception as error:
        return error, node.comm.allgather(type(error).__name__)
    return None, node.comm.allgather("")


def fails_on(comm, ranks, error, work, *words):
    """`work` raises such an error on these ranks, which the others are told; all with the words."""
    names = [each.__name__ for each in (error if isinstance(error, tuple) else (error,))]
    mine = "nothing", "", {}
    try:
        work()
    except Exception as caught:  # which is not kept, as it holds arrays
        mine = type(caught).__name__, str(caught), getattr(caught, "failures", {})
    told = comm.allgather(mine)
    assert all(each in mine[1] for each in words), mine
    for rank, (name, _, failures) in enumerate(told):
        assert name in (names if rank in ranks else ["PeerError"]), told
        assert [*failures] in ([], [*ranks])
        assert all(each.startswith(tuple(names)) for each in failures.values()), failures


@contextlib.contextmanager
def nothing_leaked(node):
    """What runs inside leaves neither files, mappings, names nor GPU memory on any rank."""
    gc.collect()
    node.barrier()
    before = held()
    free = gpu_free() if node.backend == "cuda" else 0
    node.barrier()
    yield
    gc.collect()
    node.barrier()
    assert (held().fds, held().mapped) == (before.fds, before.mapped)
    # A name of another job stands only for a moment.
    assert within(5, lambda: not held().names - before.names)
    if node.backend == "cuda":
        # Other ranks and the driver take a little at any time.
        assert gpu_free() >= free - 32 * MIB
    node.barrier()


def check_works(node):
    """Every rank reads what another one has: the node is whole. Collective."""
    with node.allocate_each(2, fill=float(node.rank)) as window:
        window.fence()
        other = (node.rank + 1) % node.size
        assert window.segment(other).tolist() == [other] * 2
        window.fence()
