"""Trials of a library by ranks that share a GPU, in children, since it may crash or hang."""

from __future__ import annotations

from pathlib import Path

from mpishare.bench.library import Library
from mpishare.bench.session import Session
from mpishare.runtime.gpu_messages import run_in_child

PROGRAM = Path(__file__).with_name("trial.py")
#: Of each trial that was run: why it failed, or None.
_failures: dict[str, str | None] = {}


def try_sharing(session: Session, kind: type[Library]) -> str | None:
    """Return why ranks that share a GPU cannot use the library, or None. Collective."""
    name = str(kind.shared_trial)
    if name not in _failures:
        _failures[name] = _failure_on_any(session, kind, name)
    return _failures[name]


def _failure_on_any(session: Session, kind: type[Library], program: str) -> str | None:
    """Return why the trial failed on the first rank on which it did, or None. Collective."""
    comm, number = session.comm, session.node.xp.cuda.Device().id
    name, reason = session.attempt(lambda: kind.unique_id() if comm.rank == 0 else None)
    if reason is not None:
        return reason
    name = comm.bcast(name, 0)
    failure = run_in_child(PROGRAM, program, name.hex(), comm.rank, comm.size, number)
    return next((each for each in comm.allgather(failure) if each is not None), None)
