"""The case ``swap``: two ranks give each other words, by kernels of one's own and by the host.

In the usages that its note in `catalog` tells; the same kernel stands on NVSHMEM and on NCCL's
windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import mpishare
from benchmarks.ring import Ring, WindowRing, in_pairs
from mpishare import UnsupportedError
from mpishare.bench.cases import Case
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.grid import Exchange, OfFields
from mpishare.bench.library import add_with_graphs, included, open_library
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Bound, Session, in_turn
from mpishare.coordination.poll import poll
from mpishare.errors import counted

#: Launches in a graph.
_STEPS = 20
#: Threads of a block, and blocks of all ranks that share a GPU: each waits for others.
_BLOCK, _MAX_BLOCKS = 512, 128
#: Each of these numbers of bytes per block, as powers of 2, is tried.
_SHARES = (15, 14, 12)
#: NCCL's words beside numbers, by `NcclDevice`: no more words than this.
_FEW_WORDS = 16 * _BLOCK
#: Messages of memory that a rank allocates for all variants of a size.
_COPIES = 90
#: Within which a first launch must end: the waits of the libraries have no deadline.
_LIMIT_S = 10.0


def run_swap(session: Session, case: Case) -> None:
    for nbytes in session.sizes(case, _COPIES):
        _run_swap(session, case, nbytes)


def _run_swap(session: Session, case: Case, nbytes: int) -> None:
    pair = _Pair(session, nbytes // 8)
    comparison = Comparison(session, case, nbytes=nbytes, sent_nbytes=nbytes, unfit=pair.unfit)
    most = _MAX_BLOCKS // max(session.ranks_per_gpu, 1)
    blocks = sorted({min(max(nbytes >> share, 1), most) for share in _SHARES})
    add = partial(add_with_graphs, comparison, steps=(_STEPS,), mark=", ")
    for count in blocks:
        add(_named("kernel", count), partial(_OwnSwap, pair, blocks=count))
    add("halo, windows", partial(_halo, pair, in_window=True))
    add("halo", partial(_halo, pair, in_window=False))
    comparison.add("fence", partial(WindowRing, pair))
    comparison.add("post .. wait", partial(in_pairs, pair))
    for name, module, _ in included(comparison):
        kind, arm, swap = _LIBRARIES[name]
        library, refusal = open_library(session, getattr(module, kind))
        of_library: dict[str, Any] = {"kind": BASELINE, "unfit": refusal}
        for count in blocks:
            add(_named(arm, count), partial(swap, pair, library, blocks=count), **of_library)
        if name == "nccl4py" and pair.words <= _FEW_WORDS:
            count = -(-pair.words // _BLOCK)
            add("nccl, words", partial(_NcclSwapWords, pair, library, blocks=count), **of_library)
    comparison.run()


def _named(arm: str, blocks: int) -> str:
    return f"{arm}, {counted(blocks, 'block')}"


class _Pair(Ring):
    """Two ranks that give each other a face of so many words."""

    def __init__(self, session: Session, words: int) -> None:
        super().__init__(session, 8 * words, steps=(1,))
        self.rank, self.peer = session.comm.rank, 1 - session.comm.rank
        is_pair = session.comm.size == session.node.size == 2
        self.unfit = self.unfit if is_pair else "it is between two ranks of one node"

    def zeros(self, count: int, dtype: str = "u8") -> Any:
        return self.node.xp.zeros(count, dtype)

    def kernel(self, name: str) -> Any:
        xp, file = self.node.xp, Path(__file__).with_suffix(".cuh")
        options = ("--std=c++17", *mpishare.device.include())
        return xp.RawModule(code=file.read_text(), options=options).get_function(name)


def _halo(pair: _Pair, *, in_window: bool, steps: int = 1) -> Exchange[_Pair]:
    """Return a `HaloExchange` of one face: a row of cells of each rank, the ghosts of the other."""
    shape, node = (4, pair.words), pair.node
    windows = [node.allocate_each(shape, float, fill=0)] if in_window else []
    field = windows[0].array if windows else node.xp.zeros(shape)
    rows = field.view("u8")
    ends = (rows[1:2], rows[0:1]) if pair.rank else (rows[2:3], rows[3:4])

    def bind(*_: Any) -> Bound:
        cart = pair.comm.Create_cart([2], [False], reorder=False)
        halo = mpishare.HaloExchange(cart, field, width=1, axes=(0,), node=node)
        return partial(halo.exchange, field), in_turn(halo.close, cart.Free)

    made = Exchange(pair, bind, ends, steps=steps)
    made.windows = windows
    return made


class _Swap(OfFields):
    """Words both usages, by a kernel that waits for the other rank.

    They land in two halves in turn, by the number of the launch. That lies in GPU memory, so that a
    graph of launches knows it, too. `bind` allocates what it needs and sets `launch`; then it is
    launched once, within a limit.
    """

    launch: Callable[..., object]
    here: Any  # where words land
    turns: Any  # launches so far, by block
    dtype: ClassVar[str] = "u8"
    awaited: Any = None  # words of a library: its waits end once they are large

    def __init__(self, pair: _Pair, library: Any = None, *, blocks: int, steps: int = 1) -> None:
        self.pair, self.check, self.source = pair, pair.check, pair.zeros(pair.words)
        self.library, self.blocks, self.steps = library, blocks, steps
        pairs = -(-pair.words // (2 * blocks))  # a thread moves two words at a time
        self.block = min(-(-pairs // 32) * 32, _BLOCK)
        self.turns = pair.zeros(blocks, self.dtype)
        self.owned: list[Any] = []  # memory of the library
        self.bind()
        pair.session.line_up()  # what is zero at first is so on both ranks
        self.step()
        stream = pair.session.stream
        if poll(lambda: stream.done, _LIMIT_S):
            return
        self.rescue()
        if not poll(lambda: stream.done, _LIMIT_S):
            raise RuntimeError(f"{type(self).__name__}: its kernel does not end")
        raise UnsupportedError(f"its kernel did not end within {_LIMIT_S:g} s")

    def bind(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        for _ in range(self.steps):
            self.launch()

    def received(self) -> Any:
        """Return where the words of the last step are; waits for the GPU."""
        words, half = self.pair.words, (int(self.turns[0]) - 1) % 2
        return self.here[half * words : (half + 1) * words]

    def current(self) -> Sequence[Any]:
        return self.source[None], self.received()[None]

    def rescue(self) -> None:
        """End the waits of a kernel: those of mpishare have a deadline, which raises."""
        if self.awaited is None:
            self.pair.node.synchronize()
            return
        cuda, words = self.pair.node.xp.cuda, self.awaited
        stream = cuda.Stream(non_blocking=True)  # beside the kernel that polls them
        cuda.runtime.memsetAsync(int(words.data.ptr), 0x7F, int(words.nbytes), int(stream.ptr))
        stream.synchronize()

    def empty(self, words: int) -> Any:
        """Return memory of the library, which `close` frees. Collective."""
        self.owned.append(self.library.empty(words))
        return self.owned[-1]

    def close(self) -> None:
        # Views of what is freed.
        self.here = self.source = self.awaited = self.launch = None  # type: ignore[assignment]
        while self.owned:
            self.library.free(self.owned.pop())


class _OwnSwap(_Swap):
    """On a window of mpishare."""

    def bind(self) -> None:
        node, words = self.pair.node, self.pair.words
        self.window = node.allocate_each(2 * words, "u8", signals=self.blocks, fill=0)
        arguments = self.window.device, self.source, np.int64(words), self.turns
        self.here, kernel = self.window.array, self.pair.kernel("swap")
        self.launch = partial(node.launch, kernel, (self.blocks,), (self.block,), arguments)

    def close(self) -> None:
        super().close()
        self.window.close()


class _NvshmemSwap(_Swap):
    """On memory of NVSHMEM."""

    def bind(self) -> None:
        words, kernel = self.pair.words, self.library.kernel("swap")
        self.source, self.here = self.empty(words), self.empty(2 * words)
        self.awaited = self.empty(self.blocks)
        rest = self.awaited, np.int64(words), np.int32(self.pair.rank), self.turns
        arguments = self.source, self.here, *rest
        self.launch = partial(kernel, (self.blocks,), (self.block,), arguments)


class _NcclSwap(_Swap):
    """On NCCL's windows."""

    dtype = "u4"

    def bind(self) -> None:
        words, self.awaited = self.pair.words, self.library.is_given_up
        self.here = self.empty(2 * words)
        table = self.library.table(self.source, self.here, self.pair.peer)
        rest = np.int32(1), np.int32(0), np.int64(8 * words), self.turns
        kernel, arguments = self.library.kernel("exchange"), (self.library.state, table, *rest)
        self.launch = partial(kernel, (self.blocks,), (self.block,), arguments)


class _NcclSwapWords(_Swap):
    """By words that travel beside a number each, which need no two halves."""

    def bind(self) -> None:
        self.here, self.awaited = self.pair.zeros(self.pair.words), self.library.is_given_up
        self.block = min(-(-self.pair.words // 32) * 32, _BLOCK)
        table = self.library.table(self.source, self.here, self.pair.peer)
        arguments = self.library.state, table, np.int32(1), *self.library.few
        kernel = self.library.kernel("exchange_words")
        self.launch = partial(kernel, (self.blocks,), (self.block,), arguments)

    def received(self) -> Any:
        return self.here


#: Of each library its class, the first word of its variants, and theirs.
_LIBRARIES: dict[str, tuple[str, str, Callable[..., Variant]]] = {
    "nvshmem": ("Nvshmem", "nvshmem", _NvshmemSwap),
    "nccl4py": ("NcclDevice", "nccl", _NcclSwap),
}
