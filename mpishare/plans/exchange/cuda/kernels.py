"""The kernels of halo exchanges, and their launches."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishare.backends import driver
from mpishare.errors import UnsupportedError
from mpishare.memory.numbers import NUMBERS
from mpishare.plans.exchange.cuda.records import (
    ITEM_RECORD,
    SIZE_OPTIONS,
    SLIDE_OPTION,
    SLIDE_RECORD,
)
from mpishare.plans.exchange.cuda.work_items import LL_CHUNK_NBYTES, ItemArray, WorkList
from mpishare.plans.gpu.launch import PlanLauncher, kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mpishare.plans.exchange.cuda.direction import Direction
    from mpishare.plans.rings import Slide
    from mpishare.runtime.context import NodeContext

THREADS = 512
_DEPTH_OF_SHARED_GPU = 4
_MAX_FIELDS = 448  # 3.5 KiB of the 4 KiB of a launch's parameters
_MAX_LL_PARTS = 16  # 3 KiB of the 4 KiB of a launch's parameters
_MAX_LL_FIELDS = 64  # another 0.5 KiB
_FILES = {
    "fused": "fused.cu",
    "fused_ll": "fused_ll.cu",
    "pack": "streamed.cu",
    "unpack": "streamed.cu",
    "add": "streamed.cu",
}
_THREADS_OF_SLIDES = 128
_AS_THEY_ARE = "length", "wanted", "first", "extent", "shift", "is_source"
_loaded: set[int] = set()
"""Kernels that were launched before, and so are loaded."""


class Launcher(PlanLauncher):
    """Prepares launches for one direction of a plan.

    `pointers`, the addresses of the fields, is the first argument of every launch.
    """

    def __init__(self, direction: Direction, context: NodeContext, where: str) -> None:
        super().__init__(context, where)
        self._nfields = max(len(direction.layouts), 1)
        self.pointers = (ctypes.c_uint64 * self._nfields)()
        self._layouts, self._tiled = direction.layouts, direction.tiled
        self._wire, self.slides = direction.wire, Slides(self)
        # Units that a thread has in flight.
        self._depth = _DEPTH_OF_SHARED_GPU if self.ranks_per_gpu > 1 else 1
        self._states: dict[str, int] = {}
        self._names: set[tuple[str, tuple[str, ...]]] = set()  # and the options of the compiler

    def state(self, name: str, nwords: int = 2) -> int:
        """Return the address of zeroed 8-byte words that a kernel keeps from launch to launch."""
        if name not in self._states:
            self._states[name] = self.zeros(8 * nwords)
        return self._states[name]

    def work_list(self, alignments: Sequence[int]) -> WorkList:
        rest = self._tiled, self.slides.places_of
        return WorkList(self._layouts, alignments, self.upload, self._wire, *rest)

    def prepare(
        self, name: str, items: ItemArray, *rest: int, blocks: int = 0, threads: int = THREADS
    ) -> driver.Launch:
        """Return a launch of a kernel on work items; `rest` are its further pointers."""
        arguments = [self.pointers, items.address, items.length, *rest]
        grid = max(1, min(items.length, blocks or self.max_blocks))
        return self._launch(name, grid, threads, arguments, items.options)

    def for_fused(self, work: WorkList, abort: int) -> Callable[..., driver.Launch]:
        """Return a function of ``blocks=`` and ``threads=`` that prepares fused launches.

        All launches of a launcher count the same epochs: they must be for the same parts. Few small
        parts get a kernel with a block per chunk. The word at `abort` ends all waits.
        """
        nparts, log_chunks = work.nparts, work.log_ll_chunks
        blocks = nparts << log_chunks
        is_small = (
            work.is_ll
            and nparts <= _MAX_LL_PARTS
            and len(self._layouts) <= _MAX_LL_FIELDS
            and blocks <= self.max_blocks // 2  # half of the most: see `Fused.beside`
        )
        if is_small:
            state = self.state("fused_ll", blocks + 1)
            given = work.ll_parts(), log_chunks, state, abort, work.options
            return functools.partial(self._prepare_ll, *given)
        return functools.partial(self.prepare, "fused", work.load(), self.state("fused"), abort)

    def _prepare_ll(
        self,
        parts: np.ndarray[Any, Any],
        log_chunks: int,
        state: int,
        abort: int,
        options: tuple[str, ...],
        *,
        blocks: int = 0,
        threads: int = THREADS,
    ) -> driver.Launch:
        blocks = len(parts) << log_chunks
        padded = np.zeros(_MAX_LL_PARTS, ITEM_RECORD)
        padded[: len(parts)] = parts
        items = (ctypes.c_char * padded.nbytes).from_buffer_copy(padded.tobytes())
        arguments = [self.pointers, items, log_chunks, state, state + 8 * blocks, abort]
        return self._launch("fused_ll", blocks, threads, arguments, options)

    def _launch(
        self, name: str, grid: int, threads: int, arguments: list[Any], options: tuple[str, ...]
    ) -> driver.Launch:
        function = self._kernel(name, options)
        self._names.add((name, options))
        return driver.Launch(function, grid, threads, arguments, self.where)

    def load(self, stream: int) -> None:
        """Enqueue copies of the launches' data, and one launch of each new kernel on no items.

        Loading a kernel later would wait for the streams.
        """
        names = {each: self._kernel(*each) for each in self._names}
        new = {name: names[name] for name in sorted(names) if names[name] not in _loaded}
        launches = self._launches_on_nothing(new)
        super().load(stream)
        for launch in launches:
            launch.enqueue(stream)
        _loaded.update(new.values())

    def _kernel(self, name: str, options: tuple[str, ...]) -> int:
        """Return a kernel's handle, compiled with these options besides its sizes."""
        nfields = self._nfields
        if nfields > _MAX_FIELDS:
            raise UnsupportedError(
                f"{nfields} fields in one plan: {_MAX_FIELDS} are allowed on CUDA"
            )
        sizes = (
            f"-DNFIELDS={nfields}",
            f"-DDEPTH={self._depth}",
            *options,
            f"-DNITEMS={_MAX_LL_PARTS}",
            f"-DCHUNK_NBYTES={LL_CHUNK_NBYTES}",
            *(() if self._wire is None else (f"-DWIRE={NUMBERS[self._wire].kernel}",)),
        )
        path = Path(__file__).with_name(_FILES[name])
        return kernel(path, name, (*sizes, *SIZE_OPTIONS), self.device)

    def _launches_on_nothing(
        self, names: Collection[tuple[str, tuple[str, ...]]]
    ) -> list[driver.Launch]:
        if not names:
            return []
        nothing, zeros = self.work_list(()), self.zeros(32)
        items = nothing.load()
        epochs = self.zeros(24), self.zeros(8)
        rest = {"fused": (zeros, zeros), "pack": epochs, "unpack": epochs, "add": epochs}
        return [
            self._prepare_ll(nothing.records(), 0, zeros, zeros, options)
            if name == "fused_ll"
            else self.prepare(name, items._replace(options=options), *rest[name])
            for name, options in names
        ]


class Slides:
    """The parts of a plan that are cut at each call: a table of places for each, for all launches.

    A kernel of their own finds the places before it.
    """

    def __init__(self, launcher: PlanLauncher) -> None:
        self._launcher = launcher
        self._places: dict[tuple[Slide, int], int] = {}
        self._words: Any = None
        self._launch: driver.Launch | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    def places_of(self, slide: Slide, room: int) -> int:
        known = slide, room
        if known not in self._places:
            self._places[known] = self._launcher.zeros(8 * room)
        return self._places[known]

    def prepare(self, nshifts: int) -> None:
        """Prepare the launch, once all parts are known and before the tables are loaded."""
        if not self._places:
            return
        records = np.zeros(len(self._places), SLIDE_RECORD)
        for record, ((slide, room), places) in zip(records, self._places.items(), strict=True):
            for name in _AS_THEY_ARE:
                record[name] = getattr(slide, name)
            record["start"] = slide.start % slide.length
            record["room"], record["places"] = room, places
        options = f"-DNSHIFTS={nshifts}", SLIDE_OPTION
        path = Path(__file__).with_name("slides.cu")
        function = kernel(path, "slides", options, self._launcher.device)
        self._words = (ctypes.c_int64 * (3 * nshifts))()
        arguments = [self._words, self._launcher.upload(records)]
        self._launch = driver.Launch(
            function, len(records), _THREADS_OF_SLIDES, arguments, self._launcher.where
        )

    def enqueue(self, stream: int, shifts: Sequence[Any]) -> None:
        """Find the places for the numbers of a call: each an int, or a place in GPU memory."""
        if self._launch is None:
            return
        for at, each in enumerate(shifts):
            self._words[3 * at : 3 * at + 3] = (
                (each, 0, 0) if isinstance(each, int) else (0, each.address, each.nbytes)
            )
        self._launch.enqueue(stream)
