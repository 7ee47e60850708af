"""What an application found: the whole field, whether it is right, and how rank 0 says so."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import mpishare

    Array = Any  # numpy.ndarray or cupy.ndarray


def gather(cart: MPI.Cartcomm, owned: Array) -> np.ndarray | None:
    """Return the whole field on rank 0, None elsewhere. Collective."""
    # Copied first: CuPy forgets the current stream when it copies out what is not contiguous.
    packed = owned.copy()
    mine = packed if isinstance(packed, np.ndarray) else packed.get()
    parts = cart.gather(mine)
    if parts is None:
        return None
    whole = np.empty([n * d for n, d in zip(mine.shape, cart.dims, strict=True)], mine.dtype)
    for rank, part in enumerate(parts):
        corner = [c * n for c, n in zip(cart.Get_coords(rank), mine.shape, strict=True)]
        whole[tuple(slice(c, c + n) for c, n in zip(corner, mine.shape, strict=True))] = part
    return whole


def compare(backend: str, name: str, found: np.ndarray, right: np.ndarray) -> list[str]:
    """Return what is wrong with a field, as lines; none where it is right.

    NumPy does the same arithmetic in the same order on every rank: to the last bit. A GPU is given
    a few units in the last place of the largest value.
    """
    error = np.abs(found - right)
    allowed = (
        0.0 if backend == "host" else 4 * float(np.finfo(right.dtype).eps * np.abs(right).max())
    )
    wrong = ~(error <= allowed)  # NaN is wrong
    if not wrong.any():
        return []
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    return [
        f"{name}: {np.count_nonzero(wrong)} of {wrong.size} cells differ from the reference, first "
        f"{where}: {found[where]!r} instead of {right[where]!r} (allowed: {allowed:g})"
    ]


@dataclass
class Outcome:
    """What an application found; rank 0 prints it."""

    program: str
    args: argparse.Namespace
    node: mpishare.Node
    cart: MPI.Cartcomm
    step_us: tuple[float, float]  # median and mean
    exchange_us: float
    facts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] | None = None  # None: not checked

    def tell(self) -> int:
        """Print it on rank 0 and return the exit status, the same on every rank. Collective."""
        args, cart = self.args, self.cart
        status = judge(self.program, cart, self.wrong or [])
        if cart.rank:
            return status
        if args.json:
            row = {
                "program": self.program,
                "staged": args.staged,
                "backend": self.node.backend,
                "ranks": cart.size,
                "n": args.n if args.cells is None else None,
                "steps": args.steps,
                "step_us_median": round(self.step_us[0], 2),
                "step_us_mean": round(self.step_us[1], 2),
                "exchange_us_median": round(self.exchange_us, 2),
                "checked": status == 0 if args.check else None,
                "gpu": self.node.device and self.node.device.name,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "graph": getattr(args, "graph", False),
                "wrap": getattr(args, "wrap", False),
                "dims": cart.dims,
                "cells": args.shape,  # of a rank
                "mpi": MPI.get_vendor()[0],
                **self.facts,
            }
            print(json.dumps(row), flush=True)
            return status
        form = f"staged {args.staged}" if args.staged else "mpishare"
        median, mean = self.step_us
        text = f"{args.steps} steps, median {median:.1f} us, mean {mean:.1f} us; "
        text += f"exchange alone {self.exchange_us:.1f} us"
        say(self.program, args, cart, f"{self.node.backend}, {form}", text, status)
        for name, value in self.facts.items():
            print(f"  {name} {value:.6g}")
        sys.stdout.flush()
        return status


def judge(program: str, cart: MPI.Cartcomm, wrong: Sequence[str]) -> int:
    """Print what is wrong on rank 0 and return the exit status, the same everywhere. Collective."""
    for line in wrong if cart.rank == 0 else ():
        sys.stderr.write(f"{program}: WRONG: {line}\n")
    sys.stderr.flush()
    return int(cart.bcast(bool(wrong)))


def say(
    program: str, args: argparse.Namespace, cart: MPI.Cartcomm, way: str, text: str, status: int
) -> None:
    """Print in a line what was found, for which cells and by which way."""
    grid, cells = (" x ".join(map(str, each)) for each in (cart.dims, args.shape))
    verdict = ("WRONG" if status else "checked") if args.check else "not checked"
    print(f"{program}: {grid} ranks of {cells} cells, {way}: {text}; {verdict}", flush=True)
