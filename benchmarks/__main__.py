"""``python -m benchmarks``: run cases, or set two runs side by side (``compare``)."""

import sys

from benchmarks import catalog, compare
from mpishare.bench import cli

PROG = "python -m benchmarks"


def main(argv: list[str] | None = None) -> int:
    """Return the exit status, as `mpishare.bench.cli.main` does."""
    words = sys.argv[1:] if argv is None else argv
    catalog.extend()
    return compare.main(words[1:]) if words[:1] == ["compare"] else cli.main(words, PROG)


if __name__ == "__main__":
    sys.exit(main())
