"""Where steps can be captured into CUDA graphs, and how many into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

    import mpishare

LONGEST = 100  # steps of a graph


def refusal(node: mpishare.Node, cart: MPI.Cartcomm, halo: Any) -> str | None:
    """Return why steps with this exchange cannot be captured; None where they can. Collective."""
    if node.backend != "cuda":
        return f"--graph: the {node.backend} backend has no graphs"
    mine = set(getattr(halo, "routes", {0: "staged"}).values())
    on_host = sorted(set().union(*cart.allgather(mine)) & {"staged", "pinned", "mpi", "mpi-gpu"})
    if on_host:
        return f"--graph: some neighbors are served by the host: {', '.join(on_host)}"
    return None
