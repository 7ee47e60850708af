"""``python -m mpishare``: the commands that there are."""

import sys

from mpishare import __version__
from mpishare.tools.cli import is_first_process

COMMANDS = {
    "info": "which ranks share memory, and by which routes",
    "bench": "times beside MPI and other libraries, with every result checked",
    "mps": "a command whose ranks share GPUs by the Multi-Process Service",
}

if __name__ == "__main__":
    is_wrong = bool({*sys.argv[1:]} - {"-h", "--help"})
    if is_first_process():
        lines = [f"mpishare {__version__}. Commands, each with --help:"]
        for name, what in COMMANDS.items():
            command = f"{'' if name == 'mps' else 'mpirun -n 4 '}python -m mpishare.{name}"
            lines.append(f"  {command:40}{what}")
        (sys.stderr if is_wrong else sys.stdout).write("\n".join(lines) + "\n")
    sys.exit(2 if is_wrong else 0)
