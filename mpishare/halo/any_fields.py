"""The engines of a plan for any fields of its block: one pair for each combination of layouts.

All ranks agree on a combination at its first use and keep it, so they all have the same ones. A
rank that waits for this agreement while others exchange a known combination is in a wrong program;
it notices by their counts of calls, since in a right program no rank can get ahead.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from mpishare.coordination import recording
from mpishare.coordination.life import Event
from mpishare.errors import MismatchError, UnsupportedError, format_nbytes, name_ranks
from mpishare.plans.exchange.pair import EnginePair, engine_class
from mpishare.plans.fields import layouts_of
from mpishare.plans.layout import FieldLayout, Layout, as_list
from mpishare.plans.setup import agree_on_fields, agree_on_routes, plan_setup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.engine import Engine, PlanSetup, RoutedSetup
    from mpishare.plans.fields import GivenFields
    from mpishare.plans.message import Message
    from mpishare.plans.setup import Description

log = logging.getLogger("mpishare.halo")

MANY = 64
"""Combinations that deserve a warning: each has staging memory of its own."""

_MAX_KEYS = 1024
_MAX_NAMED = 4  # fields, in the name of a combination
_of_array = attrgetter("shape", "strides", "dtype")


class FieldCells(Protocol):
    """Which cells of fields go where."""

    def describe(self, found: GivenFields) -> Description:
        """Describe fields for an agreement, or raise if they do not fit."""
        ...

    def messages(self, setup: PlanSetup) -> tuple[Sequence[Message], Sequence[Message]]:
        """Return this rank's messages of agreed fields: to send, and to receive."""
        ...


class AnyFields:
    """The engines of a plan for fields of any dtype, and of any axes that are not cut.

    The messages of `setup` are those of a field with the axes of the block alone.
    """

    def __init__(self, setup: RoutedSetup, cells: FieldCells) -> None:
        self.setup, self._cells = setup, cells
        self._backend = "cuda" if setup.on_gpu else "host"
        self._pairs: list[EnginePair] = []
        self._by_key: dict[Any, EnginePair] = {}
        self._started: Engine

    def pair_for(self, call: str, fields: Sequence[Any], stream: Any) -> EnginePair:
        """Return the engines for the fields of a call; local for a known combination."""
        key = _key_of(fields)
        pair = self._by_key.get(key)
        if pair is None:
            pair = self._find(fields) or self._add_combination(call, fields, stream)
            if key is not None:
                if len(self._by_key) >= _MAX_KEYS:
                    self._by_key.clear()
                self._by_key[key] = pair
        return pair

    def has_seen(self, fields: Sequence[Any]) -> bool:
        """Whether `pair_for` is local."""
        return self._find(fields) is not None

    # --- known combinations

    def try_fast(self, fields: Sequence[Any], stream: Any) -> bool:
        """See `Engine.try_fast`."""
        pair = self._by_key.get(_key_of(fields))
        return pair is not None and pair.forward.try_fast(fields, stream)

    def try_start(self, fields: Sequence[Any], stream: Any) -> bool:
        """See `Engine.try_start`."""
        pair = self._by_key.get(_key_of(fields))
        if pair is None or not pair.forward.try_start(fields, stream):
            return False
        self._started = pair.forward
        return True

    def try_wait(self, stream: Any) -> bool:
        """See `Engine.try_wait`."""
        return self._started.try_wait(stream)

    # --- the end

    @property
    def engines(self) -> list[Engine]:
        return [engine for pair in self._pairs for engine in pair.engines]

    @property
    def setups(self) -> list[RoutedSetup]:
        """Setups to close after the engines: the plan's own last."""
        return [*(pair.setup for pair in self._pairs), self.setup]

    # --- a new combination

    def _find(self, fields: Sequence[Any]) -> EnginePair | None:
        """Return the engines of an equivalent combination, None if there is none."""
        try:
            found = layouts_of(as_list(fields), self._backend)
        except (TypeError, ValueError):
            return None  # the agreement on a new combination raises it on all ranks
        device = self.setup.mine[0].device
        seen = [
            replace(each, device=device) if isinstance(field, Layout) else each
            for field, each in zip(fields, found, strict=True)
        ]
        for pair in self._pairs:
            mine = pair.setup.mine
            if len(mine) == len(seen) and all(map(FieldLayout.is_like, mine, seen)):
                return pair
        return None

    def _add_combination(self, call: str, fields: Sequence[Any], stream: Any) -> EnginePair:
        """Agree on a new combination, and make its engines. Collective, host-blocking."""
        outer, begin = self.setup, perf_counter()
        what, given = f"{outer.name}: {call}", _describe(fields)
        if self._is_captured(fields, stream):
            raise UnsupportedError(
                f"{what} failed: the plan has not seen {given} before. All ranks agree on that by "
                "the host, which cannot be captured into a graph. Call it once with such arrays "
                "before the capture."
            )
        try:
            with plan_setup(what, outer.group.comm, outer.context, is_inner=True) as start:
                watch = partial(self._require_none_ahead, what, given)
                agreed = agree_on_fields(
                    replace(start, name=outer.name, backend=self._backend, watch=watch),
                    fields,
                    outer.same["require"],
                    self._cells.describe,
                )
                # Ranks may be in different combinations: an error names that of each.
                name = f"{outer.name} of {_name(agreed.setup.same)}"
                setup = agree_on_routes(
                    replace(agreed.setup, name=name),
                    agreed.arrays,
                    *self._cells.messages(agreed.setup),
                    engine_class,
                    outer,  # calls of one plan are in order, on any streams
                )
                pair = EnginePair(setup)
        except BaseException:
            # A failure on all ranks leaves the plan as it was. No rank may call it again, and get
            # ahead, before all have left the wait in which they compare their counts of calls.
            if outer.context.agreement.failure is None:
                outer.comm.step("a call with new fields, which fails", lambda: None)
            raise
        self._pairs.append(pair)
        log.info(
            "%s has seen %s first, in %.1f ms, %s of staging",
            outer.name,
            given,
            1e3 * (perf_counter() - begin),
            format_nbytes(pair.forward.staging_nbytes),
        )
        if len(self._pairs) == MANY and not setup.comm.rank:
            log.warning(
                "%s has seen %d combinations of dtypes, axes and orders in memory, and keeps "
                "staging memory%s for each until it is closed. Where extents change from call to "
                "call, give it arrays of a few sizes, and use a part of these.",
                outer.name,
                MANY,
                " and a stream" if setup.on_gpu else "",
            )
        return pair

    def _is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        if recording.current() is not None or not self.setup.on_gpu:
            return recording.current() is not None
        from mpishare.plans.gpu.fields import is_captured

        return is_captured(fields, stream, self.setup.context.backend)

    def _require_none_ahead(self, what: str, given: str, wrong: Sequence[Exception]) -> None:
        """Raise if other ranks have made more calls, while this rank waits for an agreement."""
        ahead = sorted({rank for engine in self.engines for rank in engine.ahead()})
        if not ahead:
            return
        agreement = self.setup.context.agreement
        if wrong:
            agreement.leave(what, wrong[0])  # published to the others
            raise wrong[0]
        text = (
            f"{what} failed: {given} with these strides is new to the plan on this rank, while "
            f"{name_ranks(ahead)} of the node gave fields that it has seen. At a call all ranks "
            "must give fields of the same dtypes and axes, and each rank must give them in the "
            "strides in which it gave them first."
        )
        failures = dict.fromkeys(ahead, "gave fields seen before")
        raise agreement.end_by(Event.DISORDER, MismatchError(text, failures=failures))


def _key_of(fields: Sequence[Any]) -> Any:
    """Return a key of shapes, strides and dtypes; None if a field lacks one of these.

    Several keys may belong to one combination. Written for speed: it runs at each call.
    """
    try:
        if len(fields) == 1:
            return _of_array(fields[0])
        return tuple(map(_of_array, fields))
    except AttributeError:  # of tensors
        with suppress(AttributeError, TypeError):
            return tuple((each.shape, each.stride(), each.dtype) for each in fields)
        return None


def _name(same: dict[str, Any]) -> str:
    """Return the name of a combination, the same on all ranks."""
    fields = zip(same["dtypes"], same["other axes"], strict=True)
    words = [f"{dtype}{list(axes) if axes else ''}" for dtype, axes in fields]
    rest = len(words) - _MAX_NAMED
    return ", ".join(words[:_MAX_NAMED] + ([f"{rest} more fields"] if rest > 0 else []))


def _describe(fields: Sequence[Any]) -> str:
    """Return a description of the user's fields, valid or not, for messages."""
    return ", ".join(
        f"{each.dtype}{tuple(each.shape)}"
        if hasattr(each, "dtype") and hasattr(each, "shape")
        else type(each).__name__
        for each in fields
    )
