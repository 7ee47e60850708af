"""Boundaries between ranks: containers, namespaces, and reads of each other's memory.

A container is a set of namespaces, and each forbids something else: a PID namespace the reads from
process to process, an IPC namespace of Docker the common /dev/shm. See namespaces(7).
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.errors import counted, format_nbytes, grouped, name_ranks
from mpishare.memory import limits, shared
from mpishare.memory.process_memory import Token, try_read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The namespaces that matter here, by the names of the links in /proc/self/ns.
KINDS = ("ipc", "net", "pid", "user", "uts")

# The namespaces that a machine starts with (proc_ns.h of the kernel).
_FIRST = {"ipc": 0xEFFFFFFF, "uts": 0xEFFFFFFE, "user": 0xEFFFFFFD, "pid": 0xEFFFFFFC}
# Variables of the environment in a container of each kind, then files of its root folder.
_VARIABLES = {
    "APPTAINER_CONTAINER": "Apptainer",
    "SINGULARITY_CONTAINER": "Singularity",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}
_FILES = {"run/.containerenv": "Podman", ".dockerenv": "Docker"}


@dataclass(frozen=True)
class Surroundings:
    """The boundaries between the ranks of a node. ``describe()`` is a text for people.

    Attributes
    ----------
    containers : tuple of (str or None)
        For each rank, the program that made its container; None outside of containers.
    separate : tuple of str
        The kinds of namespaces that are not the same for all ranks: `KINDS`.
    unreadable : tuple of (int, int, str)
        A rank, one whose memory it cannot read (CMA), and why.
    remedy : str
        The remedy for the first of these; empty without any.
    shm_nbytes, shm_left : int, bytes
        The size of /dev/shm, and the rest of it when the report was asked for.
    memory_nbytes, memory_left : int or None, bytes
        The limit on the memory of the rank that asked for the report, shared memory included, and
        the rest of it; None without a limit.
    """

    containers: tuple[str | None, ...]
    separate: tuple[str, ...]
    unreadable: tuple[tuple[int, int, str], ...]
    remedy: str
    shm_nbytes: int = 0
    shm_left: int = 0
    memory_nbytes: int | None = None
    memory_left: int | None = None

    def with_room(self) -> Surroundings:
        """Return the same with the room that there is now. Takes about 1 ms."""
        (left, nbytes), limit = shared.room(), limits.tightest()
        return replace(
            self,
            shm_nbytes=nbytes,
            shm_left=left,
            memory_nbytes=limit and limit.nbytes,
            memory_left=limit and limit.left,
        )

    def describe(self) -> list[str]:
        """Return lines for the report."""
        left, size = format_nbytes(self.shm_left), format_nbytes(self.shm_nbytes)
        found = grouped((name, rank) for rank, name in enumerate(self.containers))
        who = [f"{name_ranks(ranks)} in {name or 'none'}" for name, ranks in found.items()]
        where = "; ".join(who) if len(who) > 1 else f"in {self.containers[0] or 'no container'}"
        line = f"{where}; /dev/shm of {size}, {left} left"
        if self.memory_nbytes is not None and self.memory_left is not None:
            limit, left = format_nbytes(self.memory_nbytes), format_nbytes(self.memory_left)
            line += f"; memory limited to {limit}, {left} left"
        if self.separate:
            line += f"; ranks have their own namespaces: {', '.join(self.separate)}"
        lines = [line]
        if self.unreadable:
            reader, owner, why = self.unreadable[0]
            others = len(self.unreadable) - 1
            more = f" and {counted(others, 'more pair')}" if others else ""
            lines.append(f"no CMA: rank {reader} cannot read memory of rank {owner}{more}: {why}")
            lines.append(f"so large faces of arrays in no window are copied twice. {self.remedy}")
        elif len(self.containers) > 1:
            lines.append("CMA works: ranks read large faces out of each other's arrays")
        return lines


def find_container(environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the program that made the container of this process; None outside of containers."""
    for variable, name in _VARIABLES.items():
        if environment.get(variable):
            return name
    for file, name in _FILES.items():
        if (root / file).exists():
            return name
    if environment.get("container"):  # as systemd has it
        return environment["container"]
    own = namespaces(root)
    apart = [kind for kind in ("ipc", "pid", "user") if own.get(kind, _FIRST[kind]) != _FIRST[kind]]
    return f"{', '.join(apart)} namespaces" if apart else None


def namespaces(root: Path = Path("/")) -> dict[str, int]:
    """Return the identities of the namespaces of this process, as far as /proc shows them."""
    found = {}
    for kind in KINDS:
        try:
            link = str((root / "proc/self/ns" / kind).readlink())
        except OSError:
            continue
        found[kind] = int(link.strip(f"{kind}:[]"))
    return found


class Survey:
    """Lets all ranks of a new node try to read each other's memory.

    It adds to steps that the ranks take anyway: `describe` in one, `read` in a later one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._token = Token()  # held until all have read it

    def describe(self) -> dict[str, Any]:
        """Return the description of this rank for the others."""
        return {
            "offer": self._token.offer,
            "container": find_container(os.environ),
            "namespaces": namespaces(),
            "ptrace_scope": _ptrace_scope(),
        }

    def read(self, facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Try to read the memory of the others, given the results of `describe` on all ranks."""
        others = [rank for rank in range(len(facts)) if rank != self._rank]
        errors = {rank: error for rank in others if (error := _try_read(facts[rank]))}
        # This process may be unable to read any memory, even its own.
        return {"errors": list(errors.items()), "own": errors and _try_read(facts[self._rank])}


def describe_surroundings(
    facts: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]]
) -> Surroundings:
    """Return the boundaries, given the results of `describe` and `read` of `Survey` by rank."""
    unreadable = tuple(
        (reader, owner, _why(error, facts[reader], facts[owner]))
        for reader, each in enumerate(tried)
        for owner, error in each["errors"]
    )
    remedy = ""
    if unreadable:
        reader, owner, _ = unreadable[0]
        remedy = remedy_for(facts[reader], facts[owner], own_error=tried[reader]["own"] or 0)
    return Surroundings(
        containers=tuple(each["container"] for each in facts),
        separate=tuple(
            kind for kind in KINDS if len({each["namespaces"].get(kind) for each in facts}) > 1
        ),
        unreadable=unreadable,
        remedy=remedy,
    )


def remedy_for(reader: Mapping[str, Any], owner: Mapping[str, Any], *, own_error: int) -> str:
    """Return how one rank could read the memory of another one, from the facts of both.

    `own_error` is the error number when the reader reads its own memory; 0 if it can.
    """
    if own_error == errno.ENOSYS:
        return "This kernel, or the sandbox around it, has no process_vm_readv"
    if own_error:
        return (
            "A seccomp filter forbids process_vm_readv: start the containers with "
            "--cap-add=SYS_PTRACE"
        )
    if kind := _separate(reader, owner):
        option = {"pid": "--pid=host", "user": "--userns=host, Apptainer with --sharens"}[kind]
        return f"To avoid that start the containers with {option}"
    scope = max(reader["ptrace_scope"], owner["ptrace_scope"])
    if scope:
        return (
            f"kernel.yama.ptrace_scope is {scope}: 0 allows it, or --cap-add=SYS_PTRACE for "
            "containers"
        )
    return "Run all ranks as one user; start containers with --cap-add=SYS_PTRACE"


def _ptrace_scope() -> int:
    """Return the rule of Yama, a security module, for reading another process's memory."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except OSError:
        return 0


def _try_read(owner: Mapping[str, Any]) -> int:
    """Try to read the memory of a rank; return 0, or the error number."""
    error = try_read(*owner["offer"])
    return errno.ESRCH if error is None else error


def _why(error: int, reader: Mapping[str, Any], owner: Mapping[str, Any]) -> str:
    kind = _separate(reader, owner)
    return f"another {kind.replace('pid', 'PID')} namespace" if kind else os.strerror(error)


def _separate(reader: Mapping[str, Any], owner: Mapping[str, Any]) -> str | None:
    """Return the kind of namespace that keeps one rank from reading another's memory."""
    mine, theirs = reader["namespaces"], owner["namespaces"]
    return next((kind for kind in ("pid", "user") if mine.get(kind) != theirs.get(kind)), None)
