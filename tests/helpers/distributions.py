"""Random distributions of global arrays, alike on all ranks, and what each rank must have then."""

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
    counts = [np.zeros(shape, int), np.zeros(shape, int)]
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
    on_host = node.backend == "host"
    case = random_case(seed, comm.rank, comm.size, HOST_DTYPES if on_host else DTYPES)
    plan = make(comm, case, node=node)
    rng = np.random.default_rng([seed, comm.rank])
    assert plan.source_shape == case.source_part.shape, case.words
    assert plan.target_shape == case.target_part.shape, case.words

    def given(part, step):
        """That part in step `step`, in memory with gaps or without."""
        part = np.roll(case.whole.ravel(), step).reshape(case.whole.shape)[part]
        if rng.random() < 0.3:
            gapped = node.xp.zeros([2 * extent for extent in part.shape], part.dtype)
            gapped = gapped[tuple(slice(None, None, 2) for _ in part.shape)]
            gapped[...] = node.xp.asarray(part)
            return gapped
        return node.xp.asarray(part)

    def cells(step, *, of_target):
        box = plan.target_box if of_target else plan.source_box
        part = np.roll(case.whole.ravel(), step).reshape(case.whole.shape)[box.slices]
        return part.transpose(case.permute) if of_target and case.permute else part

    def out(shape):
        return node.xp.empty(shape, case.whole.dtype) if rng.random() < 0.5 else None

    for step in range(4):
        a = given(plan.source_box.slices, step)
        if step % 2:
            plan.start(a, out(plan.target_shape))
            b = plan.wait()
        else:
            b = plan.forward(a, out(plan.target_shape))
        _require_equal(b, cells(step, of_target=True), case.words)
        if case.is_reversible:
            back = plan.backward(b, out(plan.source_shape))
            _require_equal(back, cells(step, of_target=False), case.words)
    if not case.is_reversible:
        try:
            plan.backward(b)
        except mpishare.UnsupportedError:
            pass
        else:
            raise AssertionError(f"there is no way back: {case.words}")
    return plan


def _require_equal(found, expected, words) -> None:
    found = found.get() if hasattr(found, "get") else found
    assert found.shape == expected.shape, words
    assert found.dtype == expected.dtype, words
    assert found.tobytes() == expected.tobytes(), words
