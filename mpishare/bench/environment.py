"""The environment of a run: machine, libraries, versions and command, the header of a report."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mpishare
from mpishare.bench.cases import CASES
from mpishare.bench.session import Session
from mpishare.errors import counted, grouped
from mpishare.runtime.preflight import VARIABLES

_GIT_S = 5.0
#: Options that change only the report.
_REPORT_OPTIONS = ("--output", "--format", "--revision")
#: Packages whose version a reader must know, by their modules.
_PACKAGES = {"numpy": "numpy", "mpi4py": "mpi4py", "cupy": "cupy", "torch": "torch"}
_PACKAGES |= {
    "cuda-bindings": "cuda.bindings",
    "nvshmem4py": "nvshmem",
    "nccl": "mpishare.bench.nccl",
    "nccl4py": "nccl.core",
}
#: Settings of mpishare and other libraries that a reader must know.
_SETTINGS = (
    *VARIABLES,
    "MPIR_CVAR_ENABLE_GPU",
    "NCCL_MAX_CTAS",
    "OMPI_MCA_mpi_yield_when_idle",
    "OMPI_MCA_osc",
    "OMPI_MCA_pml",
    "UCX_TLS",
)


def gather(session: Session) -> dict[str, Any]:
    """Return the header of a report, the same on every rank. Collective, host-blocking."""
    from mpi4py import MPI

    node, comm = session.node, session.comm
    ranks = comm.allgather(_describe_rank(session))
    gpus = _gpus(ranks)
    # The driver and packages of rank 0 stand for those of all.
    driver, cuda = versions_of(node.device)
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hostname": ranks[0]["hostname"],
        "backend": node.backend,
        "host_code": node.report().host_code,
        "ranks": comm.size,
        "nodes": sum(seen["node_rank"] == 0 for seen in ranks),
        "cpu": _found_in("/proc/cpuinfo", r"^model name\s*: (.*)$"),
        # Of the host of rank 0: those of its ranks, which may be bound; of rank 0; of the machine.
        "cores": len(_cores_of(ranks, ranks[0]["hostname"])),
        "cores_per_rank": len(ranks[0]["affinity"]),
        "cores_of_machine": os.cpu_count(),
        "load": os.getloadavg()[0],  # of the last minute
        "gpus": gpus,
        "links": sorted({link for seen in ranks for link in seen["links"]}),
        "mps": None if node.device is None else node.device.mps,
        "driver": driver,
        "cuda": cuda,
        "mpi_library": MPI.Get_library_version().strip("\0 \n").partition("\n")[0].strip(),
        "versions": versions(),
        "git_revision": session.options.revision or (_git_revision() if comm.rank == 0 else None),
        "command": command(session.options.prog, comm.size, sys.argv[1:], os.environ),
        "options": session.options.as_dict(),
    }
    found["notes"] = [*crowded(ranks), *node.report().notes, *_absent(session)]
    return dict(comm.bcast(found, 0))


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that are imported: others have no part in the numbers."""
    found = {name: sys.modules.get(module) for name, module in _PACKAGES.items()}
    numbers = {name: getattr(module, "__version__", None) for name, module in found.items()}
    texts = {name: None if number is None else str(number) for name, number in numbers.items()}
    return {"mpishare": mpishare.__version__, "python": platform.python_version(), **texts}


def _describe_rank(session: Session) -> dict[str, Any]:
    """Return what this rank knows about itself, and the links of its GPU."""
    node, device = session.node, session.node.device
    pairs = () if device is None else node.report().pairs
    names = ("name", "uuid", "pci_id", "mps")
    return {
        "rank": session.comm.rank,
        "hostname": platform.node(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "node_rank": node.rank,
        "gpu": None if device is None else {name: getattr(device, name) for name in names},
        "links": {str(p.link) for p in pairs if p.origin == node.rank != p.target},
    }


def _gpus(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every GPU once, with its host and its ranks."""
    by_gpu = grouped((seen["gpu"]["uuid"], seen) for seen in ranks if seen["gpu"] is not None)
    return [
        {**of[0]["gpu"], "hostname": of[0]["hostname"], "ranks": [seen["rank"] for seen in of]}
        for of in by_gpu.values()
    ]


def _cores_of(ranks: Sequence[dict[str, Any]], hostname: str) -> set[int]:
    """Return the cores of a host: its ranks may be bound, each to cores of its own."""
    return set().union(*(seen["affinity"] for seen in ranks if seen["hostname"] == hostname))


def crowded(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return a note for each host with more ranks than cores; `ranks`: the description of each."""
    found = []
    for hostname, nranks in Counter(seen["hostname"] for seen in ranks).items():
        ncores = len(_cores_of(ranks, hostname))
        if nranks > ncores:
            found.append(
                f"{nranks} ranks share {counted(ncores, 'core')} of {hostname}: a wait, "
                "mpishare's or MPI's, may take a turn of the scheduler, milliseconds, which hide "
                "what is measured. Start no more ranks than cores (-n)."
            )
    return found


def _absent(session: Session) -> list[str]:
    """Return a note on the baselines that were asked for and that no case has here."""
    options, backend = session.options, session.node.backend
    here = {name for case in options.cases for name in CASES[case].baselines[backend]}
    missing = {*(options.against or ())} - here - {"all"}
    found = f"the {backend} backend has no baseline {', '.join(sorted(missing))} of these cases"
    return [found] * bool(missing)


def command(prog: str, ranks: int, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the command of this run, with the settings that change what is measured."""
    settings = [f"{name}={shlex.quote(variables[name])}" for name in _SETTINGS if name in variables]
    before = ("", *arguments)  # the value of an option stands behind it
    words = [
        shlex.quote(argument)
        for argument, last in zip(arguments, before, strict=False)
        if not {argument.partition("=")[0], last} & {*_REPORT_OPTIONS}
    ]
    # The ranks do not know which launcher started them.
    return " ".join([*settings, f"mpirun -n {ranks} {prog}", *words])


def _found_in(file: str, pattern: str) -> str | None:
    """Return the group of a pattern in a file of the system, None where there is no such thing."""
    try:
        found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def versions_of(device: Any) -> tuple[str | None, str | None]:
    """Return the version of a GPU's driver, and the newest CUDA that it supports, e.g. 13.0."""
    found = re.search(r"(?:([\d.]+) \()?CUDA ([\d.]+)", "" if device is None else device.driver)
    return (found[1], found[2]) if found else (None, None)


def _git_revision() -> str | None:
    """Return the commit that mpishare was imported from, None outside of a checkout."""
    root = Path(mpishare.__file__).resolve().parents[1]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    command = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, timeout=_GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
