"""Libraries that move data between GPUs: their interface, and the variant that exchanges by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from mpishare.bench.cases import BASELINES, Usage
from mpishare.bench.comparison import Comparison, Make, Variant
from mpishare.bench.grid import ITEM_NBYTES, Exchange, Problem, Side
from mpishare.bench.report import BASELINE
from mpishare.bench.session import Bound, Call, Session, do_nothing, in_turn
from mpishare.errors import CudaError, UnsupportedError

#: How many calls of something short a graph has.
IN_GRAPHS = (1, 20)


def capture(session: Session, work: Callable[[], object]) -> Any:
    """Return the graph of what `work` puts on the stream.

    Collective: works once first, since what a library sets up or loads at its first use must not be
    captured. Raises `UnsupportedError` if it cannot be captured.
    """
    stream = session.stream
    work()
    session.synchronize()
    try:
        stream.begin_capture()
        work()
        return stream.end_capture()
    # CuPy's of CUDA and of NCCL; mpishare's.
    except (RuntimeError, UnsupportedError, CudaError) as exc:
        # End the capture in any case, and report the first error.
        with suppress(RuntimeError):
            stream.end_capture()
        raise UnsupportedError(f"cannot be captured into a graph: {exc}") from exc


def captured(session: Session, make: Make) -> Make:
    """Return what makes a variant, and one graph of its step. Collective, see `capture`."""

    def made() -> Variant:
        variant = make()
        variant.captured = variant.step
        variant.step = partial(capture(session, variant.step).launch, session.stream)
        return variant

    return made


@dataclass(frozen=True)
class Transfer:
    """Words that leave for one rank in a step, and as many that arrive from another.

    All ranks list their transfers in the same order, and what leaves by the k-th of one rank
    arrives by the k-th of another: where a library needs memory that is symmetric on all ranks, the
    k-th `into` is.
    """

    to: int  # ranks in the session's communicator
    source: int
    out: Any  # 64-bit words, contiguous
    into: Any

    @property
    def words(self) -> int:
        return int(self.out.size)


class Library:
    """A library that moves words between the GPUs of a run, made once per run. Collective."""

    label: ClassVar[str]  # its name in reasons
    #: How many buffers words land in by turns. Two where a rank writes into another's memory, or
    #: lets MPI write into its own, before the reader of the step before is known to be done.
    halves: ClassVar[int] = 1
    #: Whether it takes any memory of the GPU, not only what `empty` returns.
    is_direct: ClassVar[bool] = False
    #: Whether ranks may share a GPU.
    shares_gpus: ClassVar[bool] = True

    def __init__(self, session: Session) -> None:
        self.session = session

    @classmethod
    def refusal(cls, why: str) -> UnsupportedError:
        """Return the error that says why it cannot run here."""
        return UnsupportedError(f"{cls.label}: {why}")

    @classmethod
    @contextmanager
    def refusals(cls, *errors: type[Exception]) -> Iterator[None]:
        """Turn the library's own errors into such a one."""
        try:
            yield
        except errors as exc:
            # The first line has the reason; the others say where in the library it arose.
            lines = str(exc).strip().splitlines()
            raise cls.refusal(lines[0] if lines else type(exc).__name__) from exc

    @classmethod
    def require(cls, session: Session) -> None:
        """Raise `UnsupportedError` where it is not installed, or does not work. Local."""

    def empty(self, words: int) -> Any:
        """Return memory of the GPU that the library can send from and receive into. Collective."""
        return self.session.node.xp.zeros(words, "u8")

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Call:
        """Return the call that moves the words of all `transfers`, stream-ordered or host-blocking.

        Collective. Work that is enqueued after the call finds the words where they land. `early`:
        words may land as soon as the ranks have come to this step, before the stream has, since the
        buffers are from `empty`, and there are `halves` of them, used in turn. Without it the words
        of the step before may be read until the stream has come to this step.
        """
        raise NotImplementedError

    def bind_sum(self, array: Any) -> Call:  # noqa: ARG002
        """Return the call that replaces an array by its sum over all ranks. Collective."""
        raise self.refusal("no sum over all ranks")

    def bind_gather(self, out: Any, into: Any) -> Call:  # noqa: ARG002
        """Return the call that brings `out` of all ranks into `into`, by rank. Collective."""
        raise self.refusal("no gather on all ranks")

    def free(self, memory: Any) -> None:
        """Free what `empty` returned. Collective."""

    def close(self) -> None:
        """Shut the library down. Collective."""


def open_library(session: Session, kind: type[Library]) -> tuple[Any, str | None]:
    """Return the library, made once per run, or None and why it cannot run. Collective."""
    if kind in session.libraries:
        return session.libraries[kind]
    library = None
    # Known to all before any rank enters the library, which would wait for the others there.
    _, reason = session.attempt(lambda: kind.require(session))
    if reason is None and session.ranks_per_gpu > 1 and not kind.shares_gpus:
        reason = f"{kind.label}: ranks share a GPU"
    if reason is None:
        library, reason = session.attempt(lambda: kind(session))
    session.libraries[kind] = library, reason
    return library, reason


def included(comparison: Comparison) -> Iterator[tuple[str, ModuleType, dict[str, Usage]]]:
    """Yield the name and module of each library that the run includes, and its variants."""
    for name, each in BASELINES.items():
        if each.usages and comparison.includes(name):
            yield name, import_module(each.module), each.usages


def add_collectives(
    comparison: Comparison, make: Callable[..., Variant], bind: Callable[..., Call]
) -> None:
    """Enter a collective of each library that the run includes, once, and in graphs.

    `make` takes what binds a call to arrays, `allocate` for these and ``steps=``; `bind` takes the
    library and the arrays.
    """
    for name, module, usages in included(comparison):
        kind = getattr(module, next(iter(usages.values())).kind)
        library, refusal = open_library(comparison.session, kind)
        graphs = IN_GRAPHS if any(usage.is_captured for usage in usages.values()) else ()
        make_one = partial(_collective, library, make, bind)
        add_with_graphs(comparison, name, make_one, graphs, kind=BASELINE, unfit=refusal)


def _collective(
    library: Library, make: Callable[..., Variant], bind: Callable[..., Call], steps: int = 1
) -> Variant:
    def allocate(shape: tuple[int, ...], dtype: Any) -> Any:
        words = prod(shape) * np.dtype(dtype).itemsize // ITEM_NBYTES
        return library.empty(words).view(dtype).reshape(shape)

    def bound(_: Problem, *arrays: Any) -> Bound:
        free = (partial(library.free, array.view("u8")) for array in reversed(arrays))
        return bind(library, *arrays), in_turn(*free)

    return make(bound, allocate=allocate, steps=steps)


def add_with_graphs(
    comparison: Comparison,
    name: str,
    make: Callable[..., Variant],
    steps: Sequence[int],
    mark: str = " ",
    **arguments: Any,
) -> None:
    """Enter a variant as it is called, and on CUDA for each of `steps` a graph of so many calls.

    `make` takes the number of calls as ``steps=``; `mark` stands in a name before that of a graph.
    """
    comparison.add(name, make, **arguments)
    for count in steps if comparison.session.on_cuda else ():
        label = f"{name}{mark}graph" + f" of {count}" * (count > 1)
        make_graph = captured(comparison.session, partial(make, steps=count))
        comparison.add(label, make_graph, **arguments)


def add_libraries(comparison: Comparison, problem: Problem) -> None:
    """Enter the variants of the libraries that the run includes; they are opened once."""
    for _, module, usages in included(comparison):
        for variant, usage in usages.items():
            if usage.in_place and problem.has_buffers:
                continue  # these are put into memory of the library anyway
            library, refusal = open_library(problem.session, getattr(module, usage.kind))
            make: Make = partial(LibraryExchange, problem, library, usage)
            if usage.is_captured:
                make = captured(problem.session, make)
            comparison.add(variant, make, kind=BASELINE, unfit=refusal)


class LibraryExchange(Exchange[Problem]):
    """Pack all sides into memory of the library, move, unpack.

    There is nothing to pack where the fields are buffers, which are then memory of the library, or
    where every face is contiguous and the library takes any memory.
    """

    # Set before `Exchange` asks for the current fields.
    _landed: list[Any] | None = None  # memory of the library that stands for fields, by turns
    _turn = 0

    def __init__(self, problem: Problem, library: Library, usage: Usage) -> None:
        self._library, self._usage = library, usage
        self._owned: list[Any] = []  # memory of the library
        self._is_contiguous = problem.has_contiguous_faces()
        if not self._is_contiguous and usage.in_place:
            raise library.refusal("its faces are not contiguous")
        fields = problem.fields
        super().__init__(problem, self._bind, self._in_place(fields) if usage.in_place else fields)

    def _in_place(self, fields: Sequence[Any]) -> list[Any]:
        self._owned = [self._library.empty(int(field.size)) for field in fields]
        pairs = zip(self._owned, fields, strict=True)
        return [memory.view(field.dtype).reshape(field.shape) for memory, field in pairs]

    def _bind(self, problem: Problem, *fields: Any) -> Bound:
        library, usage = self._library, self._usage
        sends_faces = library.is_direct and self._is_contiguous and not problem.has_buffers
        if usage.in_place or sends_faces:
            return self._move_of_faces(fields), self._free_memory
        # A graph has its buffers baked in: it cannot use two of them in turn.
        turns = self._turns_of_buffers(1 if usage.is_captured else library.halves)

        def exchange() -> None:
            self._turn = (self._turn + 1) % len(turns)
            turns[self._turn]()

        return exchange, self._free_memory

    def _move_of_faces(self, fields: Sequence[Any]) -> Call:
        faces = self.problem.faces(fields)
        out, into = ([view.view("u8").ravel() for view in views] for views in faces)
        per_field = [side for side in self.problem.sides for _ in fields]
        return self._library.bind(transfers(per_field, out, into), early=False)

    def _turns_of_buffers(self, halves: int) -> list[Call]:
        """Return for each of the buffers that words land in by turns: pack, move, unpack."""
        problem, library = self.problem, self._library
        words = max(sum(problem.slots()), 1)
        self._owned = [library.empty(words) for _ in range(1 + halves)]
        out, *landed = self._owned
        found = []
        for into in landed:
            moved = transfers(problem.sides, *problem.parts(out, into))
            move: Call = do_nothing
            if moved:  # there is another rank
                move = library.bind(moved, early=halves == library.halves)
            if problem.has_buffers:
                self._landed = landed
                found.append(move)
            else:
                pack, unpack = problem.packing(self.fields, out, into)
                found.append(in_turn(pack, move, unpack))
        return found

    def current(self) -> Sequence[Any]:
        if self._landed is None:
            return self.fields
        rows = len(self.fields[0]), -1
        return [each.reshape(rows) for each in (self._owned[0], self._landed[self._turn])]

    def _free_memory(self) -> None:
        self._landed = None
        while self._owned:
            self._library.free(self._owned.pop())


def transfers(sides: Sequence[Side], out: list[Any], into: list[Any]) -> list[Transfer]:
    moved = zip(sides, out, into, strict=True)
    return [Transfer(side.to, side.source, *views) for side, *views in moved]
