"""Laplace's equation on a rectangle by Jacobi's method.

The problem of NVIDIA's multi-gpu-programming-models: float32, periodic in y, the left and the right
column held at one period of a sine, zero inside, and the norm of the change every so many steps.
Small blocks are exchanged and then updated; with large ones the exchange is hidden: see `--order`.

    mpirun -n 4 python scripts/applications/jacobi2d.py --n 128 --steps 3000 --check
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import boxes
import common
import numpy as np
import orders
import outcome
import staged
from mpi4py import MPI

import mpishare
from mpishare.tools.cli import fail_usage

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

QUARTER = np.float32(0.25)
SMALL = 2**20  # cells per rank that are updated faster than an exchange can be hidden
SMALL_CALLED = 2**24  # and faster than Python can call what hides it
MARCH_RECORD = np.dtype(  # as in jacobi2d.cu
    [
        ("fields", np.int64, 2),
        ("before", np.int64),
        ("plane", np.int32),
        ("rows", np.int32),
        ("columns", np.int32),
        ("per_block", np.int32),
        ("depth", np.int32),
        ("steps", np.int32),
        ("sides", np.int32, 4),
    ]
)
THREADS = 512  # of a block of the persistent kernel
MARCH = (4, 1)  # rows that a thread of the GPU goes through, in large and in small blocks


class Jacobi(orders.Steps):
    """The rectangle, cut into one block a rank: axis 0 is y, axis 1 is x."""

    def __init__(self, args: argparse.Namespace, cart: MPI.Cartcomm, node: mpishare.Node) -> None:
        self.name, self.every = "jacobi2d", args.norm_every
        self.args, self.cart, self.node, self.xp = args, cart, node, node.xp
        shape = tuple(n + 2 for n in args.shape)
        is_persistent = args.order == "persistent"
        signals = 4 * blocks_of(args, node) if is_persistent else 0
        self.window, (self.u, self.v) = boxes.fields(node, shape, np.float32, signals)
        super().__init__(args, node, self.u, self.v, self.make_halo(args.staged), group=4)
        self.kernel, self.summing_kernel, self.marching_kernel = boxes.kernels(
            self.xp, "jacobi2d", "relax", "relax_and_sum", "relax_steps"
        )
        if is_persistent:
            self.orders = (*orders.ORDERS, "persistent")
            self.march = self.march_of(signals // 4)
        self.sum = self.xp.zeros(1)
        self.is_summing = False
        self.norm = math.nan
        self.done = 0

    def make_halo(self, form: str | None) -> Any:
        """Make the exchange: by mpishare, or staged. Collective."""
        cart, u, node, xp = self.cart, self.u, self.node, self.xp
        if form == "naive":
            return staged.Naive(cart, u, xp)
        if form == "pinned":
            return staged.Pinned(cart, u, xp)
        return mpishare.HaloExchange(cart, u, width=1, node=node)

    def begin(self) -> None:
        """Set both fields to the initial values; in the outermost columns they stay."""
        edge = common.my_part(self.cart, 0, boundary(self.args.shape[0] * self.cart.dims[0]))
        block = np.zeros(self.u.shape, np.float32)
        for column, is_outermost in (
            (0, self.cart.coords[1] == 0),
            (-1, self.cart.coords[1] == self.cart.dims[1] - 1),
        ):
            if is_outermost:
                block[1:-1, column] = edge
        self.done = 0
        self.u, self.v = self.fields
        for u in self.fields:
            u[...] = self.xp.asarray(block)
        super().begin()

    def run(self, count: int) -> None:
        """Make steps, with the norm where it is due."""
        self.done += count
        is_due = self.done % self.args.norm_every == 0 or self.done == self.args.steps
        self.advance(count, is_measured=is_due)

    def advance(self, count: int, *, is_measured: bool = False) -> None:
        """Make steps, and find the norm of the last one's change; only that waits for the GPU."""
        super().advance(count, is_measured=is_measured)
        if is_measured:
            self.norm = math.sqrt(self.cart.allreduce(float(self.sum[0])))

    def steps(self, count: int, *, is_measured: bool) -> None:
        """Make steps; the last one adds up the squares of the changes too."""
        if is_measured:
            self.clear()
        if self.order == "persistent":
            self.persistent(count, is_measured=is_measured)
            if count % 2:
                self.u, self.v = self.v, self.u
            return
        for left in range(count, 0, -1):
            self.is_summing = is_measured and left == 1
            self.step()
        self.is_summing = False

    def march_of(self, blocks: int) -> np.ndarray:
        """Return what `relax_steps` gets: the places of fields, rows of blocks, and neighbors."""
        node, cart, u = self.node, self.cart, self.u
        rows, columns = self.args.shape
        found = np.zeros(1, MARCH_RECORD)
        begin = self.window.array.data.ptr
        found["fields"] = [(each.data.ptr - begin) // u.itemsize for each in self.fields]
        found["plane"], found["rows"], found["columns"] = u.strides[0] // u.itemsize, rows, columns
        found["per_block"] = per_block = -(-rows // blocks)
        found["depth"] = -(-per_block * -(-columns // 4) // THREADS)
        ranks = [*cart.Shift(0, 1), *cart.Shift(1, 1)]
        mine, theirs = cart.Get_group(), node.comm.Get_group()
        found["sides"] = [
            -1 if rank == MPI.PROC_NULL else mine.Translate_ranks([rank], theirs)[0]
            for rank in ranks
        ]
        return found

    def persistent(self, count: int = 1, *, is_measured: bool = False) -> None:
        """Make steps by one kernel, which exchanges the halos itself; the fields stay in place."""
        march = self.march.copy()
        march["steps"] = count
        if self.u is not self.fields[0]:
            march["fields"] = self.march["fields"][:, ::-1]
        blocks = -(-self.args.shape[0] // int(march["per_block"][0]))
        record = march.view(f"V{MARCH_RECORD.itemsize}")
        args = self.window.device, record, self.sum if is_measured else np.uint64(0)
        self.node.launch(self.marching_kernel, (blocks,), (THREADS,), args)
        self.march["before"] += count

    def clear(self) -> None:
        """Set the sum of the squares to zero."""
        if self.kernel:
            self.sum.data.memset_async(0, self.sum.nbytes)
        else:
            self.sum[0] = 0

    def warm_up(self, counts: list[int]) -> None:
        """Load the kernel that adds up too."""
        self.clear()
        self.is_summing = True
        self.update(self.owned)
        self.is_summing = False
        super().warm_up(counts)

    def facts(self, times: dict[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Return the norm."""
        return {"norm": self.norm}

    def update(self, cells: boxes.Boxes) -> None:
        """Set cells of `v` to the mean of their four neighbors in `u`."""
        u, v = self.u, self.v
        if self.kernel:
            if self.is_summing:
                cells.launch(self.summing_kernel, (u, v), self.sum)
            else:
                cells.launch(self.kernel, (u, v))
            return
        for box in cells:
            new = v[box]
            np.add(u[boxes.shifted(box, 0, -1)], u[boxes.shifted(box, 0, 1)], out=new)
            new += u[boxes.shifted(box, 1, -1)]
            new += u[boxes.shifted(box, 1, 1)]
            new *= QUARTER
            if self.is_summing:
                self.sum += np.square(new - u[box], dtype=np.float64).sum()


def blocks_of(args: argparse.Namespace, node: mpishare.Node) -> int:
    """Return how many blocks of a kernel on every GPU run at once, of all its ranks. Collective."""
    devices = [each.device.uuid for each in node.report().members if each.device is not None]
    sharing = max(devices.count(uuid) for uuid in devices)
    count = node.xp.cuda.Device().attributes["MultiProcessorCount"] // sharing
    most = node.comm.allreduce(count, MPI.MIN)
    return -(-args.shape[0] // -(-args.shape[0] // most))


def refusal(node: mpishare.Node, cart: MPI.Cartcomm) -> str | None:
    """Return why no kernel can exchange halos itself; None where it can."""
    if node.backend != "cuda":
        return f"--order persistent: the {node.backend} backend has no kernels"
    if node.report().time_sliced_gpus:
        return "--order persistent: ranks share a GPU without the Multi-Process Service"
    if node.size < cart.size:
        return "--order persistent: ranks are on several nodes"
    return None


def boundary(ny: int) -> np.ndarray:
    """Return the values of the left and the right column.

    NVIDIA's rows 0 and last are its halo: so the first of the rest is row 1 of ``ny + 2``.
    """
    return np.sin(2 * np.pi * np.arange(1, ny + 1) / (ny + 1)).astype(np.float32)


def reference(ny: int, nx: int, args: argparse.Namespace) -> tuple[np.ndarray, float]:
    """Return the result and the last norm, from one process that has the whole rectangle."""
    u = np.zeros((ny, nx + 2), np.float32)
    u[:, 0] = u[:, -1] = boundary(ny)
    norm = math.nan
    for number in range(1, args.steps + 1):
        v = u.copy()
        vertical = (np.roll(u, 1, axis=0) + np.roll(u, -1, axis=0))[:, 1:-1]
        v[:, 1:-1] = (vertical + u[:, :-2] + u[:, 2:]) * QUARTER
        if number == args.steps:
            norm = math.sqrt(np.square(v - u, dtype=np.float64).sum())
        u = v
    return u[:, 1:-1], norm


def check(whole: np.ndarray, jacobi: Jacobi) -> list[str]:
    """Return what is wrong, as lines."""
    right, right_norm = reference(whole.shape[0], whole.shape[1], jacobi.args)
    wrong = outcome.compare(jacobi.node.backend, "u", whole, right)
    # The squares are added in another order.
    if not math.isclose(jacobi.norm, right_norm, rel_tol=1e-6):
        wrong.append(f"norm: {jacobi.norm!r} instead of {right_norm!r}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the application; the exit status is 1 where the check fails."""
    parser = common.parser(__doc__, n=512, steps=500)
    common.add_orders(
        parser,
        said=f"plain to {SMALL_CALLED} cells per rank, with --graph to {SMALL}, then beside",
        more=["persistent"],
    )
    parser.add_argument(
        "--norm-every",
        type=common.count,
        default=100,
        metavar="STEPS",
        help="steps from one norm to the next (100)",
    )
    args, cart = common.parse(parser, arguments, [True, False])
    cells = math.prod(args.shape)
    args.march = MARCH[cells <= SMALL]
    is_small = cells <= (SMALL if args.graph else SMALL_CALLED)
    with mpishare.Node() as node, common.stream(node):
        problem = refusal(node, cart) if args.order == "persistent" else None
        if problem:
            return fail_usage("jacobi2d", problem)
        args.order = args.order or common.order_for(node, "plain" if is_small else "beside")
        return common.solve(Jacobi(args, cart, node), check)


if __name__ == "__main__":
    common.run(main)
