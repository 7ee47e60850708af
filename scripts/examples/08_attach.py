"""A notebook looks into a running job: by name, without MPI, and without stopping anything.

    mpirun -n 2 python -m mpi4py scripts/examples/08_attach.py

Rank 0 starts the viewer itself here. Yours is a notebook, or a program in another terminal, on the
same machine, with the lines of VIEWER.
"""

import subprocess
import sys

import mpishare

N = 1000
VIEWER = """
import mpishare  # no MPI is needed, and none is started

with mpishare.attach("density") as there:
    for frame in there:  # the newest snapshot each time; some are skipped
        whole = frame.whole((len(there.ranks),), width=1)  # joined, without the ghosts
        step = frame.numbers["step"]
        if float(whole.min()) != step or float(whole.max()) != step:
            raise SystemExit(f"frame {frame.number} is torn")
        if step >= 100:
            break
print(f"{len(there.ranks)} segments as {whole.shape}, every frame whole")
"""

with mpishare.Node() as node:
    u = node.allocate_each(N, fill=0, name="density")  # one word more than without
    viewer = None
    if node.is_leader:
        viewer = subprocess.Popen([sys.executable, "-c", VIEWER], stdout=subprocess.PIPE, text=True)
    is_watched = True
    step = 0
    while is_watched:
        step += 1
        u.array[...] = step
        u.snapshot(step=step)  # a copy for who looks, and numbers; waits for nobody
        is_watched = node.comm.bcast(viewer is None or viewer.poll() is None)
    if viewer:
        said, _ = viewer.communicate()
        if viewer.returncode:
            raise SystemExit("WRONG: the viewer failed")
        print(f"the viewer saw {said.strip()}: right")
