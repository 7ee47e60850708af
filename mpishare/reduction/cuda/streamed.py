"""Routes ``copy`` and ``pinned``: streams wait for the other ranks, kernels never do.

For GPUs that ranks share by turns, where a kernel that waits would use up its turn, and for memory
that cannot be mapped. Each rank packs its field into its own buffer and sets a flag for the others;
each folds the buffers of all ranks. There are two, by the parity of the epoch: see epochs.cuh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.backends.driver import InOrder
from mpishare.plans.gpu.flags import Handshake, Host
from mpishare.plans.message import padded
from mpishare.reduction.cuda.group import NO_EPOCH
from mpishare.reduction.cuda.records import USUAL_FORMS, address_array

if TYPE_CHECKING:
    from mpishare.backends.driver import Enqueued, Launch
    from mpishare.reduction.cuda.group import Buffers, Group, Pointers
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
        nbytes = max(self._segment * group.itemsize, group.sum_nbytes)
        self._parity_offset = padded(nbytes, _ALIGN)
        self.nbytes = 2 * self._parity_offset

    def bind(self, buffers: Buffers) -> None:
        group = self._group
        self._buffers = buffers
        self._handshake = Handshake(group.backend, buffers.flags).both
        epochs = self._parity_offset, group.zeros(24)
        self._begin, self._end = (*epochs, buffers.flags.begun), (*epochs, buffers.flags.done)
        self._of_blocks, self._dot_state = group.zeros(group.blocks_nbytes), group.zeros(16)
        self._sum = group.zeros(max(_NUMBER_NBYTES, group.sum_nbytes))
        self._of_sum = group.shape_of_sum()

    def reduce(self, pointers: Pointers) -> Enqueued:
        (field,) = pointers.arguments
        parts: list[Enqueued] = []
        for begin in range(0, self._count, self._segment):
            count = min(self._segment, self._count - begin)
            parts += self._steps(self._shape, field, field, begin, count, form=self._form)
        return InOrder(parts)

    def dot(self, pointers: Pointers, shapes: list[Shape], count: int, *, form: Form) -> Enqueued:
        group, (x, y, out) = self._group, pointers.arguments
        local = self.local_dot(shapes, [x, y, self._sum], count, form=form)
        target = out if group.exact is None else self._sum
        given = self._of_sum, self._sum, target, 0, group.sum_count
        combined = self._steps(*given, form="ROW", group=group.sums)
        return InOrder([local, *combined, *group.round(self._sum, out)])

    def warm_up(self, pointers: Pointers, *, with_dot: bool) -> list[Launch]:
        (field,) = pointers.arguments
        launches: list[Launch] = []
        rows = self._buffers.addresses()
        kernels: set[tuple[Group, Form]] = {(self._group, self._form)}
        if with_dot:
            kernels.add((self._group.sums, "ROW"))
        for group, form in kernels:
            launches += [
                group.pack(self._shape, field, 0, 0, rows[group.me], NO_EPOCH, form=form),
                group.fold(self._shape, rows, field, 0, 0, NO_EPOCH, form=form),
            ]
        if with_dot:
            arrays = [field, field, self._sum]
            shapes = [self._shape] * 2
            launches += [self.local_dot(shapes, arrays, 0, form=form) for form in USUAL_FORMS]
            launches += self._group.round(self._sum, self._group.zeros(_NUMBER_NBYTES))
        return launches

    def _steps(
        self,
        shape: Shape,
        source: Any,
        target: Any,
        begin: int,
        count: int,
        *,
        form: Form,
        group: Group | None = None,
    ) -> list[Enqueued]:
        group = group or self._group
        rows = self._buffers.addresses()
        mine = rows[group.me]
        pack = group.pack(shape, source, begin, count, mine, self._begin, form=form)
        fold = group.fold(shape, rows, target, begin, count, self._end, form=form)
        return [pack, self._handshake, fold]

    def local_dot(
        self, shapes: list[Shape], arrays: list[Any], count: int, *, form: Form
    ) -> Launch:
        ours = self._of_blocks, -1, self._dot_state, Host()
        arguments = [address_array([0]), *shapes, *arrays, count, *ours]
        name, size = self._group.dot_name, self._group.grid_of(count)
        return self._group.launch(name, size, arguments, form=form, nranks=1)
