"""``python -m mpishare.mps COMMAND``: run a command under a Multi-Process Service of its own."""

import sys

from mpishare.tools.mps import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
