"""``python -m benchmarks``: run cases."""

import sys

from benchmarks import catalog
from mpishare.bench import cli

PROG = "python -m benchmarks"


def main(argv: list[str] | None = None) -> int:
    """Return the exit status, as `mpishare.bench.cli.main` does."""
    catalog.extend()
    return cli.main(argv, PROG)


if __name__ == "__main__":
    sys.exit(main())
