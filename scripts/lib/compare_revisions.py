"""Time two revisions of mpishare against each other, in turns, in one process per rank.

compare_revisions.py --export TREE_A TREE_B --exported DIR
    Write the packages of two trees (a git revision, or a folder like the repository) into DIR, as
    mpishare_a and mpishare_b.
mpirun -n 2 python3 compare_revisions.py --exported DIR [--backend cuda] [--only WORDS]
    Time them. DIR is all that is needed beside this file, so that a machine without git will do.

Each operation is timed in rounds of four batches, A B B A or B A A B, so that what drifts, and what
comes first, hurts both alike. Of a batch the maximum over the ranks counts. The ratio is the median
of those of the rounds; p25 and p75 are their quartiles. All is made anew in each of several passes,
since addresses alone make a difference of some per cent; "+-" is the error of the ratio as the
passes differ. Calls are timed back to back. On GPUs that is the time of the host, and a second row,
"synchronized", has a synchronize of the stream after each call. Results are checked.
"""

import argparse
import gc
import importlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SIDES = "ab"
BATCH_S = 0.001
MOST_CALLS = {"host": 1024, "cuda": 64}  # on GPUs less than fills the queue of a stream
PASSES = {"host": 12, "cuda": 4}  # a node on GPUs takes long
SECONDS = {"host": 75, "cuda": 50}


def export(trees: list[str], folder: Path) -> None:
    """Write each tree's package under a name of its own."""
    from extension import FILE, build_and_tell
    from structure import tree_of

    folder.mkdir(parents=True, exist_ok=True)
    for side, tree in zip(SIDES, trees, strict=True):
        name = f"mpishare_{side}"
        shutil.rmtree(folder / name, ignore_errors=True)
        with tree_of(tree) as root:
            ignored = ["__pycache__"]
            if (root / "setup.py").exists():  # before, the compiled part was built at first use
                build_and_tell(root)
                ignored += ["*.c"] * (root / FILE).exists()
            ignore = shutil.ignore_patterns(*ignored)
            shutil.copytree(root / "mpishare", folder / name, ignore=ignore)
        for path in (folder / name).rglob("*"):
            if path.suffix in (".py", ".cu", ".cuh"):
                path.write_text(re.sub(r"\bmpishare\b", name, path.read_text()))
    names = [Path(tree).resolve().name if Path(tree).is_dir() else tree for tree in trees]
    (folder / "trees").write_text("\n".join(names))


@dataclass
class Side:
    """One revision: its package, its node, and what ends a call on a stream."""

    package: Any
    node: Any
    backend: str
    sync: Callable[[], None]

    @property
    def rank(self) -> int:
        return self.node.rank

    @property
    def ring(self) -> tuple[int, ...]:
        """The left neighbor, this rank, and the right one."""
        return tuple((self.rank + step) % self.node.size for step in (-1, 0, 1))


Seconds = Callable[[int], float]
#: What takes the time of that many calls, and what tells whether a call is right.
Timed = tuple[Seconds, Callable[[], bool]]
#: Makes an operation of a revision, yields it ready to be timed, and closes what it made.
Operation = Callable[[Side], Iterator[Timed]]


def looped(call: Callable[[], None]) -> Seconds:
    def seconds(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - begin

    return seconds


def unchecked() -> bool:
    return True


def exchange(
    side: Side,
    *,
    nbytes: int,
    fields: int = 1,
    kind: str = "exchange",
    window: bool = False,
    is_new: bool = False,
) -> Iterator[Timed]:
    """The two faces of fields, in a ring.

    `kind`: by one call, the same captured ("capture"), by `start` and `wait` ("split"), or the
    reverse ("accumulate"), in which the ghosts are zero after the first call. `is_new`: of a copy
    that each call makes.
    """
    node, shape = side.node, (6, nbytes // 8)
    cart = node.comm.Create_cart([node.size], periods=[True])
    windows = [node.allocate_each(shape) for _ in range(fields * window)]
    arrays = [each.array for each in windows] or [node.xp.zeros(shape) for _ in range(fields)]
    plan = side.package.HaloExchange(cart, arrays, 1, axes=(0,), node=node)

    def call() -> None:
        if is_new:
            arrays[:] = [array.copy() for array in arrays]
        plan.exchange(*arrays)

    def call_split() -> None:
        plan.start(*arrays)
        plan.wait()

    def call_reverse() -> None:
        plan.accumulate(*arrays)

    step = side.package.capture(node, plan.exchange)

    def call_captured() -> None:
        step(*arrays)

    calls = {
        "exchange": call,
        "capture": call_captured,
        "split": call_split,
        "accumulate": call_reverse,
    }

    def check() -> bool:
        for number, array in enumerate(arrays):
            array[...] = 10 * side.rank + number
            if kind != "accumulate":
                array[[0, -1]] = -1
        calls[kind]()
        side.sync()
        is_right = True
        for number, array in enumerate(arrays):
            left, mine, right = (10 * rank + number for rank in side.ring)
            sums = [0, mine + left, mine, mine, mine + right, 0]
            wanted = sums if kind == "accumulate" else [left, *[mine] * 4, right]
            is_right &= bool((array == node.xp.asarray(wanted)[:, None]).all())
        side.sync()
        return is_right

    yield looped(calls[kind]), check
    step.close()
    plan.close()
    arrays.clear()
    for each in windows:
        each.close()
    cart.Free()


def dot(side: Side) -> Iterator[Timed]:
    """The product of two vectors."""
    a, b = side.node.xp.full(512, float(side.rank)), side.node.xp.ones(512)
    plan = side.package.Allreduce(side.node.comm, side.node.xp.zeros(1), node=side.node)

    def check() -> bool:
        return float(plan.dot(a, b)) == 512 * sum(range(side.node.size))

    yield looped(lambda: plan.dot(a, b)), check
    plan.close()


def redistribute(side: Side, *, cells: int) -> Iterator[Timed]:
    """Rows of a matrix that become columns."""
    node, shape = side.node, (cells, cells)
    plan = side.package.Redistribute(node.comm, shape, source=0, target=1, dtype=float, node=node)
    whole = node.xp.arange(float(cells * cells)).reshape(shape)
    rows = whole[plan.source_box.slices].copy()
    columns = node.xp.empty_like(whole[plan.target_box.slices])

    def check() -> bool:
        columns[...] = -1
        plan.forward(rows, columns)
        return bool((columns == whole[plan.target_box.slices]).all())

    yield looped(lambda: plan.forward(rows, columns)), check
    plan.close()


def reduce(side: Side) -> Iterator[Timed]:
    """The sum of one number."""
    array = side.node.xp.zeros(1)
    plan = side.package.Allreduce(side.node.comm, array, node=side.node)

    def check() -> bool:
        array[0] = side.rank
        plan.reduce(array)
        side.sync()
        found, array[0] = float(array[0]), 0
        return found == sum(range(side.node.size))

    yield looped(lambda: plan.reduce(array)), check
    plan.close()


def window_call(side: Side, *, kind: str) -> Iterator[Timed]:
    """A fence, or post, start, complete and wait with both neighbors."""
    window = side.node.allocate_each(2, fill=-1)
    left, _, right = side.ring
    peers = sorted({left, right})

    def fence(put: Callable[[], None]) -> None:
        put()
        window.fence()

    def pairwise(put: Callable[[], None]) -> None:
        window.post(peers)
        window.start(peers)
        put()
        window.complete()
        window.wait()

    ordered = fence if kind == "fence" else pairwise

    def put_ranks() -> None:
        window.segment(right)[0] = side.rank
        window.segment(left)[1] = side.rank

    def check() -> bool:
        ordered(put_ranks)
        side.sync()
        is_right = window.array.tolist() == [left, right]
        window.fence()  # before the next one writes
        side.sync()
        return is_right

    def nothing() -> None:
        pass

    yield looped(lambda: ordered(nothing)), check
    window.close()


def event(side: Side) -> Iterator[Timed]:
    """The record of one rank, for which all others wait."""
    found = side.node.event(0)
    yield looped(found.record if side.rank == 0 else found.wait), unchecked
    found.close()


def barrier(side: Side) -> Iterator[Timed]:
    yield looped(side.node.barrier), unchecked


def allocate(side: Side) -> Iterator[Timed]:
    yield looped(lambda: side.node.allocate(1024).close()), unchecked


def node(side: Side) -> Iterator[Timed]:
    make = partial(side.package.Node, side.node.comm, backend=side.backend)
    yield looped(lambda: make().close()), unchecked


def plan(side: Side, *, is_first: bool) -> Iterator[Timed]:
    """A plan that is made and closed: the first on a new node, or beside another one."""
    cart = side.node.comm.Create_cart([side.node.size], periods=[True])
    make = partial(
        side.package.HaloExchange, cart, side.node.xp.zeros((6, 512)), width=1, axes=(0,)
    )

    def first(count: int) -> float:
        seconds = 0.0
        for _ in range(count):
            new = side.package.Node(side.node.comm, backend=side.backend)
            cart.Barrier()
            seconds += looped(lambda new=new: make(node=new).close())(1)
            new.close()
        return seconds

    kept = None if is_first else make(node=side.node)
    yield first if is_first else looped(lambda: make(node=side.node).close()), unchecked
    if kept is not None:
        kept.close()
    cart.Free()


#: What is put on a stream where there is one.
ORDERED: dict[str, Operation] = {
    "exchange, 8 B": partial(exchange, nbytes=8),
    "exchange, 4 KiB": partial(exchange, nbytes=4096),
    "exchange, 64 KiB": partial(exchange, nbytes=65536),
    "exchange, 1 MiB": partial(exchange, nbytes=1 << 20),
    "exchange, 8 B, in windows": partial(exchange, nbytes=8, window=True),
    "exchange, 64 KiB, in windows": partial(exchange, nbytes=65536, window=True),
    "exchange, 1 MiB, in windows": partial(exchange, nbytes=1 << 20, window=True),
    "copy and exchange it, 512 B": partial(exchange, nbytes=512, is_new=True),
    "copy and exchange it, 8 KiB": partial(exchange, nbytes=8 << 10, is_new=True),
    "copy and exchange it, 72 KiB": partial(exchange, nbytes=72 << 10, is_new=True),
    "exchange, 3 fields of 4 KiB": partial(exchange, nbytes=4096, fields=3),
    "start and wait, 4 KiB": partial(exchange, nbytes=4096, kind="split"),
    "accumulate, 8 B": partial(exchange, nbytes=8, kind="accumulate"),
    "accumulate, 64 KiB": partial(exchange, nbytes=65536, kind="accumulate"),
    "accumulate, 1 MiB": partial(exchange, nbytes=1 << 20, kind="accumulate"),
    "captured exchange, 4 KiB": partial(exchange, nbytes=4096, kind="capture"),
    "reduce, 8 B": reduce,
    "dot, 4 KiB": dot,
    "redistribute, 128 KiB": partial(redistribute, cells=128),
    "redistribute, 2 MiB": partial(redistribute, cells=512),
    "fence": partial(window_call, kind="fence"),
    "post, start, complete, wait": partial(window_call, kind="pairwise"),
    "event": event,
}
#: What blocks the host.
BLOCKING: dict[str, Operation] = {
    "barrier": barrier,
    "allocate and close": allocate,
    "node, made and closed": node,
    "first plan, made and closed": partial(plan, is_first=True),
    "second plan, made and closed": partial(plan, is_first=False),
}


def synchronized(side: Side, *, make: Operation) -> Iterator[Timed]:
    """The same with a synchronize after each call."""
    with contextmanager(make)(side) as (seconds, check):

        def call() -> None:
            seconds(1)
            side.sync()

        yield looped(call), check


class Comparison:
    """The ranks that time both sides together."""

    def __init__(self, comm: Any, folder: Path, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        sys.path.insert(0, str(folder))
        self.packages = {side: importlib.import_module(f"mpishare_{side}") for side in SIDES}
        self.stream: Any = None
        self.sync: Callable[[], None] = lambda: None
        self.operations = {**ORDERED, **BLOCKING}
        if options.backend == "cuda":
            waiting = {
                f"{name}, synchronized": partial(synchronized, make=make)
                for name, make in ORDERED.items()
            }
            self.operations = {**ORDERED, **waiting, **BLOCKING}
        if options.only:
            self.operations = {
                name: make for name, make in self.operations.items() if options.only in name
            }
        self.counts: dict[str, int] = {}
        self.rounds: dict[str, list[np.ndarray]] = {name: [] for name in self.operations}

    def run(self) -> None:
        gc.disable()
        passes = self.options.passes
        seconds = self.options.seconds / passes / max(len(self.operations), 1)
        for number in range(passes):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            nodes = {side: self.node(side) for side in order}
            sides = {
                side: Side(self.packages[side], nodes[side], self.options.backend, self.sync)
                for side in order
            }
            for name, make in self.operations.items():
                with ExitStack() as stack:
                    enter, made = stack.enter_context, contextmanager(make)
                    self.compare(name, {side: enter(made(sides[side])) for side in order}, seconds)
                gc.collect()
            for each in nodes.values():
                each.close()

    def node(self, side: str) -> Any:
        made = self.packages[side].Node(self.comm, backend=self.options.backend)
        if self.options.backend == "cuda" and self.stream is None:
            # Of the GPU that the node has chosen; both sides use it as the current stream.
            self.stream = made.xp.cuda.Stream(non_blocking=True)
            self.stream.use()
            self.sync = self.stream.synchronize
        return made

    def compare(self, name: str, made: dict[str, Timed], seconds: float) -> None:
        """Time both sides in turn for that long."""
        self.check(name, made)
        count = self.count(name, made)
        found: list[tuple[float, ...]] = []
        end = time.monotonic() + seconds
        while self.comm.bcast(time.monotonic() < end or len(found) < 2):
            order = "abba" if len(found) % 2 == 0 else "baab"
            batch = [self.batch(made[side], count) for side in order]
            by_side = sorted(zip(order, batch, strict=True), key=lambda pair: pair[0])
            found.append(tuple(took / count for _, took in by_side))
        mine = np.array(found)
        slowest = np.empty_like(mine)
        self.comm.Allreduce(mine, slowest, op=self.options.max)
        # Columns: both batches of A, then those of B.
        self.rounds[name].append(slowest.reshape(-1, 2, 2).mean(axis=2))
        self.check(name, made)

    def batch(self, made: Timed, count: int) -> float:
        self.sync()
        self.comm.Barrier()
        return made[0](count)

    def count(self, name: str, made: dict[str, Timed]) -> int:
        """How many calls make a batch; the same in every pass."""
        count = self.counts.get(name, 1)
        while name not in self.counts:
            took = [self.batch(each, count) for each in made.values()]
            is_enough = max(took) >= BATCH_S or count >= MOST_CALLS[self.options.backend]
            if self.comm.allreduce(is_enough, op=self.options.max):
                self.counts[name] = count
            else:
                count *= 2
        return count

    def check(self, name: str, made: dict[str, Timed]) -> None:
        for _, check in made.values():
            wrong = [rank for rank, ok in enumerate(self.comm.allgather(check())) if not ok]
            if wrong:
                raise SystemExit(f"{name}: a wrong result on ranks {wrong}")

    def report(self, trees: list[str]) -> list[str]:
        size, backend = self.comm.size, self.options.backend
        lines = [f"A: {trees[0]}, B: {trees[1]}; {size} ranks, backend {backend}"]
        lines.append(
            f"{'medians of the maximum over ranks':38}{'A, us':>11}{'B, us':>11}"
            f"{'B / A':>8}{'+-':>7}{'p25':>7}{'p75':>7}{'rounds':>8}"
        )
        for name, passes in self.rounds.items():
            times = np.concatenate(passes)
            ratios = times[:, 1] / times[:, 0]
            p25, ratio, p75 = np.percentile(ratios, (25, 50, 75))
            of_passes = [np.median(each[:, 1] / each[:, 0]) for each in passes]
            error = np.std(of_passes) / max(len(passes) - 1, 1) ** 0.5
            a_us, b_us = 1e6 * np.median(times, axis=0)
            lines.append(
                f"{name:38}{a_us:11.2f}{b_us:11.2f}{ratio:8.3f}{error:7.3f}{p25:7.3f}{p75:7.3f}"
                f"{len(ratios):8d}"
            )
        return lines


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exported", type=Path, required=True, metavar="DIR")
    parser.add_argument("--export", nargs=2, metavar=("TREE_A", "TREE_B"))
    parser.add_argument("--backend", choices=MOST_CALLS, default="host")
    parser.add_argument("--seconds", type=float, help="of all timing together")
    parser.add_argument("--passes", type=int, help="how often all is made anew")
    parser.add_argument("--only", metavar="WORDS", help="operations whose name has these words")
    options = parser.parse_args(words)
    if options.export:
        export(options.export, options.exported)
        return
    from mpi4py import MPI

    options.max = MPI.MAX
    options.passes = options.passes or PASSES[options.backend]
    options.seconds = options.seconds or SECONDS[options.backend]
    comparison = Comparison(MPI.COMM_WORLD, options.exported, options)
    comparison.run()
    if MPI.COMM_WORLD.rank == 0:
        trees = (options.exported / "trees").read_text().splitlines()
        print("\n".join(comparison.report(trees)))


if __name__ == "__main__":
    main(sys.argv[1:])
