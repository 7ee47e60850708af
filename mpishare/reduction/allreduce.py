"""The reduction over all ranks of a communicator, in place and ordered on streams."""

from __future__ import annotations

import logging
from itertools import chain
from math import prod
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from mpishare.memory.arguments import require_bool
from mpishare.plans.base_plan import BasePlan
from mpishare.plans.setup import Description, agree_on_fields, begin_plan, plan_setup
from mpishare.reduction.across_nodes import AcrossNodes, Transfer
from mpishare.reduction.exact import SUM_OF_WORDS, ExactOperation
from mpishare.reduction.operation import Operation, name_of
from mpishare.reduction.partners import nodes_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpishare.memory.types import (
        AnyArray,
        Array,
        BackendName,
        GivenArray,
        OperationName,
        Stream,
    )
    from mpishare.node import Node
    from mpishare.plans.engine import PlanEngine, PlanSetup
    from mpishare.plans.fields import GivenFields
    from mpishare.reduction.cuda.engine import CudaReduce
    from mpishare.reduction.host import HostReduce

    Engine: TypeAlias = HostReduce | CudaReduce

_CALL = "Allreduce"


class Allreduce(BasePlan):
    """A reduction over all ranks that is made many times, of arrays of the same layout.

    Collective over `comm`, host-blocking: some milliseconds on the host, more on CUDA. Make it
    once, use it at every step.

    The elements are combined in their own dtype in the order of the ranks, ``(x0 + x1) + x2``; over
    several nodes first those of each node, then the results of the nodes in the order of their
    lowest ranks. So all ranks get the same bits, in every run with the same placement, on both
    backends. (Which NaN, and which of 0.0 and -0.0 is the larger, is left to the processor.)

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks, on any number of nodes.
    like : array or Layout
        What is reduced: a NumPy array, or a CuPy array or a PyTorch tensor on this rank's GPU, or
        a `Layout` that stands for one. Shape and dtype are the same on all ranks; strides may
        differ. Elements are integers, floats, complex numbers or bool; bfloat16 where ml_dtypes is
        installed. It is not kept.
    op : str or mpi4py.MPI.Op
        ``"sum"``, ``"max"``, ``"min"``, ``"prod"``, ``"maxloc"``, ``"minloc"``, ``"land"``,
        ``"lor"``, ``"lxor"``, ``"band"``, ``"bor"`` or ``"bxor"``, or that of MPI with the same
        name, such as ``MPI.SUM``. NaN is larger and smaller than everything, as in
        `numpy.maximum`; integers wrap. Complex numbers have no max and min. maxloc and minloc take
        complex numbers, ``value + 1j * index``: of equal values, and of several NaNs, the one with
        the lowest index. Logical operations, which give 0 and 1, and those bit by bit take
        integers and bool. bool has no sum and prod.
    exact : bool
        Round each sum once, from its exact value: one number for any ranks, partition, order and
        backend. For the sum of floats and complex numbers (of the real and the imaginary part
        each; numbers of 16 bits are rounded to 32 first). It overflows only where the exact sum
        does, and is -0.0 only where all terms are. The same on all ranks.
    node, backend
        As for `HaloExchange`.

    Raises
    ------
    TypeError, ValueError
        If there is no such operation on elements of that dtype, or no exact one.
    PeerError
        If another rank's arguments are wrong; `MismatchError` if shapes, dtypes, `op` or `exact`
        differ.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> comm = MPI.COMM_WORLD
    >>> x = numpy.full(3, 1.0)
    >>> with Allreduce(comm, x) as total:
    ...     y = total.reduce(x)  # x itself
    ...     squares = total.dot(x, x)
    >>> y is x, bool(x[0] == comm.size), bool(squares == 3 * comm.size**3)
    (True, True, True)
    """

    _log = logging.getLogger("mpishare.allreduce")
    _ranges = "reduce", "dot"

    def __init__(
        self,
        comm: MPI.Intracomm,
        like: Array,
        op: OperationName | MPI.Op = "sum",
        *,
        exact: bool = False,
        node: Node | None = None,
        backend: Literal["auto"] | BackendName = "auto",
    ) -> None:
        name = name_of(op)

        def describe(given: GivenFields) -> Description:
            if given.takes_any:
                raise TypeError("like is a Layout without dtype: an Allreduce is for one dtype")
            (layout,) = given.layouts
            is_exact = require_bool("", "exact", exact)
            operation = (ExactOperation if is_exact else Operation)(name, layout.dtype)
            same = {"op": operation.name, "shape": layout.shape, "exact": is_exact}
            return Description(same)

        with plan_setup(_CALL, comm, node, backend=backend) as start:
            setup = agree_on_fields(start, [like], None, describe, "like").setup
            begin_plan(setup, _classes)
            self._layout = layout = setup.mine[0]
            self._operation = Operation(name, layout.dtype)
            compiled = setup.context.compiled_here
            self._exact = ExactOperation(name, layout.dtype, compiled) if exact else None
            engine, self._transfer = _classes(setup)
            self._engine: Engine = engine(setup, layout, self._elements(setup), self._exact)
            self._by_host: dict[str, list[AcrossNodes]] = {}
            if groups := self._groups(setup):
                self._connect(setup, groups)
            self._open_on(setup)
        self._agreement = setup.context.agreement
        self._try_fast = None if self._by_host else self._engine.try_fast
        self._log_made()

    def reduce(self, x: GivenArray, stream: Stream | None = None) -> GivenArray:
        """Replace `x`, on every rank, by the combination of all ranks' `x`, and return it.

        Collective. Stream-ordered on CUDA, where it may be captured into a graph; it blocks
        until the result is there on the host backend, over several nodes without NCCL, and where
        ranks share a GPU without MPS.

        Parameters
        ----------
        x : array
            Of the layout that the plan was made for, from any allocator; no memory that another
            rank passes too.
        stream : stream, optional
            The stream that writes and reads `x`. Default: the current one of the library that `x`
            comes from.

        Returns
        -------
        array
            `x` itself.

        Raises
        ------
        TypeError, ValueError
            If `x` has another layout; the message says what differs. Nothing was done then.
        MismatchError
            On the host backend, if another rank of the node calls `dot`: the node is over. Exact
            sums over several nodes end in a PeerTimeout instead.
        PeerError, PeerTimeout
            If a rank is gone or does not come.
        EpochError
            On the host backend, if a handler of a signal calls the plan amid a call.
        UnsupportedError
            In a capture, if the plan spans several nodes without NCCL, or ranks share a GPU without
            MPS.
        ClosedError
            If the plan is closed.

        Notes
        -----
        If a call is interrupted (Ctrl-C), this rank leaves the node, since others may
        be storing into its array.
        """
        # Written for speed, as the small ones are little more than the call.
        fast = self._try_fast
        if fast is not None and fast(x, stream):
            return x
        agreement = self._agreement
        if self._is_closed or agreement.life.failure or get_ident() != agreement.thread:
            self._check("reduce")
        by_host = self._by_host
        try:
            if by_host:
                self._refuse_capture("reduce", x, stream)
            self._engine.reduce(x, stream)
            if by_host:
                for each in by_host.get("reduce", ()):
                    each.reduce(x, stream)
        except BaseException as error:
            self._fail("reduce", error)
        return x

    @overload
    def dot(
        self, x: Array, y: Array, out: None = None, stream: Stream | None = None
    ) -> AnyArray: ...
    @overload
    def dot(
        self, x: Array, y: Array, out: GivenArray, stream: Stream | None = None
    ) -> GivenArray: ...
    def dot(
        self, x: Array, y: Array, out: Array | None = None, stream: Stream | None = None
    ) -> Any:
        """Return the sum of ``conj(x) * y`` over the elements of all ranks.

        Collective, as `reduce`; in the order of the ranks, and in an order of a rank's own elements
        that depends on their number and layout alone: the same arrays give the same bits. Exact
        ones are the same however the elements are spread over the ranks.

        Parameters
        ----------
        x, y : array
            Of the plan's dtype, both of the same shape; it may differ from that of the plan, and
            from rank to rank: cells without their ghosts, ``u[halo.owned]``.
        out : array of one element, optional
            Of the plan's dtype, where the result is stored. Default: a new one of shape ().
        stream : stream, optional
            As in `reduce`.

        Returns
        -------
        array of one element
            Of shape (), in the memory of the fields, without waiting on CUDA; ``float(...)`` of it
            waits. Or `out`.

        Raises
        ------
        ValueError
            Where the plan's operation is not ``"sum"``. Other errors as in `reduce`.
        """
        agreement = self._agreement
        if self._is_closed or agreement.life.failure or get_ident() != agreement.thread:
            self._check("dot")
        self._require_sum()
        by_host = self._by_host
        try:
            if by_host:
                self._refuse_capture("dot", x, stream)
            result = self._engine.dot(x, y, out, stream)
            if by_host and self._exact is None:
                for each in by_host.get("dot", ()):
                    each.reduce(result, stream)
        except BaseException as error:
            self._fail("dot", error)
        return result

    def _groups(self, setup: PlanSetup) -> list[list[list[int]]]:
        """Return the groups of ranks with one result each that the host combines, step by step."""
        comm = setup.comm
        steps = [[[rank] for rank in comm.ranks_here]] if self._engine.is_staged else []
        nodes = nodes_of(comm.nodes)
        return steps if len(nodes) == 1 or self._engine.reaches_nodes else [*steps, nodes]

    def _connect(self, setup: PlanSetup, groups: list[list[list[int]]]) -> None:
        """Make what the host combines. Collective."""
        elements, of_ranks = self._elements(setup), [[[rank] for rank in range(setup.comm.size)]]
        wanted = {"reduce": (prod(self._layout.shape), elements)}
        if self._exact is not None:
            wanted["dot"] = self._exact.nwords, SUM_OF_WORDS
        elif self._operation.name == "sum":
            wanted["dot"] = 1, self._operation
        try:
            for call, (count, operation) in wanted.items():
                # The engine of GPUs leaves the words of its ranks to the host, too.
                is_of_ranks = setup.on_gpu and operation is SUM_OF_WORDS
                is_of_ranks |= operation is self._exact
                for each in (of_ranks if is_of_ranks else groups) if count else ():
                    made = AcrossNodes(setup, count, operation, self._transfer(setup), call, each)
                    self._by_host.setdefault(call, []).append(made)
            if self._exact is not None:
                (across,) = self._by_host["dot"]
                self._engine.combine_words = across.reduce
        except BaseException:
            for engine in self._engines:
                engine.release()
                engine.close()
            raise

    def _elements(self, setup: PlanSetup) -> Operation:
        """Return how elements are combined: the sum of two is rounded once anyhow."""
        return self._operation if self._exact is None or setup.comm.size < 3 else self._exact

    def _require_sum(self) -> None:
        if self._operation.name != "sum":
            raise ValueError(
                f"{self.name}: dot failed: it is a sum, and the plan's op is "
                f"{self._operation.name!r}. Make another Allreduce for it"
            )

    @property
    def _needs_host(self) -> bool:
        return bool(self._by_host)

    def _refuse_capture(self, call: str, x: Any, stream: Any) -> None:
        if self._engine.is_captured([x], stream):
            raise self._refused(
                call,
                "the stream is being captured into a graph, and the ranks are on several nodes, or "
                "share a GPU without the Multi-Process Service, and exchange messages by the host "
                "at every call. Call it outside of the capture.",
            )

    @property
    def _engines(self) -> list[PlanEngine]:
        return [*chain(*self._by_host.values()), self._engine]

    def __repr__(self) -> str:
        layout, exact = self._layout, "exact " if self._exact else ""
        return (
            f"<mpishare.{self.name}: {exact}{self._operation.name} of "
            f"{layout.dtype}{layout.shape} over {self._setup.comm.size} ranks{self._state()}>"
        )


def _classes(setup: PlanSetup) -> tuple[type[Engine], type[Transfer]]:
    """Import the engine for the backend of the fields, and what copies them for other nodes."""
    if setup.on_gpu:
        from mpishare.reduction.cuda.engine import CudaReduce
        from mpishare.reduction.cuda.transfer import CudaTransfer

        return CudaReduce, CudaTransfer
    from mpishare.reduction.host import HostReduce

    return HostReduce, Transfer
