"""Steps as CUDA graphs: captured once from a stream, then launched by one call of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from mpi4py import MPI

    import mpishare

LONGEST = 100  # steps of a graph


def refusal(node: mpishare.Node, cart: MPI.Cartcomm, halo: Any) -> str | None:
    """Return why steps with this exchange cannot be captured; None where they can. Collective."""
    if node.backend != "cuda":
        return f"--graph: the {node.backend} backend has no graphs"
    mine = set(getattr(halo, "routes", {0: "staged"}).values())
    on_host = sorted(set().union(*cart.allgather(mine)) & {"staged", "pinned", "mpi"})
    if on_host:
        return f"--graph: some neighbors are served by the host: {', '.join(on_host)}"
    return None


class Graphs:
    """What was captured, by key."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._made: dict[Hashable, int] = {}

    def launch(self, key: Hashable, work: Callable[[], None]) -> None:
        """Put on the current stream what `work` does on it, which runs at a key's first time."""
        stream = self._xp.cuda.get_current_stream()
        if key not in self._made:
            stream.begin_capture()
            try:
                work()
            finally:
                graph = stream.end_capture()
            self._made[key] = instantiate(graph.graph)
        self._xp.cuda.runtime.graphLaunch(self._made[key], stream.ptr)

    def close(self) -> None:
        """Destroy them; what was launched goes on."""
        for made in self._made.values():
            self._xp.cuda.runtime.graphExecDestroy(made)
        self._made = {}


def instantiate(graph: int) -> int:
    """Return an executable graph in which every kernel has the priority of its stream.

    CuPy's own has none: what waits for other ranks would start behind what it should run beside.
    """
    from cuda.bindings import driver

    flag = driver.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
    code, made = driver.cuGraphInstantiate(driver.CUgraph(graph), int(flag))
    if int(code):
        raise RuntimeError(f"cuGraphInstantiate failed: {code!r}")
    return int(made)
