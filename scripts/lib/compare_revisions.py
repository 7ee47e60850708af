"""Time two revisions of mpishare against each other, in turns, in one process per rank.

compare_revisions.py --export TREE_A TREE_B --exported DIR
    Write the packages of two trees (a git revision, or a folder like the repository) into DIR, as
    mpishare_a and mpishare_b.
mpirun -n 2 python3 compare_revisions.py --exported DIR [--backend cuda] [--only WORDS]
    Time them. DIR and this folder are all that is needed, so that a machine without git will do.

Both take turns in batches of about a millisecond, and the slowest rank's time counts. The ratio is
the median of those of the rounds, with its quartiles. All is made anew in each of several passes,
since addresses alone make a difference of some per cent; "+-" is the error of the ratio as the
passes differ. Calls are timed back to back. On GPUs that is the time of the host, and a second row,
"synchronized", has a synchronize of the stream after each call. What a call brings must have the
same bits in both.
"""

import argparse
import gc
import importlib
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SIDES = "ab"
BATCH_US = 1000
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

    def new_node(self) -> Any:
        return self.package.Node(self.node.comm, backend=self.backend)


Call = Callable[[], object]
#: Makes what a revision needs for a call, and what closes that again, the last first; returns the
#: call, and the arrays that one has brought.
Operation = Callable[[Side, ExitStack], tuple[Call, list[Any]]]


def exchange(
    side: Side,
    stack: ExitStack,
    *,
    nbytes: int,
    fields: int = 1,
    kind: str = "exchange",
    window: bool = False,
) -> tuple[Call, list[Any]]:
    """The two faces of fields, in a ring.

    `kind`: by one call, the same captured ("capture"), by `start` and `wait` ("split"), of a copy
    that each call makes ("new"), or the reverse ("accumulate", "give back").
    """
    node, shape = side.node, (6, nbytes // 8)
    cart = node.comm.Create_cart([node.size], periods=[True])
    stack.callback(cart.Free)
    windows = [node.allocate_each(shape) for _ in range(fields * window)]
    for each in windows:
        stack.callback(each.close)
    arrays = [each.array for each in windows] or [node.xp.zeros(shape) for _ in range(fields)]
    stack.callback(arrays.clear)
    plan = side.package.HaloExchange(cart, arrays, 1, axes=(0,), node=node)
    stack.callback(plan.close)
    step = side.package.capture(node, plan.exchange)
    stack.callback(step.close)

    def call_split() -> None:
        plan.start(*arrays)
        plan.wait()

    def call_new() -> None:
        arrays[:] = [array.copy() for array in arrays]
        plan.exchange(*arrays)

    calls: dict[str, Call] = {
        "exchange": lambda: plan.exchange(*arrays),
        "capture": lambda: step(*arrays),
        "split": call_split,
        "new": call_new,
        "accumulate": lambda: plan.accumulate(*arrays),
        "give back": lambda: plan.accumulate(*arrays, give_back=True),
    }
    for number, array in enumerate(arrays):
        array[...] = 10 * node.rank + number
    calls[kind]()
    side.sync()
    brought = [array.copy() for array in arrays]
    for array in arrays:
        array.fill(0)  # which no sum makes larger
    return calls[kind], brought


def seams(side: Side, stack: ExitStack, *, cells: int) -> tuple[Call, list[Any]]:
    """Rows of ghosts that are columns of the neighbors."""
    node, package = side.node, side.package
    u = node.xp.arange(float(cells * cells)).reshape(cells, cells) + node.rank
    ends = (-1, np.s_[:3], np.s_[-6:-3]), (1, np.s_[-3:], np.s_[3:6])
    mine = [
        package.Seam(
            (0, (rows, np.s_[3:-3])),
            ((node.rank + step) % node.size, 0, (np.s_[3:-3], columns)),
            axes=(1, 0),
            flip=(1,),
        )
        for step, rows, columns in ends
    ]
    plan = package.SeamExchange(node.comm, u, mine, node=node)
    stack.callback(plan.close)
    plan.exchange(u)
    side.sync()
    return lambda: plan.exchange(u), [u.copy()]


def reduce(side: Side, stack: ExitStack) -> tuple[Call, list[Any]]:
    """The sum of one number."""
    array = side.node.xp.full(1, 1.0 + side.node.rank)
    plan = side.package.Allreduce(side.node.comm, array, node=side.node)
    stack.callback(plan.close)
    plan.reduce(array)
    side.sync()
    brought = array.copy()
    array.fill(0)
    return lambda: plan.reduce(array), [brought]


def dot(side: Side, stack: ExitStack) -> tuple[Call, list[Any]]:
    """The product of two vectors."""
    xp = side.node.xp
    a, b = xp.full(512, 1.0 + side.node.rank), xp.ones(512)
    plan = side.package.Allreduce(side.node.comm, xp.zeros(1), node=side.node)
    stack.callback(plan.close)
    return lambda: plan.dot(a, b), [np.array(float(plan.dot(a, b)))]


def redistribute(side: Side, stack: ExitStack, *, cells: int) -> tuple[Call, list[Any]]:
    """Rows of a matrix that become columns."""
    node, shape = side.node, (cells, cells)
    plan = side.package.Redistribute(node.comm, shape, source=0, target=1, dtype=float, node=node)
    stack.callback(plan.close)
    whole = node.xp.arange(float(cells * cells)).reshape(shape)
    rows, columns = whole[plan.source_box.slices].copy(), whole[plan.target_box.slices].copy()
    columns.fill(-1)
    plan.forward(rows, columns)
    side.sync()
    return lambda: plan.forward(rows, columns), [columns.copy()]


def window_call(side: Side, stack: ExitStack, *, kind: str) -> tuple[Call, list[Any]]:
    """A fence, or post, start, complete and wait with both neighbors."""
    window, node = side.node.allocate_each(2, fill=-1), side.node
    stack.callback(window.close)
    left, right = ((node.rank + step) % node.size for step in (-1, 1))
    peers = sorted({left, right})
    window.segment(right)[0] = window.segment(left)[1] = node.rank
    window.fence()
    side.sync()

    def pairwise() -> None:
        window.post(peers)
        window.start(peers)
        window.complete()
        window.wait()

    return window.fence if kind == "fence" else pairwise, [window.array.copy()]


def event(side: Side, stack: ExitStack) -> tuple[Call, list[Any]]:
    """The record of one rank, for which all others wait."""
    found = side.node.event(0)
    stack.callback(found.close)
    return found.record if side.node.rank == 0 else found.wait, []


def barrier(side: Side, _: ExitStack) -> tuple[Call, list[Any]]:
    return side.node.barrier, []


def allocate(side: Side, _: ExitStack) -> tuple[Call, list[Any]]:
    return lambda: side.node.allocate(1024).close(), []


def node(side: Side, _: ExitStack) -> tuple[Call, list[Any]]:
    return lambda: side.new_node().close(), []


def plan(side: Side, stack: ExitStack, *, is_first: bool) -> tuple[Call, list[Any]]:
    """A plan that is made and closed: with a node of its own, or beside another one."""
    cart = side.node.comm.Create_cart([side.node.size], periods=[True])
    stack.callback(cart.Free)
    like = side.node.xp.zeros((6, 512))
    make = partial(side.package.HaloExchange, cart, like, width=1, axes=(0,))

    def first() -> None:
        new = side.new_node()
        make(node=new).close()
        new.close()

    if not is_first:
        stack.callback(make(node=side.node).close)
    return first if is_first else lambda: make(node=side.node).close(), []


#: What is put on a stream where there is one.
ORDERED: dict[str, Operation] = {
    "exchange, 8 B": partial(exchange, nbytes=8),
    "exchange, 4 KiB": partial(exchange, nbytes=4096),
    "exchange, 64 KiB": partial(exchange, nbytes=65536),
    "exchange, 1 MiB": partial(exchange, nbytes=1 << 20),
    "exchange, 8 B, in windows": partial(exchange, nbytes=8, window=True),
    "exchange, 64 KiB, in windows": partial(exchange, nbytes=65536, window=True),
    "exchange, 1 MiB, in windows": partial(exchange, nbytes=1 << 20, window=True),
    "copy and exchange it, 512 B": partial(exchange, nbytes=512, kind="new"),
    "copy and exchange it, 8 KiB": partial(exchange, nbytes=8 << 10, kind="new"),
    "copy and exchange it, 72 KiB": partial(exchange, nbytes=72 << 10, kind="new"),
    "exchange, 3 fields of 4 KiB": partial(exchange, nbytes=4096, fields=3),
    "start and wait, 4 KiB": partial(exchange, nbytes=4096, kind="split"),
    "accumulate, 8 B": partial(exchange, nbytes=8, kind="accumulate"),
    "accumulate, 64 KiB": partial(exchange, nbytes=65536, kind="accumulate"),
    "accumulate, 1 MiB": partial(exchange, nbytes=1 << 20, kind="accumulate"),
    "accumulate and give back, 64 KiB": partial(exchange, nbytes=65536, kind="give back"),
    "captured exchange, 4 KiB": partial(exchange, nbytes=4096, kind="capture"),
    "turned seams, 12 KiB": partial(seams, cells=518),
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
    "node and its first plan": partial(plan, is_first=True),
    "second plan, made and closed": partial(plan, is_first=False),
}


def synchronized(side: Side, stack: ExitStack, *, make: Operation) -> tuple[Call, list[Any]]:
    """The same with a synchronize after each call."""
    call, brought = make(side, stack)
    return lambda: (call(), side.sync()), brought


def operations(backend: str, words: str, without: list[str]) -> dict[str, Operation]:
    """What is timed: all whose names have these words, and none of those."""
    waiting = {
        f"{name}, synchronized": partial(synchronized, make=ORDERED[name]) for name in ORDERED
    }
    found = {**ORDERED, **(waiting if backend == "cuda" else {}), **BLOCKING}
    return {n: m for n, m in found.items() if words in n and not any(w in n for w in without)}


class Comparison:
    """The ranks that time both sides together."""

    def __init__(self, turns: Any, folder: Path, options: argparse.Namespace) -> None:
        self.turns, self.options = turns, options  # the module in_turns
        sys.path.insert(0, str(folder))
        self.packages = {side: importlib.import_module(f"mpishare_{side}") for side in SIDES}
        self.sync: Callable[[], None] = turns.nothing
        self.operations = operations(options.backend, options.only, options.without)
        #: Of each operation the times of both sides, a pass after the other.
        self.passes: dict[str, list[dict[str, list[float]]]] = {
            each: [] for each in self.operations
        }

    def run(self) -> None:
        gc.disable()
        passes = self.options.passes
        batch_s = self.options.seconds / passes / max(len(self.operations), 1)
        for number in range(passes):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            nodes = {side: self.node(side) for side in order}
            for name, make in self.operations.items():
                with ExitStack() as stack:
                    self.time(name, make, nodes, stack, batch_s)
                gc.collect()
            for each in nodes.values():
                each.close()

    def node(self, side: str) -> Any:
        made = self.packages[side].Node(self.turns.comm, backend=self.options.backend)
        if self.options.backend == "cuda" and self.sync is self.turns.nothing:
            # Of the GPU that the node has chosen; both sides use it as the current stream.
            stream = made.xp.cuda.Stream(non_blocking=True)
            stream.use()
            self.sync = stream.synchronize
        return made

    def time(
        self, name: str, make: Operation, nodes: dict[str, Any], stack: ExitStack, seconds: float
    ) -> None:
        """Make an operation of both sides, and time them in turn for that long."""
        turns, backend = self.turns, self.options.backend
        calls, brought = {}, []
        for side, node in nodes.items():
            call, arrays = make(Side(self.packages[side], node, backend, self.sync), stack)
            calls[side] = call
            brought.append([turns.on_host(array) for array in arrays])
        if (bits := turns.compare_bits(*brought)) != "the same":
            raise SystemExit(f"{name}: what both bring is not the same, but {bits}")
        count = 1
        while True:
            took_us = [count * self.batch_us(call, count) for call in calls.values()]
            if max(took_us) >= BATCH_US or count >= MOST_CALLS[backend]:
                break
            count *= 2
        rounds = max(2, int(1e6 * seconds / sum(took_us)))
        # The time until the calls have returned, and on the stream nothing is left of others.
        found = turns.in_turns_us(
            calls, lambda _: self.sync(), drain=turns.nothing, count=count, turns=rounds
        )
        self.passes[name].append({side: found[side] for side in SIDES})

    def batch_us(self, call: Call, count: int) -> float:
        self.sync()
        return self.turns.slowest_us(call, count, self.turns.nothing)

    def report(self, trees: list[str]) -> None:
        size, backend = self.turns.comm.size, self.options.backend
        if self.turns.comm.rank == 0:
            print(f"A: {trees[0]}, B: {trees[1]}; {size} ranks, backend {backend}, µs, medians\n")
            print("| | A | B | B / A | by pass |\n|---|---|---|---|---|")
        for name, passes in self.passes.items():
            of_passes = [np.median(np.divide(each["b"], each["a"])) for each in passes]
            error = np.std(of_passes) / max(len(passes) - 1, 1) ** 0.5
            times = {side: [us for each in passes for us in each[side]] for side in SIDES}
            self.turns.print_line(name, times, f"+- {error:.3f}", digits=3)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exported", type=Path, required=True, metavar="DIR")
    parser.add_argument("--export", nargs=2, metavar=("TREE_A", "TREE_B"))
    parser.add_argument("--backend", choices=MOST_CALLS, default="host")
    parser.add_argument("--seconds", type=float, help="of all timing together")
    parser.add_argument("--passes", type=int, help="how often all is made anew")
    parser.add_argument("--only", metavar="WORDS", default="", help="operations with these words")
    parser.add_argument("--without", metavar="WORDS", action="append", default=[])
    options = parser.parse_args(words)
    if options.export:
        export(options.export, options.exported)
        return
    import in_turns

    options.passes = options.passes or PASSES[options.backend]
    options.seconds = options.seconds or SECONDS[options.backend]
    comparison = Comparison(in_turns, options.exported, options)
    comparison.run()
    comparison.report((options.exported / "trees").read_text().splitlines())


if __name__ == "__main__":
    main(sys.argv[1:])
