"""The exception tree: errors with their facts as attributes."""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import logging
    from collections.abc import Collection, Iterable, Mapping, Sequence

Key = TypeVar("Key")
Value = TypeVar("Value")


class MpiShareError(Exception):
    """Base of every error of mpishare itself. Can be pickled, and keeps its attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[MpiShareError], args: tuple[Any, ...], facts: dict[str, Any]) -> Any:
    """Make an error anew, not by its own constructor, which takes facts by their names."""
    error = kind.__new__(kind, *args)
    super(MpiShareError, error).__init__(*args)
    error.__dict__.update(facts)
    return error


class CudaError(MpiShareError):
    """A CUDA driver call failed.

    Attributes
    ----------
    call : str
        The driver function, e.g. ``cuMemAlloc``.
    code : int
        The driver's result, e.g. 2.
    name : str
        The driver's name for it, e.g. ``CUDA_ERROR_OUT_OF_MEMORY``.
    """

    def __init__(self, message: str, *, call: str, code: int, name: str) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class PeerError(MpiShareError):
    """Another rank failed; the cause is not on this rank.

    Attributes
    ----------
    failures : dict of int to str
        For each rank that failed, its error as text. Ranks are those of ``node.comm``; those of
        the communicator that was given where ``Node()`` itself failed.
    """

    def __init__(self, message: str, *, failures: Mapping[int, str]) -> None:
        super().__init__(message)
        self.failures: dict[int, str] = dict(failures)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that failed, in order."""
        return tuple(sorted(self.failures))


class MismatchError(PeerError, ValueError):
    """Ranks made different collective calls, or the same one with arguments that differ.

    ``failures`` has the call or arguments of each rank that differs from this one.
    """


class PeerTimeout(MpiShareError, TimeoutError):
    """A rank is missing: it died, or it did not arrive within the deadline.

    Attributes
    ----------
    ranks : tuple of int
        The missing ranks. Empty where they cannot be known: when ``Node()`` itself waits, or the
        close of a plan over several nodes.
    timeout_s : float, seconds
        The deadline that was in force.
    where : dict of int to str
        Where missing ranks of the node were at the deadline, as they said themselves: the file, the
        line and the function of their program, or why there was no answer. Empty after a death.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Iterable[int],
        timeout_s: float,
        where: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(sorted(ranks))
        self.timeout_s = timeout_s
        self.where: dict[int, str] = dict(where or {})


class UnsupportedError(MpiShareError):
    """The request cannot be fulfilled here; the message has the reason and the remedy."""


class CapacityError(MpiShareError):
    """More rows came than there is room for; none of them is lost."""


class HandleError(MpiShareError, ValueError):
    """A received handle does not fit, and was refused before the driver saw it."""


class ClosedError(MpiShareError, RuntimeError):
    """The object was used after it was closed."""


class EpochError(MpiShareError, RuntimeError):
    """Calls in the wrong order: complete without start, wait without post, or either twice.

    With ``MPISHARE_CHECK=1`` also a race: two ranks touched an element without an order between
    them. In kernels: a word of `put_word` that the next one overwrote before it was read.
    """


_MOST_NAMED = 6  # of the values in one message
_MOST_SHOWN = 80  # characters of a value that is none


def escaped(text: str, kept: str = "") -> str:
    """Return text safe for a terminal: `kept` are characters that stay though they do not print."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def describe(error: BaseException) -> str:
    """Return an error as one line, for other ranks."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as inner:  # of a user's class; the others must hear of the error all the same
        text = f"(its text raised {type(inner).__name__})"
    return f"{name}: {text}" if text else name


def peer_error(call: str, failures: dict[int, str]) -> PeerError:
    """Return the error with the failures of other ranks in a call, which names the call once."""
    texts = {r: text.replace(f": {call} failed: ", ": ", 1) for r, text in failures.items()}
    whole = f"{call} failed on {name_ranks(failures)}: {_joined(texts)}"
    return PeerError(whole, failures=failures)


def mismatch(
    what: str,
    values: Mapping[int, str],
    rank: int,
    verb: str,
    rule: str,
    where: Mapping[int, str] = MappingProxyType({}),
) -> MismatchError:
    """Return the error of ranks that differ: those with the rarest value first.

    `what` stands before the values of all ranks, `rule` behind them; ranks `verb` their value, and
    are `where` that is known.
    """
    holders = grouped((value, each) for each, value in values.items())
    groups = sorted(holders.items(), key=lambda group: (len(group[1]), group[1]))
    *rare, (most, many) = groups
    texts = [f"{name_ranks(ranks)}: {value}" for value, ranks in rare[:_MOST_NAMED]]
    if len(rare) > _MOST_NAMED:
        texts.append(f"{len(rare) - _MOST_NAMED} more values")
    is_rule = bool(rare) and len(many) > len(rare[-1][1])
    texts.append(f"{f'the other {len(many)} ranks' if is_rule else name_ranks(many)}: {most}")
    mine = values[rank]
    differing = {each: f"{verb} {value}" for each, value in values.items() if value != mine}
    whole = f"{what}: {'; '.join(texts)}{name_places(where)}. {rule}"
    return MismatchError(whole, failures=differing)


def departure_error(
    call: str,
    departures: dict[int, str],
    missing: Collection[int],
    timeout_s: float,
    where: Mapping[int, str],
) -> PeerError | PeerTimeout:
    """Return the error of a call that could not end, since other ranks had left before it.

    A `PeerTimeout` where they left since others are `missing`, whose places their texts have.
    """
    verb = "has" if len(departures) == 1 else "have"
    whole = f"{call} failed: {name_ranks(departures)} {verb} left: {_joined(departures)}"
    if missing:
        return PeerTimeout(whole, ranks=missing, timeout_s=timeout_s, where=where)
    return PeerError(whole, failures=departures)


# All texts of `PeerTimeout`. The remedy for a dead rank whose death no other rank of its node could
# report:
_UNSEEN_DEATH = (
    "All ranks make the same calls, in one order: did one leave a call out? If one died, let "
    "`srun --kill-on-bad-exit=1` or `python -m mpi4py` end the job."
)
_UNUSABLE = "The node cannot be used any more"


def late(
    what: str,
    timeout_s: float,
    more: str,
    ranks: Iterable[int] = (),
    where: Mapping[int, str] | None = None,
) -> PeerTimeout:
    """Return the error where something did not happen by the deadline; `ranks` are missing."""
    text = f"{what} within {timeout_s:g} s{more}"
    return PeerTimeout(text, ranks=ranks, timeout_s=timeout_s, where=where)


def late_ranks(
    call: str, ranks: Collection[int], timeout_s: float, here: str, where: Mapping[int, str]
) -> PeerTimeout:
    """Return the error of a call in which ranks of the node are missing; `here` is this rank."""
    what = f"{call} failed: {name_ranks(ranks)} did not arrive"
    remedy = "Look there for a missing call, or give Node a larger timeout_s"
    more = f" ({here}){name_places(where)}. {remedy}. {_UNUSABLE}."
    return late(what, timeout_s, more, ranks, where)


def closed(what: str) -> ClosedError:
    """Return the error of a call of an object that was closed, by itself or with its node."""
    return ClosedError(f"{what} is closed. Use it before close() or the end of its with block")


def overwritten(call: str, ranks: Collection[int], here: str) -> EpochError:
    """Return the error of a kernel that has missed a word of `ranks`."""
    return EpochError(
        f"{call} failed: {name_ranks(ranks)} sent the next word to a slot before this one was read "
        f"({here}). Let the sender wait for an answer to each word, or take two slots in turn. "
        f"{_UNUSABLE}."
    )


def late_elsewhere(
    call: str,
    places: Collection[int],
    ranks: Collection[int],
    timeout_s: float,
    here: str,
    where: Mapping[int, str],
) -> PeerTimeout:
    """Return the error where some of a plan's `places` are not `ranks` of this node."""
    what = f"{call} failed: {name_ranks(places)} of the plan's communicator did not arrive"
    more = f" ({here}){name_places(where)}. {_UNUSABLE}. {_UNSEEN_DEATH}"
    return late(what, timeout_s, more, ranks, where)


def late_unknown(call: str, timeout_s: float) -> PeerTimeout:
    """Return the error where the missing ranks cannot be known, but for ranks of a node."""
    what = f"{call} failed: not every rank of the communicator arrived"
    rule = "All of its ranks must call it, and none inside of `if rank == 0:`"
    return late(what, timeout_s, f". {rule}. {_UNSEEN_DEATH}")


def is_failing_exit(error: BaseException) -> bool:
    """Whether an exception is a `sys.exit` with a status other than 0, or with a text."""
    return isinstance(error, SystemExit) and bool(error.code)


def describe_death(dead: Iterable[int], rank: int, size: int) -> str:
    """Return the line that one survivor prints."""
    return f"{name_ranks(dead)} of {size} died (seen by rank {rank})"


def died(dead: Sequence[int], rank: int, size: int, timeout_s: float) -> PeerTimeout:
    """Return the error of every call after a death."""
    death = describe_death(dead, rank, size)
    text = f"{death}. {_UNUSABLE}: its close waits for nobody, and the job is aborted at exit."
    return PeerTimeout(text, ranks=dead, timeout_s=timeout_s)


def _joined(texts: dict[int, str]) -> str:
    """Join the texts of the ranks; of one rank, which is named before, the text alone."""
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))


def describe_stragglers(
    call: str, ranks: Sequence[int], since_s: float, rank: int, where: Mapping[int, str]
) -> str:
    """Return a text that names the ranks of a long wait, and where they are."""
    waits = f"rank {rank} has waited {since_s:.0f} s in {call} for {name_ranks(ranks)}"
    return waits + name_places(where)


def name_places(where: Mapping[int, str]) -> str:
    """Return where ranks are, to follow a text."""
    groups = [*grouped((text, rank) for rank, text in where.items()).items()]
    named = [
        f"; {name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}"
        for text, ranks in groups[:_MOST_NAMED]
    ]
    more = len(groups) - _MOST_NAMED
    return "".join(named) + (f"; {counted(more, 'more place')}" if more > 0 else "")


def shortened(value: object) -> str:
    """Return the `repr` of a user's value, of 80 characters at most."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def format_nbytes(nbytes: int) -> str:
    """Return a size in the largest unit that it reaches: ``8 B``, ``64 KiB``, ``1.5 MiB``."""
    for unit, power in (("EiB", 60), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes} B"


@functools.cache
def warn_once(log: logging.Logger, text: str, *values: str) -> None:
    """Warn once in each process, of the same."""
    log.warning(text, *values)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in the order in which they come."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence."""
    listed = [str(rank) for rank in sorted(ranks)]
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(listed)
