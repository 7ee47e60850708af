"""What separates ranks, as text: who shares memory, containers, who may read whose memory."""

import errno
import os
from dataclasses import replace

import pytest

from mpishare.runtime.places import Place, elsewhere, here, mates_of
from mpishare.runtime.surroundings import Surroundings, find_container, namespaces, remedy_for
from tests.helpers.children import python

FIRST = {"ipc": 0xEFFFFFFF, "uts": 0xEFFFFFFE, "user": 0xEFFFFFFD, "pid": 0xEFFFFFFC}
ALONE = Surroundings((None, None), (), (), "", 8 << 30, 4 << 30)


def test_here_is_one_place():
    assert here(0, 0) == here(0, 1)
    assert here(0, 0).boot


SHM = (7, 1)
ELSEWHERE = "the machine of rank 0 also runs rank 2 of the given communicator"


@pytest.mark.parametrize(
    ("places", "mates", "words"),
    [
        ([Place(0, "a", SHM)] * 3, [0, 1, 2], []),
        # Several /dev/shm on one machine, whether MPI calls them shared or not.
        *(
            ([Place(0, "a", SHM)] * 2 + [Place(group, "a", folder)], [0, 1], [ELSEWHERE, "--ipc"])
            for folder in ((8, 1), (7, 2))  # another device, a folder inside
            for group in (0, 2)
        ),
        # Equal numbers of devices mean nothing on another kernel, and no option would help.
        *(([Place(0, "a", SHM), Place(group, "b", SHM)], [1], []) for group in (0, 1)),
        ([Place(0, "a", SHM), Place(1, "a", SHM)], [1], []),  # MPI is believed where it parts ranks
        ([Place(0, "", (0,)), Place(0, "", (1,))], [1], []),  # no /dev/shm
    ],
)
def test_which_ranks_share_memory_and_which_could(places, mates, words):
    assert mates_of(1, places) == mates
    notes = elsewhere(1, places)
    assert len(notes) == bool(words)
    assert all(word in notes[0] for word in words)
    assert not words or ("--ipc=host" in notes[0]) == ("--ipc" in words)


@pytest.fixture
def machine(tmp_path):
    """A root folder in which the namespaces are the machine's own."""
    links = tmp_path / "proc/self/ns"
    links.mkdir(parents=True)
    for kind, number in FIRST.items():
        (links / kind).symlink_to(f"{kind}:[{number}]")
    return tmp_path


def test_namespaces_of_this_process():
    found = namespaces()
    assert set(found) == {"ipc", "net", "pid", "user", "uts"}
    assert str(found["pid"]) in os.readlink("/proc/self/ns/pid")  # noqa: PTH115


def test_containers_by_their_marks(machine):
    assert find_container({}, machine) is None
    assert find_container({"APPTAINER_CONTAINER": "job.sif"}, machine) == "Apptainer"
    assert find_container({"container": "lxc"}, machine) == "lxc"
    (machine / ".dockerenv").touch()
    assert find_container({}, machine) == "Docker"
    (machine / "run").mkdir()
    (machine / "run/.containerenv").touch()
    assert find_container({"container": "podman"}, machine) == "Podman"
    assert find_container({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, machine) == "Kubernetes"


def test_containers_without_marks(machine):
    link = machine / "proc/self/ns/pid"
    link.unlink()
    link.symlink_to("pid:[4026532180]")
    assert find_container({}, machine) == "pid namespaces"


def told(**changes):
    return {"namespaces": FIRST | changes, "ptrace_scope": 0}


def test_remedies():
    """The nearest cause is named alone."""
    seccomp = remedy_for(told(), told(pid=1), own_error=errno.EPERM)
    assert "--cap-add=SYS_PTRACE" in seccomp
    assert "--pid=host" not in seccomp
    assert "process_vm_readv" in remedy_for(told(), told(), own_error=errno.ENOSYS)
    assert "--pid=host" in remedy_for(told(), told(pid=1, user=2), own_error=0)
    assert "--userns=host" in remedy_for(told(), told(user=2), own_error=0)
    yama = remedy_for(told(), told() | {"ptrace_scope": 1}, own_error=0)
    assert "kernel.yama.ptrace_scope is 1" in yama
    assert "one user" in remedy_for(told(), told(), own_error=0)


def test_lines():
    assert ALONE.describe() == [
        "in no container; /dev/shm of 8 GiB, 4 GiB left",
        "CMA works: ranks read large faces out of each other's arrays",
    ]
    assert len(replace(ALONE, containers=("Docker",)).describe()) == 1
    mixed = replace(
        ALONE,
        containers=("Podman", None),
        separate=("pid", "uts"),
        memory_nbytes=2 << 30,
        memory_left=1 << 30,
        unreadable=((0, 1, "No such process"), (1, 0, "No such process")),
        remedy="Do that",
    )
    assert mixed.describe() == [
        "rank 0 in Podman; rank 1 in none; /dev/shm of 8 GiB, 4 GiB left; memory limited to 2 GiB, "
        "1 GiB left; ranks have their own namespaces: pid, uts",
        "no CMA: rank 0 cannot read memory of rank 1 and 1 more pair: No such process",
        "so large faces of arrays in no window are copied twice. Do that",
    ]


STARTS = """
import ctypes, os, sys, time
from mpishare.memory import shared
from mpishare.tools.mpi_start import limited_start

os.register_at_fork(before=lambda: print("forked, beside threads of any library"))
shared.room = lambda: (1 << 34, 1 << 35)
with limited_start("prog", float(sys.argv[1]), is_first=True):
    if "never" in sys.argv:  # as MPI does: without Python, whose lock it holds
        ctypes.PyDLL(None).pause()
    if "late" in sys.argv:
        time.sleep(1.5)  # as long as an MPI that is slow
print("started")
"""


def test_an_mpi_that_never_starts():
    ended = python(STARTS, 0.5, "never")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("prog: MPI has not started after 0.5 s in process ")
    assert "--ipc=host" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_an_mpi_that_starts_behind_the_deadline():
    """The process that speaks for it has spoken its last by then."""
    ended = python(STARTS, 0.5, "late")
    assert (ended.returncode, ended.stdout) == (0, "started\n"), ended.stderr
    assert ended.stderr.startswith("prog: MPI has not started after 0.5 s in process ")
    assert ended.stderr.count("\n") == 1


def test_an_mpi_that_starts():
    ended = python(STARTS, 0.5)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "started\n", "")
