"""One kernel stores into the other ranks' buffers, waits for theirs, and folds.

The buffers are in the memory of GPUs, or of the host where GPUs cannot reach each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.backends.driver import InOrder
from mpishare.plans.gpu.flags import Host
from mpishare.plans.message import padded
from mpishare.reduction.cuda.records import (
    USUAL_FORMS,
    Staging,
    address_array,
    staging_of,
)
from mpishare.reduction.cuda.schedule import schedule

if TYPE_CHECKING:
    from mpishare.backends.driver import Enqueued, Launch
    from mpishare.reduction.cuda.group import Buffers, Group, Pointers
    from mpishare.reduction.cuda.records import Form, Shape

SMALL_NBYTES = 1 << 20
"""Fields up to this size, times the number of other ranks, go to all ranks as they are."""
SEGMENT_NBYTES = 128 << 20
"""Larger fields are reduced part by part, so that the staging buffers stay small."""

_FEW_THREADS, _THREADS = 128, 512
EXACT_BLOCKS_PER_SM = 2  # of dot products
_WARP, _ELEMENTS_PER_LANE = 32, 8  # of a dot product for which one warp is enough
_STATE_NBYTES = 16
_ALIGN = 128
# (slice bytes up to, chunk bytes)
_CHUNKS = ((1 << 20, 16 << 10), (1 << 62, 32 << 10))
_LAG = 128


class SpinningRoute:
    """Launches with kernels that wait for the other ranks, for small and for large fields."""

    def __init__(self, group: Group, shape: Shape, count: int, *, form: Form) -> None:
        self._group, self._shape, self._form, self._count = group, shape, form, count
        itemsize, others = group.itemsize, group.size - 1
        self.is_small = count * itemsize * others <= SMALL_NBYTES
        # Those of dot products come first, in words of 4 bytes at least.
        self._begin = padded(4 * group.size * max(group.sum_nbytes, 4), _ALIGN)
        self._segment = max(1, min(count, SEGMENT_NBYTES // itemsize))
        of_slice = self._segment * itemsize // group.size
        self._chunk = next(chunk for largest, chunk in _CHUNKS if of_slice <= largest)
        self._staging, nbytes = self._staging_of(self._segment)
        nbytes = self._ll_nbytes(count if others else 0) if self.is_small else nbytes
        self.nbytes = self._begin + nbytes

    def bind(self, buffers: Buffers) -> None:
        """Allocate the state that the kernels keep from launch to launch."""
        group, flags = self._group, buffers.flags
        self._buffers = buffers
        self._host = Host(flags.stalled_on(group.ranks[0]), flags.abort)
        self._state, self._dot_state = group.zeros(_STATE_NBYTES), group.zeros(_STATE_NBYTES)
        self._of_blocks = group.zeros(group.blocks_nbytes)

    def reduce(self, pointers: Pointers) -> Enqueued:
        """Return the launches that reduce the field at the first address."""
        (field,) = pointers.arguments
        if self.is_small:
            return self._small(field, self._count, self._state)
        begins = range(0, self._count, self._segment)
        return InOrder([self._large(field, begin, self._state) for begin in begins])

    def dot(self, pointers: Pointers, shapes: list[Shape], count: int, *, form: Form) -> Enqueued:
        """Return the launch for the arrays at the first two addresses, into the third."""
        me, state = self._group.me, self._dot_state
        return self._dot(shapes, pointers.arguments, count, me, state, form=form)

    def warm_up(self, pointers: Pointers, *, with_dot: bool) -> list[Launch]:
        """Return a launch of each kernel on no elements."""
        state = self._group.zeros(_STATE_NBYTES)
        (field,) = pointers.arguments
        if self.is_small:
            launches = [self._small(field, 0, state)]
        else:
            launches = [self._large(field, self._count, state)]
        if with_dot:
            arrays = [field, field, self._group.zeros(max(16, self._group.sum_nbytes))]
            shapes = [self._shape] * 2
            launches += [self._dot(shapes, arrays, 0, -1, state, form=f) for f in USUAL_FORMS]
        return launches

    def local_dot(
        self, shapes: list[Shape], arrays: list[Any], count: int, *, form: Form
    ) -> Launch:
        """Return the launch for this rank's arrays at two addresses, into the third."""
        return self._dot(shapes, arrays, count, -1, self._dot_state, form=form)

    def _small(self, field: Any, count: int, state: int) -> Launch:
        most = self._group.max_blocks
        threads = _FEW_THREADS if count <= most * _FEW_THREADS else _THREADS
        blocks = max(1, min(-(-count // threads), most))
        arguments = [self._shape, field, count, self._group.me, state]
        return self._launch("small", (blocks, threads), self._begin, arguments, form=self._form)

    def _large(self, field: Any, begin: int, state: int) -> Launch:
        group = self._group
        staging, _ = self._staging_of(min(self._count - begin, self._segment))
        # In every segment the parts of the buffers have the offsets of a whole one.
        for name in ("sent_flags", "reduced_flags", "sent", "reduced"):
            setattr(staging, name, getattr(self._staging, name))
        items = schedule(group.me, group.size, staging.chunks, _LAG)
        blocks = max(1, min(len(items), group.max_blocks))
        work = group.upload(items), len(items)
        arguments = [self._shape, staging, field, begin, *work, group.me, state]
        return self._launch("large", (blocks, _THREADS), self._begin, arguments, form=self._form)

    def _dot(
        self,
        shapes: list[Shape],
        arrays: list[Any],
        count: int,
        me: int,
        state: int,
        *,
        form: Form,
    ) -> Launch:
        # An exact one computes more for each element.
        is_exact = self._group.exact is not None
        of_lane, blocks_of_sm = (2, EXACT_BLOCKS_PER_SM) if is_exact else (_ELEMENTS_PER_LANE, 1)
        threads = _WARP if count <= _WARP * of_lane else _THREADS
        most = blocks_of_sm * self._group.sm_count
        blocks = max(1, min(-(-count // (2 * threads)), most)) if threads > _WARP else 1
        arguments = [*shapes, *arrays, count, self._of_blocks, me, state]
        return self._launch(self._group.dot_name, (blocks, threads), 0, arguments, form=form)

    def _launch(
        self, name: str, size: tuple[int, int], offset: int, arguments: list[Any], *, form: Form
    ) -> Launch:
        peers = address_array(self._buffers.addresses(offset))
        return self._group.launch(name, size, [peers, *arguments, self._host], form=form)

    def _ll_nbytes(self, count: int) -> int:
        return 2 * self._group.size * count * 8 * max(1, self._group.itemsize // 4)

    def _staging_of(self, count: int) -> tuple[Staging, int]:
        return staging_of(count, self._group.itemsize, self._group.size, self._chunk)
