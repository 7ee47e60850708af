"""Run a command whose processes share their GPUs through a Multi-Process Service (MPS) of its own.

Usage: python -m mpishare.mps [--folder FOLDER] COMMAND...

  --folder FOLDER    where the daemon is reached, for commands that are started elsewhere with
                     CUDA_MPS_PIPE_DIRECTORY=FOLDER; it is made, and removed at the end

    python -m mpishare.mps mpirun -n 4 python app.py    one machine, or a batch script of one node
    python -m mpishare.mps srun -n 4 python app.py      the same: the daemon is there first

It serves the machine that it runs on, and no other: a job on several nodes needs a daemon on each,
which one task per node starts (scripts/slurm/mps-nodes.sbatch).
Where SLURM does not hide the GPUs of other jobs (no device cgroup), srun counts them its own way:
use mpirun there.
It starts nvidia-cuda-mps-control on the GPUs of CUDA_VISIBLE_DEVICES, which its clients then count
from 0, and ends it when the command has ended: well or not, by a signal, or by one to this process,
which is passed on. Where a daemon answers already, of this user or of root, the command is run as
it is.

Exit status: the command's; 128 + N where signal N ended it; 126 or 127 where it cannot be started;
2 where no daemon can be started, and then neither is the command.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
DEFAULT = "/tmp/nvidia-mps"  # where CUDA looks without CUDA_MPS_PIPE_DIRECTORY
ANSWER_S = 10  # the daemon answers at once
QUIT_S = 20  # it waits for its clients, and one may hang
END_S = 5
PASSED_ON = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
HEARD = {*PASSED_ON, signal.SIGCHLD}
FROM_TERMINAL = 0x80  # si_code SI_KERNEL: the whole foreground got it, the command too
# How many ranks a launcher has started, in all; and on this machine, where it says so.
RANKS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE": "MPI_LOCALNRANKS",
    "SLURM_STEP_NUM_TASKS": "SLURM_STEP_TASKS_PER_NODE",
}
SOCKET_PATH_NBYTES = 107
LONGEST_NAME = f"{CONTROL}.pid"


class Refused(Exception):  # noqa: N818  no error of this program
    """No daemon can be had here."""


def main(command: list[str]) -> int:
    if not command or command[0] in ("-h", "--help"):
        (sys.stdout if command else sys.stderr).write(__doc__)
        return 0 if command else 2
    folder = None
    if command[0] == "--folder":
        if len(command) < 3:
            say("--folder needs a folder, and a command behind it")
            return 2
        folder, *command = command[1:]
    if shutil.which(command[0]) is None:
        status, why = (126, "cannot be run") if Path(command[0]).exists() else (127, "not found")
        say(f"{command[0]}: {why}")
        return status
    try:
        return serve(command, folder)
    except Refused as refused:
        say(str(refused))
        return 2


def serve(command: list[str], folder: str | None) -> int:
    """Return the exit status of a command beside a daemon; become it where one answers already."""
    require_first()
    require_gpu()
    if folder is not None:
        os.environ.pop("CUDA_MPS_PIPE_DIRECTORY", None)  # most likely the folder
    elif is_served():
        say("an MPS daemon answers already: the command is run as it is")
        os.execvp(command[0], command)
    # From here on signals wait for `run`, so that no daemon is left behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    with made(folder) as place, contextlib.closing(Daemon(place)) as daemon:
        return run(command, daemon.environment)


@contextlib.contextmanager
def made(folder: str | None) -> Iterator[str]:
    """Make a folder for the daemon, the named one or any, and remove it at the end."""
    try:
        if folder is None:
            folder = tempfile.mkdtemp(prefix="mps-")
        else:
            Path(folder).mkdir(mode=0o700)
    except OSError as error:
        raise Refused(f"cannot make {error.filename}: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_first() -> None:
    """Raise where a launcher started several ranks here: each would start its own daemon."""
    for name, of_machine in RANKS.items():
        if name in os.environ:  # the first is that of the nearest launcher
            try:
                count = ranks_here(os.environ[name], os.environ.get(of_machine))
            except (ValueError, IndexError):
                told = f"{name}={os.environ[name]}, {of_machine}={os.environ.get(of_machine)}"
                raise Refused(f"{told} says nothing of this node: unset {name}") from None
            if count > 1:
                raise Refused(
                    f"{name}={os.environ[name]}: this is one of several ranks. Put it before what "
                    "starts them: python -m mpishare.mps mpirun ..."
                )
            return


def ranks_here(in_all: str, here: str | None) -> int:
    """Return how many ranks there are on this machine; SLURM counts them as in 4(x2),3."""
    if not here:
        return int(in_all or 1)
    counts: list[int] = []
    for each in here.split(","):
        count, _, times = each.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[int(os.environ.get("SLURM_NODEID", 0))] if len(counts) > 1 else counts[0]


def require_gpu() -> None:
    """Raise where there is no GPU, or nothing that serves it."""
    if shutil.which(CONTROL) is None:
        raise Refused(f"no {CONTROL} on PATH: it comes with the NVIDIA driver")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        raise Refused(f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Refused("no nvidia-smi on PATH: is there a GPU?") from None
    if "GPU " not in listed.stdout:
        raise Refused(f"nvidia-smi sees no GPU: {(listed.stdout + listed.stderr).strip()}")


def is_served() -> bool:
    """Whether processes started from here would find a daemon; raises where it is missing."""
    named = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    try:
        owner = os.lstat(named or DEFAULT).st_uid
    except OSError:  # there is none
        owner = os.geteuid()
    if owner not in (0, os.geteuid()):  # anybody can make a folder in /tmp, and answer there
        why = f"it belongs to user {owner}"
    elif ask("get_server_list", dict(os.environ)) is not None:
        return True
    else:
        why = "no daemon answers there"
    if named is not None:
        raise Refused(f"CUDA_MPS_PIPE_DIRECTORY={named}, but {why}: unset it, and one is started")
    return False


def ask(words: str, environment: dict[str, str], seconds: float = ANSWER_S) -> str | None:
    """Return what a daemon answers; None where none does."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=f"{words}\n",
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


class Daemon:
    """A daemon of our own, in a folder of its own."""

    def __init__(self, folder: str) -> None:
        if len(os.fsencode(f"{folder}/{LONGEST_NAME}")) > SOCKET_PATH_NBYTES:
            raise Refused(f"{folder} is too long for the path of a socket: set TMPDIR=/tmp")
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        self.environment = {**os.environ, **environment}
        output = Path(folder, "output")
        with output.open("w") as file:
            started = subprocess.run(
                [CONTROL, "-d"],
                stdin=subprocess.DEVNULL,
                stdout=file,  # no pipe: the daemon would hold it open
                stderr=file,
                env=self.environment,
                start_new_session=True,  # a terminal's Ctrl-C is not for it
                preexec_fn=hear,
                check=False,
            )
        try:
            self._process = os.pidfd_open(int(Path(folder, f"{CONTROL}.pid").read_text()))
        except (OSError, ValueError) as error:
            told = output.read_text().strip() or error
            raise Refused(
                f"{CONTROL} -d did not start (exit status {started.returncode}): {told}"
            ) from None
        if ask("get_server_list", self.environment) is None:
            self.close()
            raise Refused(f"{CONTROL} -d was started, and does not answer")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if all(each.strip().isdecimal() for each in visible):
            self.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(len(visible))))

    def close(self) -> None:
        """End it; by its pid, with its servers, only where it does not quit."""
        servers = self._servers()
        ask("quit", self.environment, QUIT_S)
        for process, name in ((self._process, "the MPS daemon"), *servers):
            for number in (signal.SIGTERM, signal.SIGKILL):
                if is_over(process):
                    break
                say(f"{name} did not quit: {number.name}")
                signal.pidfd_send_signal(process, number)
            os.close(process)

    def _servers(self) -> list[tuple[int, str]]:
        found = []
        for pid in (ask("get_server_list", self.environment) or "").split():
            try:
                found.append((os.pidfd_open(int(pid)), f"MPS server {pid}"))
            except ProcessLookupError:
                continue  # it has ended since
        return found


def is_over(process: int) -> bool:
    """Whether a process has ended, or does so soon."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(1000 * END_S))


def hear() -> None:
    """Let signals in again, in a new process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)


def run(command: list[str], environment: dict[str, str]) -> int:
    """Return the exit status of a command, to which signals are passed on."""
    try:
        child = subprocess.Popen(command, env=environment, preexec_fn=hear)
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        return 126
    while child.poll() is None:
        heard = signal.sigwaitinfo(HEARD)
        if heard.si_signo in PASSED_ON and heard.si_code != FROM_TERMINAL:
            child.send_signal(heard.si_signo)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def say(text: str) -> None:
    sys.stderr.write(f"mpishare.mps: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
