"""Random distributions of global arrays, alike on all ranks, and what each rank must have then."""

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpishare
from mpishare import Box, OnRank

HOST_DTYPES = ("?", "i1", "i2", "f2", "f4", "c8", "f8", "c16", "V3", "f8,i4,S5")
DTYPES = HOST_DTYPES[:-2]  # CuPy has no others
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


def check_case(node, comm, seed: int) -> mpishare.Redistribute:
    """Make a random plan, use it in every way, and compare with NumPy; return it, open."""
    xp, is_on_host = node.xp, node.backend == "host"
    case = random_case(seed, comm.rank, comm.size, HOST_DTYPES if is_on_host else DTYPES)
    shared_rng = np.random.default_rng([seed, 27])
    rng = np.random.default_rng([seed, comm.rank])
    is_in_place = shared_rng.random() < 0.2
    plan = make(comm, case, node=node, in_place=is_in_place)
    parts = case.source_part, case.target_part
    shapes = plan.source_shape, plan.target_shape
    assert shapes == tuple(part.shape for part in parts), case.words
    dtype = case.whole.dtype
    windows, kept, mapped = [], {}, []
    steps = [rng.choice([1, -1], len(shape)).tolist() for shape in shapes]
    if shared_rng.random() < 0.2:
        windows += [node.allocate_each(shape, dtype) for shape in shapes]
        kept |= enumerate(window.array for window in windows)

    def cells(step: int, end: int) -> np.ndarray:
        part = parts[end].copy(order="C")
        part.reshape(-1).view(np.uint8)[...] ^= step & 0xFF
        return part

    def new(end: int) -> Any:
        """An array of the user's, in a window, or in memory that will be unmapped."""
        shape, kind = shapes[end], rng.choice(["new", "gapped", "reversed", "kept", "mapped"])
        if kind == "kept":
            return kept.setdefault(end, xp.empty(shape, dtype))
        if kind == "gapped":
            gapped = xp.zeros([2 * extent for extent in shape], dtype)
            return gapped[tuple(slice(None, None, 2) for _ in shape)]
        if kind == "reversed":
            return xp.empty(shape, dtype)[tuple(slice(None, None, step) for step in steps[end])]
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if kind == "mapped" and is_on_host and nbytes:
            mapped.append(mmap.mmap(-1, nbytes))
            return np.frombuffer(mapped[-1], dtype).reshape(shape)
        return xp.empty(shape, dtype)

    def given(step: int, end: int) -> Any:
        array = new(end)
        array[...] = xp.asarray(cells(step, end))
        if is_on_host and array is not kept.get(end) and rng.random() < 0.1:
            array.flags.writeable = False
        return array

    def call(step: int, *, backward: bool) -> None:
        """One call, of which the arrays are overwritten and dropped as soon as it is over."""
        a = given(step, backward)
        out = new(not backward) if rng.random() < 0.5 else None
        if is_in_place and shapes[0] == shapes[1] and rng.random() < 0.5:
            out = a if not is_on_host or a.flags.writeable else None
        if rng.random() < 0.5:
            plan.start(a, out, backward=backward)
            found = plan.wait()
        else:
            found = (plan.backward if backward else plan.forward)(a, out)
        assert out is None or found is out
        if found is not a and (not is_on_host or a.flags.writeable):
            a[...] = xp.zeros((), a.dtype)
        a = out = None
        _require_equal(found, cells(step, not backward), case.words)
        found = None
        while mapped:
            mapped.pop().close()  # raises where the plan still holds the array

    for step in range(1, 5):
        call(step, backward=False)
        if case.is_reversible:
            call(step + 100, backward=True)
    if not case.is_reversible:
        try:
            plan.backward(given(0, True))
        except mpishare.UnsupportedError:
            pass
        else:
            raise AssertionError(f"there is no way back: {case.words}")
    kept.clear()
    for window in windows:
        window.close()
    return plan


def _require_equal(found, expected, words) -> None:
    found = found.get() if hasattr(found, "get") else found
    assert found.shape == expected.shape, words
    assert found.dtype == expected.dtype, words
    assert found.tobytes() == expected.tobytes(), words
