"""A plan for any fields of its block: a dictionary of engines, by the layouts of the fields.

All ranks make a pair of engines together, at the first call with such fields, and keep it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from mpishare.coordination import recording
from mpishare.errors import UnsupportedError, format_nbytes
from mpishare.plans.exchange.pair import EnginePair, engine_class
from mpishare.plans.fields import GivenFields, layouts_of
from mpishare.plans.layout import as_list
from mpishare.plans.setup import agree_on_fields, agree_on_routes, plan_setup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.plans.engine import PlanSetup, RoutedSetup
    from mpishare.plans.exchange.pair import Engine
    from mpishare.plans.message import Message
    from mpishare.plans.setup import Description

log = logging.getLogger("mpishare.halo")

_of_array = attrgetter("shape", "strides", "dtype")


class FieldCells(Protocol):
    def describe(self, found: GivenFields) -> Description:
        """Describe fields for an agreement, or raise if they do not fit."""
        ...

    def messages(self, setup: PlanSetup) -> tuple[Sequence[Message], Sequence[Message]]:
        """Return this rank's messages of agreed fields: to send, and to receive."""
        ...


class AnyFields:
    """The engines for fields of any dtype, and of any axes that are not cut.

    The messages of `setup` are those of a field with the axes of the block alone.
    """

    def __init__(self, setup: RoutedSetup, cells: FieldCells) -> None:
        self._setup, self._cells = setup, cells
        self._backend = "cuda" if setup.on_gpu else "host"
        self._pairs: dict[Any, EnginePair] = {}
        # The same pairs by what arrays say of themselves, which takes less time to compare.
        self._seen: dict[Any, EnginePair] = {}
        self._started: Engine

    def pair_for(self, call: str, fields: Sequence[Any], stream: Any) -> EnginePair:
        """Return the engines for the fields of a call; collective for a new kind of fields."""
        words = _words_of(fields)
        pair = self._seen.get(words)
        if pair is None:
            pair = self._pairs.get(self._key(fields)) or self._add(call, fields, stream)
            if words is not None:
                self._seen[words] = pair
        return pair

    def has_seen(self, fields: Sequence[Any]) -> bool:
        """Whether `pair_for` is local."""
        return self._key(fields) in self._pairs

    def exchange(self, fields: Sequence[Any], stream: Any) -> None:
        pair = self._seen.get(_words_of(fields)) or self.pair_for("exchange", fields, stream)
        pair.forward.exchange(fields, stream)

    def start(self, fields: Sequence[Any], stream: Any) -> None:
        self._started = self.pair_for("start", fields, stream).forward
        self._started.start(fields, stream)

    def wait(self, fields: Sequence[Any], stream: Any) -> None:
        self._started.wait(fields, stream)

    @property
    def engines(self) -> list[Engine]:
        return [engine for pair in self._pairs.values() for engine in pair.engines]

    @property
    def setups(self) -> list[RoutedSetup]:
        """Setups to close after the engines: the plan's own last."""
        return [*(pair.setup for pair in self._pairs.values()), self._setup]

    def _key(self, fields: Sequence[Any]) -> Any:
        """Return the layouts of fields; None for those that no plan takes."""
        try:
            layouts = layouts_of(as_list(fields), self._backend)
        except (TypeError, ValueError):
            return None  # the agreement raises it on all ranks
        # A `Layout` is on no device yet.
        return tuple(replace(each, device=self._setup.mine[0].device).key for each in layouts)

    def _add(self, call: str, fields: Sequence[Any], stream: Any) -> EnginePair:
        """Agree on a new kind of fields, and make its engines. Collective, host-blocking."""
        outer = self._setup
        what = f"{outer.name}: {call}"
        if self._is_captured(fields, stream):
            raise UnsupportedError(
                f"{what} failed: the plan has not seen these fields before. All ranks agree on "
                "that by the host, which cannot be captured into a graph. Call it once with such "
                "arrays before the capture."
            )
        # Before the others learn of it: they wait for this call until it is made right.
        self._cells.describe(GivenFields.of(fields, self._backend))
        with plan_setup(what, outer.comm.comm, outer.context, outer=outer.comm) as start:
            start.name, start.backend = outer.name, self._backend
            agreed = agree_on_fields(start, fields, outer.same["require"], self._cells.describe)
            # Ranks may be at fields of different kinds: an error names those of each.
            same = agreed.setup.same
            kinds = zip(same["dtypes"], same["other axes"], strict=True)
            texts = dict.fromkeys(f"{dtype}{[*axes] or ''}" for dtype, axes in kinds)
            named = replace(agreed.setup, name=f"{outer.name} of {', '.join(texts)}")
            messages = self._cells.messages(named)
            # Calls of one plan are in order, on any streams: the pair gets those of `outer`.
            setup = agree_on_routes(named, agreed.arrays, *messages, engine_class, outer)
            pair = self._pairs[self._key(fields)] = EnginePair(setup)
        log.info("%s made, %s of staging", setup.name, format_nbytes(pair.forward.staging_nbytes))
        return pair

    def _is_captured(self, fields: Sequence[Any], stream: Any) -> bool:
        if recording.current() is not None or not self._setup.on_gpu:
            return recording.current() is not None
        from mpishare.plans.gpu.fields import is_captured

        return is_captured(fields, stream, self._setup.context.backend)


def _words_of(fields: Sequence[Any]) -> Any:
    """Return what arrays say of themselves; None for a field that says less."""
    try:
        return _of_array(fields[0]) if len(fields) == 1 else tuple(map(_of_array, fields))
    except AttributeError:  # of tensors
        with suppress(AttributeError, TypeError):
            return tuple((each.shape, each.stride(), each.dtype) for each in fields)
        return None
