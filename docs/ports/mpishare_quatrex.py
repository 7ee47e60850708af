"""A back end "mpishare" for QuaTrEx's collectives: `use(node)` before `comm.configure`."""

import importlib

from qttools import xp
from qttools.comm import comm
from qttools.datastructures import DSDBSparse

import mpishare

COLLECTIVES = "all_to_all", "all_gather", "all_reduce", "bcast"
MOST_PLANS = 64  #: per communicator; the one that was not used for longest is dropped
#: In host memory messages are as fast for broadcasts of so many ranks, and long sums of so many.
FEW, PAIR, LONG = 7, 2, 1 << 20

backends = importlib.import_module("qttools.comm.comm")  # its package has an object of that name
messages, dtranspose_by_messages = backends._SubCommunicator, DSDBSparse.dtranspose


def use(node):
    """Let `comm.configure` take "mpishare", for collectives of arrays in the memory of `node`.

    None: no longer, from the next `comm.configure` on.
    """
    SubCommunicator.node = node
    backends._SubCommunicator = messages if node is None else SubCommunicator
    DSDBSparse.dtranspose = dtranspose_by_messages if node is None else dtranspose


class SubCommunicator(messages):
    """Collectives by plans where its configuration or the call names "mpishare"."""

    node = None

    def __init__(self, mpi_comm, config):
        super().__init__(mpi_comm, config)
        self.node, self.plans = SubCommunicator.node, {}

    @classmethod
    def _validate_config(cls, config):
        ours = [name for name in COLLECTIVES if config.get(name) == "mpishare"]
        messages._validate_config({name: config[name] for name in config if name not in ours})

    def goes_by_plan(self, name, backend=None):
        """Return whether a collective goes by plan; not between QuaTrEx's group start and end."""
        is_ours = (backend or self._config[name]) == "mpishare"
        return is_ours and not self._group_start_called

    def by_messages(self, name, backend, most):
        """Return QuaTrEx's back end where a call goes by it, as all of up to `most` ranks."""
        if not self.goes_by_plan(name, backend):
            return backend or self._config[name]
        return "device_mpi" if self.node.backend == "host" and self.size <= most else None

    def plan(self, make, *key):
        """Return the plan for a key that is the same on all ranks, as were the calls before."""
        of = make, *key
        plan = self.plans.pop(of, None) or make(self._mpi_comm, *key, node=self.node)
        self.plans[of] = plan
        if len(self.plans) > MOST_PLANS:
            del self.plans[next(iter(self.plans))]
        return plan

    def all_to_all(self, sendbuf, recvbuf, backend=None):
        """Send the r-th part to rank r."""
        if not self.goes_by_plan("all_to_all", backend):
            super().all_to_all(sendbuf, recvbuf, backend)
            return
        shape = self.size, self.size, sendbuf.size // self.size
        plan = self.plan(mpishare.Redistribute, shape, 0, 1, sendbuf.dtype.name)
        out = flat(recvbuf).reshape(plan.target_shape)
        plan.forward(flat(sendbuf).reshape(plan.source_shape), out=out)

    def all_gather(self, sendbuf, recvbuf, backend=None):
        """Gather all ranks' parts, in their order."""
        if not self.goes_by_plan("all_gather", backend):
            super().all_gather(sendbuf, recvbuf, backend)
            return
        shape = self.size, sendbuf.size
        plan = self.plan(mpishare.Redistribute, shape, 0, None, sendbuf.dtype.name)
        is_within = backends._check_bufs_aliased(sendbuf, recvbuf)
        part = flat(sendbuf.copy() if is_within else sendbuf)
        plan.forward(part.reshape(plan.source_shape), out=flat(recvbuf).reshape(shape))

    def all_reduce(self, sendbuf, recvbuf, op="sum", backend=None):
        """Reduce where the result is to be."""
        most = PAIR if recvbuf.nbytes > LONG else 0
        if by := self.by_messages("all_reduce", backend, most):
            super().all_reduce(sendbuf, recvbuf, op, by)
            return
        elements = flat(recvbuf)
        if sendbuf is not recvbuf:
            elements[...] = sendbuf.reshape(-1)
        self.plan(reduction, elements.size, elements.dtype.name, op).reduce(elements)

    def bcast(self, sendrecvbuf, root=0, backend=None):
        """Move the root's elements to all others."""
        if by := self.by_messages("bcast", backend, FEW):
            super().bcast(sendrecvbuf, root, by)
            return
        elements, nothing = flat(sendrecvbuf), xp.empty(0, sendrecvbuf.dtype)
        plan = self.plan(broadcast, elements.size, elements.dtype.name, root)
        if self.rank == root:
            plan.forward(elements, out=nothing)
        else:
            plan.forward(nothing, out=elements)


def flat(buffer):
    """Return the elements of a buffer along one axis, in the same memory."""
    if not buffer.flags.c_contiguous:
        raise ValueError("the back end mpishare takes C-contiguous buffers")
    return buffer.reshape(-1)


def reduction(comm, count, dtype, op, node):
    """Make the plan of a reduction."""
    return mpishare.Allreduce(comm, mpishare.Layout(count, dtype), op, node=node)


def broadcast(comm, count, dtype, root, node):
    """Make the plan of a broadcast, in which the root receives nothing."""
    wanted = mpishare.Box((0,), (0 if comm.rank == root else count,))
    return mpishare.Redistribute(comm, count, mpishare.OnRank(root), wanted, dtype, node=node)


def transposition(comm, shape, heights, width, dtype, node):
    """Make the plan from a stack cut along its first axis to one cut along its last."""
    begin, at = sum(heights[: comm.rank]), comm.rank * width
    extents = shape[1:-1]
    zeros = (0,) * len(extents)
    source = mpishare.Box((begin, *zeros, 0), (begin + heights[comm.rank], *extents, shape[-1]))
    target = mpishare.Box((0, *zeros, at), (shape[0], *extents, at + width))
    return mpishare.Redistribute(comm, shape, source, target, dtype, node=node)


def dtranspose(self, discard=False):
    """Transpose a distributed matrix, without the blocks and the shuffle that messages need."""
    if discard or not comm.stack.goes_by_plan("all_to_all"):
        dtranspose_by_messages(self, discard)
        return
    (length, *extents), last = self.global_stack_shape, self.total_nnz_size
    heights, width = tuple(map(int, self.stack_section_sizes)), last // comm.stack.size
    shape = length, *extents, last
    plan = comm.stack.plan(transposition, shape, heights, width, self._data.dtype.name)
    if self.distribution_state == "stack":
        move, given, height, wanted = plan.forward, heights[comm.stack.rank], length, "nnz"
        padded = self.total_stack_size, *extents, width
    else:
        move, given, height, wanted = plan.backward, length, heights[comm.stack.rank], "stack"
        padded = max(heights), *extents, last
    out = xp.empty(padded, self._data.dtype)
    out[height:] = 0
    move(self._data[:given], out=out[:height])
    self._data, self.distribution_state = out, wanted
