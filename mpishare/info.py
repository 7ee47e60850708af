"""Which ranks share memory, by which route, or why not: ``mpirun -n 4 python -m mpishare.info``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from mpishare.cli import (
    Parser,
    UsageError,
    fail_run,
    fail_usage,
    mpi_library,
    run_on_ranks,
    seconds,
)
from mpishare.viewers.survey import as_text, attachable

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpishare import Node

PROG = "python -m mpishare.info"

_EPILOG = """\
Exit status: 0; 1 where a node has several ranks and no two of them share memory, or where a node
cannot be made; 2 for a wrong command line.
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
        help="deadline of the host's waits (%(default)g s)",
    )
    try:
        options = parser.parse_args(argv)
    except UsageError as exc:
        return fail_usage(PROG, str(exc))
    if options.attachable:
        return _list_attachable(is_json=options.json)
    if options.srun_option:
        return _print_srun_option()
    return run_on_ranks(lambda comm: _run(comm, options.timeout_s, is_json=options.json))


def _list_attachable(*, is_json: bool) -> int:
    windows = attachable()
    sys.stdout.write(json.dumps(windows, indent=1) + "\n" if is_json else as_text(windows))
    return 0


def _print_srun_option() -> int:
    from mpishare.setup.launch import srun_option

    library = mpi_library()
    option = srun_option(library)
    if option is None:
        sys.stderr.write(f"{PROG}: no --mpi= of srun is known for {library!r}\n")
        return 1
    sys.stdout.write(f"{option}\n")
    return 0


def _run(comm: MPI.Intracomm, timeout_s: float, *, is_json: bool) -> int:
    from mpishare import MpiShareError, Node

    try:
        with Node(comm, timeout_s=timeout_s) as node:
            reports = comm.gather(_of_node(node), 0)
    except (MpiShareError, ValueError) as exc:  # of a wrong MPISHARE_BACKEND
        return fail_run(PROG, comm, exc)
    status = 0
    if reports is not None:
        nodes = [report for report in reports if report is not None]
        sys.stdout.write(_as_json(nodes) if is_json else _as_text(nodes))
        sys.stdout.flush()
        status = int(not all(report["can_share"] for report in nodes))
    return int(comm.bcast(status, 0))


def _of_node(node: Node) -> dict[str, Any] | None:
    """Return the report of a node, on its rank 0 alone."""
    report = node.report()
    if node.rank != 0:
        return None
    data = {**report.as_dict(), "mps_gain": report.mps_gain}
    return {"text": str(report), "data": data, "can_share": report.can_share}


def _as_text(nodes: list[dict[str, Any]]) -> str:
    texts = []
    for node in nodes:
        verdict = "" if node["can_share"] else "No two ranks of this node share memory.\n"
        gain = f"  {node['data']['mps_gain']}\n" if node["data"]["mps_gain"] else ""
        texts.append(node["text"].rstrip("\n") + "\n" + gain + verdict)
    return "\n".join(texts)


def _as_json(nodes: list[dict[str, Any]]) -> str:
    return json.dumps({"nodes": [node["data"] for node in nodes]}, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
