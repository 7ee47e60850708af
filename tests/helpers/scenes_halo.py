"""Scenes on pretended nodes: one machine that the launcher of MPICH takes for several.

Or machines with a network, process numbers and a /dev/shm of their own, where namespaces are
allowed.
"""

import functools
import subprocess
from collections.abc import Callable

import pytest

from tests.helpers.launch import ROOT, launcher, run_ranks
from tests.helpers.scenes import Played, program_of
from tests.helpers.shared_job import play_shared

NODES = {
    "2 + 2": ("-hosts", "nodea:2,nodeb:2"),
    "1 + 1": ("-hosts", "nodea:1,nodeb:1"),
    "2 + 1": ("-hosts", "nodea:2,nodeb:1"),
    "2 + 1 + 1": ("-hosts", "nodea:2,nodeb:1,nodec:1"),
    "1 + 1 + 2": ("-hosts", "nodea:1,nodeb:1,nodec:2"),
    "1 + 2 + 1": ("-hosts", "nodea:1,nodeb:2,nodec:1"),
    "3 + 3": ("-hosts", "nodea:3,nodeb:3"),
    "in turn": ("-hosts", "nodea:1,nodeb:1,nodea:1,nodeb:1"),
}
MACHINES = {
    "2 + 1 machines": (2, "node1:2,node2:1"),
    "2 + 2 machines": (2, "node1:2,node2:2"),
    "2 + 1 + 1 machines": (3, "node1:2,node2:1,node3:1"),
}
PRETEND = ROOT / "tests" / "helpers" / "machines"


@functools.cache
def _why_no_machines() -> str | None:
    """Why there can be none here, or None."""
    tried = subprocess.run([PRETEND, "2", "true"], capture_output=True, text=True, check=False)
    assert tried.returncode in {0, 77}, tried.stderr
    return tried.stderr if tried.returncode else None


def play_on(
    nodes: str,
    n: int,
    scene: Callable,
    *arguments: object,
    backend: str = "host",
    shared: bool = False,
) -> Played:
    """Run the function on `n` ranks of pretended nodes, with a `Stage` as its first argument."""
    if launcher()[1] != "mpich":
        pytest.skip("only the launcher of MPICH pretends to be on several nodes")
    if nodes in MACHINES:
        if why := _why_no_machines():
            pytest.skip(why)
        count, hosts = MACHINES[nodes]
        before, options = [PRETEND, str(count)], ("-hosts", hosts)
    else:
        before, options = [], ("-launcher", "fork", *NODES[nodes])
    run = play_shared if shared and backend == "host" else run_ranks
    result = run(
        n,
        program_of(scene, arguments),
        env={"MPISHARE_BACKEND": backend},
        extra_mpirun=options,
        before=before,
        timeout_s=50,
    )
    played = Played(result, {})
    assert not played.result.timed_out, played.describe()
    return played
