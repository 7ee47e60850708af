"""QuaTrEx's collectives and transpositions by its back ends and by mpishare, in turns.

export PYTHONPATH=../lib:../../docs/ports
QTX_ARRAY_MODULE=numpy mpirun -n 2 python -m mpi4py quatrex_times.py [ROUNDS]

On GPUs QTX_ARRAY_MODULE is cupy, and there is a table for each of host_mpi and nccl.
"""

import in_turns
import mpishare_quatrex
import numpy as np
from in_turns import node, on_gpu, print_head
from mpishare_quatrex import COLLECTIVES
from qttools import sparse, xp
from qttools.comm import comm
from qttools.datastructures import DSDBCOO

STACKS = ((16,), 500), ((64,), 2000), ((32, 4), 2000)  # energies and k points; rows
COUNTS = 1000, 100_000, 1_000_000
OF_A_ROW = 20  # nonzeros


def use(way):
    """Let all collectives go by a back end."""
    comm.stack._config.update(dict.fromkeys(COLLECTIVES, way))


def transposition(stack, rows):
    """Return a transposition there and back, and what it brings."""
    random = np.random.default_rng(0)
    places = [random.integers(rows, size=OF_A_ROW * rows) for _ in range(2)]
    ones = np.ones(len(places[0]), complex)
    cells = sparse.coo_matrix((xp.asarray(ones), tuple(map(xp.asarray, places))), (rows, rows))
    matrix = DSDBCOO.from_sparray(cells, np.full(10, rows // 10), stack)
    matrix._data[...] = numbers(matrix._data.shape)
    matrix.dtranspose()
    found = matrix._data.copy()
    matrix.dtranspose()

    def there_and_back():
        matrix.dtranspose()
        matrix.dtranspose()

    return there_and_back, [found, matrix._data]


def collective(name, count):
    """Return a collective of so many numbers of each rank, and what it brings."""
    of_all = comm.stack.size, count  # NCCL looks for parts along the first axis
    given = numbers(of_all if name == "all_to_all" else count)
    into = xp.empty(of_all if name in {"all_to_all", "all_gather"} else count, complex)
    buffers = [given] if name == "bcast" else [given, into]
    call = lambda: getattr(comm.stack, name)(*buffers)  # noqa: E731
    call()
    return call, buffers[-1:]


def numbers(shape):
    """Return random numbers, others on each rank."""
    random = np.random.default_rng(comm.stack.rank)
    return xp.asarray(random.random(shape) + 1j * random.random(shape))


if xp.__name__ == "cupy":  # QuaTrEx has begun on the first GPU, in each rank
    xp.cuda.Device(comm.rank % xp.cuda.runtime.getDeviceCount()).use()
mpishare_quatrex.use(node())
for theirs in ("host_mpi", "nccl") if on_gpu() else ("device_mpi",):
    config = dict.fromkeys(COLLECTIVES, theirs)
    comm.configure(1, {**config, "send_recv": theirs}, config, override=True)
    ways = theirs, "mpishare"
    print_head("QuaTrEx", ways, "numpy", "scipy")
    for stack, rows in STACKS:
        what = f"`dtranspose`, {' x '.join(map(str, stack))} of {rows}^2, both ways"
        in_turns.compare(what, ways, transposition, stack, rows, use=use)
    for count in COUNTS:
        for name in COLLECTIVES:
            what = f"`{name}`, {count} complex128"
            in_turns.compare(what, ways, collective, name, count, use=use)
