"""Routes ``copy`` and ``pinned``: streams wait for the other ranks, kernels never do.

For GPUs that ranks share by turns, where a kernel that waits would use up its turn, and for memory
that cannot be mapped. Each rank packs its field into its own buffer and sets a flag for the others;
each folds the buffers of all ranks. There are two, by the parity of the epoch: see epochs.cuh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.plans.gpu.flags import Handshake, Host
from mpishare.plans.message import padded
from mpishare.reduction.cuda.group import NO_EPOCH, InOrder
from mpishare.reduction.cuda.records import USUAL_FORMS, address_array, shapes_of

if TYPE_CHECKING:
    from mpishare.backends.driver import Enqueued, Launch
    from mpishare.reduction.cuda.group import Buffers, Epoch, Group, Pointers
    from mpishare.reduction.cuda.records import Form, Shape

SEGMENT_NBYTES = 8 << 20
"""Larger fields are reduced part by part, so that the buffers stay small."""

_NUMBER_NBYTES = 16  # room for one element of any dtype
_ALIGN = 128


class StreamedRoute:
    """Launches and signals of reductions in which streams wait."""

    are_graphs = False

    def __init__(self, group: Group, shape: Shape, count: int, *, form: Form) -> None:
        self._group, self._shape, self._form, self._count = group, shape, form, count
        self._segment = max(1, min(count, SEGMENT_NBYTES // group.itemsize))
        self._parity_offset = padded(self._segment * group.itemsize, _ALIGN)
        self.nbytes = 2 * self._parity_offset

    def bind(self, buffers: Buffers) -> None:
        """Prepare the signals."""
        group = self._group
        self._buffers = buffers
        self._handshake = Handshake(group.backend, buffers.flags).both
        epochs = self._parity_offset, group.zeros(24)
        self._begin, self._end = (*epochs, buffers.flags.begun), (*epochs, buffers.flags.done)
        self._of_blocks, self._dot_state = group.zeros(16 * group.most_blocks), group.zeros(16)
        self._sum = group.zeros(_NUMBER_NBYTES)
        (self._of_one,), _ = shapes_of((1,), [(group.itemsize,)], group.itemsize, "C")

    def reduce(self, pointers: Pointers) -> Enqueued:
        """Return the steps that reduce the field at the first address."""
        (field,) = pointers.arguments
        parts: list[Enqueued] = []
        for begin in range(0, self._count, self._segment):
            count = min(self._segment, self._count - begin)
            parts += self._steps(self._shape, field, field, begin, count, form=self._form)
        return InOrder(parts)

    def dot(self, pointers: Pointers, shapes: list[Shape], count: int, *, form: Form) -> Enqueued:
        """Return the steps that reduce the arrays at the first two addresses, into the third."""
        x, y, out = pointers.arguments
        local = self._local_dot(shapes, [x, y, self._sum], count, form=form)
        return InOrder([local, *self._steps(self._of_one, self._sum, out, 0, 1, form="ROW")])

    def warm_up(self, pointers: Pointers, *, with_dot: bool) -> list[Launch]:
        """Return a launch of each kernel on no elements."""
        (field,) = pointers.arguments
        forms: set[Form] = {self._form, "ROW"} if with_dot else {self._form}
        launches: list[Launch] = []
        for form in forms:
            arguments = self._shape, field, 0, 0, NO_EPOCH
            launches += self._pack(*arguments, form=form), self._fold(*arguments, form=form)
        if with_dot:
            arrays = [field, field, self._sum]
            shapes = [self._shape] * 2
            launches += [self._local_dot(shapes, arrays, 0, form=form) for form in USUAL_FORMS]
        return launches

    def _steps(
        self, shape: Shape, source: Any, target: Any, begin: int, count: int, *, form: Form
    ) -> list[Enqueued]:
        pack = self._pack(shape, source, begin, count, self._begin, form=form)
        fold = self._fold(shape, target, begin, count, self._end, form=form)
        return [pack, self._handshake, fold]

    def _pack(
        self, shape: Shape, field: Any, begin: int, count: int, epoch: Epoch, *, form: Form
    ) -> Launch:
        mine = self._buffers.addresses()[self._group.me]
        return self._group.pack(shape, field, begin, count, mine, epoch, form=form)

    def _fold(
        self, shape: Shape, field: Any, begin: int, count: int, epoch: Epoch, *, form: Form
    ) -> Launch:
        rows = self._buffers.addresses()
        return self._group.fold(shape, rows, field, begin, count, epoch, form=form)

    def _local_dot(
        self, shapes: list[Shape], arrays: list[Any], count: int, *, form: Form
    ) -> Launch:
        ours = self._of_blocks, 0, self._dot_state, Host()
        arguments = [address_array([0]), *shapes, *arrays, count, *ours]
        return self._group.launch("dot", self._group.grid_of(count), arguments, form=form, nranks=1)
