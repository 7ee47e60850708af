"""Exchanges of fields that were seen before: one look at them, and one graph."""

from __future__ import annotations

from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any

import cupy

from mpishare.backends import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.backends import Backend
    from mpishare.coordination.agreement import Agreement
    from mpishare.halo.cuda.flags import PinnedFlags
    from mpishare.halo.cuda.fused import LaunchOrder
    from mpishare.halo.layout import Layout
    from mpishare.ordering.stream_chain import StreamChain

_Array = cupy.ndarray
_layout_of = attrgetter("shape", "strides", "dtype")


def key_of(places: tuple[int, ...]) -> Any:
    """Return what graphs of fields at these addresses are found by. Local."""
    return places if len(places) > 1 else places[0]


def quick_of(
    layouts: Sequence[Layout],
    graphs: Mapping[Any, int],
    agreement: Agreement,
    chain: StreamChain,
    turns: LaunchOrder,
    words: PinnedFlags,
    backend: Backend,
    where: str,
) -> Callable[[Sequence[Any], Any], bool]:
    """Return a call that exchanges fields of which there is a graph, or returns False. Local.

    Python takes longer to look at a call than the GPU takes for it. So where the whole exchange is
    one graph, no more is done than to see that nothing has changed since; and the call is made
    for its plan, since a look at an attribute is a third of what is left.

    Parameters
    ----------
    layouts : sequence of Layout
        This rank's fields'.
    graphs : mapping of `key_of` to int
        The handles of the graphs of whole exchanges, by where the fields are.
    agreement, chain, turns, words
        The node's, and the plan's.
    backend : Backend
        Whose current stream counts.
    where : str
        For errors.
    """
    first, *others = map(_layout_of, layouts)
    count, is_current = len(layouts), backend.is_current

    def quick(fields: Sequence[Any], stream: Any) -> bool:
        if stream is not None or len(fields) != count:
            return False
        field = fields[0]
        if type(field) is not _Array or _layout_of(field) != first:
            return False
        key: Any = field.data.ptr
        if others:  # by themselves: a loop over one takes as long as the whole look at it
            places = [key]
            for field, expected in zip(fields[1:], others, strict=True):
                if type(field) is not _Array or _layout_of(field) != expected:
                    return False
                places.append(field.data.ptr)
            key = tuple(places)
        graph = graphs.get(key)
        if graph is None or agreement.failure is not None or agreement.thread != get_ident():
            return False
        number = chain.number
        if number is None or not chain.is_kept or not is_current(number):
            return False
        if turns.plans > 1 and (number != turns.chain.number or not turns.chain.is_kept):
            return False
        driver.launch_graph(graph, number, where)
        words.calls[0] += 1
        return True

    return quick
