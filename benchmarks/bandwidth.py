"""Case ``bandwidth``: copies from private memory into a rank's own and its neighbor's segment.

All ranks copy at the same time, as a user would. The baseline is a bare copy: on CUDA one call of
`cudaMemcpyAsync` between the same places, found beforehand, on the host NumPy's copy from private
to private memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.ring import Copy, Unordered
from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison
from mpishare.bench.fence import Ring
from mpishare.bench.grid import Exchange
from mpishare.bench.session import Bound, Call, Session, do_nothing
from mpishare.bench.staged import copy_call

#: Messages of memory of a rank: those of both rings and of their checks, and the windows.
_COPIES = 16


def run(session: Session, case: Case) -> None:
    copyto = session.node.xp.copyto

    def copy(copies: Sequence[Copy]) -> Call:
        return partial(copyto, *copies[0])

    def bare_copy(copies: Sequence[Copy]) -> Call:
        return copy_call(session, *copies[0])

    def private_copy(_: Ring, out: Any, into: Any) -> Bound:
        return partial(copyto, into, out), do_nothing

    for nbytes in session.sizes(case, _COPIES):
        rings = {name: Ring(session, nbytes, [k]) for k, name in enumerate(("own", "neighbor"))}
        unfit = next((ring.unfit for ring in rings.values() if ring.unfit), None)
        comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=nbytes, unfit=unfit)
        for name, ring in rings.items():
            bare = f"memcpy {name}"
            comparison.add(name, partial(Unordered, ring, copy), against=("memcpy", bare))
            if session.on_cuda:
                comparison.add_baseline("memcpy", partial(Unordered, ring, bare_copy), bare)
        if not session.on_cuda:
            comparison.add_baseline("memcpy", partial(Exchange, rings["own"], private_copy))
        comparison.run()
