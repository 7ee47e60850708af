"""A handle by file to a program without MPI, which multiplies the data in place.

    mpirun -n 1 python -m mpi4py scripts/examples/11_handle_by_file.py

The handle is a pickled window. Whoever has it, on this machine and as this user, maps the memory.
"""

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import mpishare

CONSUMER = """
import pickle
import sys

import mpishare  # no MPI

with open(sys.argv[1], "rb") as file, pickle.load(file) as there:
    there.array[...] *= 2  # in the memory of the other process
    if hasattr(there.array, "get"):  # CuPy: wait until it is done
        there.array[:1].get()
"""

with mpishare.Node() as node, tempfile.TemporaryDirectory() as folder:
    data = node.share(lambda: 42.0 + node.xp.arange(1024) / 1000, name="data")
    node.synchronize()  # written, before anybody hears of it
    if node.is_leader:
        handle = Path(folder, "handle.bin")
        handle.write_bytes(pickle.dumps(data))
        subprocess.run([sys.executable, "-c", CONSUMER, handle], check=True)
    data.fence()  # for the other ranks: the consumer is done
    right = 2 * (42.0 + node.xp.arange(1024) / 1000)
    if not bool((data.array == right).all()):
        raise SystemExit(f"rank {node.rank}: WRONG: {data.array[:3]}")
    node.barrier()
    if node.is_leader:
        print(f"first values {data.array[:3].tolist()}: right")
