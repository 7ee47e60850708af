"""Plays a scene, a function of a test file, on ranks of its own, and reads what they told."""

import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mpishare.memory.shared import remove_abandoned
from tests.helpers.launch import SHM, TIMEOUT_S, Result, launcher, run_ranks
from tests.helpers.shared_job import play_shared
from tests.helpers.stage import LIMIT_S

HEADER = """\
import atexit, builtins, contextlib, ctypes, functools, gc, importlib, logging
import os, re, signal, sys, time, warnings
import mpishare
import numpy as np
from tests.helpers.stage import CALLS, Stage, leftovers, shared_bytes
from tests.helpers.reporting import report

"""
# Open MPI goes on without a killed rank when asked to. MPICH's mpirun must not learn of the death:
# what it started, a shell that holds the rank's connection to it, lives on as `sleep`.
ENABLE_RECOVERY = {"openmpi": ["--enable-recovery"], "mpich": []}
KEEPER = """"$@"; status=$?; [ $status -lt 128 ] || exec sleep 100; exit $status"""
KEEP = {"openmpi": [], "mpich": ["/bin/sh", "-c", KEEPER, "keeper"]}
BACKENDS = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
KILLING_BACKENDS = ["host", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.kills])]


@dataclass(frozen=True)
class Told:
    """How one call of one rank ended."""

    error: str | None
    begin: float
    end: float
    text: str = ""
    ranks: list[int] | None = None
    failures: dict[int, str] = field(default_factory=dict)
    name: str | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Played:
    """What came of a scene."""

    result: Result
    stderr: dict[int, str]  # of each rank, where the scene can lose one

    def rank(self, rank: int) -> dict:
        assert rank in self.result.reports, f"rank {rank} told nothing\n{self.describe()}"
        return self.result.reports[rank]

    def told(self, rank: int, name: str) -> Told:
        facts = self.rank(rank)
        assert name in facts, f"rank {rank} told nothing of {name!r}\n{self.describe()}"
        told = dict(facts[name])
        return Told(**{**told, "failures": dict(told.get("failures", []))})

    def raised(self, rank: int, name: str, error: str) -> Told:
        """The named call, which must have raised the named error."""
        told = self.told(rank, name)
        assert told.error == error, f"rank {rank}, {name}: {told}\n{self.describe()}"
        return told

    def missed(self, missing: int, name: str, *, of: Sequence[int]) -> list[Told]:
        """The named call of each of these ranks, which must have named the one that is missing."""
        told = [self.raised(rank, name, "PeerTimeout") for rank in of]
        assert all(each.ranks == [missing] for each in told), self.describe()
        return told

    def worked(self, ranks: Sequence[int], *names: str) -> None:
        for rank in ranks:
            for name in names:
                told = self.told(rank, name)
                assert told.error is None, f"rank {rank}, {name}: {told}\n{self.describe()}"

    def released(self, timeout_s: float | None) -> Told:
        """How the stream of `Stage.stream_waits` ended: rank 1 was named in time, and it ran on.

        `timeout_s` is the deadline of the node; None where rank 1 died long before.
        """
        told = self.raised(0, "synchronize", "PeerTimeout")
        assert told.ranks == [1]
        if timeout_s is None:
            assert told.end - self.rank(1)["died"] < LIMIT_S
        else:
            assert timeout_s <= told.seconds < timeout_s + 1
        assert self.rank(0)["is done"]
        assert self.raised(0, "afterwards", "PeerTimeout").ranks == [1]
        return told

    def survivors_name(self, dead: int, *, of: Sequence[int]) -> None:
        """Each was told of the death by its first call, in time, and again by the next one."""
        died = self.rank(dead)["died"]
        for first in self.missed(dead, "first", of=of):
            assert max(first.end - died, first.seconds) < LIMIT_S
        self.missed(dead, "then", of=of)
        self.worked(of, "close")

    def others_give_up(self) -> None:
        """Ranks 0 and 2 named rank 1 at the deadline, 3 s at most; the first broke it for both."""
        for rank in (0, 2):
            first = self.told(rank, "first")
            assert first.error in ("PeerTimeout", "PeerError"), first
            assert "1" in first.text
            assert first.seconds < 3 + LIMIT_S
        assert [1] in [self.told(rank, "first").ranks for rank in (0, 2)]

    def survivors_name_rank_0(self, survivors: int) -> None:
        """How a scene of `Stage.lose_rank_0` ended."""
        self.survivors_name(0, of=range(1, 1 + survivors))
        assert self.result.returncode != 0, self.describe()

    def ended(self) -> None:
        """Every rank came to the end of the scene."""
        assert self.result.returncode == 0, self.describe()

    def ended_well(self) -> None:
        """The same, and none said anything."""
        self.ended()
        assert self.result.stderr.strip() == "", self.describe()

    def describe(self) -> str:
        return f"{self.result.describe()}\n-- stderr of ranks --\n{self.stderr}"


def play(
    n: int,
    scene: Callable,
    *arguments: object,
    backend: str = "host",
    shared: bool = False,
    survivable: bool = False,
    python: Sequence[str] = (),
    env: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Played:
    """Run the function on `n` ranks, with a `Stage` as its first argument.

    It checks what it can itself, so that `ended_well` is all that is left to the test. What comes
    of the other ranks where one is killed, or the job is aborted, it tells by `attempt` and
    `report`.

    Its source is run and not its module, so that the ranks need no pytest. Ends in an error where
    anything of mpishare's is left: a process, or a name in /dev/shm. A scene in which no rank ends
    may be `shared`: on the host a job that is already there plays it.
    """
    source = program_of(scene, arguments)
    if shared and backend == "host":
        variables = {"MPISHARE_BACKEND": backend, **(env or {})}
        result = play_shared(n, source, env=variables, timeout_s=timeout_s)
        assert not result.timed_out, result.describe()
        return Played(result, {})
    names = set(SHM.glob("mpishare-*"))
    with tempfile.TemporaryDirectory(prefix="scene-") as folder:
        program = Path(folder, "scene.py")
        program.write_text(source)
        stderr = Path(folder, "stderr")
        stderr.mkdir()
        variables = {"MPISHARE_BACKEND": backend, **(env or {})}
        variables |= {"STAGE_STDERR": str(stderr)} if survivable else {}
        kind = launcher()[1]
        result = run_ranks(
            n,
            [*(KEEP[kind] if survivable else []), sys.executable, *python, program],
            env=variables,
            extra_mpirun=ENABLE_RECOVERY[kind] if survivable else [],
            timeout_s=timeout_s,
        )
        words = {int(file.name): file.read_text() for file in sorted(stderr.iterdir())}
    played = Played(result, words)
    assert not result.timed_out, played.describe()
    remove_abandoned()  # as the next node
    left = {name for name in set(SHM.glob("mpishare-*")) - names if not _is_of_the_living(name)}
    assert not left, f"left in /dev/shm: {left}\n{played.describe()}"
    return played


def program_of(scene: Callable, arguments: Sequence[object]) -> str:
    """What each rank runs."""
    call = f"{scene.__name__}(Stage(), *{tuple(arguments)!r})"
    return f"{HEADER}\n{inspect.getsource(scene)}\n\n{call}\n"


def _is_of_the_living(name: Path) -> bool:
    """Whether a name in /dev/shm was given by a process that runs: by another job, then."""
    pid = name.name.split("-")[1]
    return pid.isdecimal() and Path("/proc", pid).exists()
