"""Random distributions of global arrays, alike on all ranks, and what each rank must have then."""

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpishare
from mpishare import Box, OnRank

HOST_DTYPES = ("?", "i1", "i2", "f2", "f4", "c8", "f8", "c16", "V3")
DTYPES = HOST_DTYPES[:-1]  # CuPy has no others
MOST = (300, 40, 14, 9)  # cells along an axis, of arrays of 1 to 4 axes


@dataclass
class Case:
    """A global array, its two distributions, and a rank's parts by NumPy."""

    whole: np.ndarray
    source: Any
    target: Any
    permute: list[int] | None
    source_part: np.ndarray
    target_part: np.ndarray
    is_reversible: bool
    words: str


def random_case(seed: int, rank: int, size: int, dtypes: tuple[str, ...]) -> Case:
    """The same array on every rank, and this rank's arguments."""
    rng = np.random.default_rng([seed, size, 26])
    ndim = int(rng.integers(1, 5))
    shape = tuple(map(int, rng.integers(1, MOST[ndim - 1], ndim)))
    dtype = np.dtype(str(rng.choice(dtypes)))
    whole = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    permute = [*map(int, rng.permutation(ndim))] if rng.random() < 0.5 else None
    sources, source_slices = _spread(rng, shape, size, is_target=False)
    targets, target_slices = _spread(rng, shape, size, is_target=True)
    part = whole[target_slices[rank]]
    counts = [np.zeros(shape, np.int8), np.zeros(shape, np.int8)]
    for count, slices in zip(counts, (source_slices, target_slices), strict=True):
        for each in slices:
            count[each] += 1
    holes = (counts[0] == 0) & (counts[1] > 0)
    assert not holes.any()
    assert counts[0].max() <= 1
    return Case(
        whole,
        sources[rank],
        targets[rank],
        permute,
        whole[source_slices[rank]],
        part if permute is None else part.transpose(permute),
        is_reversible=counts[1].max() <= 1 and bool((counts[1] >= counts[0]).all()),
        words=f"seed {seed}: {dtype}{shape}, {sources} to {targets}, permute {permute}",
    )


def _spread(rng, shape, size, *, is_target):
    """What each rank gives as a distribution, and its slices of the whole."""
    ndim, kind = len(shape), rng.random()
    whole = tuple(slice(0, extent) for extent in shape)
    nothing = tuple(slice(0, 0) for _ in shape)
    if kind < 0.3:
        axis = int(rng.integers(ndim))
        parts = [1] * ndim
        parts[axis] = size
        given = axis if rng.random() < 0.5 else axis - ndim
        return [given] * size, _cut(shape, parts)
    if kind < 0.6:
        parts = [1] * ndim
        for factor in _factors(size):
            parts[int(rng.integers(ndim))] *= factor
        return [tuple(parts)] * size, _cut(shape, parts)
    if kind < 0.7:
        owner = int(rng.integers(size))
        return [OnRank(owner)] * size, [whole if rank == owner else nothing for rank in range(size)]
    if is_target and kind < 0.8:
        return [None] * size, [whole] * size
    if is_target and kind < 0.9:  # any boxes, which may overlap or be empty
        ends = [np.sort(rng.integers(0, extent + 1, (2, size)), axis=0) for extent in shape]
        boxes = [
            Box(tuple(int(end[0, rank]) for end in ends), tuple(int(end[1, rank]) for end in ends))
            for rank in range(size)
        ]
    else:  # uneven slabs, in any order
        axis = int(rng.integers(ndim))
        cuts = [0, *sorted(map(int, rng.integers(0, shape[axis] + 1, size - 1))), shape[axis]]
        boxes = []
        for place in rng.permutation(size):
            lower, upper = [0] * ndim, list(shape)
            lower[axis], upper[axis] = cuts[place], cuts[place + 1]
            boxes.append(Box(tuple(lower), tuple(upper)))
    return boxes, [box.slices for box in boxes]


def _cut(shape, parts):
    """The slices of `numpy.array_split` along each axis, by rank."""
    along = [
        [slice(int(part[0]), int(part[-1]) + 1) if part.size else slice(0, 0) for part in cuts]
        for cuts in (
            np.array_split(np.arange(extent), count)
            for extent, count in zip(shape, parts, strict=True)
        )
    ]
    places = (np.unravel_index(rank, parts) for rank in range(int(np.prod(parts))))
    return [tuple(cuts[at] for cuts, at in zip(along, place, strict=True)) for place in places]


def _factors(size):
    for prime in range(2, size + 1):
        while size % prime == 0:
            yield prime
            size //= prime


def make(comm, case: Case, **words) -> mpishare.Redistribute:
    return mpishare.Redistribute(
        comm, case.whole.shape, case.source, case.target, case.whole.dtype,
        permute=case.permute, **words,
    )  # fmt: skip


class Checked:
    """A random plan, its case, and arrays of every kind that it may be given, new and old ones."""

    def __init__(self, node, comm, seed: int) -> None:
        self._node, self._is_on_host = node, node.backend == "host"
        dtypes = HOST_DTYPES if self._is_on_host else DTYPES
        self.case = case = random_case(seed, comm.rank, comm.size, dtypes)
        self._shared_rng = np.random.default_rng([seed, 27])
        self._rng = np.random.default_rng([seed, comm.rank])
        self._mapped = []
        self._is_in_place = self._shared_rng.random() < 0.2
        self.plan = plan = make(comm, case, node=node, in_place=self._is_in_place)
        assert plan.source_shape == case.source_part.shape, case.words
        assert plan.target_shape == case.target_part.shape, case.words
        self._windows, self._kept = [], {}
        if self._shared_rng.random() < 0.2:
            shapes = {False: plan.source_shape, True: plan.target_shape}
            for of_target, shape in shapes.items():
                self._windows.append(node.allocate_each(shape, case.whole.dtype))
                self._kept[of_target] = self._windows[-1].array

    def _cells(self, step: int, *, of_target: bool) -> np.ndarray:
        part = (self.case.target_part if of_target else self.case.source_part).copy(order="C")
        part.reshape(-1).view(np.uint8)[...] ^= step & 0xFF
        return part

    def _new(self, *, of_target: bool) -> Any:
        """An array of the user's, in a window, or in memory that will be unmapped."""
        xp, dtype = self._node.xp, self.case.whole.dtype
        shape = self.plan.target_shape if of_target else self.plan.source_shape
        kind = self._rng.choice(["new", "gapped", "kept", "mapped"])
        if kind == "kept":
            if of_target not in self._kept:
                self._kept[of_target] = xp.empty(shape, dtype)
            return self._kept[of_target]
        if kind == "gapped":
            gapped = xp.zeros([2 * extent for extent in shape], dtype)
            return gapped[tuple(slice(None, None, 2) for _ in shape)]
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if kind == "mapped" and self._is_on_host and nbytes:
            self._mapped.append(mmap.mmap(-1, nbytes))
            return np.frombuffer(self._mapped[-1], dtype).reshape(shape)
        return xp.empty(shape, dtype)

    def _given(self, step: int, *, of_target: bool) -> Any:
        array = self._new(of_target=of_target)
        array[...] = self._node.xp.asarray(self._cells(step, of_target=of_target))
        is_kept = array is self._kept.get(of_target)
        if self._is_on_host and not is_kept and self._rng.random() < 0.1:
            array.flags.writeable = False
        return array

    def _call(self, step: int, *, backward: bool) -> None:
        """One call, of which the arrays are overwritten and dropped as soon as it is over."""
        plan, rng = self.plan, self._rng
        a = self._given(step, of_target=backward)
        out = self._new(of_target=not backward) if rng.random() < 0.5 else None
        if self._is_in_place and plan.source_shape == plan.target_shape and rng.random() < 0.5:
            out = a if not self._is_on_host or a.flags.writeable else None
        if rng.random() < 0.5:
            plan.start(a, out, backward=backward)
            found = plan.wait()
        else:
            found = (plan.backward if backward else plan.forward)(a, out)
        assert out is None or found is out
        if found is not a and (not self._is_on_host or a.flags.writeable):
            a[...] = self._node.xp.zeros((), a.dtype)
        a = out = None
        _require_equal(found, self._cells(step, of_target=not backward), self.case.words)
        found = None
        while self._mapped:
            self._mapped.pop().close()  # raises where the plan still holds the array

    def step(self, number: int) -> None:
        """There and, if there is a way, back."""
        self._call(number, backward=False)
        if self.case.is_reversible:
            self._call(number + 100, backward=True)

    def require_no_way_back(self) -> None:
        if not self.case.is_reversible:
            try:
                self.plan.backward(self._given(0, of_target=True))
            except mpishare.UnsupportedError:
                pass
            else:
                raise AssertionError(f"there is no way back: {self.case.words}")

    def close_windows(self) -> None:
        self._kept = {}
        while self._windows:
            self._windows.pop().close()


def check_case(node, comm, seed: int) -> mpishare.Redistribute:
    """Make a random plan, use it in every way, and compare with NumPy; return it, open."""
    checked = Checked(node, comm, seed)
    for number in range(1, 5):
        checked.step(number)
    checked.require_no_way_back()
    checked.close_windows()
    return checked.plan


def _require_equal(found, expected, words) -> None:
    found = found.get() if hasattr(found, "get") else found
    assert found.shape == expected.shape, words
    assert found.dtype == expected.dtype, words
    assert found.tobytes() == expected.tobytes(), words
