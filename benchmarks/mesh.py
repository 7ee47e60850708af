"""Case ``mesh``: an exchange of cells by their places, as unstructured meshes number them.

Each rank sends the cells at some of its places to both neighbors of a ring, and receives as many
ghosts. A mesh in a good order has the cells of a neighbor together, *contiguous*, or *in runs* of
different lengths, 1 to 31 cells; *scattered* are any places in any order, at both ends. The
baseline *isend* is written by hand: Irecv, then `numpy.take` into a buffer and Isend, Waitall, and
the ghosts put in their places; contiguous cells it sends and receives where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpishare
from mpishare.bench.cases import Case
from mpishare.bench.check import Check, Part, word
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import ITEM_NBYTES, Exchange, Problem
from mpishare.bench.session import Bound, Session, do_nothing

KINDS = ("contiguous", "in runs", "scattered")
#: Places among which those of one neighbor lie, for each that it gets; the longest run.
_SPREAD, _LONGEST_RUN = 4, 31
#: The memory of all kinds, in faces: fields in windows and private ones, places, words, buffers.
_FACES = 160


def run(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _FACES):
        comparison = Comparison(session, case, nbytes=nbytes)
        for kind in KINDS:
            mesh, baseline = Mesh(session, kind, nbytes // ITEM_NBYTES), f"isend {kind}"
            against = (baseline,)
            sent_nbytes = nbytes * len(mesh.sends)
            for name, in_windows in ((kind, False), (f"{kind}, windows", True)):
                make = partial(Exchange, mesh, _exchange, in_windows=in_windows)
                comparison.add(name, make, against=against, sent_nbytes=sent_nbytes)
            by_hand = partial(Exchange, mesh, _isend)
            comparison.add_baseline("isend", by_hand, baseline, sent_nbytes=sent_nbytes)
        comparison.run()


class Mesh(Problem):
    """One size of one kind: the cells of a rank, then the ghosts of each of its neighbors."""

    def __init__(self, session: Session, kind: str, n: int) -> None:
        self.session, self.comm = session, session.comm
        xp, rank, size = session.node.xp, session.comm.rank, session.comm.size
        neighbors = sorted({(rank - 1) % size, (rank + 1) % size})
        n_owned = _SPREAD * n
        self._count = (1 + len(neighbors)) * n_owned
        self.fields = self.arrays(xp.zeros)
        self.sends = {peer: _places(kind, n, 0, (rank, peer, 0)) for peer in neighbors}
        self.recvs = {
            peer: _places(kind, n, (1 + at) * n_owned, (peer, rank, 1))
            for at, peer in enumerate(neighbors)
        }
        place = np.arange(n_owned, dtype="u8")
        theirs = {peer: place[_places(kind, n, 0, (peer, rank, 0))] for peer in neighbors}
        owned, ghosts = slice(0, n_owned), slice(n_owned, None)
        self.check = Check(
            xp,
            self.fields,
            [Part(0, owned, xp.asarray(place + np.uint64(word(rank, 0, 0))))],
            [
                Part(0, places, xp.asarray(theirs[peer] + np.uint64(word(peer, 0, 0))))
                for peer, places in self.recvs.items()
            ],
            [(0, ghosts)],
        )

    def arrays(self, allocate: Callable[..., Any]) -> Sequence[Any]:
        return (allocate((self._count,), float),)


def _places(kind: str, n: int, first: int, seed: Sequence[int]) -> Any:
    """Return `n` places from `first` on, the same on all ranks for the same seed."""
    rng = np.random.default_rng(seed)
    if kind == "contiguous":
        return slice(first, first + n)
    if kind == "scattered":
        return first + rng.permutation(_SPREAD * n)[:n]
    # Each run is followed by a gap of `_SPREAD - 1` times its length.
    runs = rng.integers(1, 1 + _LONGEST_RUN, n)
    lengths = np.stack([runs, (_SPREAD - 1) * runs], axis=1).ravel()
    return first + np.flatnonzero(np.repeat(np.arange(2 * n) % 2 == 0, lengths)[: _SPREAD * n])[:n]


def _exchange(mesh: Mesh, field: Any) -> Bound:
    plan = mpishare.NeighborExchange(
        mesh.comm, mesh.sends, mesh.recvs, [field], node=mesh.session.node
    )
    return partial(plan.exchange, field), plan.close


def _isend(mesh: Mesh, field: Any) -> Bound:
    comm, waitall = mesh.comm, MPI.Request.Waitall
    # Of a slice the field's own memory.
    sends, recvs = (
        [(rank, places, field[places]) for rank, places in each.items()]
        for each in (mesh.sends, mesh.recvs)
    )

    def exchange() -> None:
        requests = [comm.Irecv(buffer, rank) for rank, _, buffer in recvs]
        for rank, places, buffer in sends:
            if not isinstance(places, slice):
                np.take(field, places, out=buffer, mode="clip")  # any other mode copies once more
            requests.append(comm.Isend(buffer, rank))
        waitall(requests)
        for _, places, buffer in recvs:
            if not isinstance(places, slice):
                field[places] = buffer

    return exchange, do_nothing
