"""Case ``ring``: both neighbors' faces moved through windows, beside MPI messages.

The rivals move the same bytes. On the host they are MPI messages from the same faces. On CUDA those
are staged, with one copy of both faces to pinned memory and one of both ghosts back; the others
move the faces from GPU to GPU by a library.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.arm import Arm, Entry
from mpishare.bench.cases import CEILINGS, LINKS
from mpishare.bench.cases.messages import Isend, Persistent, Sendrecv
from mpishare.bench.cases.neighbors import PairwiseArm, ParityArm, Ring
from mpishare.bench.contest import contest, rivals

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.rows import Kind, Row
    from mpishare.bench.session import Session

#: A rival's entries in the report: where none of several forms is the fastest everywhere, all.
_MESSAGES: dict[str, dict[str, Callable[[Ring], Arm]]] = {
    "isend": {"isend": Isend},
    "persistent": {"persistent": Persistent},
    "sendrecv": {"sendrecv": Sendrecv},
    "staged": {"staged": Isend, "staged persistent": Persistent},
}


def run(session: Session) -> list[Row]:
    """Run the case at every size and return its rows. Collective, host-blocking."""
    rows: list[Row] = []
    for nbytes in session.sizes:
        rows += _run_size(session, nbytes)
    return rows


def _run_size(session: Session, nbytes: int) -> list[Row]:
    ring, reason = session.attempt(lambda: Ring(session, nbytes))

    def entry(name: str, arm: Callable[[Ring], Arm], kind: Kind = "rival") -> Entry:
        make = Arm if ring is None else partial(arm, ring)
        return Entry(name, make, 2 * nbytes, against if kind == "own" else (), kind, reason)

    def messages(word: str) -> list[Entry]:
        return [entry(name, arm) for name, arm in _MESSAGES[word].items()]

    def linked(word: str) -> list[Entry]:
        from mpishare.bench.cases.linked import LinkedRing, entries

        arm = None if ring is None else partial(LinkedRing, ring)
        return entries(session, word, arm, 2 * nbytes, reason)

    def ceilings() -> list[Entry]:
        from mpishare.bench.cases.ceilings import entries

        return entries(session, nbytes, reason)

    makers: dict[str, Callable[[], list[Entry]]] = {
        **{word: partial(messages, word) for word in _MESSAGES},
        **{word: partial(linked, word) for word in LINKS},
        CEILINGS: ceilings,
    }
    others = rivals(session, "ring", makers)
    against = tuple(other.name for other in others if other.kind == "rival")
    own = [entry("window pairwise", PairwiseArm, "own"), entry("window fence", ParityArm, "own")]
    return contest(session, "ring", nbytes, [*own, *others])
