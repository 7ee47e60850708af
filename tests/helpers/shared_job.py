"""A job whose ranks stay and play one scene after another, so that MPI and imports are paid once.

For scenes in which no rank dies, none is missing in a call of MPI itself, and nothing of the
process is changed for good. Environment variable `TESTS_APART=1` gives each a job of its own.
Each scene has reports, a stderr and a communicator of its own, so that
messages that are left open meet none of the next scene. Where a rank raised, hung or ended, or a
thread of mpishare's goes on, the job is ended behind the scene, and the next one starts another.
"""

import atexit
import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.helpers import launch, reporting

THREADS_S = 1.0  # until those of nodes that were closed have ended
GRACE_S = 1.0  # for the other ranks, once one has failed
_jobs: dict[object, "SharedJob"] = {}


def play_shared(
    n: int,
    program: str,
    *,
    env: Mapping[str, str],
    extra_mpirun: Sequence[str] = (),
    before: Sequence[str | Path] = (),
    timeout_s: float = launch.TIMEOUT_S,
) -> launch.Result:
    """Run the source of a scene on the job of `n` ranks that was started in this way."""
    if "TESTS_APART" in os.environ:
        return launch.run_ranks(
            n, program, env=env, extra_mpirun=extra_mpirun, before=before, timeout_s=timeout_s
        )
    key = (n, frozenset(env.items()), *extra_mpirun, *before)
    if key not in _jobs:
        _jobs[key] = SharedJob(n, env, extra_mpirun, before)
    result, may_stay = _jobs[key].play(program, timeout_s)
    if not may_stay:
        _jobs.pop(key).end()
    return result


class SharedJob:
    def __init__(
        self,
        n: int,
        env: Mapping[str, str],
        extra_mpirun: Sequence[str],
        before: Sequence[str | Path],
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="job-")
        self.segments = launch.segments()
        work = Path(self.folder.name)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(work / "socket"))
            listener.listen(n)
            listener.settimeout(launch.TIMEOUT_S)
            command, variables = launch.started_as(
                n, [sys.executable, "-m", __name__], work, env, extra_mpirun, before
            )
            with (work / "output").open("w") as output:
                self.process = launch.start_job(command, variables, output, output)
            atexit.register(self.end)
            self.ranks = [listener.accept()[0] for _ in range(n)]

    def play(self, program: str, timeout_s: float) -> tuple[launch.Result, bool]:
        """Return how the scene ended, and whether the job can play another one."""
        with tempfile.TemporaryDirectory(prefix="scene-") as folder:
            begin = time.monotonic()
            order = json.dumps({"program": program, "folder": folder}).encode() + b"\n"
            for rank in self.ranks:
                rank.sendall(order)
            answers, timed_out = self._answers(begin + timeout_s)
            if timed_out:
                self.interrupt()
            work = Path(folder)
            texts = {
                name: "".join(file.read_text() for file in sorted(work.glob(f"{name}-*")))
                for name in ("stdout", "stderr")
            }
            reports = {int(f.stem): json.loads(f.read_text()) for f in work.glob("[0-9]*.json")}
        is_right = len(answers) == len(self.ranks) and not any(each["failed"] for each in answers)
        result = launch.Result(
            returncode=0 if is_right else 1,
            **texts,
            seconds=time.monotonic() - begin,
            reports=dict(sorted(reports.items())),
            timed_out=timed_out,
            survivors=[],
        )
        return result, is_right and all(each["may_stay"] for each in answers)

    def _answers(self, end: float) -> tuple[list[dict], bool]:
        """What the ranks said at their end; and whether some had not ended at the deadline."""
        answers, waiting = [], list(self.ranks)
        while waiting:
            ready = select.select(waiting, [], [], max(0, end - time.monotonic()))[0]
            if not ready:
                return answers, not any(each["failed"] for each in answers)
            for rank in ready:
                waiting.remove(rank)
                said = rank.makefile().readline()
                answers.append(json.loads(said) if said else {"failed": True, "may_stay": False})
            if any(each["failed"] for each in answers):
                end = min(end, time.monotonic() + GRACE_S)
        return answers, False

    def interrupt(self) -> None:
        """Let each rank print where it is."""
        launch.print_where(Path(self.folder.name))
        launch.wait_until(lambda: self.process.poll() is not None, 2)

    def end(self) -> None:
        """Let the ranks go; what does not is killed."""
        atexit.unregister(self.end)
        for rank in self.ranks:
            rank.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        for pid, _ in list(launch.processes_of(Path(self.folder.name))):
            launch.send_signal(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(10)
        launch.remove_unused(launch.segments() - self.segments)
        self.folder.cleanup()


def _serve() -> None:
    """Play on this rank what is sent, until the test process is gone."""
    from mpishare.coordination.poll import poll
    from tests.helpers import stage

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(Path(os.environ["REPORT_DIR"], "socket")))
        for line in connection.makefile():
            order = json.loads(line)
            failed = False
            stage.begin()
            with _restored(Path(order["folder"])):
                try:
                    exec(compile(order["program"], "scene.py", "exec"), {"__name__": "__main__"})
                    names = [*launch.SHM.glob(f"mpishare-{os.getpid()}-*")]
                    assert not names, f"left in /dev/shm: {names}"
                except BaseException:
                    traceback.print_exc()
                    failed = True
            gc.collect()
            answer = {
                "failed": failed,
                "may_stay": poll(lambda: not stage.has_threads(), THREADS_S),
            }
            connection.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)  # MPI could wait for messages of scenes whose ranks did not come


@contextlib.contextmanager
def _restored(folder: Path) -> Iterator[None]:
    """Let a scene write into the folder, and undo what scenes change of their process."""
    rank = reporting.my_rank()
    reporting.begin(folder)
    environment, log = dict(os.environ), logging.getLogger("mpishare")
    level, handlers = log.level, log.handlers[:]
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    kept = [(stream, os.dup(stream)) for stream in (1, 2)]
    for stream, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    with warnings.catch_warnings():
        yield
    sys.stdout.flush()
    for stream, copy in kept:
        os.dup2(copy, stream)
        os.close(copy)
    for number, handler in signals.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    log.setLevel(level)
    log.handlers[:] = handlers
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    _serve()
