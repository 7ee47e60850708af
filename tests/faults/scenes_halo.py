"""Scenes on pretended nodes: one machine that the launcher of MPICH takes for several."""

import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.scenes import HEADER, Played
from tests.helpers.launch import launcher, run_ranks

NODES = {
    "2 + 2": ("-hosts", "nodea:2,nodeb:2"),
    "1 + 1": ("-hosts", "nodea:1,nodeb:1"),
    "2 + 1": ("-hosts", "nodea:2,nodeb:1"),
    "2 + 1 + 1": ("-hosts", "nodea:2,nodeb:1,nodec:1"),
    "1 + 2 + 1": ("-hosts", "nodea:1,nodeb:2,nodec:1"),
    "3 + 3": ("-hosts", "nodea:3,nodeb:3"),
    "in turn": ("-hosts", "nodea:1,nodeb:1,nodea:1,nodeb:1"),
}


def play_on(
    nodes: str, n: int, scene: Callable, *arguments: object, timeout_s: float = 50
) -> Played:
    """Run the function on `n` ranks of pretended nodes, with a `Stage` as its first argument."""
    if launcher()[1] != "mpich":
        pytest.skip("only the launcher of MPICH pretends to be on several nodes")
    with tempfile.TemporaryDirectory(prefix="scene-") as folder:
        program = Path(folder, "scene.py")
        source = inspect.getsource(scene)
        program.write_text(f"{HEADER}\n{source}\n\n{scene.__name__}(Stage(), *{arguments!r})\n")
        result = run_ranks(
            n,
            [sys.executable, program],
            env={"MPISHARE_BACKEND": "host"},
            extra_mpirun=["-launcher", "fork", *NODES[nodes]],
            timeout_s=50,
        )
    played = Played(result, {})
    assert not result.timed_out, played.describe()
    return played
