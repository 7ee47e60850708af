"""Run the benchmark: ``python -m mpishare.bench``."""

import sys

from mpishare.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
