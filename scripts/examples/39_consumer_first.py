"""A consumer that is started first waits for the producer's memory: `attach(wait_s=)`.

    mpirun -n 2 python -m mpi4py scripts/examples/39_consumer_first.py

Rank 0 starts the consumer itself here. Yours may be in another terminal, with the lines of
CONSUMER.
"""

import subprocess
import sys

import mpishare

CONSUMER = """
import mpishare  # no MPI is needed, and none is started

print("waiting", flush=True)
with mpishare.attach("late", wait_s=60) as there:
    values = there.array.tolist()
if any(abs(value - 42 - k / 1000) > 1e-4 for k, value in enumerate(values)):
    raise SystemExit(f"the data are {values}")
print(*(f"{value:.3f}" for value in values[:5]))
"""

with mpishare.Node() as node:
    consumer = None
    if node.is_leader:
        consumer = subprocess.Popen(
            [sys.executable, "-c", CONSUMER], stdout=subprocess.PIPE, text=True
        )
        assert consumer.stdout
        consumer.stdout.readline()  # it runs, and there is nothing to attach to yet
    # The name is there once the values are.
    window = node.share(lambda: 42 + node.xp.arange(1024, dtype="f4") / 1000, name="late")
    if consumer:
        said, _ = consumer.communicate()
        if consumer.returncode:
            raise SystemExit("WRONG: the consumer failed")
        print(f"the consumer came first, and has {said.strip()}: right")
