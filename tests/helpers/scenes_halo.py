"""Scenes on pretended nodes: one machine that the launcher of MPICH takes for several.

Or machines with a network, process numbers and a /dev/shm of their own, where namespaces are
allowed.
"""

import functools
import re
import subprocess
from collections.abc import Callable

import pytest

from tests.helpers.launch import ROOT, launcher, run_ranks
from tests.helpers.scenes import Played, program_of
from tests.helpers.shared_job import play_shared

# A number for each node: of its ranks.
NODES = ("2 + 2", "1 + 1", "2 + 1", "2 + 1 + 1", "1 + 2 + 1", "in turn")
MACHINES = ("2 + 1 machines", "2 + 2 machines", "2 + 1 + 1 machines")
PRETEND = ROOT / "tests" / "helpers" / "machines"


def hosts_of(nodes: str) -> list[tuple[str, int]]:
    """Return the name of each node, and how many ranks it takes before the next one."""
    if nodes == "in turn":
        return [("nodea", 1), ("nodeb", 1)] * 2
    names = "123" if nodes in MACHINES else "abc"
    counts = map(int, re.findall(r"\d", nodes))
    return [(f"node{name}", n) for name, n in zip(names, counts, strict=False)]


def size_of(nodes: str) -> int:
    """Return the number of ranks of all nodes."""
    return sum(n for _, n in hosts_of(nodes))


@functools.cache
def _why_no_machines() -> str | None:
    """Why there can be none here, or None."""
    tried = subprocess.run([PRETEND, "2", "true"], capture_output=True, text=True, check=False)
    assert tried.returncode in {0, 77}, tried.stderr
    return tried.stderr if tried.returncode else None


def play_on(
    nodes: str, scene: Callable, *arguments: object, backend: str = "host", shared: bool = False
) -> Played:
    """Run the function on the ranks of pretended nodes, with a `Stage` as its first argument."""
    if launcher()[1] != "mpich":
        pytest.skip("only the launcher of MPICH pretends to be on several nodes")
    hosts = hosts_of(nodes)
    options = ["-hosts", ",".join(f"{name}:{n}" for name, n in hosts)]
    before = []
    if nodes not in MACHINES:
        options = ["-launcher", "fork", *options]
    elif why := _why_no_machines():
        pytest.skip(why)
    else:
        before = [str(PRETEND), str(len(hosts))]
    run = play_shared if shared and backend == "host" else run_ranks
    result = run(
        size_of(nodes),
        program_of(scene, arguments),
        env={"MPISHARE_BACKEND": backend},
        extra_mpirun=options,
        before=before,
    )
    played = Played(result, {})
    assert not played.result.timed_out, played.describe()
    return played
