"""The open nodes of this process, and those among them that the program has dropped.

A node that was dropped has no collective call of its own. The next one that has all its ranks
closes it: that which makes a node of them, or `Node.collect` of a node that has them.
"""

from __future__ import annotations

import logging
from itertools import chain
from threading import get_ident
from typing import TYPE_CHECKING, Any

from mpishare.coordination.objects import Children
from mpishare.errors import MpiShareError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mpishare.runtime.context import NodeContext
    from mpishare.runtime.findings import Findings


log = logging.getLogger("mpishare")


class OpenNodes(Children):
    """The nodes of all threads; each call is about those of the calling one."""

    def surveyed(self, place: list[Any] | None) -> dict[str, NodeContext]:
        """Return by their names the whole nodes that have findings of their own, of this place.

        Those that have probed GPUs come first: a node on the host has no findings on them.
        """
        contexts = [node._context for node in self.registered() if _is_whole(node)]
        contexts.sort(key=lambda each: each.findings.probed is None)
        return {
            each.name: each
            for each in contexts
            if each.findings.name == each.name and each.findings.place == place
        }

    def dropped(self) -> dict[str, Any]:
        """Return by their names the nodes that this rank has dropped, with all made from them."""
        self.note_dropped()
        nodes = [entry.held for entry in self.entries()]
        return {
            node._context.name: node
            for node in nodes
            if node is not None and _is_whole(node) and node._let_go()
        }


open_nodes = OpenNodes()


def _is_whole(node: Any) -> bool:
    agreement = node._context.agreement
    return agreement.failure is None and agreement.owner == get_ident()


def known_to_all(
    ranks_in: Sequence[Mapping[str, int]], mine: Mapping[str, NodeContext]
) -> Findings | None:
    """Return the findings of a node that has all these ranks; None without one.

    `ranks_in` has, for each rank, the names of the nodes whose findings it has, with its rank
    there; the result is the same on all ranks.
    """
    name = next((name for name in ranks_in[0] if all(name in each for each in ranks_in)), None)
    return None if name is None else mine[name].findings.of([each[name] for each in ranks_in])


def close_dropped(mine: Mapping[str, Any], published: Iterable[Iterable[str]]) -> None:
    """Close the nodes that all their ranks have dropped. Collective over each, host-blocking.

    `published` has for each rank of the call the names of `OpenNodes.dropped`; only the ranks of a
    node know its name.
    """
    names = [*chain.from_iterable(published)]
    for name in sorted(mine):  # in the same order on all ranks of each
        if names.count(name) == mine[name].size:
            try:
                mine[name].close()
            except MpiShareError as error:  # of no call of the program's
                log.warning("a node that was dropped: %s", error)
