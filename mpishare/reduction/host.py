"""The engine for fields in host memory: the ranks of a node reduce through shared memory.

A rank copies its elements into its slot; after a barrier each rank folds the slots of all into its
field, or a share of them. Fields that have no room in a slot go by `LargeReduce`.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import handle_of
from mpishare.coordination.waits import NO_THREAD
from mpishare.plans.engine import PlanEngine
from mpishare.plans.layout import FieldLayout, as_numpy, require_writeable
from mpishare.reduction.exact import SUM_OF_WORDS, ExactOperation
from mpishare.reduction.large import LargeReduce
from mpishare.reduction.operation import BLOCK, blocks_of, packing_order, quiet_runner
from mpishare.reduction.slots import DOT, REDUCE, Slots, capacity, folds_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.memory.types import Order
    from mpishare.plans.engine import PlanSetup
    from mpishare.reduction.operation import Operation

    Array = np.ndarray[Any, Any]


class HostReduce(PlanEngine):
    """Reduces over the ranks of a node in host memory, in the order of their ranks in the plan.

    Collective to make, host-blocking. `CudaReduce` has the same methods. The plan has checked that
    it is open, the node whole, and the thread its own; arrays are checked here, before anything is
    touched: `TypeError` or `ValueError`. `try_fast` replaces the plan and `reduce` where it can be
    sure of all of that; else it returns False with nothing done. With an exact operation `dot`
    makes words, which `combine_words` combines over nodes where it is set, and rounds them.
    """

    #: None: the wait for the other ranks takes longer than all checks.
    try_fast: Callable[[Any, Any], bool] | None = None
    reaches_nodes = is_staged = False  # it reduces over the ranks of its own node

    def __init__(
        self,
        setup: PlanSetup,
        layout: FieldLayout,
        operation: Operation,
        exact: ExactOperation | None,
    ) -> None:
        self._name = setup.name
        self._agreement = setup.context.agreement
        self._layout = layout
        shape, self._dtype = layout.shape, layout.dtype
        self._shape, self._strides = shape, layout.strides
        self._quietly = quiet_runner()
        self._exact = exact
        self._store_dot = store_dot if exact is None else exact.store_dot
        self.combine_words: Callable[[Any, Any], None] | None = None
        self._sum = np.empty(1, layout.dtype) if exact is None else np.zeros(exact.nwords, np.int64)
        count, nranks = prod(shape), len(setup.comm.ranks_here)
        size = capacity(count if nranks > 1 else 1, layout.dtype.itemsize)
        size = max(size, -(-self._sum.nbytes // layout.dtype.itemsize))
        self._slots = slots = Slots(setup.comm, setup.name, layout.dtype, size)
        self.staging_nbytes = slots.nbytes
        self._fold = operation.fold
        self._order = order = packing_order(setup)
        self._has_others = nranks > 1
        # Rounded once: not by each node.
        is_apart = isinstance(operation, ExactOperation) and not setup.comm.is_of_one_node
        self._is_needed = nranks > 1 and count > 0 and not is_apart
        self._is_shared = not folds_all(nranks, min(count, size) * layout.dtype.itemsize)
        combine = InSlots(slots, operation, order).combine
        of_sums = combine if exact is None else InSlots(slots, SUM_OF_WORDS, order).combine
        self._combine_sums = partial(of_sums, DOT, False)
        in_slots = partial(combine, REDUCE, self._is_shared)
        self._large = LargeReduce(setup, slots, self._fold, in_slots)
        self._reduce_packed = in_slots if count <= size else self._reduce_large
        if layout.is_packed(order):
            self._reduce = self._reduce_packed
        else:
            self._packed = np.empty(shape, layout.dtype, order)
            self._reduce = self._reduce_unpacked

    def reduce(self, field: Any, stream: Any) -> None:
        """Put the node's result into `field` on every rank."""
        if stream is not None:
            handle_of(stream)
        # Written for speed: with few elements, the checks take as long as the rest.
        if type(field) is not np.ndarray:
            field = as_numpy(field, "x")
        if (
            field.shape != self._shape
            or field.strides != self._strides
            or field.dtype != self._dtype
            or not field.flags.writeable
        ):
            self._require(field)
        if not self._is_needed:
            return
        agreement = self._agreement
        # `Blocked` by hand, here and in `dot`: its block takes a tenth of a small sum once more.
        thread, agreement.thread = agreement.thread, NO_THREAD
        try:
            self._quietly(self._reduce, field)
        except BaseException as error:
            agreement.life.leave(f"{self._name}: reduce", error)
            raise
        finally:
            agreement.thread = thread

    def _reduce_large(self, field: Array) -> None:
        self._large.reduce(field.reshape(-1, order=self._order))  # a view

    def _reduce_unpacked(self, field: Array) -> None:
        """Copy a field that is not packed into one that is, and back."""
        packed = self._packed
        packed[...] = field
        self._reduce_packed(packed)
        field[...] = packed

    def dot(self, x: Any, y: Any, out: Any, stream: Any) -> Any:
        """Put the sum of ``conj(x) * y`` over the node's ranks into `out`, and return that."""
        if stream is not None:
            handle_of(stream)
        a, b = self._operand(x, "x"), self._operand(y, "y")
        if a.shape != b.shape:
            raise ValueError(f"x has shape {a.shape}, y has {b.shape}: they must be the same")
        target = np.empty((), self._dtype) if out is None else self._single(out)
        agreement = self._agreement
        thread, agreement.thread = agreement.thread, NO_THREAD
        try:
            self._quietly(self._dot, a, b)
        except BaseException as error:
            agreement.life.leave(f"{self._name}: dot", error)
            raise
        finally:
            agreement.thread = thread
        if self._exact is None:
            target[...] = self._sum[0]
        else:
            if self.combine_words is not None:
                self.combine_words(self._sum, stream)
            self._quietly(self._exact.round, self._sum, target)
        return target if out is None else out

    def _dot(self, x: Array, y: Array) -> None:
        self._store_dot(self._sum, x, y)
        if self._has_others:
            self._combine_sums(self._sum)

    # --- checks of the arrays

    def _require(self, field: Array) -> None:
        self._layout.require(FieldLayout.of_host(field), "x")
        require_writeable(field, "x")

    def _operand(self, field: Any, name: str) -> Array:
        array = as_numpy(field, name)
        if array.dtype != self._dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype} instead of {self._dtype}. Make another plan, or "
                "convert it by astype"
            )
        return array

    def _single(self, out: Any) -> Array:
        array = self._operand(out, "out")
        if array.size != 1:
            raise ValueError(f"out has shape {array.shape}: it must be of one element")
        require_writeable(array, "out")
        return array

    def close(self) -> None:
        # Else a closed engine would live until a collection of cycles.
        del self._reduce, self._reduce_packed, self._combine_sums, self._large
        self._slots.close()


class InSlots:
    """Combines elements of all ranks in their slots, in C where it knows the operation."""

    def __init__(self, slots: Slots, operation: Operation, order: Order) -> None:
        self._slots, self._order, self._fold = slots, order, operation.fold
        self._pair = slots.pair_of(operation.dtype)
        self._compiled = slots.compiled(operation.key, operation.dtype)
        self.combine = self._combine_in_numpy if self._compiled is None else self._combine_in_c

    def _combine_in_c(self, kind: int, is_shared: bool, field: Array) -> None:
        """Fold the elements that all ranks give in a call `kind`, an index of `CALLS`."""
        slots = self._slots
        parity = slots.parity = slots.parity ^ 1
        value = 2 * slots.next_epoch() + kind
        while (awaited := self._compiled(field, parity, value, is_shared)) is not None:
            slots.wait(awaited)
        if is_shared:
            slots.next_epoch()

    def _combine_in_numpy(self, kind: int, is_shared: bool, field: Array) -> None:
        """Do the same for an operation that is not compiled."""
        slots = self._slots
        slots.parity ^= 1
        flat = field.reshape(-1, order=self._order)  # a view
        operands = [slot[: flat.size] for slot in self._pair[slots.parity]]
        operands[slots.place][...] = flat
        slots.meet(kind)
        if not is_shared:
            self._fold(operands, flat)
            return
        shares = [slots.share(flat.size, place) for place in range(len(operands))]
        mine = shares[slots.place]
        self._fold([each[mine] for each in operands], flat[mine])
        operands[slots.place][mine] = flat[mine]
        slots.meet(kind)
        for share, results in zip(shares, operands, strict=True):
            if share is not mine:
                flat[share] = results[share]


def store_dot(total: Array, x: Array, y: Array) -> None:
    """Store the dot product of two arrays of this process in `total`, of one element.

    Block by block, in the order in which the elements lie. A block is smaller than those for which
    a BLAS library starts threads: the bits depend on the arrays alone, not on the number of
    threads.
    """
    if x.size <= BLOCK and x.flags.c_contiguous and y.flags.c_contiguous:
        total[...] = np.vdot(x, y)
        return
    total[...] = 0
    for a, b in blocks_of(x, y):
        np.add(total, np.vdot(a, b), out=total)
