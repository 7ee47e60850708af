"""mpishare.mps: what it says, returns and clears away, with a daemon that is none.

That ranks are served by a true one is shown on GPUs alone: `scripts/test-gpu` runs under it.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.launch import OF_A_JOB, ROOT
from tests.helpers.planted import NOBODY, needs_two_users

WITH_MPS = ROOT / "scripts" / "with-mps"
CONTROL = """\
#!/bin/sh
pipe=${CUDA_MPS_PIPE_DIRECTORY:-$FAKE/default}
file=$pipe/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
  [ -z "$FAKE_BROKEN" ] || { echo 'no such server' >&2; exit 1; }
  sleep 100 &
  echo $! >"$file"
  echo $! >>"$FAKE/daemons"
  printf %s "$CUDA_VISIBLE_DEVICES" >"$FAKE/devices"
  exit
fi
read -r words
kill -0 "$(cat "$file" 2>/dev/null)" 2>/dev/null || exit 1
[ "$words" != quit ] || [ -n "$FAKE_STAYS" ] || kill "$(cat "$file")"
"""
SMI = '#!/bin/sh\n[ -n "$FAKE_NO_GPU" ] || echo "GPU 0: H200"\n'
SHOW = 'echo "$CUDA_MPS_PIPE_DIRECTORY" "${CUDA_VISIBLE_DEVICES-unset}"; exit '


class Place:
    """A machine of the test's own, with what is on its PATH."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / "tmp"
        for folder in (self.work, path / "bin", path / "default"):
            folder.mkdir()
        self.program("nvidia-cuda-mps-control", CONTROL)
        self.program("nvidia-smi", SMI)
        unwanted = ("CUDA_", *OF_A_JOB, "SLURM_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        paths = [str(path / "bin"), "/usr/bin", "/bin"]
        self.environment = kept | {
            "PATH": os.pathsep.join(paths),
            "FAKE": str(path),
            "TMPDIR": str(self.work),
        }

    def program(self, name: str, text: str) -> None:
        file = self.path / "bin" / name
        file.write_text(text)
        file.chmod(0o755)

    def begin(self, *command: str, before: Sequence[str] = (str(WITH_MPS),), **environment: str):
        pipe, env = subprocess.PIPE, self.environment | environment
        words = [sys.executable, *before, *command]
        return subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True)

    def run(self, *command: str, **options: object):
        """Its exit status, what it said on stdout, and on stderr."""
        process = self.begin(*command, **options)
        out, err = process.communicate(timeout=30)
        return process.returncode, out.strip(), err.strip()

    def start_other(self, folder: Path) -> int:
        environment = self.environment | {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}
        control = self.path / "bin" / "nvidia-cuda-mps-control"
        subprocess.run([control, "-d"], env=environment, check=True, stdout=subprocess.DEVNULL)
        return self.daemons()[-1]

    def daemons(self) -> list[int]:
        file = self.path / "daemons"
        return list(map(int, file.read_text().split())) if file.exists() else []

    def is_clear(self) -> bool:
        """Whether no daemon lives, and no file is left."""
        return not any(map(lives, self.daemons())) and not list(self.work.iterdir())


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def place():
    # Not tmp_path, which has the user's name and the test's: too long for a socket.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        place = Place(Path(folder))
        yield place
        for pid in filter(lives, place.daemons()):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_the_status_is_the_commands_and_the_daemon_goes_with_it(place, end, status):
    returned, out, err = place.run("sh", "-c", f'echo "$CUDA_MPS_PIPE_DIRECTORY"; {end}')
    assert (returned, err) == (status, "")
    assert Path(out).parent == place.work
    assert len(place.daemons()) == 1
    assert place.is_clear()


@pytest.mark.parametrize(
    ("given", "clients"),
    [("2", "0"), ("3,1", "0,1"), ("GPU-8a56a4bc", "GPU-8a56a4bc"), (None, "unset")],
)
def test_clients_count_the_gpus_of_the_daemon_from_0(place, given, clients):
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    status, out, err = place.run("sh", "-c", f"{SHOW} 0", **environment)
    assert (status, out.split()[1]) == (0, clients), err
    assert (place.path / "devices").read_text() == (given or "")


HEARD = "trap 'echo heard; exit 5' TERM INT; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("script", "number", "status", "said"),
    [
        (HEARD, signal.SIGTERM, 5, "heard\n"),
        (HEARD, signal.SIGINT, 5, "heard\n"),
        ("echo ready; exec sleep 60", signal.SIGTERM, 128 + signal.SIGTERM, ""),
    ],
)
def test_a_signal_is_passed_on_and_the_daemon_taken_away(place, script, number, status, said):
    process = place.begin("sh", "-c", script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (status, said)
    assert place.is_clear()


def slurm(tasks: str, per_node: str, node: str) -> dict[str, str]:
    values = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": per_node}
    return values | {"SLURM_NODEID": node}


@pytest.mark.parametrize(
    ("missing", "environment", "words"),
    [
        ("nvidia-cuda-mps-control", {}, "no nvidia-cuda-mps-control on PATH"),
        ("nvidia-smi", {}, "no nvidia-smi on PATH"),
        (None, {"FAKE_NO_GPU": "1"}, "sees no GPU"),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, "hides every GPU"),
        (None, {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}, "no daemon answers there"),
        (None, {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, "one of several ranks"),
        (None, slurm("3", "1,2", "1"), "one of several ranks"),
        (None, {"PMI_SIZE": "many"}, "says nothing of this node"),
        (None, {"FAKE_BROKEN": "1"}, "did not start (exit status 1): no such server"),
    ],
)
def test_refused_and_the_command_not_run(place, missing, environment, words):
    if missing:
        (place.path / "bin" / missing).unlink()
    status, out, err = place.run("sh", "-c", "echo ran", **environment)
    assert (status, out) == (2, "")
    assert err.startswith("mpishare.mps: ")
    assert words in err
    assert place.is_clear()


@pytest.mark.parametrize(
    "environment",
    [
        slurm("3", "1(x3)", "2"),
        slurm("3", "2,1", "1"),
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        # One process of an mpirun whose helpers srun started.
        {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_one_rank_on_each_of_several_nodes_starts_the_daemon_of_its_node(place, environment):
    status, out, err = place.run("sh", "-c", "echo ran", **environment)
    assert (status, out, err) == (0, "ran", "")
    assert len(place.daemons()) == 1
    assert place.is_clear()


def test_folders_that_will_not_do(place):
    """Unlike one that others know: one that is there, without a command, too long for a socket."""
    known = str(place.work / "known")
    named = {"CUDA_MPS_PIPE_DIRECTORY": known}
    status, out, err = place.run("--folder", known, "sh", "-c", f"{SHOW} 3", **named)
    assert (status, out.split()[0], err) == (3, known, "")
    assert place.is_clear()
    taken, long = place.path / "default", place.work / ("long" * 25)
    status, out, err = place.run("--folder", str(taken), "sh", "-c", "echo ran")
    assert (status, out) == (2, "")
    assert "File exists" in err
    assert taken.exists()
    assert place.run("--folder", "x")[0] == 2
    long.mkdir()
    status, out, err = place.run("sh", "-c", "echo ran", TMPDIR=str(long))
    assert (status, out) == (2, "")
    assert "set TMPDIR=/tmp" in err
    assert len(place.daemons()) == 1


@pytest.mark.parametrize(
    ("is_named", "is_of_another"),
    [(True, False), (False, False), pytest.param(True, True, marks=needs_two_users)],
)
def test_where_a_daemon_answers_the_command_is_run_as_it_is(place, is_named, is_of_another):
    """Unless it is of another user, whom it serves alone."""
    other = place.path / "default"
    pid = place.start_other(other)
    named = {"CUDA_MPS_PIPE_DIRECTORY": str(other)} if is_named else {}
    if is_of_another:
        os.chown(other, NOBODY, NOBODY)
    status, out, err = place.run("sh", "-c", f"{SHOW} 3", CUDA_VISIBLE_DEVICES="2", **named)
    if is_of_another:
        assert (status, out) == (2, "")
        assert f"CUDA_MPS_PIPE_DIRECTORY={other}, but it belongs to user {NOBODY}" in err
    else:
        assert (status, out.split()) == (3, [*named.values(), "2"])
        assert "answers already" in err
    assert place.daemons() == [pid]
    assert lives(pid)


def test_one_that_does_not_quit_is_ended_and_no_other(place):
    other = place.path / "other"
    other.mkdir()
    pid = place.start_other(other)
    quick = (
        "import sys\nfrom mpishare.tools import mps\nmps.END_S = 0.2\n"
        "sys.exit(mps.main(sys.argv[1:]))\n"
    )
    status, _, err = place.run("sh", "-c", "exit 4", before=["-c", quick], FAKE_STAYS="1")
    assert status == 4
    assert "did not quit: SIGTERM" in err
    assert len(place.daemons()) == 2
    assert [lives(each) for each in place.daemons()] == [True, False]
    assert lives(pid)


def test_a_command_that_is_not_there(place):
    assert place.run("nosuch")[0] == 127
    assert place.run(str(place.path))[0] == 126
    assert place.run()[0] == 2
    assert not place.daemons()
