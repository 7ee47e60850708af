"""``mpirun -n 4 python -m mpishare.info``: which ranks share memory, and by which route."""

import sys

from mpishare.tools.info import main

if __name__ == "__main__":
    sys.exit(main())
