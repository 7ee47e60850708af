"""Viewers outside the job that are killed, stopped, many or foreign: the job goes on."""

import gc
import os
import signal
import sys
import time
import warnings

import pytest

from tests.helpers.planted import NOBODY, needs_two_users
from tests.helpers.scenes import KILLING_BACKENDS, play
from tests.helpers.stage import Stage, leftovers
from tests.helpers.viewer import Viewer

# Runs in a viewer.
COME = """
def come_last(there):
    visit = mpishare.view.names.find(there.name, there.job, 30)[1]
    try:
        visit.ask({"attaches": True})  # the job waits for it, and dies
    except mpishare.HandleError:
        pass
    return visit
"""
# Runs in a viewer: its children attach and are killed, with a lease, and most in a copy.
VICTIMS = """
import random, signal
def victims(name, count):
    for _ in range(count):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            there = attach(name)
            there.latest()
            os.write(writer, b"x")
            while True:
                there.latest()
        assert os.read(reader, 1) == b"x"
        os.close(reader); os.close(writer)
        time.sleep(random.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return count
"""


def viewed(stage: Stage, source: str, call: str, size: int, burst: int, is_right: str) -> None:
    """Take snapshots, whose values are their numbers, until the viewer of rank 0 has answered.

    Its answer must be right by an expression, and nothing is left.
    """
    import select

    from tests.helpers.held import held
    from tests.helpers.latch import within
    from tests.helpers.viewer import Viewer, facts_of

    node = stage.node()
    node.allocate_each(size, name="warm").close()
    gc.collect()
    before = held()
    window = node.allocate_each(size, name="viewed", fill=0.0)
    viewer = Viewer() if stage.rank == 0 else None
    if viewer:
        viewer(source)
        viewer.begin(call)
    is_over, step = False, 0
    while not is_over:
        for _ in range(burst):
            step += 1
            window.array[...] = step
            window.snapshot()
        window.fence()
        node.synchronize()
        ready = viewer and select.select([viewer.process.stdout], [], [], 0)[0]
        is_over = stage.world.bcast(bool(ready), 0)
    if viewer:
        answer = viewer.answer()
        assert eval(is_right, {"answer": answer}), answer
        assert viewer.close() == 0
        assert within(60, lambda: facts_of("viewed")["viewers"] == [])
    window.close()
    gc.collect()
    assert held() == before
    node.close()
    assert leftovers() == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", KILLING_BACKENDS)
def test_a_hundred_viewers_that_are_killed(backend):
    kills = 100 if backend == "host" else 10  # each makes a context on the GPU
    scene = viewed, VICTIMS, f"victims('viewed', {kills})", 1 << 16, 1, f"answer == {kills}"
    play(2, *scene, backend=backend, timeout_s=100, shared=True).ended_well()


def stopped(stage: Stage, killed_after_s: float) -> None:
    """A close on a GPU waits for the viewer as long as it may have an answer still."""
    import threading

    from tests.helpers.viewer import Viewer

    node = stage.node()
    window = node.allocate_each(1 << 16, name="stopped", fill=1.0)
    window.snapshot()
    node.synchronize()
    node.barrier()
    viewer = Viewer() if stage.rank == 0 else None
    if viewer:
        assert viewer("host(attach('stopped').latest().array)[0]") == 1.0
        viewer("there = attach('stopped')")
        os.kill(viewer.pid, signal.SIGSTOP)
        if killed_after_s:
            threading.Timer(killed_after_s, viewer.process.kill).start()
    node.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = time.monotonic()
        window.close()
        seconds = time.monotonic() - begin
    warned = [str(w.message) for w in caught if w.category is ResourceWarning]
    is_kept = node.backend == "cuda" and not killed_after_s
    assert len(warned) == int(is_kept and stage.rank == 0)
    if viewer:
        assert not warned or f"[{viewer.pid}" in warned[0]
        least, most = (0.0, 3.0) if node.backend == "host" else (3, 4) if is_kept else (0.3, 2)
        assert least <= seconds < most
    node.allocate(4, name="stopped").close()
    if viewer:
        viewer.kill()
    node.close()


@pytest.mark.parametrize("backend", KILLING_BACKENDS)
@pytest.mark.parametrize("killed_after_s", [0.0, 0.5], ids=["stays", "killed during the close"])
def test_a_viewer_that_is_stopped_delays_nothing_but_a_close_on_a_gpu(backend, killed_after_s):
    play(2, stopped, killed_after_s, backend=backend, shared=True).ended()


def dying_amid_frames(stage: Stage, names: list[str]) -> None:
    """The producer is killed behind two frames of each channel, and ended only the first one."""
    from tests.helpers.latch import within
    from tests.helpers.viewer import facts_of

    node = stage.node()
    channels = [node.channel(4, name=name, consumers=[]) for name in names]
    if stage.rank == 0:
        assert within(60, lambda: len(facts_of(names[1])["viewers"]) == 2)
        for channel in channels:
            for value in range(2):
                with channel.put() as slot:
                    slot[...] = value
        channels[0].end()
    stage.world.Barrier()
    stage.die()


def test_a_killed_producer_is_not_taken_for_the_end_of_its_frames():
    names = [f"{each}-{os.getpid()}" for each in ("ended", "cut")]
    with Viewer() as viewer:
        viewer(COME)
        viewer.begin(
            f"ended, cut = (mpishare.attach(name, wait_s=30) for name in {names})\n"
            "last = come_last(cut)\n"
            "numbers = [f.number for f in cut]"
        )
        play(2, dying_amid_frames, names, backend="host")
        told = viewer.told()
        assert told["error"] == "ClosedError"
        gone = f"the job of {names[1]!r} is gone, but the channel was not ended behind frame 2: "
        assert gone in told["text"]
        viewer.raises("ClosedError", "list(cut)", told["text"])  # another loop too
        assert viewer("[f.number for f in ended]") == [1, 2]
        assert viewer("list(ended)") == []


CROWD = """
def crowd(name, count, seconds):
    pipes = []
    for _ in range(count):
        reader, writer = os.pipe()
        if os.fork() == 0:
            seen = torn = 0
            with attach(name, timeout_s=20) as there:
                end = time.time() + seconds
                while time.time() < end:
                    f = there.latest()
                    seen += 1
                    torn += any((f.segment(r) != f.number).any() for r in there.ranks)
            os.write(writer, json.dumps([seen, int(torn)]).encode())
            os._exit(0)
        os.close(writer)
        pipes.append(reader)
    told = [json.loads(os.read(reader, 100)) for reader in pipes]
    for _ in pipes: os.wait()
    return told
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("count", "seconds", "least"), [(50, 3.0, 1), (1, 4.0, 500)])
def test_no_frame_is_torn_at_full_speed(count, seconds, least):
    is_right = f"len(answer) == {count} and all(n >= {least} and not torn for n, torn in answer)"
    scene = viewed, CROWD, f"crowd('viewed', {count}, {seconds})", 512, 500, is_right
    play(2, *scene, timeout_s=100, shared=True).ended_well()


def twice(stage: Stage) -> None:
    from tests.helpers.viewer import Viewer, facts_of

    node = stage.node(stage.MPI.COMM_SELF)
    window = stage.attempt(
        "allocate", lambda: node.allocate(2, fill=float(stage.rank), name="twice")
    )
    jobs = stage.gather("" if window is None else facts_of("twice")["job"])
    if stage.rank == 0 and all(jobs):
        with Viewer() as viewer:
            words = [*map(repr, jobs), "Pass job= with one of them"]
            viewer.raises("HandleError", "mpishare.attach('twice')", *words)
            for job, value in ((repr(jobs[0]), 0), (repr(jobs[1]), 1), (jobs[0], 0)):
                seen = viewer(f"host(mpishare.attach('twice', job={job}).array)")
                assert seen == [value, value]
            wrong = "mpishare.attach('twice', job='none-such')"
            viewer.raises("HandleError", wrong, f"'twice' of job {jobs[0]}")
    stage.world.Barrier()
    node.close()


def test_a_name_of_two_jobs():
    played = play(2, twice, shared=True)
    played.worked([0, 1], "allocate")
    played.ended()


def test_a_name_is_taken_by_another_node_of_a_scheduled_job():
    played = play(2, twice, env={"SLURM_JOB_ID": f"7{os.getpid()}"})
    outcomes = sorted(str(played.told(rank, "allocate").error) for rank in range(2))
    assert outcomes in (["None", "ValueError"], ["ValueError"] * 2)  # at once, both are refused


# Runs as another user, who reads the addresses of all sockets, and binds what it likes.
SQUATTER = """
import os, re, socket, sys, time
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
taken = {}
def take(address, backlog=8):
    squatter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        squatter.bind(chr(0) + address)
        squatter.listen(backlog)
        taken[address] = squatter
    except OSError:
        squatter.close()
    return squatter

prefix = sys.argv[1]
take(f"{prefix}/foreign")
take(f"{prefix}/foreign/guessed")
take(f"{prefix}/false/AAAAAA")
take("mpishare/0/window/another-job/foreign/AAAAAA")
take(f"{prefix}/" + chr(27) + "[2Jcleared/AAAAAA")
take(f"{prefix}/\\n00000000 00010000 0 1 1 @mpishare/0/window/1/" + chr(27) + "[2J/A")
full = take(f"{prefix}/foreign/FULLFU", 0)
for _ in range(2):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    taken[one] = one.connect_ex(full.getsockname())
print("squatting", flush=True)
while True:
    for address in re.findall("@(mpishare/0/.*)", open("/proc/net/unix", errors="replace").read()):
        if address not in taken:
            take(address)
    time.sleep(0.0005)
"""
FOREIGN = """
def foreign(nobody, name):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setgid(nobody); os.setuid(nobody)
        try:
            told = f"attached: {attach(name)}"
        except mpishare.HandleError as error:
            told = str(error)
        os.write(writer, told.encode())
        os._exit(0)
    os.wait()
    return os.read(reader, 10000).decode()
"""


def beside_another_user(stage: Stage, squatter: str, source: str, nobody: int) -> None:
    import subprocess

    from mpishare.view.names import job_id
    from tests.helpers.viewer import Viewer

    node = stage.node()
    hostile = None
    if stage.rank == 0:
        prefix = f"mpishare/{os.getuid()}/window/{job_id(os.getpid())}"
        command = [sys.executable, "-c", squatter, prefix, str(nobody)]
        hostile = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert hostile.stdout.readline() == b"squatting\n"
    stage.world.Barrier()
    for _ in range(4):
        node.pool(max_nbytes=1 << 16).close()
        node.allocate(4, name="foreign").close()
    window = node.allocate(4, name="foreign", fill=3.0)
    if hostile:
        with Viewer() as viewer:
            viewer(source)
            begin = time.monotonic()
            assert viewer("host(mpishare.attach('foreign', timeout_s=60).array)") == [3.0] * 4
            # Not the deadline, though one socket takes no connection.
            assert time.monotonic() - begin < 30
            told = viewer(f"foreign({nobody}, 'foreign')")
            assert "User 0 has a window of that name" in told
            viewer.begin("attach('false')")
            told = viewer.told()["text"]
            assert "no process of this user has a window of that name" in told
            command = [sys.executable, "-m", "mpishare.info", "--attachable"]
            listed = subprocess.run(command, capture_output=True, text=True).stdout
            assert "foreign  job" in listed
            assert "\x1b" not in listed + told
        hostile.kill()
        hostile.wait()
    stage.world.Barrier()
    window.close()
    node.close()


@pytest.mark.timeout(120)
@needs_two_users
def test_another_user_takes_every_address_and_neither_job_nor_viewer_is_misled():
    scene = beside_another_user, SQUATTER, FOREIGN, NOBODY
    play(2, *scene, timeout_s=100, shared=True).ended_well()
