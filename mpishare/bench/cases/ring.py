"""Case ``ring``: both neighbors' faces moved through windows, beside MPI messages.

The rivals move the same bytes from the same faces. On CUDA they are staged: one copy of both faces
to pinned memory, the messages, one copy of both ghosts back.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.cases.messages import Isend, Persistent, Sendrecv
from mpishare.bench.cases.neighbors import PairwiseArm, ParityArm, Ring
from mpishare.bench.compare import compare, rivals

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.rows import Row
    from mpishare.bench.session import Session

_RIVALS = {"isend": Isend, "persistent": Persistent, "sendrecv": Sendrecv}


def run(session: Session) -> list[Row]:
    """Run the case at every size and return its rows. Collective, host-blocking."""
    rows: list[Row] = []
    for nbytes in session.sizes:
        rows += _run_size(session, nbytes)
    return rows


def _run_size(session: Session, nbytes: int) -> list[Row]:
    ring, reason = session.attempt(lambda: Ring(session, nbytes))

    def entry(name: str, kind: Callable[[Ring], Arm], *, is_rival: bool = False) -> Entry:
        make = Arm if ring is None else partial(kind, ring)
        against = () if is_rival else tuple(_RIVALS)
        return Entry(name, make, 2 * nbytes, against, is_rival, reason)

    entries = [entry("window pairwise", PairwiseArm), entry("window fence", ParityArm)]
    entries += rivals(
        session,
        "ring",
        {
            name: partial(lambda name: [entry(name, _RIVALS[name], is_rival=True)], name)
            for name in _RIVALS
        },
    )
    return compare(session, "ring", nbytes, entries)
