"""Case ``mesh``: an exchange of cells by their places, as unstructured meshes number them.

Each rank sends the cells at some of its places to both neighbors of a ring, and receives as many
ghosts. A mesh in a good order has the cells of a neighbor together, *contiguous*, or *in runs* of
different lengths, 1 to 31 cells; *scattered* are any places in any order, at both ends. The
baseline *isend* is written by hand: Irecv, then `numpy.take` into a buffer and Isend, Waitall, and
the ghosts put in their places; contiguous cells it sends and receives where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpishare
from mpishare.bench.cases import Case
from mpishare.bench.check import Check, Part, word
from mpishare.bench.comparison import Comparison
from mpishare.bench.grid import ITEM_NBYTES, Exchange, Problem
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Session

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
            for name, make in {kind: Private, f"{kind}, windows": InWindows}.items():
                comparison.add(name, partial(make, mesh), against=against, sent_nbytes=sent_nbytes)
            if comparison.includes("isend"):
                make_isend = partial(Isend, mesh)
                comparison.add(baseline, make_isend, kind=BASELINE, sent_nbytes=sent_nbytes)
        comparison.run()


class Mesh(Problem):
    """One size of one kind: the cells of a rank, then the ghosts of each of its neighbors."""

    def __init__(self, session: Session, kind: str, n: int) -> None:
        self.session, self.comm, self.side_nbytes = session, session.comm, n * ITEM_NBYTES
        xp, rank, size = session.node.xp, session.comm.rank, session.comm.size
        neighbors = sorted({(rank - 1) % size, (rank + 1) % size})
        n_owned = _SPREAD * n
        self.shape = ((1 + len(neighbors)) * n_owned,)
        self.fields = (xp.zeros(self.shape),)
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


class Private(Exchange[Mesh]):
    """`NeighborExchange` of a private field."""

    def __init__(self, mesh: Mesh, field: Any = None) -> None:
        super().__init__(mesh, None if field is None else (field,))
        self._plan = mpishare.NeighborExchange(
            mesh.comm, mesh.sends, mesh.recvs, self.fields, node=mesh.session.node
        )
        self._exchange = self._plan.exchange

    def step(self) -> None:
        self._exchange(*self.fields)

    def close(self) -> None:
        self._plan.close()
        del self._plan, self._exchange, self.fields  # a window must have no views left


class InWindows(Private):
    """The same of a field in a window."""

    def __init__(self, mesh: Mesh) -> None:
        self._window = mesh.session.node.allocate_each(mesh.shape, float, fill=0)
        super().__init__(mesh, self._window.array)

    def close(self) -> None:
        super().close()
        self._window.close()


class Isend(Exchange[Mesh]):
    """The baseline by hand."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._sends, self._recvs = (
            [(rank, places, self._buffer(places)) for rank, places in each.items()]
            for each in (mesh.sends, mesh.recvs)
        )

    def _buffer(self, places: Any) -> Any:
        (field,) = self.fields
        return field[places]  # of a slice the field's own memory

    def step(self) -> None:
        (field,), comm = self.fields, self.problem.comm
        requests = [comm.Irecv(buffer, rank) for rank, _, buffer in self._recvs]
        for rank, places, buffer in self._sends:
            if not isinstance(places, slice):
                np.take(field, places, out=buffer, mode="clip")  # any other mode copies once more
            requests.append(comm.Isend(buffer, rank))
        MPI.Request.Waitall(requests)
        for _, places, buffer in self._recvs:
            if not isinstance(places, slice):
                field[places] = buffer
