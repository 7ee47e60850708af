"""In which order a step updates its cells and exchanges their ghosts, and what each order takes."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import boxes
import graphs
import timing

import mpishare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from mpi4py import MPI

ORDERS = ("plain", "last", "first", "beside")
NEW_FIRST = ("first", "beside", "persistent")  # these exchange the field that the step makes


class Steps:
    """Steps that make the field `v` of the field `u`, in which each cell needs its neighbors.

    plain
        Exchange `u`, then update all cells.
    last
        Exchange `u` beside the update of the interior; the shell comes last.
    first
        Update the shell first, then exchange `v` beside the update of the interior.
    beside
        As `first`, but the shell and its exchange are beside the interior, on another stream.

    Parameters
    ----------
    args : namespace
        Of which `order`, `graph` and `march` are used.
    u, v : array
        Of one layout, from `boxes.fields`.
    halo : HaloExchange or Staged
        For them.
    group : int
        Cells that a thread takes at once.
    """

    name: str  # of the program
    every: int  # steps from one measurement to the next
    orders: tuple[str, ...] = ORDERS  # that are compared
    args: argparse.Namespace
    cart: MPI.Cartcomm

    def __init__(
        self, args: argparse.Namespace, node: mpishare.Node, u: Any, v: Any, halo: Any, group: int
    ) -> None:
        self.node, self.xp, self.halo = node, node.xp, halo
        self.u, self.v = self.fields = (u, v)
        self.order = args.order
        line = boxes.LINE // u.itemsize if node.backend == "cuda" else 1
        self.mine, inner = self.parts(halo)
        interior = boxes.in_lines(inner, self.mine, line)
        self.owned, self.interior = (
            boxes.Boxes(self.xp, u, [box], group=group, march=args.march)
            for box in (self.mine, interior)
        )
        # The exchange waits for the shell: it is done by as many threads as it can be.
        shell = boxes.outside(self.mine, interior)
        self.shell = boxes.Boxes(self.xp, u, shell, group=group)
        self._captured = mpishare.capture(node, self._steps_of) if args.graph else None
        if node.backend == "cuda":
            cuda = self.xp.cuda
            self._side = cuda.Stream(non_blocking=True, priority=-1)
            self._forked, self._joined = (cuda.Event(disable_timing=True) for _ in range(2))

    def parts(self, halo: Any) -> tuple[boxes.Box, boxes.Box]:
        """Return the box of all cells that a step updates, and of those that need no exchange."""
        return halo.owned, halo.interior

    def update(self, cells: boxes.Boxes) -> None:
        """Set the cells of `v` in these boxes."""
        raise NotImplementedError

    def make_halo(self, form: str | None) -> Any:
        """Make the exchange: by mpishare, or staged. Collective."""
        raise NotImplementedError

    def actions(self, halo: Any) -> dict[str, Callable[[], None]]:
        """Return what is timed with each form of the exchange: that by itself, and in a step."""
        step = functools.partial(self.step_with, halo, self.order)
        return {"exchange": lambda: halo.exchange(self.u), "step": step}

    def step_with(self, halo: Any, order: str) -> None:
        """Make a step with this exchange, in this order."""
        self.halo, self.order = halo, order
        self.step()

    def parts_of_a_step(self) -> dict[str, Callable[[], None]]:
        """Return what else is timed by itself."""
        return {}

    def facts(self, times: dict[str, float]) -> dict[str, float]:
        """Return what else was found; `times`: of the actions and the parts."""
        raise NotImplementedError

    def run(self, count: int) -> None:
        """Make steps of the run, with what is measured where it is due."""
        self.advance(count)

    def begin(self) -> None:
        """Bring the ghosts of the initial values up to date where a step needs them to be."""
        if self.order in NEW_FIRST:
            self.halo.exchange(self.u)
        self.node.synchronize()

    def step(self) -> None:
        """Make a step."""
        getattr(self, self.order)()
        self.u, self.v = self.v, self.u

    def plain(self) -> None:
        """Do one thing after the other."""
        self.halo.exchange(self.u)
        self.update(self.owned)

    def last(self) -> None:
        """Hide the exchange behind the interior; the shell waits for it."""
        self.halo.start(self.u)
        self.update(self.interior)
        self.halo.wait()
        self.update(self.shell)

    def first(self) -> None:
        """Hide the exchange, which waits for the shell, behind the interior."""
        self.update(self.shell)
        self.halo.start(self.v)
        self.update(self.interior)
        self.halo.wait()

    def beside(self) -> None:
        """Hide the shell too: its cells and the interior are different ones."""
        with self._aside():
            self.update(self.shell)
            self.halo.start(self.v)
            self.halo.wait()
        self.update(self.interior)
        self._join()

    def alone(self) -> None:
        """Update all cells as if there were no neighbors: what the others are measured by."""
        self.update(self.owned)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Put what is inside on another stream, after what was put on the current one."""
        if self.node.backend != "cuda":
            yield
            return
        self._forked.record()
        self._side.wait_event(self._forked)
        with self._side:
            yield
        self._joined.record(self._side)

    def _join(self) -> None:
        """Let the current stream go on after the other one."""
        if self.node.backend == "cuda":
            self.xp.cuda.get_current_stream().wait_event(self._joined)

    def steps(self, count: int, *, is_measured: bool) -> None:  # noqa: ARG002
        """Make steps; a program that measures something does so in the last of them."""
        for _ in range(count):
            self.step()

    def advance(self, count: int, *, is_measured: bool = False) -> None:
        """Make steps, in one graph where there are graphs."""
        if self._captured is None or self.order not in (*ORDERS, "alone"):
            self.steps(count, is_measured=is_measured)
            return
        u, v = self.u, self.v
        self._captured(u, v, count, is_measured, self.order)
        # A replay calls no step.
        self.u, self.v = (v, u) if count % 2 else (u, v)

    def _steps_of(self, u: Any, v: Any, count: int, is_measured: bool, order: str) -> None:
        self.u, self.v, self.order = u, v, order
        self.steps(count, is_measured=is_measured)

    def warm_up(self, counts: list[int]) -> None:
        """Load the kernels, and capture what these counts of steps need."""
        # A kernel is loaded at its first use, and that must not wait for an exchange.
        for cells in (self.owned, self.interior, self.shell):
            self.update(cells)
        for count in sorted(set(counts)):
            for is_measured in (False, True):
                # Either field may be `u`; the first call of each runs, the second captures.
                for _ in range(2 * len(self.fields)):
                    self.advance(count, is_measured=is_measured)

    def close(self) -> None:
        """Destroy the graphs."""
        if self._captured is not None:
            self._captured.close()


def lengths(steps: int, every: int, *, is_graph: bool) -> list[int]:
    """Return how many steps are made at once: with graphs as many as there are to a measurement."""
    longest, done, found = graphs.LONGEST if is_graph else 1, 0, []
    while done < steps:
        found.append(min(longest, every - done % every, steps - done))
        done += found[-1]
    return found


def compare(
    node: mpishare.Node,
    cart: MPI.Cartcomm,
    steps: Steps,
    count: int,
    calls: int,
) -> dict[str, float]:
    """Time calls of `count` steps in each order, and without neighbors, in turns. Collective.

    Returns the times of a step, and of each order the efficiency: the time without neighbors over
    its own. What the fields hold is of no use afterwards.
    """
    mine = steps.order

    def action(order: str) -> Callable[[], None]:
        def act() -> None:
            steps.order = order
            steps.advance(count, is_measured=True)

        return act

    actions = {order: action(order) for order in (*steps.orders, "alone")}
    for act in actions.values():
        for _ in range(2 * len(steps.fields)):  # as `Steps.warm_up`
            act()
    times = timing.alone_us(node, cart, actions, calls)
    steps.order = mine
    found = {f"{order}_us": time / count for order, time in times.items()}
    return found | {f"{order}_efficiency": times["alone"] / times[order] for order in steps.orders}
