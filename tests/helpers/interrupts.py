"""Handlers of signals that come amid a call."""

import contextlib
import signal
from collections.abc import Callable, Iterator

LIMIT_S = 10


@contextlib.contextmanager
def interrupting() -> Iterator[list[Callable[[], object]]]:
    """Within the block SIGUSR2 runs the functions of the list, each once, at most 10 s in all."""
    handlers: list[Callable[[], object]] = []

    def late(*_: object) -> None:
        raise TimeoutError(f"no end after {LIMIT_S} s")

    def run(*_: object) -> None:
        signal.alarm(LIMIT_S)
        while handlers:
            handlers[0]()
            del handlers[0]
        signal.alarm(0)

    before = signal.signal(signal.SIGALRM, late), signal.signal(signal.SIGUSR2, run)
    try:
        yield handlers
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGUSR2, before[1])
