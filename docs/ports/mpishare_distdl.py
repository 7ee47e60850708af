"""DistDL's halos, repartitions and all-sums by mpishare: `use(node)` before layers are made."""

import torch
from distdl.backends.mpi import functional, halo_exchange, repartition
from distdl.backends.mpi.tensor_decomposition import compute_subtensor_shapes_unbalanced
from distdl.utilities.dtype import torch_to_numpy_dtype_dict as numpy_dtypes
from distdl.utilities.slicing import compute_start_index, compute_subshape
from distdl.utilities.tensor_decomposition import compute_subtensor_start_indices

import mpishare

in_use = None  # the node
replaced = [
    (functional.halo_exchange, "HaloExchangeFunction"),
    (functional.repartition, "RepartitionFunction"),
    (functional.all_sum_reduce, "AllSumReduceFunction"),
    (halo_exchange, "allocate_halo_exchange_buffers"),
    (repartition, "allocate_repartition_buffers"),
]
messages = {name: getattr(module, name) for module, name in replaced}


def use(node):
    """Let layers made from now on move tensors in the memory of `node` by plans; None: messages.

    Backward passes then stay in the thread that calls them: plans are of one thread.
    """
    global in_use
    in_use = node
    for module, name in replaced:
        setattr(module, name, (messages if node is None else globals())[name])
    torch.autograd.set_multithreading_enabled(node is None)


class Buffers(list):
    """Those of a layer while its input keeps its structure: not used, but its plan is kept here."""


def plan_of(kept, make, *args):
    """Return the plan that is kept there: made at the first call, and dropped with it."""
    if not hasattr(kept, "plan"):
        kept.plan = make(*args)
    return kept.plan


def allocate_halo_exchange_buffers(manager, slices, ghosts, *others):
    """Keep how many ghosts there are; a plan finds out what others want."""
    allocate = messages["allocate_halo_exchange_buffers"]
    kept = Buffers(allocate(manager, slices, ghosts, *others))
    kept.ghosts = ghosts
    return kept


def halo(partition, ghosts, tensor):
    """Make the plan of an exchange along the axes that are cut: it takes four at most."""
    is_cut = [parts > 1 for parts in partition.shape.tolist()]
    grid = partition._comm.Sub(is_cut)
    plan = mpishare.HaloExchange(
        grid,
        mpishare.Layout(tuple(tensor.shape), numpy_dtypes[tensor.dtype]),
        ghosts[is_cut].astype(int).tolist(),
        axes=[axis for axis, is_one in enumerate(is_cut) if is_one],
        corners=True,
        node=in_use,
    )
    grid.Free()  # a plan has a communicator of its own
    return plan


class HaloExchangeFunction(torch.autograd.Function):
    """Fill the ghosts of a tensor; the adjoint adds them to the cells that they shadow."""

    @staticmethod
    def forward(ctx, input, partition, _slices, kept, _neighbors):
        """Exchange."""
        ctx.mark_dirty(input)
        is_alone = partition.size == 1
        ctx.plan = None if is_alone else plan_of(kept, halo, partition, kept.ghosts, input)
        if ctx.plan:
            in_place(ctx.plan.exchange, input)
        return input

    @staticmethod
    def backward(ctx, grad_output):
        """Add, and set to zero."""
        if ctx.plan:
            in_place(ctx.plan.accumulate, grad_output)
        return grad_output, None, None, None, None


def allocate_repartition_buffers(*args):
    """Keep the plan with those for what is sent."""
    sent, received = messages["allocate_repartition_buffers"](*args)
    return Buffers(sent), received


def redistribution(union, whole, mine, before, after):
    """Make the plan of a repartition, of parts that may be uneven into even ones."""
    source = target = box([0] * len(whole.shape), [0] * len(whole.shape))
    shapes = compute_subtensor_shapes_unbalanced(mine, before, union)
    if before.active:
        source = box(compute_subtensor_start_indices(shapes)[tuple(before.index)], mine.shape)
    if after.active:
        cut = after.shape, after.index, whole.shape
        target = box(compute_start_index(*cut), compute_subshape(*cut))
    shape, dtype = [int(extent) for extent in whole.shape], numpy_dtypes[whole.dtype]
    return mpishare.Redistribute(union._comm, shape, source, target, dtype, node=in_use)


def box(start, shape):
    """Return the cells of a part."""
    ends = [(int(first), int(first + extent)) for first, extent in zip(start, shape, strict=True)]
    return mpishare.Box(*zip(*ends, strict=True))


class RepartitionFunction(torch.autograd.Function):
    """Move the parts of a tensor to those of another partition; the adjoint moves them back."""

    @staticmethod
    def forward(ctx, input, union, whole, mine, _out, before, _to, kept, after, _from, *others):
        """Return this rank's new part, without elements where it has none."""
        ctx.plan = plan_of(kept, redistribution, union, whole, mine, before, after)
        ctx.shape, ctx.dtype = input.shape, whole.dtype
        part = ctx.plan.forward(as_part(input, whole.dtype, ctx.plan.source_shape))
        if after.active:
            return part
        keeps_batch = others[-1]
        return part.new_empty((input.shape[0], 0) if keeps_batch else 0)

    @staticmethod
    def backward(ctx, grad_output):
        """Return the gradient of this rank's old part."""
        part = ctx.plan.backward(as_part(grad_output, ctx.dtype, ctx.plan.target_shape))
        return part.reshape(ctx.shape), *[None] * 11


def as_part(tensor, dtype, shape):
    """Return the elements as a plan takes them: of no elements also the dtype may differ."""
    return tensor.detach().to(dtype).reshape(shape)


class AllSumReduceFunction(torch.autograd.Function):
    """Sum over the ranks, which is its own adjoint."""

    @staticmethod
    def forward(ctx, input, partition, mine, _out):
        """Return the sum."""
        ctx.plan = plan_of(mine, total, partition, input)
        return ctx.plan.reduce(compact_copy(input))

    @staticmethod
    def backward(ctx, grad_output):
        """Return the sum."""
        return ctx.plan.reduce(compact_copy(grad_output)), None, None, None


def total(partition, tensor):
    """Make the plan of a sum."""
    like = mpishare.Layout(tuple(tensor.shape), numpy_dtypes[tensor.dtype])
    return mpishare.Allreduce(partition._comm, like, "sum", node=in_use)


def compact_copy(tensor):
    """Return a copy in C order, for a sum that is made in place."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def in_place(exchange, tensor):
    """Call a plan for a tensor, through a copy where it has gaps."""
    cells = tensor.detach()
    compact = cells.contiguous()
    exchange(compact)
    if compact.data_ptr() != cells.data_ptr():
        cells.copy_(compact)
