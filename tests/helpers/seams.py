"""Lists of seams for tests, and what an exchange of them brings: found cell by cell, by numbers."""

from typing import Any, NamedTuple

import numpy as np

from mpishare import Seam, SeamExchange
from tests.helpers.halos import on_host, pause

DTYPES = ("f8", "f4", "c16", "c8", "i4", "i8", "u1", "?")
HOST_DTYPES = (*DTYPES, "i2", "f2", ">f8", "M8[s]")
WRITTEN = 3  # planes of axis 0 that seams write; they read the others


class Spec(NamedTuple):
    """A field; its order has the axes from the slowest in memory to the fastest."""

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...]

    def make(self, xp: Any, rng: np.random.Generator) -> Any:
        """An array of whole numbers where they are complex, so that their products are exact."""
        values = rng.integers(1, 90, self.shape)
        if np.dtype(self.dtype).kind == "c":
            values = values - 1j * rng.integers(-9, 10, self.shape)
        elif np.dtype(self.dtype).kind == "f":
            values = values / 7
        array = xp.zeros([self.shape[axis] for axis in self.order], self.dtype)
        array = array.transpose([self.order.index(axis) for axis in range(len(self.shape))])
        array[...] = xp.asarray(values.astype(self.dtype))
        return array


class Numbered:
    """The fields of all ranks: a number for each cell, and the values of those of a dtype."""

    def __init__(self, everything):
        self.numbers: dict[tuple[int, int], Any] = {}
        self.values: dict[Any, Any] = {}
        self.dtypes: dict[tuple[int, int], Any] = {}
        for rank, fields in enumerate(everything):
            for field, array in enumerate(fields):
                before = self.values.get(array.dtype, np.zeros(0, array.dtype))
                numbers = np.arange(array.size).reshape(array.shape)
                self.numbers[rank, field] = numbers + len(before)
                self.values[array.dtype] = np.concatenate([before, array.ravel()])
                self.dtypes[rank, field] = array.dtype

    def places(self, seam, rank, shift):
        """The cells that a seam writes and those that it reads, in the order of the source."""
        target = self.numbers[rank, seam.into[0]][seam.into[1]]
        axes = range(target.ndim) if seam.axes is None else seam.axes
        target = np.flip(target, seam.flip).transpose(np.argsort(axes))
        if seam.along is None:
            peer, field, box = seam.source
            return target, self.numbers[peer, field][box]
        ring = [self.numbers[peer, field][box] for peer, field, box in seam.source]
        ring = np.concatenate(ring, seam.along)
        first = seam.start + (shift[seam.shift] if seam.shift else 0)
        places = first + np.arange(target.shape[seam.along])
        if not target.size:
            return target, target
        return target, ring.take(places % ring.shape[seam.along], seam.along)


def expected(comm, fields, seams, shift=None, *, adds=False):
    """The fields of this rank after an exchange of all ranks, or after its adjoint."""
    all_fields = Numbered(comm.allgather(fields))
    before = {dtype: each.copy() for dtype, each in all_fields.values.items()}
    listed = [(rank, s) for rank, each in enumerate(comm.allgather(seams)) for s in each]
    for rank, seam in listed:
        dtype = all_fields.dtypes[rank, seam.into[0]]
        target, source = all_fields.places(seam, rank, shift)
        values, scale = all_fields.values[dtype], np.conj(seam.scale) if adds else seam.scale
        cells = before[dtype][target if adds else source]
        cells = cells if scale == 1 else cells * np.array(scale).astype(dtype)
        if adds:  # one after the other along a ring, for a cell that is read twice
            ways = (np.moveaxis(each, seam.along or 0, 0) for each in (source, cells))
            for at, cell in zip(*map(np.ravel, ways), strict=True):
                values[at] = values[at] + cell
        else:
            values[target] = cells if seam.offset == 0 else cells + np.array(seam.offset, dtype)
    for rank, seam in listed if adds else ():
        target, _ = all_fields.places(seam, rank, shift)
        all_fields.values[all_fields.dtypes[rank, seam.into[0]]][target] = 0
    mine = (all_fields.numbers[comm.rank, number] for number in range(len(fields)))
    return [all_fields.values[each.dtype][at] for each, at in zip(fields, mine, strict=True)]


FACTORS = {
    "f": ((-1.0, 0.3, 1.0), (0.0, 2.6)),
    "c": ((-1.0, 0.5 + 2j, 1j, 1.0), (0.0, 3 - 1j)),
    "i": ((-1, 1), (0, 5)),
    "u": ((1,), (0, 7)),
}


class RandomSeams:
    """Fields and seams of all ranks, the same on each."""

    def __init__(self, seed: int, size: int, dtypes=DTYPES, *, most: int = 9):
        self._rng = rng = np.random.default_rng([seed, size])
        self._ndim = int(rng.integers(1, 4))
        dtypes = rng.choice(dtypes, 2).tolist()
        self.shifts = ("a", "b")[: rng.integers(0, 3)]
        counts = [int(rng.integers(not rank, 4)) for rank in range(size)]
        self.fields = [[self._field(dtypes, most) for _ in range(count)] for count in counts]
        self._readable = [(r, f) for r in range(size) for f in range(counts[r])]
        self.seams = [[*self._seams_of(rank)] for rank in range(size)]
        named = {seam.shift for each in self.seams for seam in each}
        self.shifts = tuple(each for each in self.shifts if each in named)

    def shift(self) -> dict[str, int] | None:
        """The numbers of a call."""
        return {name: int(self._rng.integers(-70, 70)) for name in self.shifts} or None

    def _field(self, dtypes, most):
        rng = self._rng
        shape = tuple(rng.integers(5, most, self._ndim).tolist())
        return Spec(shape, dtypes[rng.integers(2)], tuple(rng.permutation(self._ndim).tolist()))

    def _seams_of(self, rank):
        for field, spec in enumerate(self.fields[rank]):
            first = 0
            while first < WRITTEN:
                planes = int(self._rng.integers(0, WRITTEN - first + 1))
                seam = self._seam(field, spec, first, planes)
                first += max(planes, 1)
                if seam is not None:
                    yield seam

    def _seam(self, field, spec, first, planes):
        rng, ndim = self._rng, self._ndim
        bounds = [(first, first + planes)]
        bounds += [tuple(sorted(rng.integers(0, n + 1, 2).tolist())) for n in spec.shape[1:]]
        axes = tuple(rng.permutation(ndim).tolist())
        wanted = [0] * ndim
        for (low, high), axis in zip(bounds, axes, strict=True):
            wanted[axis] = high - low
        rest: dict[str, Any] = {}
        if rng.integers(2):
            source = self._box(spec.dtype, wanted)
        else:
            along = int(rng.integers(ndim))
            pieces = [[*wanted] for _ in range(rng.integers(1, 4))]
            for piece in pieces:
                piece[along] = int(rng.integers(1, 4))
            source = [self._box(spec.dtype, piece) for piece in pieces]
            rest = {"along": along, "start": int(rng.integers(-20, 20))}
            if self.shifts and rng.integers(3):
                rest["shift"] = str(rng.choice(self.shifts))
        if source is None or (isinstance(source, list) and None in source):
            return None
        scales, offsets = FACTORS.get(np.dtype(spec.dtype).kind, ((1,), (0,)))
        return Seam(
            into=(field, tuple(slice(*each) for each in bounds)),
            source=source,
            axes=axes,
            flip=tuple(np.flatnonzero(rng.integers(0, 2, ndim)).tolist()),
            scale=scales[rng.integers(len(scales))],
            offset=offsets[rng.integers(len(offsets))],
            **rest,
        )

    def _box(self, dtype, wanted):
        """A box of so many cells that some field has, which no seam writes; None for none."""
        fits = []
        for rank, field in self._readable:
            spec = self.fields[rank][field]
            free = (spec.shape[0] - WRITTEN, *spec.shape[1:])
            if spec.dtype == dtype and all(n <= m for n, m in zip(wanted, free, strict=True)):
                fits.append((rank, field, spec.shape))
        if not fits:
            return None
        rank, field, shape = fits[self._rng.integers(len(fits))]
        lows = [int(self._rng.integers(0, n - m + 1)) for n, m in zip(shape, wanted, strict=True)]
        lows[0] = max(lows[0], WRITTEN)
        return rank, field, tuple(slice(low, low + n) for low, n in zip(lows, wanted, strict=True))


def check_list(node, comm, seed, dtypes, most=9):
    """Exchanges and adjoints in turns, on the same plan, by new shifts."""
    case = RandomSeams(seed, comm.size, dtypes, most=most)
    rng = np.random.default_rng([seed, comm.rank])
    specs, seams = case.fields[comm.rank], case.seams[comm.rank]
    fields = [spec.make(node.xp, rng) for spec in specs]
    kinds = {np.dtype(spec.dtype).kind for each in case.fields for spec in each}
    with SeamExchange(comm, fields, seams, node=node) as plan:
        assert plan.shifts == case.shifts
        routes = plan.routes
        for step in range(4):
            for spec, each in zip(specs, fields, strict=True):
                each[...] = node.xp.asarray(spec.make(np, rng))
            shift, adds = case.shift(), bool(step % 2) and kinds <= set("iufc")
            before = [on_host(each) for each in fields]
            right = expected(comm, before, seams, shift, adds=adds)
            gives_back = adds and step == 3
            if gives_back:
                right = expected(comm, right, seams, shift)
            pause(rng)
            if adds:
                plan.accumulate(*fields, shift=shift, give_back=gives_back)
            elif step:
                plan.exchange(*fields, shift=shift)
            else:
                plan.start(*fields, shift=shift)
                plan.wait()
            for number, each in enumerate(fields):
                wrong = np.argwhere(on_host(each) != right[number])[:4].tolist()
                assert not wrong, f"seed {seed}, step {step}, field {number} at {wrong}: {seams}"
    return routes
