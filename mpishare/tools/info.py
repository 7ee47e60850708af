"""Which ranks share memory, by which route, or why not: ``mpirun -n 4 python -m mpishare.info``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from mpishare.runtime.route import agree_on_forced
from mpishare.tools.cli import (
    Parser,
    UsageError,
    fail_run,
    fail_usage,
    mpi_library,
    run_on_ranks,
    seconds,
    start_mpi_in_time,
    tell,
)
from mpishare.view.names import as_text, attachable

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpishare.runtime.report import Report

PROG = "python -m mpishare.info"
_LINKS = (
    "`nvidia-smi topo -m` shows how GPUs are linked, `nvidia-smi topo -p2p r` why some have no P2P"
)

_EPILOG = """\
Exit status: 0; 1 where a node has several ranks and no two of them share memory, where a node
cannot be made, or where MPISHARE_ROUTE is wrong; 2 for a wrong command line.
"""


def main(argv: list[str] | None = None) -> int:
    """Run ``python -m mpishare.info`` and return its exit status.

    Collective over COMM_WORLD, host-blocking.
    """
    parser = Parser(
        prog=PROG,
        description="Print for every node which ranks share memory, by which route, and why not.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.add_argument(
        "--attachable",
        action="store_true",
        help="list the named windows of this machine and their viewers instead; starts no MPI",
    )
    parser.add_argument(
        "--srun-option",
        action="store_true",
        help="print the --mpi= that srun needs for the MPI library here instead; starts no MPI",
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=300.0,
        metavar="S",
        help="deadline of MPI's start and of the host's waits (%(default)g s)",
    )
    try:
        options = parser.parse_args(argv)
    except UsageError as exc:
        return fail_usage(PROG, str(exc))
    if options.attachable:
        windows = attachable()
        sys.stdout.write(json.dumps(windows, indent=1) + "\n" if options.json else as_text(windows))
        return 0
    if options.srun_option:
        return _print_srun_option()
    start_mpi_in_time(options.timeout_s)
    return run_on_ranks(lambda comm: _run(comm, options.timeout_s, is_json=options.json))


def _print_srun_option() -> int:
    from mpishare.runtime.preflight import srun_option

    library = mpi_library()
    option = srun_option(library)
    if option is None:
        tell(PROG, f"no --mpi= of srun is known for {library!r}")
        return 1
    sys.stdout.write(f"{option}\n")
    return 0


def _run(comm: MPI.Intracomm, timeout_s: float, *, is_json: bool) -> int:
    from mpishare import MpiShareError, Node

    try:
        with Node(comm, timeout_s=timeout_s) as node:
            route = agree_on_forced(comm, "info", timeout_s, on_gpu=node.backend == "cuda")
            report = node.report()
            reports = comm.gather(report if node.rank == 0 else None, 0)
    except (MpiShareError, ValueError) as exc:  # of a wrong MPISHARE_BACKEND or MPISHARE_ROUTE
        return fail_run(PROG, comm, exc)
    status = 0
    if reports is not None:
        nodes = [*filter(None, reports)]
        sys.stdout.write(_as_json(nodes, route) if is_json else _as_text(nodes, route))
        sys.stdout.flush()
        status = int(not all(each.can_share for each in nodes))
    return int(comm.bcast(status, 0))


def _as_text(nodes: list[Report], route: str | None) -> str:
    texts = []
    for report in nodes:
        verdict = "" if report.can_share else "No two ranks of this node share memory.\n"
        links = "" if all(pair.memory for pair in report.pairs) else f"  {_LINKS}\n"
        texts.append(f"{report}\n{links}{verdict}")
    if route is not None:
        how = "send MPI messages" if route.startswith("mpi") else f"take route {route}"
        texts.append(f"MPISHARE_ROUTE={route}: halo exchanges inside a node {how}\n")
    if sum(len(report.members) for report in nodes) == 1:
        texts.append("one rank: start it by mpirun to see which ranks share memory\n")
    return "\n".join(texts)


def _as_json(nodes: list[Report], route: str | None) -> str:
    data = {"nodes": [report.as_dict() for report in nodes], "MPISHARE_ROUTE": route}
    return json.dumps(data, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
