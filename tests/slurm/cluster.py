"""SLURM's own daemons on pretended nodes: slurmctld in front, a slurmd on each node.

`tests/helpers/machines` makes the nodes. Each has four GPUs that are files, so that SLURM hands
them out; nothing keeps a job to its own.
"""

import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch import NOT_INHERITED, OPEN_MPI, ROOT, wait_until

NODES = ("node1", "node2")
COMMON = Path("/mnt")  # the folder that front and nodes share, outside /tmp
GPUS = 4
CPUS = 8
MEMORY_MIB = 64000

# Open MPI starts nothing for root by itself, and a barrier of more ranks than cores takes long.
ROOT_MAY = {name: value for name, value in OPEN_MPI.items() if "OMPI" in name}

CONF = """\
ClusterName=pretended
SlurmctldHost=front
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
KillWait=2
MinJobAge=300
GresTypes=gpu
NodeName=node[1-2] CPUs={cpus} CoresPerSocket={cpus} RealMemory={memory} Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8 DefMemPerNode=1000
"""


@dataclass(frozen=True)
class Job:
    """How a job or a step ended."""

    status: int
    output: str
    error: str
    seconds: float
    state: str = ""
    number: int = 0

    @property
    def words(self) -> list[str]:
        """What its programs printed, without what srun says: that it waits for a busy node."""
        return " ".join(programs_lines(self.output)).split()

    def describe(self) -> str:
        """Everything, for the message of an assert."""
        return (
            f"{self.state} exit status {self.status} after {self.seconds:.1f} s\n"
            f"-- stdout --\n{self.output}\n-- stderr --\n{self.error}"
        )


class Cluster:
    """Daemons from `start` to `stop`, and the commands of a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        unwanted = (*NOT_INHERITED, "SLURM_", "PRTE_", "TMPDIR", "PYTEST_", "VIRTUAL_ENV", "CUDA_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        self.environment = kept | {"SLURM_CONF": str(self.conf)} | ROOT_MAY

    def start(self) -> None:
        """Start all daemons, and wait until the nodes take jobs. `share_folders` comes before."""
        folder = self.folder
        for name in ("state", "dev", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        devices = [folder / "dev" / f"nvidia{number}" for number in range(GPUS)]
        for number, device in enumerate(devices):
            subprocess.run(["mknod", device, "c", "195", str(number)], check=True)
        self.conf.write_text(CONF.format(folder=folder, cpus=CPUS, memory=MEMORY_MIB, gpus=GPUS))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/nvidia[0-{GPUS - 1}]\n")
        # The folder of its socket must not be one that the nodes have in common.
        (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
        # The plugin is named: SLURM would look for it in the mounts, which a node lacks.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        subprocess.run(["slurmctld"], env=self.environment, check=True)
        for node in NODES:
            self.on(node, "slurmd")
        self._await_nodes()

    def _await_nodes(self) -> None:
        if not wait_until(lambda: self._command("sinfo", "-h", "-o", "%T").output == "idle\n", 60):
            logs = [f"== {log}\n{log.read_text()}" for log in self.folder.glob("*.log")]
            raise AssertionError("the nodes do not come up\n" + "\n".join(logs))

    def stop(self) -> None:
        """End jobs and daemons, and wait for that."""
        self._command("scancel", "--user=root")
        wait_until(lambda: not self._command("squeue", "-h").output, 15)
        self._command("scontrol", "shutdown")
        wait_until(lambda: not list(self.folder.glob("slurm*.pid")), 15)

    def on(self, node: str, command: str) -> str:
        """Run a command of the shell on a node; return what it printed."""
        return on_node(node, command, self.environment)

    def srun(self, *words: object, timeout_s: float = 90, **variables: str) -> Job:
        """Run a step in a job of its own, from the front."""
        return self._command("srun", *words, timeout_s=timeout_s, **variables)

    def sbatch(self, *words: object, **variables: str) -> int:
        """Submit a batch script; return the job's number. Its output is in `output_of`."""
        options = ["--parsable", f"--output={self.folder}/%A.out", f"--chdir={ROOT}"]
        done = self._command("sbatch", *options, *words, **variables)
        assert done.status == 0, done.describe()
        return int(done.output)

    def write(self, text: str, *words: object, **variables: str) -> int:
        """Submit a batch script that is given as text."""
        file = self.folder / f"script-{time.monotonic_ns()}"
        file.write_text(f"#!/bin/bash\n{text}")
        return self.sbatch(*words, file, **variables)

    def output_of(self, job: int) -> str:
        """What a job has printed so far."""
        file = self.folder / f"{job}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def version(self) -> tuple[int, ...]:
        """SLURM's version."""
        found = re.search(r"(\d+)\.(\d+)\.(\d+)", self._command("srun", "--version").output)
        assert found is not None
        return tuple(map(int, found.groups()))

    def field(self, job: int, name: str) -> str:
        """A field of `scontrol show job`."""
        shown = self._command("scontrol", "show", "job", job).output
        found = re.search(rf"\b{name}=(\S+)", shown)
        return found[1] if found else ""

    def wait(self, job: int, timeout_s: float = 90) -> Job:
        """Wait until a job has ended."""
        begin = time.monotonic()
        over = wait_until(lambda: self.field(job, "EndTime") and self._is_over(job), timeout_s)
        seconds = time.monotonic() - begin
        state = self.field(job, "JobState")
        if not over:
            self._command("scancel", job)
        output = self.output_of(job)
        assert over, f"job {job} is {state} after {timeout_s} s\n{output}"
        status, _, number = self.field(job, "ExitCode").partition(":")
        return Job(
            int(status) or 128 * (number != "0") + int(number), output, "", seconds, state, job
        )

    def _is_over(self, job: int) -> bool:
        states = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        return self.field(job, "JobState") not in states

    def until_said(self, job: int, words: str, timeout_s: float = 90) -> None:
        """Wait until a running job has printed something."""
        wait_until(lambda: words in self.output_of(job) or self._is_over(job), timeout_s)
        said = self.output_of(job)
        assert words in said, f"job {job} does not say {words!r}\n{said}"

    def cancel(self, job: int, *words: object) -> None:
        """Run scancel."""
        done = self._command("scancel", *words, job)
        assert done.status == 0, done.describe()

    def _command(self, *words: object, timeout_s: float = 90, **variables: str) -> Job:
        begin = time.monotonic()
        # Past the limit srun is killed; then the daemons end its step.
        done = subprocess.run(
            [str(word) for word in words],
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        return Job(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)


def on_node(node: str, command: str, environment: dict[str, str]) -> str:
    """Run a command of the shell on a node; return what it printed."""
    shell = Path(os.environ["MACHINES_DIR"], "shell")
    done = subprocess.run(
        [shell, node, command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, f"{command} on {node}: {done.stdout}{done.stderr}"
    return done.stdout


def share_folders() -> None:
    """Give front and nodes one folder in common, and each node a /tmp of its own."""
    work = os.environ["TEST_SLURM_FOLDER"]
    kept = f"{COMMON}/repository"
    Path(work, "repository").mkdir()
    share = f"mount --bind {work} {COMMON} && mount --bind {ROOT} {kept}"
    subprocess.run(["sh", "-c", share], check=True)
    private = f"{share} && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /sys/fs/cgroup"
    if Path("/tmp") in ROOT.parents:
        private += f" && mkdir -p {ROOT} && mount --bind {kept} {ROOT}"
    for node in NODES:
        on_node(node, f"cd / && {private}", dict(os.environ))


def programs_lines(output: str) -> list[str]:
    """Return the lines of an output that are not srun's own."""
    return [line for line in output.splitlines() if not line.startswith("srun: ")]
