"""Case ``ring``: both neighbors' faces moved through windows, against MPI messages.

The baselines move the same bytes. On the host they are MPI messages between private memory. On CUDA
these are staged, with one copy of both faces to pinned memory and one of both ghosts back; the
others move the faces from GPU to GPU by a library.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mpishare.bench.baselines.host_mpi import Isend, Persistent, Sendrecv
from mpishare.bench.baselines.library import add_library
from mpishare.bench.baselines.staged import Staged, StagedPersistent
from mpishare.bench.cases import LIBRARIES, UPPER_BOUNDS
from mpishare.bench.comparison import Comparison
from mpishare.bench.problems.ring import FenceRing, PairwiseRing, Ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.bench.cases import Case
    from mpishare.bench.comparison import Variant
    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session

#: The variants of each baseline; several where none of them is the fastest at every size.
_MPI: dict[str, dict[str, Callable[[Ring], Variant]]] = {
    "isend": {"isend": Isend},
    "persistent": {"persistent": Persistent},
    "sendrecv": {"sendrecv": Sendrecv},
    "staged": {"staged": Staged, "staged persistent": StagedPersistent},
}


def run(session: Session, case: Case) -> list[Row]:
    """Run the case at every size and return its rows. Collective, host-blocking."""
    rows: list[Row] = []
    for nbytes in session.sizes:
        ring = Ring(session, nbytes)
        _, unfit = session.attempt(ring.allocate)
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=2 * nbytes, unfit=unfit)
        comparison.add("window pairwise", partial(PairwiseRing, ring))
        comparison.add("window fence", partial(FenceRing, ring))
        for name, variants in _MPI.items():
            comparison.add_baselines(
                name, {variant: partial(kind, ring) for variant, kind in variants.items()}
            )
        for name in LIBRARIES:
            add_library(comparison, name, ring)
        if comparison.includes(UPPER_BOUNDS):
            from mpishare.bench.baselines.upper_bounds import add_upper_bounds

            add_upper_bounds(comparison, session, nbytes)
        rows += comparison.run()
    return rows
