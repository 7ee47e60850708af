"""Heat's resplits, halos, sums, broadcasts and gathers by mpishare: `use(node)`, once."""

from itertools import accumulate

import torch
from heat.core import communication, dndarray, manipulations
from mpi4py import MPI

import mpishare

PLANS = MPI.Comm.Create_keyval()  #: the plans of a communicator, kept with it
MOST_PLANS = 64  #: per communicator; the one that was not used for longest is dropped

#: In host memory messages are faster for fewer bytes, and for all calls of so few ranks.
LEAST, LEAST_GATHER, FEW = 1 << 15, 1 << 12, {"Bcast": 7, "Allreduce": 2}

INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
REALS = INTEGERS | {torch.float32, torch.float64}
BITS = INTEGERS | {torch.bool}
MOVED = REALS | {torch.bool, torch.complex64, torch.complex128}
OPERATIONS = {}  # by handle: its name, and the dtypes that it takes
for names, dtypes in ("SUM PROD MAX MIN", REALS), ("LAND LOR LXOR BAND BOR BXOR", BITS):
    OPERATIONS |= {getattr(MPI, name).handle: (name.lower(), dtypes) for name in names.split()}

hooks = []  # what is replaced: where, its name, the function by plans, and Heat's
in_use, calls_before = None, 1  # the node, and see `use`


def use(node, after=1):
    """Let Heat's calls move tensors in the memory of `node` by plans; None: by messages.

    A plan takes milliseconds to make, and is made after that many calls of its kind by messages.
    """
    global in_use, calls_before
    in_use, calls_before = node, after
    for owner, name, by_plan, by_messages in hooks:
        is_slow = node is None or (node.backend == "host" and node.size <= FEW.get(name, 0))
        setattr(owner, name, by_messages if is_slow else by_plan)


def replaces(owner, name):
    """Register a function for one of Heat's, which is called where it returns None."""

    def hook(move):
        by_messages = getattr(owner, name)

        def by_plan(*args, **kwargs):
            filled = move(*args, **kwargs)
            return by_messages(*args, **kwargs) if filled is None else filled

        hooks.append((owner, name, by_plan, by_messages))
        return move

    return hook


def plan_of(comm, tensor, make, *key):
    """Return the plan of a call, None where it goes by messages.

    The key is the same on all ranks, and so are the calls that they made before.
    """
    place = "cuda" if in_use.backend == "cuda" else "cpu"
    if comm.size == 1 or tensor.dtype not in MOVED or tensor.device.type != place:
        return None
    plans = comm.Get_attr(PLANS)
    if plans is None:
        comm.Set_attr(PLANS, plans := {})
    name = str(tensor.dtype).removeprefix("torch.")  # that of NumPy
    of = in_use, make, name, key
    plan = plans.pop(of, 0)  # or how many calls went by messages
    if isinstance(plan, int):
        plan = plan + 1 if plan < calls_before else make(comm.handle, name, *key)
    plans[of] = plan
    while len(plans) > MOST_PLANS:
        del plans[next(iter(plans))]
    return None if isinstance(plan, int) else plan


def local(buffer):
    """Return the tensor of an array of Heat; anything else as it is."""
    return buffer.larray if isinstance(buffer, dndarray.DNDarray) else buffer


def flat(tensor):
    """Return the elements along one axis: a view where that can be."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def put(elements, tensor):
    """Copy the elements back, unless `flat` returned a view; return the tensor."""
    is_view = elements.data_ptr() == tensor.data_ptr()
    return tensor if is_view else tensor.copy_(elements.view(tensor.shape))


def views(*tensors):
    """Return arrays for a message, found faster than by Heat; None where there are gaps."""
    arrays = []
    for each in tensors:
        if each.dtype not in REALS or not each.is_contiguous():
            return None
        arrays.append(each.numpy(force=True))
    return arrays


def reduction(comm, dtype, count, op):
    """Make the plan of a reduction."""
    return mpishare.Allreduce(comm, mpishare.Layout(count, dtype), op, node=in_use)


@replaces(communication.MPICommunication, "Allreduce")
def allreduce(comm, sendbuf, recvbuf, op=MPI.SUM):
    """Reduce where the result is to be."""
    given, into = local(sendbuf), local(recvbuf)
    is_own = given is MPI.IN_PLACE
    if not isinstance(into, torch.Tensor) or not (is_own or isinstance(given, torch.Tensor)):
        return None
    if not is_own and (given.dtype, given.numel()) != (into.dtype, into.numel()):
        return None
    if into.nbytes < LEAST and not into.is_cuda:
        if arrays := None if is_own else views(given, into):
            comm.handle.Allreduce(*arrays, op)
        return arrays and into
    name, dtypes = OPERATIONS.get(op.handle, ("", ()))
    if into.dtype not in dtypes:
        return None
    plan = plan_of(comm, into, reduction, into.numel(), name)
    if plan is None:
        return None
    if not is_own and given.stride() != into.stride():
        for each in given, into:  # as Heat does, on which its callers may rely
            each.set_(each.contiguous())
    elements = flat(into)
    if not is_own:
        elements.copy_(flat(given))
    plan.reduce(elements)
    return put(elements, into)


def broadcast(comm, dtype, count, root):
    """Make the plan of a broadcast, in which the root receives nothing."""
    wanted = mpishare.Box((0,), (0 if comm.rank == root else count,))
    return mpishare.Redistribute(comm, count, mpishare.OnRank(root), wanted, dtype, node=in_use)


@replaces(communication.MPICommunication, "Bcast")
def bcast(comm, buf, root=0):
    """Move the root's elements to all others."""
    into = local(buf)
    if not isinstance(into, torch.Tensor) or not into.nbytes:
        return None
    if into.nbytes < LEAST and not into.is_cuda:
        return None
    plan = plan_of(comm, into, broadcast, into.numel(), root)
    if plan is None:
        return None
    elements, nothing = flat(into), into.new_empty(0)
    if comm.rank == root:
        plan.forward(elements, out=nothing)
    else:
        plan.forward(nothing, out=elements)
    return put(elements, into)


def cut(comm, dtype, shape, axis, counts, target):
    """Make the plan of an array cut along an axis, with `counts` per rank."""
    lower, upper = [0] * len(shape), list(shape)
    upper[axis] = sum(counts[: comm.rank + 1])
    lower[axis] = upper[axis] - counts[comm.rank]
    source = mpishare.Box(lower, upper)
    return mpishare.Redistribute(comm, shape, source, target, dtype, node=in_use)


@replaces(communication.MPICommunication, "Allgatherv")
def allgatherv(comm, sendbuf, recvbuf, recv_axis=0):
    """Gather parts that cover the result, in the order of the ranks."""
    if not isinstance(recvbuf, tuple):
        return None
    given, into = local(sendbuf), local(recvbuf[0])
    counts, starts = ([int(n) for n in each] for each in recvbuf[1:])
    if not isinstance(given, torch.Tensor) or not isinstance(into, torch.Tensor):
        return None
    shape, ends = tuple(into.shape), list(accumulate(counts))
    if given.dtype != into.dtype or starts != [0, *ends[:-1]] or ends[-1] != shape[recv_axis]:
        return None
    if into.nbytes < LEAST_GATHER and not into.is_cuda:
        row = 0 if recv_axis else into.numel() // shape[0]
        if arrays := views(given, into) if row else None:
            where = tuple([n * row for n in each] for each in (counts, starts))
            comm.handle.Allgatherv(arrays[0], (arrays[1], where))
        return arrays and into
    plan = plan_of(comm, into, cut, shape, recv_axis, tuple(counts), None)
    if plan is None:
        return None
    return plan.forward(flat(given).view(plan.source_shape), out=into.detach())


@replaces(manipulations, "_axis2axisResplit")
def resplit(given, source, tiles, into, target, _, comm):
    """Cut along another axis."""
    shape, counts = list(given.shape), tuple(tiles.lshape_map[:, source].tolist())
    shape[source] = into.shape[source]
    plan = plan_of(comm, into, cut, tuple(shape), source, counts, target)
    return plan and plan.forward(given.detach().resolve_conj(), out=into)


def halos(comm, dtype, extents, width, ranks, has_low, has_high):
    """Make the plan of a field of two halos, with this rank's first and last cells in between."""
    sends, recvs = {}, {}
    if comm.rank in ranks:
        at = ranks.index(comm.rank)
        places = [slice(n * width, (n + 1) * width) for n in range(4)]
        if at:
            sends |= {ranks[at - 1]: places[1]} if has_high else {}
            recvs |= {ranks[at - 1]: places[0]} if has_low else {}
        if at + 1 < len(ranks):
            sends |= {ranks[at + 1]: places[2]} if has_low else {}
            recvs |= {ranks[at + 1]: places[3]} if has_high else {}
    like = mpishare.Layout((4 * width, *extents), dtype)
    return mpishare.NeighborExchange(comm, sends, recvs, like, node=in_use)


@replaces(dndarray.DNDarray, "get_halo")
def get_halo(self, halo_size, prev=True, next=True):
    """Fetch the cells of the ranks before and after this one that have any."""
    split, width, cells = self.split, halo_size, self.larray.detach()
    if not isinstance(width, int) or width < 1 or not self.is_distributed():
        return None
    lengths = self.lshape_map[:, split].tolist()
    ranks = tuple(rank for rank, length in enumerate(lengths) if length)
    if len(ranks) < 2 or min(lengths[rank] for rank in ranks) < width:
        return None
    extents = tuple(n for axis, n in enumerate(self.gshape) if axis != split)
    plan = plan_of(self.comm, cells, halos, extents, width, ranks, bool(prev), bool(next))
    if plan is None:
        return None
    field = cells.new_empty(4 * width, *extents)
    low, first, last, high = field.movedim(0, split).split(width, split)
    if self.comm.rank in ranks:
        first.copy_(cells.narrow(split, 0, width))
        last.copy_(cells.narrow(split, -width, width))
    plan.exchange(field)
    if self.comm.rank in ranks:
        self._DNDarray__halo_prev = low if prev and self.comm.rank != ranks[0] else None
        self._DNDarray__halo_next = high if next and self.comm.rank != ranks[-1] else None
        self._DNDarray__ishalo = True
    return field
