"""The choice of the route to each neighbor: the same at both ends."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError, grouped, name_ranks
from mpishare.runtime.route import (
    COPY,
    GPU_MESSAGES,
    MESSAGES,
    MPI_HOST,
    NCCL,
    ROUTES,
    for_backend,
    require_allowed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mpishare.plans.comm import PlanComm
    from mpishare.plans.engine import PlanSetup
    from mpishare.runtime.report import Pair, Report
    from mpishare.runtime.route import Route

    Routes = dict[int, Route]  # by peer

log = logging.getLogger("mpishare")


def required(require: Any) -> list[str] | None:
    """Return the routes that the user allows; None for all."""
    if require is None:
        return None
    try:
        names = [require] if isinstance(require, str) else list(require)
    except TypeError:
        names = []
    if not names or not ROUTES.keys() >= {*names}:
        raise ValueError(
            f"require names routes, some of {sorted(ROUTES)}, or is None for all, not {require!r}"
        )
    return sorted(names)


def choose(
    comm: PlanComm, pairs: Iterable[Pair], peers: Iterable[int], name: str | None, *, on_gpu: bool
) -> Routes:
    """Return the route to each peer, the same at both ends.

    Between nodes it is `MESSAGES` until the ranks have agreed whether their MPI takes pointers to
    GPU memory; see `settle_messages`. `name` is the route that is forced within the node.
    """
    require_allowed(name, on_gpu=on_gpu)
    forced = MESSAGES if name in (MPI_HOST, GPU_MESSAGES) else ROUTES[name] if name else None
    # As many as the square of the ranks.
    pair_of = {(pair.origin, pair.target): pair for pair in pairs} if on_gpu else {}
    found = {}
    for peer in sorted(set(peers)):
        if peer not in comm.ranks_here:
            found[peer] = MESSAGES
        elif not on_gpu:
            found[peer] = forced or for_backend("host")[0]
        else:
            here, there = comm.ranks_here[comm.rank], comm.ranks_here[peer]
            found[peer] = _on_gpu(pair_of[here, there], pair_of[there, here], forced)
    return found


def _on_gpu(there: Pair, back: Pair, forced: Route | None) -> Route:
    slow = [pair for pair in (there, back) if not ROUTES[pair.route].needs_peer_memory]
    if forced is None:
        return ROUTES[slow[0].route if slow else there.route]
    if forced.needs_peer_memory and slow:
        raise UnsupportedError(
            f"MPISHARE_ROUTE={forced}: ranks {there.origin} and {there.target} of the node cannot "
            f"share GPU memory: {there.reason or back.reason}"
        )
    if there.origin == there.target:  # a rank needs no signal from itself, and no message
        return COPY if forced is NCCL else forced.in_order
    return forced


def settle_messages(setup: PlanSetup, answers: Sequence[str], *, has_messages: bool) -> bool:
    """Whether MPI messages go out of GPU memory; `answers`: why not, by rank, empty if they can.

    All ranks log nothing but the first, which does so once a node.
    """
    name, context = setup.same["MPISHARE_ROUTE"], setup.context
    if not (setup.on_gpu and has_messages) or name == MPI_HOST:
        return False
    why = next(filter(None, answers), "")
    if why and name == GPU_MESSAGES:
        raise UnsupportedError(
            f"MPISHARE_ROUTE=mpi-gpu: messages go through host memory: {why}. Use an MPI that "
            "takes such pointers, or leave MPISHARE_ROUTE out."
        )
    if context.gpu_messages is None and not setup.comm.rank:
        out = "out of GPU memory, which the MPI takes"
        tell, how = (log.warning, f"through host memory: {why}") if why else (log.info, out)
        tell("%s: messages between nodes go %s", setup.name, how)
    context.gpu_messages = why
    return not why


def refuse(setup: PlanSetup, routes: Sequence[Routes]) -> None:
    """Raise on every rank if any route of any rank is not allowed."""
    require = setup.same["require"]
    if require is None:
        return
    refused = grouped(
        (route, (rank, peer))
        for rank, mine in enumerate(routes)
        for peer, route in mine.items()
        if route not in require and route.broader not in require
    )
    if refused:
        texts = [f"{route} among {_among(setup, route, of)}" for route, of in refused.items()]
        raise UnsupportedError(
            f"{setup.call} failed: require={tuple(require)} refuses {', '.join(texts)}. Name their "
            "routes in require= too, or leave it out"
        )


def _among(setup: PlanSetup, route: Route, pairs: Sequence[tuple[int, int]]) -> str:
    """Return the ranks of these pairs, and why a route is taken there, as far as is known here."""
    reasons: dict[str, None] = {}
    for pair in pairs:
        here = [setup.comm.ranks_here[rank] for rank in pair if rank in setup.comm.ranks_here]
        if here:  # this rank has no report of other nodes
            target = here[1] if len(here) > 1 else None
            why = setup.context.report.why(here[0], target, route)
            reasons[why or ("" if setup.on_gpu else "the fields are in host memory")] = None
    ranks, named = name_ranks({*chain.from_iterable(pairs)}), "; ".join(filter(None, reasons))
    return f"{ranks} ({named})" if named else ranks


def warn(name: str, comm: PlanComm, report: Report, routes: Sequence[Routes]) -> None:
    """Warn on one rank of the plan if a neighbor on the same node is reached by a slow route."""
    slow = [
        (rank, peer, route)
        for rank, mine in enumerate(routes)
        for peer, route in mine.items()
        if comm.nodes[rank] == comm.nodes[peer] and not route.is_fast
    ]
    if not slow or slow[0][0] != comm.rank:
        return
    rank, peer, route = slow[0]
    why = report.why(comm.ranks_here[rank], comm.ranks_here[peer], route)
    log.warning("%s: rank %d reaches rank %d by %s: %s", name, rank, peer, route, why)
