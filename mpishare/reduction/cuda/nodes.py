"""Reductions over several nodes on streams: NCCL takes the results of the nodes to all ranks.

Every rank has the result of its own node, and gets those of the others: of small fields whole, of
large ones a share, which it folds and sends to all. No rank does that for others, so none waits for
the host, and the order of the nodes is that of the results, not of their arrival. Where that order
makes no difference, and each rank is a node, NCCL itself combines the elements.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpishare.backends.driver import InOrder, Step, is_plain
from mpishare.backends.nccl import ANY_NBYTES, combines
from mpishare.coordination.counters import NO_WORDS, SLOT_NBYTES
from mpishare.plans.gpu.nccl import NcclPeers
from mpishare.plans.message import padded
from mpishare.reduction.cuda.group import NO_EPOCH
from mpishare.reduction.cuda.records import shapes_of
from mpishare.reduction.partners import nodes_of, partners, shares_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.backends.driver import Enqueued, Launch
    from mpishare.backends.nccl import Move
    from mpishare.backends.suballocator import Suballocation
    from mpishare.plans.comm import PlanComm
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.gpu.nccl import Reduction
    from mpishare.reduction.cuda.group import Buffers, Group, Pointers
    from mpishare.reduction.cuda.records import Form, Shape
    from mpishare.reduction.cuda.spinning import SpinningRoute

MIN_SHARED_NBYTES = 256 << 10
"""Smaller fields go to all ranks at once: two messages take longer than their bytes."""
_ALIGN, _NUMBER_NBYTES = 128, 16


class NodesRoute:
    """The route within this rank's node, then that between the nodes. Collective to make."""

    def __init__(
        self,
        setup: PlanSetup,
        group: Group,
        inner: SpinningRoute,
        shape: Shape,
        count: int,
        *,
        form: Form,
    ) -> None:
        self._group, self._inner, self._count = group, inner, count
        self._shape, self._form = shape, form
        self.nbytes = inner.nbytes
        self._comm: PlanComm = setup.comm
        # Exact sums are rounded once: each rank gets the elements, or the words, of every other.
        names = setup.comm.nodes if group.exact is None else range(setup.comm.size)
        self._nodes = nodes_of(names)
        self._mine = next(at for at, ranks in enumerate(self._nodes) if setup.comm.rank in ranks)
        others = [rank for rank in range(setup.comm.size) if rank != setup.comm.rank]
        call = f"{setup.name}: reduce"
        self.peers = NcclPeers(setup.comm, setup.name, call, others)
        self._by_nccl = {
            each: self._connect(setup.name, *each)
            for each in dict.fromkeys([(group, count), (group.sums, group.sum_count)])
        }
        # Its words are those of calls begun, and done, on this GPU.
        self._memory = setup.comm.take_memory(call, 2 * SLOT_NBYTES)
        self._words = self._memory.buffer.cast("Q")
        self._blocks: list[Suballocation] = []

    def _connect(self, name: str, group: Group, count: int) -> Reduction | None:
        """Return what combines so many elements; None if we do. Collective, host-blocking."""
        each, comm = group.operation, self._comm
        if len(self._nodes) < comm.size or not combines(each.dtype, each.name, comm.size):
            return None
        ranks = self.peers.ranks
        return ranks.connect_reduction(comm, name, each.dtype, each.name, count)

    def progress(self) -> tuple[int, bool]:
        """Return how many calls are done on this GPU, and whether one is under way."""
        if not self._words:
            return 0, False
        begun, done = self._words[0], self._words[SLOT_NBYTES // 8]
        return done, begun > done

    def bind(self, buffers: Buffers) -> None:
        """Allocate the packed results."""
        group, suballocator = self._group, self._comm.context.suballocator
        self._inner.bind(buffers)
        nbytes = padded(max(self._count * group.itemsize, group.sum_nbytes), _ALIGN)
        self._blocks += [suballocator.allocate(nbytes) for _ in self._nodes]
        epochs = group.zeros(24)
        self._begin = epochs, self._memory.address
        self._end = epochs, self._memory.address + SLOT_NBYTES
        (self._row,), _ = shapes_of((1,), [(group.itemsize,)], group.itemsize, "C")
        self._of_sum, self._sum = group.shape_of_sum(), group.zeros(group.sum_nbytes)

    def reduce(self, pointers: Pointers) -> Enqueued:
        """Return the steps that reduce the field at the first address."""
        (field,) = pointers.arguments
        is_inner = self._group.size > 1 and self._group.exact is None
        inner = [self._inner.reduce(pointers)] if is_inner else []
        steps = self._steps(self._shape, field, self._count, form=self._form, group=self._group)
        return InOrder([*inner, *steps])

    def dot(self, pointers: Pointers, shapes: list[Shape], count: int, *, form: Form) -> Enqueued:
        """Return the steps that reduce the arrays at the first two addresses, into the third."""
        group, (x, y, out) = self._group, pointers.arguments
        if group.exact is None:
            inner = self._inner.dot(pointers, shapes, count, form=form)
        else:
            inner = self._inner.local_dot(shapes, [x, y, self._sum], count, form=form)
        target: Any = out if group.exact is None else self._sum
        steps = self._steps(self._of_sum, target, group.sum_count, form="ROW", group=group.sums)
        return InOrder([inner, *steps, *group.round(self._sum, out)])

    def warm_up(self, pointers: Pointers, *, with_dot: bool) -> list[Launch]:
        """Return a launch of each kernel on no elements."""
        (field,) = pointers.arguments
        launches = [*self._inner.warm_up(pointers, with_dot=with_dot)]
        own = self._rows()[self._mine]
        kernels: list[tuple[Group, Form]] = [(self._group, self._form), (self._group, "ROW")]
        for group, form in (*kernels, (self._group.sums, "ROW")):
            launches.append(group.pack(self._shape, field, 0, own, NO_EPOCH, form=form))
            for rows in (self._rows(), [own]):
                launches.append(group.fold(self._shape, rows, field, 0, NO_EPOCH, form=form))
        launches += self._group.round(self._sum, self._group.zeros(_NUMBER_NBYTES))
        return launches

    def close(self) -> None:
        """Free the memory, once no call is under way."""
        while self._blocks:
            self._blocks.pop().close()
        if self._words:
            self._words = NO_WORDS
            self._memory.close()

    def _steps(
        self, shape: Shape, field: Any, count: int, *, form: Form, group: Group
    ) -> list[Enqueued]:
        here = self._rows()[self._mine]
        if (reduce := self._by_nccl.get((group, count))) is not None:
            return self._all_reduce(shape, field, count, form, group, reduce)
        follow = partial(group.asides.of, is_aside=False)
        pack = follow(group.pack(shape, field, count, here, self._begin, form=form))
        if count * group.itemsize < MIN_SHARED_NBYTES:
            whole = [slice(0, count)] * self._comm.size
            fold = group.fold(shape, self._rows(), field, count, self._end, form=form)
            return [pack, self._results(whole, group.itemsize), follow(fold)]
        shares = shares_of(count, self._comm.size)
        mine = shares[self._comm.rank]
        begin, size = mine.start * group.itemsize, mine.stop - mine.start
        rows = [address + begin for address in self._rows()]
        fold = group.fold(self._row, rows, here + begin, size, NO_EPOCH, form="ROW")
        unpack = group.fold(shape, [here], field, count, self._end, form=form)
        results, all_shares = self._results(shares, group.itemsize), self._all_shares(shares)
        return [pack, results, fold, all_shares, follow(unpack)]

    def _all_reduce(
        self, shape: Shape, field: Any, count: int, form: Form, group: Group, reduce: Reduction
    ) -> list[Enqueued]:
        """Return the steps around NCCL's own: those that pack and unpack, or begin and end alone.

        Elements that follow each other stay in the field, unless NCCL may map its memory in
        captures: all ranks would have to capture, of such memory.
        """
        here, is_row = self._rows()[self._mine], form == "ROW"

        def steps(moved: int, place: Any) -> InOrder:
            pack = group.pack(shape, field, moved, here, self._begin, form=form)
            unpack = group.fold(shape, [here], field, moved, self._end, form=form)
            ends = (group.asides.of(each, is_aside=not moved) for each in (pack, unpack))
            return InOrder([next(ends), Step(lambda to: reduce(_address(place), to)), *ends])

        in_place, packed = steps(0, field), steps(count, here)
        is_small = count * group.itemsize <= ANY_NBYTES

        def enqueue(stream: int) -> None:
            stays = is_row and (is_small or is_plain(_address(field)))
            (in_place if stays else packed).enqueue(stream)

        return [Step(enqueue)]

    def _rows(self) -> list[int]:
        """Return the addresses of the results of all nodes, in their order."""
        return [block.address for block in self._blocks]

    def _results(self, shares: Sequence[slice], itemsize: int) -> Enqueued:
        """Return the messages by which each rank gets its share of the result of each node."""
        me = self._comm.rank
        sends: list[Move] = []
        recvs: list[Move] = []
        for at, theirs in enumerate(self._nodes):
            if at != self._mine:
                source, served = partners(self._nodes[self._mine], theirs, me)
                recvs.append(self._move(at, shares[me], source, itemsize))
                sends += [self._move(self._mine, shares[rank], rank, itemsize) for rank in served]
        return Step(self.peers.ranks.bind(sends, recvs))

    def _all_shares(self, shares: Sequence[slice]) -> Enqueued:
        """Return the messages by which each rank gets the shares that all others have folded."""
        me, itemsize = self._comm.rank, self._group.itemsize
        others = [rank for rank in range(len(shares)) if rank != me]
        sends = [self._move(self._mine, shares[me], rank, itemsize) for rank in others]
        recvs = [self._move(self._mine, shares[rank], rank, itemsize) for rank in others]
        return Step(self.peers.ranks.bind(sends, recvs))

    def _move(self, node: int, share: slice, peer: int, itemsize: int) -> Move:
        block = self._blocks[node]
        begin, end = share.start * itemsize, share.stop * itemsize
        return block.address + begin, end - begin, peer


def _address(place: Any) -> int:
    """Return an address: a number, or what a call has written."""
    found: int = getattr(place, "value", place)
    return found
