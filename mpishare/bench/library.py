"""Libraries that move data between GPUs: their interface, and the variant that exchanges by one."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from mpishare.bench.cases import BROUGHT, LIBRARIES, TRIAL
from mpishare.bench.comparison import Wrapper
from mpishare.bench.grid import Exchange, Problem
from mpishare.bench.report import BASELINE
from mpishare.bench.staged import Packing, side_sizes, split
from mpishare.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpishare.bench.cases import Way
    from mpishare.bench.comparison import Comparison, Variant
    from mpishare.bench.grid import Side
    from mpishare.bench.session import Session


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
    except RuntimeError as exc:  # CuPy's of CUDA and of NCCL
        # End the capture in any case, and report the first error.
        with suppress(RuntimeError):
            stream.end_capture()
        raise UnsupportedError(f"cannot be captured into a graph: {exc}") from exc


class Captured(Wrapper):
    """The step of `inner` as one graph. Collective, see `capture`."""

    def __init__(self, session: Session, inner: Variant) -> None:
        super().__init__(inner)
        self.stream = session.stream
        self.graph = capture(session, inner.step)

    def step(self) -> None:
        self.graph.launch(self.stream)

    def close(self) -> None:
        self.stream.synchronize()
        del self.graph
        super().close()


def captured(session: Session, make: Callable[[], Variant]) -> Callable[[], Variant]:
    """Return what makes a variant, and captures its step."""
    return lambda: Captured(session, make())


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
        """How many words move each way."""
        return int(self.out.size)


class Library:
    """A library that moves words between the GPUs of a run.

    Collective, host-blocking, and made once per run: its setup before the first word can move.
    """

    label: ClassVar[str]  # its name in reasons
    #: How many buffers words land in by turns. Two where a rank writes into another's memory, or
    #: lets MPI write into its own, before the reader of the step before is known to be done.
    halves: ClassVar[int] = 1
    #: Whether it takes any memory of the GPU, not only what `empty` returns.
    is_direct: ClassVar[bool] = False
    #: What ranks that share a GPU must try, None where it works anyway.
    shared_trial: ClassVar[str | None] = None

    def __init__(self, session: Session) -> None:
        self.session = session

    @classmethod
    def require(cls, session: Session) -> None:
        """Raise `UnsupportedError` where it is not installed, or does not work. Local."""

    @classmethod
    def unique_id(cls) -> bytes:
        """Return what ranks find each other by. On rank 0, local."""
        raise NotImplementedError

    def empty(self, words: int) -> Any:
        """Return memory of the GPU that the library can send from and receive into. Collective."""
        return self.session.node.xp.zeros(words, "u8")

    def bind(self, transfers: Sequence[Transfer], *, early: bool) -> Callable[[], None]:
        """Return the call that moves the words of all `transfers`, stream-ordered or host-blocking.

        Collective. Work that is enqueued after the call finds the words where they land. `early`:
        words may land as soon as the ranks have come to this step, before the stream has, since the
        buffers are from `empty`, and there are `halves` of them, used in turn. Without it the words
        of the step before may be read until the stream has come to this step.
        """
        raise NotImplementedError

    def bind_sum(self, array: Any) -> Callable[[], None]:  # noqa: ARG002
        """Return the call that replaces an array by its sum over all ranks. Collective.

        Stream-ordered or host-blocking; `UnsupportedError` where the library has none.
        """
        raise UnsupportedError(f"{self.label}: no sum over all ranks")

    def free(self, memory: Any) -> None:
        """Free what `empty` returned. Collective."""

    def close(self) -> None:
        """Shut the library down. Collective."""


@contextmanager
def refusals(label: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn a library's own errors into an `UnsupportedError` that says why it cannot run here.

    The first line of the message has the reason; the others say where in the library it arose.
    """
    try:
        yield
    except errors as exc:
        lines = str(exc).strip().splitlines()
        raise UnsupportedError(f"{label}: {lines[0] if lines else type(exc).__name__}") from exc


def open_library(session: Session, kind: type[Library]) -> tuple[Library | None, str | None]:
    """Return the library, made once per run, or why it cannot run. Collective, host-blocking."""
    if kind in session.libraries:
        return session.libraries[kind]
    library = None
    # Agreed on before any rank enters the library, which would wait for the others there.
    _, reason = session.attempt(lambda: kind.require(session))
    if reason is None and session.ranks_per_gpu > 1:
        reason = _refusal_to_share(session, kind)
    if reason is None:
        library, reason = session.attempt(lambda: kind(session))
    session.libraries[kind] = library, reason
    return library, reason


def _refusal_to_share(session: Session, kind: type[Library]) -> str | None:
    """Return why ranks that share a GPU cannot use the library, or None. Collective."""
    if kind.shared_trial is None:
        return None
    if TRIAL in BROUGHT:
        failure = import_module(BROUGHT[TRIAL]).try_sharing(session, kind)
        return failure and f"{kind.label}: ranks that share a GPU: {failure}"
    return f"{kind.label}: ranks share a GPU"


def add_library(comparison: Comparison, name: str, problem: Problem) -> None:
    """Enter the variants of a library, opened by the first call, if the run includes it."""
    if not comparison.includes(name):
        return
    session = problem.session
    module_name, variants = LIBRARIES[name]
    module = import_module(module_name)
    for variant, way in variants.items():
        if way.in_place and problem.has_buffers:
            continue  # these are put into memory of the library anyway
        library, refusal = open_library(session, getattr(module, way.kind))
        make = partial(_make, problem, library, way)
        comparison.add(variant, make, kind=BASELINE, unfit=refusal)


def _make(problem: Problem, library: Library | None, way: Way) -> Variant:
    """Return a variant of a library. Collective."""
    if library is None:
        raise UnsupportedError("the library was not opened")
    exchange = LibraryExchange(problem, library, way)
    return Captured(problem.session, exchange) if way.is_captured else exchange


def add_reductions(
    comparison: Comparison, name: str, session: Session, make: Callable[..., Variant], steps: int
) -> None:
    """Enter a library's sums over all ranks, made as `allreduce.Sum` is: called, and captured.

    One graph has one of them and one has `steps`, where the library can be in a graph.
    """
    if not comparison.includes(name):
        return
    module, ways = LIBRARIES[name]
    first = next(iter(ways.values()))
    kind: type[Library] = getattr(import_module(module), first.kind)
    library, refusal = open_library(session, kind)

    def bind(session: Session, array: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        if library is None:
            raise UnsupportedError(str(refusal))
        if library.is_direct:
            return library.bind_sum(array), session.synchronize
        return library.bind_sum(array), partial(library.free, array.view("u8"))

    def make_one(count: int = 1) -> Variant:
        if library is None:
            raise UnsupportedError(str(refusal))
        return make(bind, steps=count, allocate=None if library.is_direct else library.empty)

    comparison.add(name, make_one, kind=BASELINE, unfit=refusal)
    if any(way.is_captured for way in ways.values()):
        for label, count in ((f"{name} graph", 1), (f"{name} graph of {steps}", steps)):
            comparison.add(
                label, captured(session, partial(make_one, count)), kind=BASELINE, unfit=refusal
            )


class LibraryExchange(Exchange[Problem]):
    """Pack all sides into memory of the library, move, unpack.

    There is nothing to pack where the fields are buffers, which are then memory of the library, or
    where every face is contiguous and the library takes any memory.
    """

    # Set before `Exchange` asks for the current fields.
    _packing: Packing | None = None
    _memory: list[Any] | None = None  # of the library: what leaves, and where words land
    _turn = 0

    def __init__(self, problem: Problem, library: Library, way: Way) -> None:
        self._library = library
        self._owned: list[Any] = []  # memory of the library
        sides, fields = problem.sides, problem.fields
        views = [problem.leaving(side, fields) + problem.arriving(side, fields) for side in sides]
        is_contiguous = all(view.flags.c_contiguous for each in views for view in each)
        if way.in_place:
            if not is_contiguous:
                raise UnsupportedError(f"{library.label}: its faces are not contiguous")
            self._owned = [library.empty(int(field.size)) for field in fields]
            pairs = zip(self._owned, fields, strict=True)
            fields = [memory.view(field.dtype).reshape(field.shape) for memory, field in pairs]
        super().__init__(problem, fields)
        if way.is_packed and not is_contiguous:
            raise UnsupportedError(f"{library.label}: it packs these faces anyway")
        is_direct = library.is_direct and is_contiguous and not way.is_packed
        if way.in_place or (is_direct and not problem.has_buffers):
            out, into = (
                [view.view("u8").ravel() for side in sides for view in of_side(side, fields)]
                for of_side in (problem.leaving, problem.arriving)
            )
            per_field = [side for side in sides for _ in fields]
            self._moves = [library.bind(_transfers(per_field, out, into), early=False)]
            return
        sizes = side_sizes(problem, fields)
        if not problem.has_buffers:
            self._packing = Packing(problem, fields)
        # A graph has its buffers baked in: it cannot use two of them in turn.
        halves = 1 if way.is_captured else library.halves
        self._memory = self._owned = [library.empty(sum(sizes)) for _ in range(1 + halves)]
        packed, *landed = self._memory
        early = halves == library.halves
        self._moves = [
            library.bind(_transfers(sides, split(packed, sizes), split(half, sizes)), early=early)
            for half in landed
        ]

    def current(self) -> Sequence[Any]:
        if self._memory is None or self._packing is not None:
            return self.fields
        rows = len(self.fields[0]), -1
        return [self._memory[i].reshape(rows) for i in (0, 1 + self._turn)]

    def step(self) -> None:
        turn = self._turn = (self._turn + 1) % len(self._moves)
        if self._packing is None or self._memory is None:
            self._moves[turn]()
            return
        self._packing.pack(self._memory[0])
        self._moves[turn]()
        self._packing.unpack(self._memory[1 + turn])

    def close(self) -> None:
        self.problem.session.synchronize()
        del self._moves, self.fields
        self._packing = self._memory = None
        while self._owned:
            self._library.free(self._owned.pop())


def _transfers(sides: Sequence[Side], out: list[Any], into: list[Any]) -> list[Transfer]:
    return [
        Transfer(side.to, side.source, leaving, arriving)
        for side, leaving, arriving in zip(sides, out, into, strict=True)
    ]
