"""Memory limits of control groups: of both versions, on every level, and none."""

from pathlib import Path

import pytest

from mpishare.memory.limits import Limit, tightest

MIB = 1 << 20
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """A /proc and control groups as a process sees them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        self.groups: list[str] = []

    def v1(self, own: str) -> None:
        self.groups += ["5:cpu,cpuacct:/elsewhere", f"4:memory:{own}"]

    def v2(self, own: str) -> None:
        self.groups.append(f"0::{own}")

    def limit_v1(self, folder: str, limit: int, used: int, cache: int = 0) -> None:
        self._write(
            Path("sys/fs/cgroup/memory", folder),
            {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used},
            f"inactive_file 7\ntotal_inactive_file {cache}\n",
        )

    def limit_v2(self, folder: str, limit: int | str, used: int, cache: int = 0) -> None:
        files = {"memory.max": limit, "memory.current": used}
        stat = f"anon 3\ninactive_file {cache}\nactive_file 9\n"
        self._write(Path("sys/fs/cgroup", folder), files, stat)

    def _write(self, folder: Path, files: dict[str, object], stat: str) -> None:
        folder = self.root / folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(stat)

    def tightest(self) -> Limit | None:
        (self.root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in self.groups))
        return tightest(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_control_groups(machine):
    assert machine.tightest() is None


def test_no_proc(tmp_path):
    assert tightest(tmp_path) is None


def test_v1_step_of_a_job(machine):
    """The step may use what the job may, of which another step has used some."""
    machine.v1("/slurm/uid_0/job_3/step_0/task_1")
    machine.limit_v1("", NO_LIMIT_V1, 900 * MIB)
    machine.limit_v1("slurm", NO_LIMIT_V1, 800 * MIB)
    machine.limit_v1("slurm/uid_0/job_3", 1000 * MIB, 700 * MIB, cache=50 * MIB)
    machine.limit_v1("slurm/uid_0/job_3/step_0", 1000 * MIB, 200 * MIB)
    machine.limit_v1("slurm/uid_0/job_3/step_0/task_1", NO_LIMIT_V1, 100 * MIB)
    assert machine.tightest() == Limit(1000 * MIB, 350 * MIB, "/slurm/uid_0/job_3")


def test_v2_the_least_is_not_the_smallest_limit(machine):
    machine.v2("/system.slice/slurmstepd.scope/job_3/step_0/user/task_0")
    top = "system.slice/slurmstepd.scope"
    machine.limit_v2(top, 900 * MIB, 850 * MIB)
    machine.limit_v2(f"{top}/job_3", 400 * MIB, 100 * MIB, cache=20 * MIB)
    machine.limit_v2(f"{top}/job_3/step_0", "max", 90 * MIB)
    assert machine.tightest() == Limit(900 * MIB, 50 * MIB, f"/{top}")


def test_v2_in_a_container_with_a_namespace_of_its_own(machine):
    machine.v2("/")
    machine.limit_v2("", 64 * MIB, 60 * MIB, cache=1 * MIB)
    assert machine.tightest() == Limit(64 * MIB, 5 * MIB, "/")


def test_a_group_that_is_not_shown_counts_from_the_mount(machine):
    """As in a container that mounts its own group as the top."""
    machine.v1("/docker/abc")
    machine.limit_v1("", 100 * MIB, 10 * MIB)
    assert machine.tightest() == Limit(100 * MIB, 90 * MIB, "/")


def test_both_versions_side_by_side(machine):
    machine.v1("/job")
    machine.v2("/")
    machine.limit_v1("job", 100 * MIB, 10 * MIB)
    assert machine.tightest() == Limit(100 * MIB, 90 * MIB, "/job")


def test_used_up(machine):
    machine.v1("/job")
    machine.limit_v1("job", 100 * MIB, 120 * MIB)
    assert machine.tightest() == Limit(100 * MIB, 0, "/job")
