"""Time the Jacobi programs of NVIDIA Warp beside ours, in turns: a line of JSON for each.

    python scripts/lib/warp_jacobi.py -n 2 --cells 1024 4096 16384 > docs/results/warp.jsonl

Each is a job of its own on the same GPUs. Warp's are those of its package, unchanged: they capture
two iterations in a graph, and check themselves against one GPU. The norm is that of every hundredth
iteration. What cannot run is a line that says why.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WARP = ("nccl", "nvshmem", "mpi")
LIMIT_S = 120
NORM_EVERY = 100


def run(ranks: int, words: list[str]) -> tuple[str | None, str]:
    """What a job printed, or why it failed."""
    command = ["mpirun", "--bind-to", "none", "-n", str(ranks), sys.executable, *words]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"took more than {LIMIT_S} s"
    if done.returncode == 0:
        return done.stdout, ""
    errors = [line for line in done.stderr.splitlines() if re.match(r"\S*(Error|Exception)", line)]
    return None, errors[-1] if errors else f"exit status {done.returncode}"


def ours(ranks: int, cells: int, steps: int) -> tuple[float | None, str]:
    words = ["scripts/applications/jacobi2d.py", "--cells", str(cells), "--steps", str(steps)]
    printed, reason = run(ranks, [*words, "--norm-every", str(NORM_EVERY), "--graph", "--json"])
    if printed is None:
        return None, reason
    return json.loads(printed.splitlines()[-1])["step_us_mean"], ""


def warps(kind: str, ranks: int, cells: int, steps: int) -> tuple[float | None, str]:
    words = ["-m", f"warp.examples.distributed.example_jacobi_{kind}", "--csv"]
    words += ["--nx", str(cells), "--ny", str(cells), "--itermax", str(steps)]
    printed, reason = run(ranks, [*words, "--nccheck", str(NORM_EVERY)])
    if printed is None:
        return None, reason
    *_, several_s, _one_s = printed.splitlines()[-1].split(",")
    return 1e6 * float(several_s) / steps, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="ranks, one per GPU (2)")
    parser.add_argument("--cells", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3, help="jobs of each program (3)")
    args = parser.parse_args()
    try:
        of_warp = version("warp-lang")
    except PackageNotFoundError:
        parser.error("warp-lang is not installed")
    for cells in args.cells:
        times: dict[str, list[float]] = {"mpishare": [], **{f"warp {kind}": [] for kind in WARP}}
        reasons: dict[str, str] = {}
        for _ in range(args.repeat):
            for name, found in times.items():
                if name in reasons:
                    continue
                arguments = args.n, cells, args.steps
                is_ours = name == "mpishare"
                us, reason = ours(*arguments) if is_ours else warps(name.split()[1], *arguments)
                if us is None:
                    reasons[name] = reason
                else:
                    found.append(us)
        for name, found in times.items():
            row = {
                "program": name,
                "cells": cells,
                "ranks": args.n,
                "steps": args.steps,
                "step_us": round(statistics.median(found), 2) if found else None,
                "jobs": len(found),
                "reason": reasons.get(name),
                "warp": of_warp,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
