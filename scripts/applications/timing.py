"""How long steps and exchanges take, on the slowest rank."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import staged

from mpishare.bench.measure import max_over_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi4py import MPI

    import mpishare

REPEATS = 7
FORMS = ("mpishare", *staged.FORMS)


def steps_us(
    node: mpishare.Node,
    cart: MPI.Cartcomm,
    counts: Sequence[int],
    advance: Callable[[int], None],
) -> tuple[float, float]:
    """Call `advance` with each count of steps; return the median and the mean time of one step.

    Collective. Of the slowest rank. On a GPU steps last from their end to the next ones' on the
    stream, so that the host may run ahead.
    """
    is_cuda = node.backend == "cuda"
    events = [node.xp.cuda.Event() for _ in range(len(counts) + 1)] if is_cuda else []
    ends = [0.0] * (len(counts) + 1)
    node.synchronize()
    cart.Barrier()
    for number in range(len(counts) + 1):
        if number:
            advance(counts[number - 1])
        if is_cuda:
            events[number].record()
        else:
            ends[number] = time.perf_counter()
    node.synchronize()
    if is_cuda:
        elapsed = node.xp.cuda.get_elapsed_time
        took = [1e3 * elapsed(*pair) for pair in itertools.pairwise(events)]
    else:
        took = [1e6 * (end - begin) for begin, end in itertools.pairwise(ends)]
    each = np.divide(took, counts)
    median, mean = max_over_ranks(cart, [float(np.median(each)), np.sum(took) / np.sum(counts)])
    return float(median), float(mean)


def alone_us(
    node: mpishare.Node,
    cart: MPI.Cartcomm,
    actions: Mapping[str, Callable[[], object]],
    calls: int,
) -> dict[str, float]:
    """Time each action, `calls` of them back to back, synchronized at the end; per call.

    Collective. The actions take turns, so that what disturbs one disturbs all; of each turn the
    slowest rank counts, of the turns the median.
    """
    took: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(REPEATS):
        for name, action in actions.items():
            node.synchronize()
            cart.Barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                action()
            node.synchronize()
            took[name].append(1e6 * (time.perf_counter() - begin) / calls)
    return {name: float(np.median(max_over_ranks(cart, times))) for name, times in took.items()}


def compare_forms(
    node: mpishare.Node,
    cart: MPI.Cartcomm,
    make_halo: Callable[[str | None], Any],
    actions_with: Callable[[Any], Mapping[str, Callable[[], None]]],
    calls: int,
) -> dict[str, float]:
    """Time what `actions_with` returns for each form of the exchange, in turns.

    Collective. Returns the times, how much longer each staged form takes, and the time with
    mpishare over that of the fastest of them.
    """
    actions: dict[str, Callable[[], None]] = {}
    names: list[str] = []
    for form in FORMS:
        halo = make_halo(None if form == "mpishare" else form)
        for name, action in actions_with(halo).items():
            actions[f"{form}_{name}_us"] = action
            names += [name] if form == "mpishare" else []
    for action in actions.values():
        action()
    times = alone_us(node, cart, actions, calls)
    ratios = {
        f"{form}_{name}_to_mpishare": times[f"{form}_{name}_us"] / times[f"mpishare_{name}_us"]
        for name in names
        for form in FORMS[1:]
    }
    for name in names:
        fastest = min(times[f"{form}_{name}_us"] for form in FORMS[1:])
        ratios[f"{name}_to_fastest_mpi"] = times[f"mpishare_{name}_us"] / fastest
    return times | ratios
