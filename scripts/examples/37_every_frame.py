"""A process outside the job gets every frame of a channel, and the job never waits for it.

    mpirun -n 2 python -m mpi4py scripts/examples/37_every_frame.py

Rank 0 starts the viewer itself here. Yours may be in another terminal, with the lines of VIEWER.
"""

import subprocess
import sys

import mpishare

STEPS, LAG = 100, 128
VIEWER = """
import mpishare  # no MPI is needed, and none is started

with mpishare.attach("movie") as there:
    print("ready", flush=True)
    steps = [int(frame.array[-1]) for frame in there]  # until the channel ends
if steps != list(range(100)):
    raise SystemExit(f"frames are missing: {steps}")
print(f"{len(steps)} frames, none lost")
"""

with mpishare.Node() as node:
    frames = node.channel(1000, "i8", name="movie", lag=LAG)  # more than LAG behind: cut off
    viewer = None
    if node.rank == frames.producer:
        viewer = subprocess.Popen([sys.executable, "-c", VIEWER], stdout=subprocess.PIPE, text=True)
        assert viewer.stdout
        viewer.stdout.readline()  # it has attached: the frames from here on are its own too
        for step in range(STEPS):
            with frames.put() as slot:
                slot[...] = step
        frames.end()
    else:
        n_seen = sum(1 for slot in frames)  # a consumer in the job
    if viewer:
        said, _ = viewer.communicate()
        if viewer.returncode:
            raise SystemExit("WRONG: the viewer failed")
        print(f"the viewer saw {said.strip()}: right")
