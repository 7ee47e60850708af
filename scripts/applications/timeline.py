"""What the host and the GPU of rank 0 do in steps of Jacobi's method, as PyTorch's profiler saw it.

Two lines of JSON: the steps with faces staged through pinned memory, and with mpishare. A span is
where it was, on the host or the GPU, what it was, and its begin and its end in microseconds.

    mpirun -n 2 python scripts/applications/timeline.py
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import jacobi2d
import staged
from mpi4py import MPI
from torch.profiler import ProfilerActivity, profile, record_function

import mpishare

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = (512, 512)  # cells of a rank
STEPS, WARM_UP = 4, 20
WAYS = ("staged", "mpishare")
#: What the profiler calls work of the GPU, and in pages.
ON_GPU = {"kernel": "exchange", "gpu_memcpy": "copy", "gpu_memset": "exchange"}


class Pinned(staged.Pinned):
    """The exchange by hand, its two halves told to the profiler."""

    def start(self, u: Any) -> None:
        """Pack the faces, copy them out and send them."""
        with record_function("faces out"):
            super().start(u)

    def wait(self) -> None:
        """Wait for the messages, copy them in and unpack them."""
        with record_function("messages, faces in"):
            super().wait()


def named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call, told to the profiler."""

    def made(*args: Any) -> Any:
        with record_function(name):
            return call(*args)

    return made


def spans(events: list[dict[str, Any]], way: str) -> list[list[Any]]:
    """Return the spans of a trace, from its first on."""
    found = []
    for each in events:
        kind = each.get("cat")
        if kind == "user_annotation" and not each["name"].startswith("Profiler"):
            found.append(["host", each["name"], each["ts"], each["dur"]])
        elif kind in ON_GPU:
            what = "update" if "relax" in each["name"] else ON_GPU[kind]
            what = "pack" if (way, what) == ("staged", "exchange") else what
            found.append(["gpu", what, each["ts"], each["dur"]])
    first = min((begin for _, _, begin, _ in found), default=0.0)
    return [
        [where, what, round(begin - first, 2), round(begin - first + took, 2)]
        for where, what, begin, took in sorted(found, key=lambda each: each[2])
    ]


def main() -> int:
    """Trace both ways, and print them on rank 0."""
    world = MPI.COMM_WORLD
    cart = world.Create_cart(MPI.Compute_dims(world.size, 2), periods=[True, False])
    args = argparse.Namespace(
        shape=SHAPE, staged=None, order="plain", graph=False, march=1, norm_every=sys.maxsize
    )
    args.steps = STEPS
    with mpishare.Node() as node, common.stream(node):
        jacobi = jacobi2d.Jacobi(args, cart, node)
        jacobi.begin()
        jacobi.update = named("update", jacobi.update)  # type: ignore[method-assign]
        for way in WAYS:
            is_staged = way == "staged"
            halo = Pinned(cart, jacobi.u, node.xp) if is_staged else jacobi.make_halo(None)
            if not is_staged:
                exchange = named("exchange", halo.exchange)
                halo.exchange = exchange  # type: ignore[method-assign]
            for _ in range(WARM_UP):
                jacobi.step_with(halo, "plain")
            node.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                for _ in range(WARM_UP):  # the first calls under a profiler take longer
                    jacobi.step_with(halo, "plain")
                node.synchronize()
                cart.Barrier()
                for _ in range(STEPS):
                    with record_function("step"):
                        jacobi.step_with(halo, "plain")
                node.synchronize()
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json"
                seen.export_chrome_trace(str(file))
                events = json.loads(file.read_text())["traceEvents"]
            begin = min(each["ts"] for each in events if each.get("name") == "step")
            late = [each for each in events if each.get("ts", 0) >= begin and "dur" in each]
            row = {"program": "timeline", "way": way, "steps": STEPS, "cells": SHAPE}
            row |= {"ranks": cart.size, "gpu": node.device and node.device.name}
            row |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
            row |= {"spans": spans([e for e in late if e["name"] != "step"], way)}
            if cart.rank == 0:
                print(json.dumps(row), flush=True)
        jacobi.close()
    return 0


if __name__ == "__main__":
    common.run(main)
