"""What an application found: the whole field, whether it is right, and how rank 0 says so."""

from __future__ import annotations

import json
import sys
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


def tell(
    program: str,
    args: argparse.Namespace,
    node: mpishare.Node,
    cart: MPI.Cartcomm,
    wrong: Sequence[str],
    found: dict[str, Any],
    text: str,
    form: str,
) -> int:
    """Print on rank 0 what was found, by which form; return the exit status, the same everywhere.

    Collective. JSON has `found`, a line has `text`.
    """
    for line in wrong if cart.rank == 0 else ():
        sys.stderr.write(f"{program}: WRONG: {line}\n")
    sys.stderr.flush()
    status = int(cart.bcast(bool(wrong)))
    if cart.rank == 0 and args.json:
        row = {
            "program": program,
            "backend": node.backend,
            "ranks": cart.size,
            "checked": status == 0 if args.check else None,
            "gpu": node.device and node.device.name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "dims": cart.dims,
            "cells": args.shape,  # of a rank
            "mpi": MPI.get_vendor()[0],
            **found,
        }
        print(json.dumps(row), flush=True)
    elif cart.rank == 0:
        grid, cells = (" x ".join(map(str, each)) for each in (cart.dims, args.shape))
        verdict = ("WRONG" if status else "checked") if args.check else "not checked"
        way = f"{node.backend}, {form}"
        print(f"{program}: {grid} ranks of {cells} cells, {way}: {text}; {verdict}", flush=True)
    return status


def tell_steps(
    program: str,
    args: argparse.Namespace,
    node: mpishare.Node,
    cart: MPI.Cartcomm,
    wrong: Sequence[str],
    facts: dict[str, Any],
    step_us: tuple[float, float],
    exchange_us: float,
) -> int:
    """Do so of an application that makes steps: their median and mean, and further facts."""
    median, mean = step_us
    found = {
        "staged": args.staged,
        "n": args.n if args.cells is None else None,
        "steps": args.steps,
        "step_us_median": round(median, 2),
        "step_us_mean": round(mean, 2),
        "exchange_us_median": round(exchange_us, 2),
        "graph": getattr(args, "graph", False),
        "wrap": getattr(args, "wrap", False),
    }
    text = f"{args.steps} steps, median {median:.1f} us, mean {mean:.1f} us; "
    text += f"exchange alone {exchange_us:.1f} us"
    form = f"staged {args.staged}" if args.staged else "mpishare"
    status = tell(program, args, node, cart, wrong, found | facts, text, form)
    for name, value in facts.items() if cart.rank == 0 and not args.json else ():
        print(f"  {name} {value:.6g}", flush=True)
    return status
