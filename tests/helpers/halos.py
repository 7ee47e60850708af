"""What a halo must hold afterwards, by `numpy.pad` of the global array, and plans to try it on.

Everything is drawn and computed from a seed by each rank for itself: the same on all, and no
message is needed to know what is right. Needs no pytest, so that scenes of the fault tests and
ranks on pretended nodes use it too.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Self
from unittest import mock

import numpy as np

import mpishare
from mpishare.plans.exchange.cuda.staging import StagingLayout
from mpishare.plans.exchange.host import parts, process_read
from tests.helpers.reductions import base_shape, carve, on_host
from tests.helpers.windows import fails_on
from tests.helpers.wires import PAIRS, WIRES, reals, rounded

POISON = -1
"""The number of a cell that an exchange must not write."""

DTYPES = ("?", "i1", "u1", "i2", "i4", "u4", "i8", "f2", "f4", "f8", "c8", "c16")
HOST_DTYPES = ("V3", "S7", ">f8", "M8[us]", "g", "G", "3i1,f8", "f8,i4", "i2,u1", "U3", "V16")
FORMS = ("C", "F", "turned", "strided", "offset")
HOST_FORMS = (*FORMS, "unaligned")


@dataclass(frozen=True)
class Case:
    """A grid of blocks with ghosts around them."""

    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    splits: tuple[tuple[int, ...], ...]  # for each axis, the owned cells at each coordinate
    widths: tuple[tuple[tuple[int, int], ...], ...]  # for each rank, one (low, high) pair an axis
    corners: bool = False  # whether edges and corners are exchanged too

    @property
    def size(self) -> int:
        return prod(self.dims)

    @property
    def naxes(self) -> int:
        return len(self.dims)

    @cached_property
    def extents(self) -> list[tuple[int, ...]]:
        """For each rank, the cells it owns along each axis."""
        return [
            tuple(split[coord] for split, coord in zip(self.splits, coords, strict=True))
            for coords in np.ndindex(*self.dims)
        ]

    @property
    def count(self) -> int:
        return prod(sum(split) for split in self.splits)

    def owned(self, rank: int) -> tuple[slice, ...]:
        """The cells it owns, in its array along the axes of the cart."""
        pairs = zip(self.extents[rank], self.widths[rank], strict=True)
        return tuple(slice(low, low + extent) for extent, (low, _) in pairs)

    @cached_property
    def cells(self) -> list[np.ndarray]:
        """For each rank, the number of the global cell that each of its cells must show.

        `POISON` where an exchange must not write.
        """
        sums = [sum(split) for split in self.splits]
        padded = np.arange(prod(sums)).reshape(sums)
        most = max(max(pair) for widths in self.widths for pair in widths)
        for wraps in (True, False):  # poison stands too where one axis wraps and another ends
            pads = [(most, most) if each == wraps else (0, 0) for each in self.periods]
            more = {"mode": "wrap"} if wraps else {"constant_values": POISON}
            padded = np.pad(padded, pads, **more)
        return [self._of_rank(rank, padded, most) for rank in range(self.size)]

    def _of_rank(self, rank: int, padded: np.ndarray, most: int) -> np.ndarray:
        coords = np.unravel_index(rank, self.dims)
        spans = []
        for split, coord, extent, (low, high) in zip(
            self.splits, coords, self.extents[rank], self.widths[rank], strict=True
        ):
            first = sum(split[:coord]) + most - low
            spans.append(slice(first, first + low + extent + high))
        found = padded[tuple(spans)].copy()
        inside = np.zeros((self.naxes, *found.shape), bool)
        for axis, owned in enumerate(self.owned(rank)):
            np.moveaxis(inside[axis], axis, 0)[owned] = True
        sides = self.naxes - inside.sum(0)  # 1: a face, 2: an edge, more: a corner
        if not self.corners:
            found[sides > 1] = POISON
        return found


def random_case(rng: np.random.Generator, size: int, naxes: int | None = None) -> Case:
    """Any grid of that many ranks: uneven blocks, widths that differ from rank to rank."""
    naxes = naxes or int(rng.integers(1, 5))
    dims = [1] * naxes
    rest = size
    for prime in (2, 3, 5, 7):
        while rest % prime == 0:
            dims[rng.integers(naxes)] *= prime
            rest //= prime
    most = 5 if naxes < 4 else 3
    splits = tuple(tuple(rng.integers(1, most, n).tolist()) for n in dims)
    if rng.random() < 0.25:  # ranks without cells along an axis, but for one
        axis = int(rng.integers(naxes))
        empty = rng.random(dims[axis]) < 0.6
        empty[rng.integers(dims[axis])] = False
        with_none = tuple(np.where(empty, 0, splits[axis]).tolist())
        splits = (*splits[:axis], with_none, *splits[axis + 1 :])
    periods = tuple((rng.random(naxes) < 0.6).tolist())
    return Case(tuple(dims), periods, splits, _widths(rng, dims, splits), bool(rng.integers(2)))


def next_extent(split: Sequence[int], coord: int, step: int) -> int:
    """The cells of the next block along an axis that has any."""
    places = ((coord + n * step) % len(split) for n in range(1, len(split) + 1))
    return next(split[place] for place in places if split[place])


def _widths(rng, dims, splits):
    """None wider than the block that it shadows; the same on all ranks in a third of the cases."""
    if rng.random() < 1 / 3:
        sides = [rng.integers(0, min(filter(None, split)) + 1, 2) for split in splits]
        return (tuple(tuple(side.tolist()) for side in sides),) * prod(dims)
    return tuple(
        tuple(
            tuple(int(rng.integers(0, next_extent(split, coord, by) + 1)) for by in (-1, 1))
            for split, coord in zip(splits, coords, strict=True)
        )
        for coords in np.ndindex(*dims)
    )


def staggered(rng: np.random.Generator, case: Case) -> Case:
    """Cells of another field on the same ranks, with ghosts of their own.

    Along each axis as many, one more at one rank, or any others.
    """
    splits = []
    for split in case.splits:
        way = rng.integers(3)
        found = np.array(split) if way < 2 else rng.integers(0, 4, len(split))
        if way == 1 or not found.any():
            found[rng.choice([-1, int(rng.integers(len(split)))])] += 1
        splits.append(tuple(found.tolist()))
    widths = _widths(rng, case.dims, splits)
    return Case(case.dims, case.periods, tuple(splits), widths, case.corners)


def even_case(
    dims: tuple[int, ...],
    periods: bool | tuple[bool, ...] = True,
    cells: int = 4,
    width: int | tuple[tuple[int, int], ...] = 1,
    corners: bool = False,
) -> Case:
    """The same block on every rank."""
    periods = (periods,) * len(dims) if isinstance(periods, bool) else periods
    pairs = ((width, width),) * len(dims) if isinstance(width, int) else width
    return Case(dims, periods, tuple((cells,) * n for n in dims), (pairs,) * prod(dims), corners)


@dataclass(frozen=True)
class Kind:
    """A field of a plan."""

    dtype: str = "f8"
    form: str = "C"  # how it lies in memory: one of `HOST_FORMS`
    others: tuple[int, ...] = ()  # the extents of the axes that the cart does not cut
    axes: tuple[int, ...] | None = None  # where those of the cart stand; default: first, in order

    def places(self, naxes: int) -> list[int]:
        """For each axis of the cart, that of the field."""
        ndim = naxes + len(self.others)
        return [axis % ndim for axis in (range(naxes) if self.axes is None else self.axes)]

    def spread(self, cells: np.ndarray) -> np.ndarray:
        """The number of each element of the field, from those of the cells."""
        inside = np.arange(prod(self.others)).reshape(self.others)
        full = cells[(...,) + (None,) * len(self.others)]
        full = np.where(full == POISON, POISON, full * inside.size + inside)
        return np.moveaxis(full, range(cells.ndim), self.places(cells.ndim))


def random_kinds(
    rng: np.random.Generator, naxes: int, dtypes: tuple[str, ...], forms: tuple[str, ...]
) -> tuple[list[Kind], tuple[int, ...] | None]:
    """Up to three fields of one plan, and its `axes=`."""
    extra = int(rng.integers(0, 3)) if rng.random() < 0.5 else 0
    axes = None
    if extra:
        # Counted from the end or from the start: the fields may have more axes still.
        axes = tuple(rng.permutation(naxes + extra)[:naxes].tolist())
        if rng.random() < 0.5:
            axes = tuple(axis - naxes - extra for axis in axes)
    kinds = []
    for _ in range(int(rng.integers(1, 4))):
        more = extra + int(rng.integers(0, 2)) if extra else 0
        # A field beside another one may have no elements.
        others = tuple(rng.integers(int(not kinds), 4, more).tolist())
        kinds.append(Kind(str(rng.choice(dtypes)), str(rng.choice(forms)), others, axes))
    return kinds, axes


def encode(numbers: np.ndarray, dtype: str, salt: int) -> np.ndarray:
    """A value for each number, of bytes that look random: equal where number and salt are.

    All `POISON` look the same, whatever the salt.
    """
    itemsize = np.dtype(dtype).itemsize
    with np.errstate(over="ignore"):
        keys = numbers.astype("u8") + np.uint64(1)
        keys = np.where(numbers == POISON, np.uint64(0x5EED), keys + np.uint64(salt) * _ODD)
        words = [_mixed(keys + np.uint64(word) * _GOLDEN) for word in range(-(-itemsize // 8))]
    raw = np.stack(words, -1).view("u1")[..., :itemsize]
    if dtype == "?":
        raw = raw & 1
    if np.dtype(dtype).kind == "U":  # these must be characters
        raw = (raw & 7) * np.tile(np.array([1, 0, 0, 0], "u1"), itemsize // 4) + 0
        raw[..., ::4] += 65
    return np.ascontiguousarray(raw).view(dtype)[..., 0]


_GOLDEN, _ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1342543DE82EF95)


def _mixed(keys: np.ndarray) -> np.ndarray:
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _raw(array) -> np.ndarray:
    array = on_host(array)
    return np.frombuffer(array.tobytes(), "u1").reshape(*array.shape, array.dtype.itemsize)


class Field:
    """An array of one rank, in memory whose every other byte must stay as it is.

    After an exchange its elements show `numbers`, `POISON` where nothing is written. All but its
    ghosts is `owned`; it lives in `memory`, by default its own. Ghosts are rounded to `wire`.
    """

    case: Case
    rank: int
    wire: str | None = None

    def __init__(self, xp, numbers, owned, kind: Kind, memory=None) -> None:
        self.xp, self.kind, self.numbers, self.owned = xp, kind, numbers, owned
        shape = base_shape(numbers.shape, kind.form)
        nbytes = self.nbytes(numbers.shape, kind)
        if memory is None:
            memory = xp.empty(nbytes, "u1")
        skipped = int(kind.form == "unaligned")
        flat = memory[skipped:nbytes].view(kind.dtype)
        self.base = flat.reshape(shape)
        self.array = carve(self.base, kind.form)
        assert self.array.shape == numbers.shape
        self.poison()

    @classmethod
    def of(cls, xp, case: Case, rank: int, kind: Kind, memory=None) -> Self:
        """A field of a halo."""
        numbers = kind.spread(case.cells[rank])
        owned = [slice(None)] * numbers.ndim
        for place, cut in zip(kind.places(case.naxes), case.owned(rank), strict=True):
            owned[place] = cut
        field = cls(xp, numbers, tuple(owned), kind, memory)
        field.case, field.rank = case, rank
        return field

    @staticmethod
    def nbytes(shape: tuple[int, ...], kind: Kind) -> int:
        """How much memory it needs."""
        count = prod(base_shape(shape, kind.form))
        return count * np.dtype(kind.dtype).itemsize + int(kind.form == "unaligned")

    def poison(self) -> None:
        """Overwrite all of it, and of what is around it."""
        poison = encode(np.full(self.base.shape, POISON), self.kind.dtype, 0)
        self.base[...] = self.xp.asarray(poison)

    def put(self, salt: int) -> None:
        """Give the owned cells the values of that step."""
        values = encode(self.numbers[self.owned], self.kind.dtype, salt)
        self.array[self.owned] = self.xp.asarray(values)

    def spoil(self) -> None:
        """Overwrite the owned cells with what no cell may ever show."""
        values = encode(self.numbers[self.owned], self.kind.dtype, 999_983)
        self.array[self.owned] = self.xp.asarray(values)

    def _values(self, numbers: np.ndarray, salt: int) -> np.ndarray:
        values = encode(numbers, self.kind.dtype, salt)
        if self.wire:
            owned = values[self.owned].copy()
            values = np.where(numbers == POISON, values, rounded(values, self.wire))
            values[self.owned] = owned
        return values

    def _with_nans_of(self, right: np.ndarray) -> np.ndarray:
        """What it shows; of numbers that are rounded one NaN is as good as another."""
        found = on_host(self.base)
        if self.wire:
            found = found.copy()
            pairs = reals(found), reals(right)
            are_nan = np.isnan(pairs[0]) & np.isnan(pairs[1])
            pairs[0][are_nan] = pairs[1][are_nan]
        return found

    def flaws(self, salt: int, *, exchanged: bool = True) -> str:
        """What is wrong with it after the exchange of that step; empty where it is right.

        Without `exchanged` the ghosts are poison still.
        """
        numbers = self.numbers
        if not exchanged:
            numbers = np.full_like(numbers, POISON)
            numbers[self.owned] = self.numbers[self.owned]
        right = encode(np.full(self.base.shape, POISON), self.kind.dtype, 0)
        carve(right, self.kind.form)[...] = self._values(numbers, salt)
        found, right = _raw(self._with_nans_of(right)), _raw(right)
        if np.array_equal(found, right):
            return ""
        wrong = (found != right).any(-1)
        inside = carve(wrong, self.kind.form)
        first = [tuple(map(int, at)) for at in np.argwhere(inside)[:4]]
        return (
            f"{self.kind} of shape {inside.shape}, owned {self.owned}, step {salt}: {inside.sum()} "
            f"elements are wrong, first {first}, and {wrong.sum() - inside.sum()} around the field"
        )


def check(fields: list[Field], salt: int, **options: bool) -> None:
    """Raise AssertionError where a field is not as the exchange of that step must leave it.

    The fields of one plan hold different values: `salt` plus the place of the field.
    """
    flaws = [flaw for at, field in enumerate(fields) if (flaw := field.flaws(salt + at, **options))]
    assert not flaws, "\n".join(flaws)


def put(fields: list[Field], salt: int) -> None:
    """Give the owned cells of all fields of a plan the values of that step."""
    for at, field in enumerate(fields):
        field.put(salt + at)


def exchange_by(halo, *given, halves: bool, between: Callable[[], object] = lambda: None) -> None:
    if halves:
        halo.start(*given)
        between()
        halo.wait()
    else:
        halo.exchange(*given)


def exchange_step(halo, fields: list[Field], salt: int, *given) -> None:
    """Give the owned cells the values of that step, exchange, and check every cell there is."""
    put(fields, salt)
    halo.exchange(*(given or arrays(fields)))
    check(fields, salt)


def arrays(fields: list[Field]) -> list:
    return [field.array for field in fields]


def make_cart(comm, case: Case):
    """A cart of that case over all ranks of `comm`; its ranks are those of `comm`."""
    return comm.Create_cart(case.dims, case.periods, reorder=False)


@contextlib.contextmanager
def plan(comm, case: Case, fields, width=None, **options) -> Iterator[mpishare.HaloExchange]:
    """A plan of that case for the arrays, closed at the end."""
    cart = make_cart(comm, case)
    width = case.widths[cart.rank] if width is None else width
    halo = mpishare.HaloExchange(cart, fields, width, corners=case.corners, **options)
    yield halo
    halo.close()
    cart.Free()


@contextlib.contextmanager
def read_in_place(small: bool = True) -> Iterator[None]:
    """Plans that are made inside treat small fields as others treat large ones.

    Fields in windows are read in place, others from the sender's process.
    """
    with contextlib.ExitStack() as stack:
        limits = (
            (parts, "_MIN_IN_PLACE_NBYTES"),
            (parts, "_MIN_RUN_NBYTES"),
            (parts, "_MIN_READ_NBYTES"),
            (process_read, "_BLOCK_NBYTES"),
        )
        for module, name in limits if small else ():
            stack.enter_context(mock.patch.object(module, name, 1))
        yield


def make_fields(
    node,
    case: Case,
    kinds: Sequence[Kind] = (Kind(),),
    in_window: Sequence[bool] | bool = False,
    rank: int | None = None,
) -> list[Field]:
    """The fields of one plan. Collective where any of them is to be in a window of the node."""
    rank = node.rank if rank is None else rank
    flags = [in_window] * len(kinds) if isinstance(in_window, bool) else in_window
    made = []
    for kind, is_in_window in zip(kinds, flags, strict=True):
        memory = None
        if is_in_window:
            shape = kind.spread(case.cells[rank]).shape
            memory = node.allocate_each(Field.nbytes(shape, kind), "u1").array
        made.append(Field.of(node.xp, case, rank, kind, memory))
    return made


@contextlib.contextmanager
def exchanging(
    node,
    case: Case,
    kinds: Sequence[Kind] = (Kind(),),
    in_window: Sequence[bool] | bool = False,
    *,
    comm=None,
    **options,
) -> Iterator[tuple[mpishare.HaloExchange, list[Field]]]:
    """A plan of that case and its new fields, until the end of the block."""
    comm = node.comm if comm is None else comm
    fields = make_fields(node, case, kinds, in_window, comm.rank)
    options = {"axes": kinds[0].axes, "node": node, **options}
    with plan(comm, case, arrays(fields), **options) as halo:
        yield halo, fields


def plan_without_cart(comm, case: Case, fields, width=None, **options) -> mpishare.HaloExchange:
    """A plan of that case, whose ranks mpishare places."""
    options = {"dims": case.dims, "periods": case.periods, "corners": case.corners, **options}
    width = case.widths[comm.rank] if width is None else width
    return mpishare.HaloExchange(comm, fields, width, **options)


def some(node, count: int) -> int:
    """So many, or fewer where a plan takes its time: memory of GPUs is mapped for it."""
    return count if node.backend == "host" else -(-count // 4)


def pause(rng: np.random.Generator, most_s: float = 0.001, share: float = 0.15) -> None:
    """Sleep on some ranks at some steps: `rng` is the rank's own."""
    if rng.random() < share:
        time.sleep(rng.random() * most_s)


@dataclass(frozen=True)
class Drawn:
    """Any fields of one plan, in some draws with blocks of their own.

    How they lie in memory is each rank's own affair, and in half of the draws another way on each.
    """

    cases: list[Case]
    kinds: list[Kind]
    axes: tuple[int, ...] | None
    forms: tuple[str, ...]  # by rank, in turn
    has_cart: bool

    @classmethod
    def of(cls, rng, size: int, dtypes, forms, naxes: int | None = None, share=0.4) -> Self:
        case = random_case(rng, size, naxes)
        kinds, axes = random_kinds(rng, case.naxes, dtypes, forms)
        cases = [case] * len(kinds)
        if rng.random() < share:
            cases[1:] = [staggered(rng, case) for _ in kinds[1:]]
        turned = tuple(forms) if rng.integers(2) else ()
        return cls(cases, kinds, axes, turned, bool(rng.integers(2)))

    def fields(self, node, rank: int, rng: np.random.Generator | None = None) -> list[Field]:
        """Collective where `rng`, alike on all ranks, puts some into windows."""
        made = []
        for case, kind in zip(self.cases, self.kinds, strict=True):
            if self.forms:
                place = self.forms.index(kind.form) + rank
                kind = replace(kind, form=self.forms[place % len(self.forms)])
            made += make_fields(node, case, [kind], bool(rng and rng.integers(2)), rank)
        return made

    def plan(self, comm, fields, **options):
        widths = [case.widths[comm.rank] for case in self.cases]
        width = widths if len({*self.cases}) > 1 else widths[0]
        make = plan if self.has_cart else plan_without_cart
        return make(comm, self.cases[0], fields, width, axes=self.axes, **options)

    def neighbors(self, rank: int) -> set[int]:
        """The ranks whose cells it has as ghosts, or that have its cells."""
        found = set()
        for case, kind in zip(self.cases, self.kinds, strict=True):
            owners = np.full(case.count + 1, -1)  # the last: of `POISON`
            for each in range(case.size):
                owners[case.cells[each][case.owned(each)]] = each
            for each in range(case.size if prod(kind.others) else 0):
                ghosts = case.cells[each].copy()
                ghosts[case.owned(each)] = POISON
                pairs = {(int(owner), each) for owner in owners[ghosts].ravel()}
                found |= {sum(pair) - rank for pair in pairs if rank in pair}
        return found - {-1}


def random_plan(node, comm, seed: int, naxes: int | None = None) -> dict[int, str]:
    """Draw fields, make their plan, exchange some steps in all ways there are.

    Collective; returns the routes.
    """
    rng = np.random.default_rng([seed, comm.size])
    dtypes, forms = dtypes_and_forms(node)
    wire = str(rng.choice([*WIRES])) if rng.random() < 0.3 else None
    if wire:
        dtypes = tuple(dtype for dtype, of_pair in PAIRS if of_pair == wire)
        forms = tuple(form for form in forms if form != "unaligned")
    drawn = Drawn.of(rng, comm.size, dtypes, forms, naxes)
    try:
        with read_in_place(bool(rng.integers(2))):
            return _random_plan(node, comm, seed, drawn, wire, rng)
    except AssertionError as error:
        error.add_note(f"seed {seed} on {comm.size} ranks: {drawn}")
        raise


def dtypes_and_forms(node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that fields of a node may have: some are none of CuPy's."""
    if node.backend == "host":
        return DTYPES + HOST_DTYPES, HOST_FORMS
    return DTYPES, FORMS


def _random_plan(node, comm, seed, drawn, wire, rng):
    first, second = (drawn.fields(node, comm.rank, rng) for _ in range(2))
    mine = np.random.default_rng([seed, comm.rank, 7])
    given = [  # of their layouts any arrays may come
        mpishare.Layout(each.array.shape, each.array.dtype, each.kind.form)
        if not drawn.forms and each.kind.form in ("C", "F") and rng.random() < 0.5
        else each.array
        for each in first
    ]
    if len(given) == 1 and rng.random() < 0.5:
        given = given[0]
    with drawn.plan(comm, given, node=node, wire=wire) as halo:
        for step in (1, 2, 3):
            way = mine.choice(["same", "other", "fresh"])
            fields = {"same": first, "other": second}.get(way)
            if fields is None:
                fields = drawn.fields(node, comm.rank)
            for each in fields:
                each.wire = wire
            put(fields, 10 * step)
            pause(mine)
            if rng.random() < 0.5:
                halo.exchange(*arrays(fields))
            else:
                halo.start(*arrays(fields))
                pause(mine)
                for at, field in enumerate(fields):  # which nobody reads
                    inner = field.array[halo.of(at).interior]
                    inner[...] = inner[::-1].copy()
                halo.wait()
                put(fields, 10 * step)
            pause(mine)
            check(fields, 10 * step)
        assert set(halo.routes) == drawn.neighbors(comm.rank)
        return dict(halo.routes)


def attempt(comm, call) -> tuple[Exception | None, list[tuple[str, str]]]:
    """Make something, and close it; the exception, and the name and the words of every rank's."""
    error = None
    try:
        call().close()
    except Exception as caught:
        error = caught
    return error, comm.allgather((type(error).__name__, str(error)))


def same_error(comm, call) -> str:
    """The words of the ValueError that is the same on all ranks."""
    error, told = attempt(comm, call)
    assert type(error) is ValueError, told
    assert len(set(told)) == 1, told
    return str(error)


def check_refusals(comm, make, right, table, *, everywhere: bool = False) -> None:
    """Make a plan of each wrong argument on all ranks, or on the last while others are right.

    Its own error where it can be seen, `PeerError` with its words on the other ranks. The table
    has the argument, the error and its words.
    """
    ranks = [*range(comm.size)] if everywhere else [comm.size - 1]
    for wrong, kind, words in table:
        given = wrong if comm.rank in ranks else right
        fails_on(comm, ranks, kind, lambda given=given: make(given).close(), words)


def weights(case: Case, kind: Kind, rank: int, seed: int, most: int = 50) -> np.ndarray:
    """What `rank` holds in every element, owned or ghost, before an accumulation: integers."""
    shape = kind.spread(case.cells[rank]).shape
    dtype = np.dtype(kind.dtype)
    rng = np.random.default_rng([seed, rank, 3])
    low = 0 if dtype.kind == "u" else -most
    values = rng.integers(low, most, shape)
    if dtype.kind == "c":
        values = values + 1j * rng.integers(low, most, shape)
    return values.astype(dtype)


def accumulated(case: Case, kind: Kind, rank: int, seed: int, most: int = 50) -> np.ndarray:
    """What `rank` must hold after it: exact, since all are small integers."""
    total = np.zeros(case.count * prod(kind.others), "c16")
    for each in range(case.size):
        numbers = kind.spread(case.cells[each])
        shown = numbers != POISON
        np.add.at(total, numbers[shown], weights(case, kind, each, seed, most)[shown])
    numbers = kind.spread(case.cells[rank])
    field = Field.of(np, case, rank, Kind("u1", "C", kind.others, kind.axes))
    found = weights(case, kind, rank, seed, most)
    found[numbers != POISON] = 0
    values = total[numbers[field.owned]]
    found[field.owned] = (values if found.dtype.kind == "c" else values.real).astype(found.dtype)
    return found


def put_weights(fields: list[Field], seed: int) -> None:
    """Small integers everywhere, ghosts too: sums of them are exact."""
    for at, field in enumerate(fields):
        values = weights(field.case, field.kind, field.rank, seed + at, 9)
        field.array[...] = field.xp.asarray(values)


def check_sums(fields: list[Field], seed: int) -> None:
    """Raise AssertionError where a field is not as `accumulate` must leave those weights."""
    for at, field in enumerate(fields):
        right = accumulated(field.case, field.kind, field.rank, seed + at, 9)
        places = np.argwhere(on_host(field.array) != right)[:4].tolist()
        assert not places, f"seed {seed}, {field.case}, {field.kind}: wrong at {places}"


def _put_uneven(node, fields, seed):
    """Numbers whose sums depend on their order."""
    rng = np.random.default_rng([seed, node.rank, 43])
    for field in fields:
        values = rng.standard_normal(field.shape) * 10.0 ** rng.integers(-3, 6, field.shape)
        field[...] = node.xp.asarray(values.astype(field.dtype))


def check_given_back(node, plan, fields, seed: int, others=()) -> None:
    """In turns with the calls that it stands for, on the same plan, also for other arrays."""
    mine = np.random.default_rng([seed, node.rank, 47])
    for step in range(4):
        now = others if step == 2 and others else fields
        _put_uneven(node, now, seed + step)
        plan.accumulate(*now)
        plan.exchange(*now)
        right = [on_host(each).tobytes() for each in now]
        _put_uneven(node, now, seed + step)
        pause(mine)
        plan.accumulate(*now, give_back=True)
        found = [on_host(each).tobytes() for each in now]
        assert found == right, f"seed {seed}, step {step}: {plan}"


def random_sums(node, comm, seed: int, *, gives_back: bool) -> None:
    """Add ghosts of any fields on new values at each step, and exchange; or give back the sums."""
    rng = np.random.default_rng([seed, comm.size, 17])
    is_host = node.backend == "host"
    dtypes = ("i4", "i8", "f4", "f8", "c8", "c16")
    dtypes += ("i2", "u4", "f2", ">f8") if is_host and not gives_back else ()
    drawn = Drawn.of(rng, comm.size, dtypes, HOST_FORMS if is_host else FORMS)
    fields, other = drawn.fields(node, comm.rank, rng), drawn.fields(node, comm.rank)
    mine = np.random.default_rng([seed, comm.rank])
    with drawn.plan(comm, arrays(fields), node=node) as halo:
        if gives_back:
            check_given_back(node, halo, arrays(fields), seed, arrays(other))
            return
        for step in range(3):
            now = other if step == 1 else fields
            put_weights(now, seed + 100 * step)
            pause(mine)
            halo.accumulate(*arrays(now))
            check_sums(now, seed + 100 * step)
            # And forth, on the same plan, whatever came back before.
            for field in now:
                field.poison()
            exchange_step(halo, now, 10 * step, *arrays(now))


def star_of_rank_0(node: mpishare.Node) -> tuple[object, mpishare.NeighborExchange]:
    """A field, and a plan by index in which rank 0 sends all of its cells to each other rank."""
    field = node.xp.zeros(100, "i4")
    others = range(1, node.size)
    sends = {rank: range(100) for rank in others} if node.rank == 0 else {}
    recvs = {} if node.rank == 0 else {0: range(100)}
    return field, mpishare.NeighborExchange(node.comm, sends, recvs, field, node=node)


@contextlib.contextmanager
def staging_buffers(count: int) -> Iterator[None]:
    """Make plans on GPUs with two buffers of staging, or with one, which must lose cells."""
    place = StagingLayout.place

    def place_once(self: StagingLayout, *arguments: object) -> None:
        place(self, *arguments)
        self.parity_offset *= count - 1

    with mock.patch.object(StagingLayout, "place", place_once):
        yield
