"""Times of `Node.share_all` beside one `share` and many; quoted by docs/sharing.md.

mpirun -n 2 python -m mpi4py scripts/share_all.py [ROUNDS]
"""

import sys
import time

import numpy as np

import mpishare

COUNT = 200
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 20

with mpishare.Node() as node:

    def timed(make):
        """Return the microseconds of a call until all ranks have its windows."""
        node.barrier()
        begin = time.perf_counter()
        windows = make()
        node.barrier()
        taken = 1e6 * (time.perf_counter() - begin)
        for window in windows:
            window.close()
        return taken

    for nbytes in (4096, 1 << 20):
        arrays = [np.full(nbytes, number % 250, "u1") for number in range(COUNT)]
        whole = np.ones(COUNT * nbytes, "u1")
        ways = {
            "one share": lambda arrays=arrays: [node.share(arrays[0])],
            f"share_all of {COUNT}": lambda arrays=arrays: node.share_all(arrays),
            f"{COUNT} shares": lambda arrays=arrays: [node.share(each) for each in arrays],
            "one share of all their bytes": lambda whole=whole: [node.share(whole)],
        }
        least = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for name, make in ways.items():
                least[name] = min(least[name], timed(make))
        if node.is_leader:
            for name, taken in least.items():
                print(f"{nbytes >> 10:5} KiB  {name:30} {taken:10.0f} us")
