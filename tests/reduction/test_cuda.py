"""Reductions on GPUs: their records, the order of their work, kernels for every dtype."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpishare.errors import UnsupportedError
from mpishare.plans.gpu.sources import source
from mpishare.reduction.cuda.records import (
    MAX_AXES,
    options,
    order_by_strides,
    shapes_of,
    staging_of,
)
from mpishare.reduction.cuda.schedule import RECV, REDUCE, SEND, schedule
from mpishare.reduction.operation import OPERATIONS, Operation
from tests.helpers.launch import ROOT
from tests.helpers.nvrtc import check_compiles
from tests.helpers.reductions import every_operation

KERNELS = ROOT / "mpishare" / "reduction" / "cuda"


def offsets(shape, count, form):
    """Where the kernels find each element, as `elements` of elements.cuh."""
    found = []
    for number in range(count):
        i, at = number, 0
        for axis in range(shape.axes - 1, 0, -1):
            extent = shape.extent[axis]
            rest = (
                divided(i, shape.magic[axis], shape.shift[axis]) if form == "NEAR" else i // extent
            )
            at += shape.step[axis] * (i - rest * extent)
            i = rest
        found.append(at + shape.step[0] * i)
    return found


def divided(number, magic, shift):
    """In 32 bits, which must be enough for the sum."""
    total = number + (number * magic >> 32)
    assert magic < 1 << 32
    assert total < 1 << 32
    return total >> shift


def places(array, order="C"):
    """The byte offset of each element, in the order of their numbers."""
    grid = np.indices(array.shape).reshape(array.ndim, -1)
    flat = (grid * np.array(array.strides).reshape(-1, 1)).sum(axis=0).reshape(array.shape)
    return flat.ravel(order).tolist()


axes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=5)


@given(axes=axes, order=st.sampled_from("CF"), permuted=st.randoms())
def test_elements_lie_where_numpy_has_them(axes, order, permuted):
    whole = np.zeros([extent * step for extent, step in axes], "f4", order=order)
    view = whole[tuple(slice(None, None, step) for _, step in axes)]
    numbers = list(range(view.ndim))
    permuted.shuffle(numbers)
    view = view.transpose(numbers)
    [shape], form = shapes_of(view.shape, [view.strides], 4, order)
    assert offsets(shape, view.size, form) == places(view, order)
    assert form == ("ROW" if places(view, order) == list(range(0, 4 * view.size, 4)) else "NEAR")


@given(number=st.integers(0, (1 << 31) - 1), extent=st.integers(1, (1 << 31) - 1))
@example(number=(1 << 31) - 1, extent=(1 << 31) - 1)
@example(number=(1 << 31) - 1, extent=1)
@example(number=(1 << 31) - 2, extent=3)
def test_products_divide(number, extent):
    [shape], _ = shapes_of((2, extent), [(16 * extent + 8, 8)], 4, "C")
    last = shape.axes - 1
    assert shape.extent[last] in (extent, 2)
    magic, shift = shape.magic[last], shape.shift[last]
    assert divided(number, magic, shift) == number // shape.extent[last]


def test_large_strided_fields_divide_in_64_bits():
    extents, strides = (1 << 20, 1 << 12), [(1 << 14, 1)]
    assert shapes_of(extents, strides, 1, "C")[1] == "FAR"
    assert shapes_of((1 << 18, 1 << 12), strides, 1, "C")[1] == "NEAR"
    assert shapes_of((2, 2), [(1 << 31, 8)], 8, "C")[1] == "FAR"


def test_pairs_are_merged_where_both_can_be():
    u, v = np.zeros((6, 5, 4)), np.zeros((6, 9, 4))[:, :5]
    (of_u, of_v), form = shapes_of(u.shape, [u.strides, v.strides], 8, "C")
    assert (of_u.axes, of_v.axes, form) == (2, 2, "NEAR")
    assert offsets(of_v, v.size, form) == places(v)
    assert shapes_of(u.shape, [u.strides] * 2, 8, "C")[1] == "ROW"


def test_sums_take_the_elements_as_they_lie():
    u = np.zeros((6, 5, 4), order="F")
    extents, strides = order_by_strides(u.shape, [u.strides, u.strides])
    assert shapes_of(extents, strides, 8, "C")[1] == "ROW"


def test_more_axes_than_a_record_has_are_refused():
    shape = (2,) * (MAX_AXES + 1)
    whole = np.zeros([3] * len(shape))
    view = whole[tuple(slice(2) for _ in shape)]
    with pytest.raises(UnsupportedError, match="9 axes"):
        shapes_of(view.shape, [view.strides], 8, "C")


@pytest.mark.parametrize("count", [1, 3, 100, 4097, 100_003])
@pytest.mark.parametrize("nranks", [2, 3, 8])
def test_buffers_hold_every_chunk(count, nranks):
    staging, nbytes = staging_of(count, 8, nranks, 4096)
    packs = -(-count // 2)
    assert staging.slice * nranks >= packs
    assert staging.chunk * staging.chunks >= staging.slice
    flags = (nranks - 1) * staging.chunks * 32
    data = (nranks - 1) * staging.slice * 16
    regions = [
        (staging.sent_flags, flags),
        (staging.reduced_flags, flags),
        (staging.sent, data),
        (staging.reduced, data),
    ]
    for (begin, size), (after, _) in itertools.pairwise([*regions, (nbytes, 0)]):
        assert begin % 16 == 0
        assert begin + size <= after


def run(nranks, chunks, lag, resident):
    """Let so many blocks of each rank take the items; return whether all came to their end."""
    queues = [
        [
            (item >> 30, item >> 20 & 0x3FF, item & 0xFFFFF)  # as large.cu takes them
            for item in schedule(rank, nranks, chunks, lag).tolist()
        ]
        for rank in range(nranks)
    ]
    done = set()

    def is_ready(rank, kind, peer, chunk):
        others = [other for other in range(nranks) if other != rank]
        if kind == REDUCE:
            return all((other, SEND, rank, chunk) in done for other in others)
        return kind == SEND or (peer, REDUCE, peer, chunk) in done

    blocks = [[queue.pop(0) for _ in range(min(resident, len(queue)))] for queue in queues]
    while any(blocks):
        ended = [
            (rank, item) for rank in range(nranks) for item in blocks[rank] if is_ready(rank, *item)
        ]
        if not ended:
            return False
        for rank, item in ended:
            blocks[rank].remove(item)
            done.add((rank, *item))
            if queues[rank]:
                blocks[rank].append(queues[rank].pop(0))
    return len(done) == nranks * (nranks - 1) * chunks * 2 + nranks * chunks


@given(
    nranks=st.integers(2, 5),
    chunks=st.integers(1, 12),
    lag=st.integers(0, 15),
    resident=st.integers(1, 9),
)
def test_one_resident_block_is_enough(nranks, chunks, lag, resident):
    assert run(nranks, chunks, lag, resident)


def bfloat16():
    """Nothing where ml_dtypes is not installed."""
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        return []
    of_floats = [name for name, row in OPERATIONS.items() if "f" in row.kinds]
    return [Operation(name, np.dtype(ml_dtypes.bfloat16)) for name in of_floats]


COMPILED = sorted(
    {
        options(each, 2, "ROW"): each
        for each in (*every_operation("?bhilqBHILQefdFD"), *bfloat16())
    }.values(),
    key=lambda each: (each.dtype.name, each.name),
)

# The longest to compile: one type of each size.
LARGE = {each.dtype.itemsize: each for each in reversed(COMPILED) if each.name == "sum"}.values()


@pytest.mark.parametrize("operation", COMPILED, ids=lambda each: f"{each.dtype}-{each.name}")
def test_every_operation_compiles(operation):
    compiles("small", operation, 2, form="ROW")
    if operation.name == "sum":  # what an operation does is in a header that all include
        for name in ("nodes", "dot"):
            compiles(name, operation, 2, form="NEAR")
    if operation in LARGE:
        compiles("large", operation, 2, form="NEAR")


@pytest.mark.parametrize(("nranks", "form"), [(1, "ROW"), (3, "ROW"), (40, "ROW"), (2, "FAR")])
@pytest.mark.parametrize("name", ["small", "large", "dot", "nodes"])
def test_any_number_of_ranks_and_fields_of_any_size_compile(name, nranks, form):
    compiles(name, Operation("sum", np.dtype("d")), nranks, form=form)


def compiles(name, operation, nranks, *, form):
    check_compiles(source(KERNELS / f"{name}.cu"), "sm_90", *options(operation, nranks, form))


def test_kinds_are_those_of_the_kernel():
    text = source(KERNELS / "large.cu")
    for name, kind in (("SEND", SEND), ("REDUCE", REDUCE), ("RECV", RECV)):
        assert f"#define {name} {kind}u" in text
