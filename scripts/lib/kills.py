"""How often a rank that is killed is named by a survivor, whatever the launcher does to that one.

python scripts/lib/kills.py [--kills 50] [--place wait sleep numpy python] [-- LAUNCHER OPTIONS]

Kills a random one of four ranks in each job, while the others wait in a fence, sleep, or compute in
NumPy or in Python itself. Prints how often a line on stderr named it, and the milliseconds from the
kill until that line was there. Default launcher: mpirun.
"""

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 4
PLACES = ("wait", "sleep", "numpy", "python")
LIVES_S = 3.0  # if the launcher lets a survivor live


def be_a_rank(place, victim, file):
    import numpy as np

    import mpishare

    node = mpishare.Node(backend="host", timeout_s=20)
    window = node.allocate_each(1000)
    node.barrier()
    if node.rank == victim:
        time.sleep(0.2 + 0.1 * random.random())
        Path(file).write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + LIVES_S
    if place == "wait":
        window.fence()
    elif place == "sleep":
        time.sleep(LIVES_S)
    u, k = np.ones((300, 300)), 0
    while time.monotonic() < end:
        if place == "numpy":
            u = np.tanh(2 * u + 1)
        else:
            k += sum(range(1000))


def kill(launcher, place):
    """Return whether the rank was named, the milliseconds until then, and how often all in all."""
    victim = random.randrange(RANKS)
    with tempfile.NamedTemporaryFile() as file:
        job = [sys.executable, __file__, "--rank", place, str(victim), file.name]
        command = [*launcher, "-n", str(RANKS), *job]
        lines = []
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        with subprocess.Popen(command, stderr=subprocess.PIPE, **pipes) as process:
            for line in process.stderr:
                lines.append((time.monotonic(), line.decode(errors="replace")))
        died = float(Path(file.name).read_text())
    names = [(at, re.search(r"\brank (\d+) of \d+ died", line)) for at, line in lines]
    named = [(at, int(name[1])) for at, name in names if name]
    if any(rank != victim for _, rank in named):
        said = "".join(line for _, line in lines)
        sys.exit(f"rank {victim} was killed, and this was said:\n{said}")
    first = [1e3 * (at - died) for at, _ in named[:1]]
    return first, len(named)


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--rank"]:
        be_a_rank(arguments[1], int(arguments[2]), arguments[3])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--place", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("launcher", nargs="*", default=["mpirun"], help="behind --")
    given = parser.parse_args(arguments)
    for place in given.place:
        found = [kill(given.launcher, place) for _ in range(given.kills)]
        delays = [delay for first, _ in found for delay in first]
        text = f"{' '.join(given.launcher)}, {place}: named in {len(delays)} of {given.kills} jobs"
        if delays:
            middle, most = statistics.median(delays), max(delays)
            text += f", after {middle:.1f} ms (median; {most:.1f} at most)"
        print(f"{text}, in {sum(count for _, count in found)} lines", flush=True)


if __name__ == "__main__":
    main()
