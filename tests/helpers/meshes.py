"""Random meshes, described to plans by lists of places or by global ids.

Drawn from a seed by each rank for itself, the same on all. Needs no pytest.
"""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Self

import numpy as np

from mpishare import NeighborExchange
from tests.helpers.halos import (
    POISON,
    Field,
    Kind,
    arrays,
    check,
    dtypes_and_forms,
    encode,
    exchange_by,
    on_host,
    pause,
    read_in_place,
)

MOST = 40  # numbers of a mesh: a rank's places are three times as many at most, and fit into int8


@dataclass(frozen=True)
class Mesh:
    """For each rank, the number that each place along the axis must show, and which are its own."""

    numbers: list[np.ndarray]
    is_owned: list[np.ndarray]

    @classmethod
    def of(cls, rng: np.random.Generator, size: int) -> Self:
        """Owned places come first, and some ranks have none; ghosts repeat, also of one's own."""
        count = int(rng.integers(1, MOST))
        owners = rng.integers(0, size, count) % int(rng.integers(1, size + 1))
        numbers, is_owned = [], []
        for rank in range(size):
            owned = rng.permutation(np.flatnonzero(owners == rank))
            ghosts = rng.integers(0, count, int(rng.integers(0, 2 * count)))
            if rng.integers(2):  # in order, which makes runs of them
                owned, ghosts = np.sort(owned), np.sort(ghosts)
            numbers.append(np.concatenate([owned, ghosts]))
            is_owned.append(np.arange(numbers[-1].size) < owned.size)
        return cls(numbers, is_owned)

    def shuffled(self, rng: np.random.Generator) -> Self:
        """The same with the places of each second rank in any order."""
        orders = [np.arange(each.size) for each in self.numbers]
        orders[::2] = map(rng.permutation, orders[::2])
        pairs = zip(self.numbers, self.is_owned, orders, strict=True)
        found = [(numbers[order], owned[order]) for numbers, owned, order in pairs]
        return type(self)(*map(list, zip(*found, strict=True)))

    def shown(self, rank: int, kind: Kind, *, is_owned: bool = False) -> np.ndarray:
        """The number of each element of a field, or of the owned ones alone, else `POISON`."""
        numbers = self.numbers[rank]
        return kind.spread(np.where(self.is_owned[rank], numbers, POISON) if is_owned else numbers)

    def sides(self, rng: np.random.Generator, rank: int) -> tuple[dict, dict]:
        """What it sends and receives by rank; of some that get nothing, that too."""
        sends, recvs = {}, {}
        for reader, owner in product(range(len(self.numbers)), repeat=2):
            own = np.flatnonzero(self.is_owned[owner])
            place = dict(zip(self.numbers[owner][own].tolist(), own.tolist(), strict=True))
            ghosts = np.flatnonzero(~self.is_owned[reader]).tolist()
            numbers = self.numbers[reader].tolist()
            pairs = [(place[numbers[at]], at) for at in ghosts if numbers[at] in place]
            if rng.integers(2):
                pairs = rng.permutation(pairs).tolist()
            are_told = rng.random(2) < 0.3
            ends = (sends, owner, reader), (recvs, reader, owner)
            for at, (side, mine, other) in enumerate(ends):
                if mine == rank and (pairs or are_told[at]):
                    side[other] = [pair[at] for pair in pairs]
        return sends, recvs


def as_indices(rng: np.random.Generator, lists: dict[int, list[int]]) -> dict:
    """The same as arrays of any integer dtype, as lists, as tuples."""
    found = {}
    for rank, places in lists.items():
        dtype = rng.choice(["i1", "u1", "i2", "i4", "u4", "i8", "u8", "list", "tuple", "strided"])
        if dtype == "list":
            found[rank] = list(places)
        elif dtype == "tuple":
            found[rank] = tuple(places)
        elif dtype == "strided":
            found[rank] = np.repeat(np.array(places, "i8"), 2)[::2]
        else:
            found[rank] = np.array(places, dtype)
    return found


def random_kinds(rng: np.random.Generator, dtypes, forms) -> list[Kind]:
    """Up to three fields, indexed along one axis, which is counted from either end."""
    first = int(rng.integers(0, 3))
    axis = -1 - first if rng.integers(2) else first
    kinds = []
    for _ in range(int(rng.integers(1, 4))):
        others = tuple(rng.integers(1, 4, first + int(rng.integers(0, 2))).tolist())
        kinds.append(Kind(str(rng.choice(dtypes)), str(rng.choice(forms)), others, (axis,)))
    return kinds


def make_field(node, mesh: Mesh, rank: int, kind: Kind, *, is_in_window: bool) -> Field:
    numbers = mesh.shown(rank, kind)
    window = node.allocate_each(Field.nbytes(numbers.shape, kind), "u1") if is_in_window else None
    # Ghosts are no box here: everything counts as owned.
    return Field(node.xp, numbers, (slice(None),) * numbers.ndim, kind, window and window.array)


def make_exchange(node, comm, mesh: Mesh, fields, rng, *, by_ids: bool):
    """A plan of that mesh, whose arguments are overwritten then: it has its own."""
    options = {"axis": fields[0].kind.axes[0], "node": node}
    if by_ids:
        ids = (rng.permutation(2 * MOST) - 20) * int(rng.choice([1, 1 << 55]))
        mine = ids[mesh.numbers[comm.rank]]
        n_owned = int(mesh.is_owned[comm.rank].sum())
        made = NeighborExchange.from_global_ids(comm, mine, n_owned, arrays(fields), **options)
        mine[:] = 77
        return made
    sends, recvs = (as_indices(rng, each) for each in mesh.sides(rng, comm.rank))
    made = NeighborExchange(comm, sends, recvs, arrays(fields), **options)
    for side in (sends, recvs):
        for places in side.values():
            if not isinstance(places, tuple):
                places[:] = places[:1] * len(places) if isinstance(places, list) else 0
        side.clear()
    return made


def check_sums(exchange, mesh: Mesh, rank: int, fields, seed: int) -> None:
    """Each ghost is added to the place it came from, then zeroed; and forth again."""
    totals = []
    for at, field in enumerate(fields):
        rng, total = np.random.default_rng([seed, at]), np.zeros(MOST * prod(field.kind.others))
        for each in range(len(mesh.numbers)):
            numbers = mesh.shown(each, field.kind)
            weights = rng.integers(-50, 50, numbers.shape)
            np.add.at(total, numbers, weights)
            if each == rank:
                field.array[...] = field.xp.asarray(weights.astype(field.kind.dtype))
        totals.append(total)
    exchange.accumulate(*arrays(fields))
    for is_owned in (True, False):
        for field, total in zip(fields, totals, strict=True):
            numbers = mesh.shown(rank, field.kind, is_owned=is_owned)
            right = np.where(numbers == POISON, 0, total[numbers])
            assert np.array_equal(on_host(field.array), right), f"seed {seed}: {mesh}"
        exchange.exchange(*arrays(fields))


def random_exchange(node, comm, seed: int, steps: int = 3) -> None:
    """Draw a mesh and its fields, make the plan, exchange some steps in all ways, and add up."""
    rng, mine = (
        np.random.default_rng([seed, comm.size, 3]),
        np.random.default_rng([seed, comm.rank]),
    )
    mesh = Mesh.of(rng, comm.size)
    adds, by_ids, is_small, *in_window = rng.integers(0, 2, 6).astype(bool).tolist()
    dtypes, forms = dtypes_and_forms(node)
    kinds = random_kinds(rng, ("i4", "i8", "f8", "c16") if adds else dtypes, forms)
    if not by_ids:
        mesh = mesh.shuffled(rng)
    fields = [
        make_field(node, mesh, comm.rank, kind, is_in_window=flag)
        for kind, flag in zip(kinds, in_window, strict=False)
    ]
    with (
        read_in_place(small=is_small),
        make_exchange(node, comm, mesh, fields, rng, by_ids=by_ids) as exchange,
    ):
        for step in range(1, steps + 1):
            for at, field in enumerate(fields):
                own = mesh.shown(comm.rank, field.kind, is_owned=True)
                values = encode(own, field.kind.dtype, 10 * step + at)
                field.array[...] = field.xp.asarray(values)
            pause(mine)
            halves = mine.random() < 0.5
            exchange_by(exchange, *arrays(fields), halves=halves, between=lambda: pause(mine))
            try:
                check(fields, 10 * step)
            except AssertionError as error:
                error.add_note(f"seed {seed}: {mesh}")
                raise
        if adds:
            check_sums(exchange, mesh, comm.rank, fields, seed)
        sends, recvs = mesh.sides(rng, comm.rank)
        assert {*exchange.routes} == {*filter(sends.get, sends), *filter(recvs.get, recvs)}
