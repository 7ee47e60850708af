"""Names of windows, and the page by which viewers know that a snapshot is whole."""

import contextlib
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import mpishare
from mpishare import HandleError
from mpishare.errors import CudaError
from mpishare.memory.fd_server import FdServer
from mpishare.memory.memory import ArrayLayout
from mpishare.memory.shared import whole_pages
from mpishare.view import names
from mpishare.view.description import Description, Segment
from mpishare.view.frames import Frame
from mpishare.view.live import map_on_gpu
from mpishare.view.page import BUFFERS, Page, Places, pack_numbers, unpack_numbers
from mpishare.view.readers import OVERWRITTEN, Reader
from mpishare.view.snapshots import Slot
from tests.helpers.planted import NOBODY, needs_two_users


def page_of(buffers=BUFFERS):
    """A page in plain memory, of two segments of a word each."""
    places = Places([8, 8], buffers)
    return Page(bytearray(places.page_nbytes()), places)


@pytest.fixture
def page():
    return page_of()


def reader_of(page, checked=("begin", "end"), lag=0):
    """A reader of the segments of ranks 0 and 2, whose copies are the numbers of the buffers."""

    class PageReader(Reader):
        def __init__(self):
            self._page, self._track, self._checked = page, "host", checked
            self._segments = [Segment(rank, ArrayLayout((1,), np.dtype("i8"))) for rank in (0, 2)]
            self._reads_all = lag > 0
            self.during = int

        def _copy(self, place):
            self.during()
            return {0: place}

    return PageReader()


def write(page, rank, number, words=("begin", "end", "mark")):
    for word in words:
        page.slots["records"]["host"][word][rank // 2, number % page.places.buffers] = number


def newest(page, checked=("begin", "end")):
    copied = reader_of(page, checked).read(0)
    return copied.number if copied else 0


def test_the_newest_snapshot_is_whole_on_all_ranks(page):
    assert newest(page) == 0
    for number in (1, 2, 3):
        write(page, 0, number)
    assert newest(page) == 0
    write(page, 2, 1)
    assert newest(page) == 1
    write(page, 0, 4, ["begin"])
    assert newest(page) == 0  # the first is being overwritten
    write(page, 2, 2)
    assert newest(page) == 2


def test_a_snapshot_whose_source_was_overwritten_does_not_count(page):
    for rank in (0, 2):
        write(page, rank, 4)
        write(page, rank, 5)
    write(page, 2, 8, ["mark"])
    assert newest(page, ("begin", "end", "mark")) == 4
    assert newest(page) == 5


def test_snapshots_with_gaps(page):
    for rank in (0, 2):
        for number in (8, 16, 32):
            write(page, rank, number)
    assert newest(page) == 32
    write(page, 2, 64, ["begin"])  # where 16 was
    assert newest(page) == 32
    write(page, 0, 256, ["begin", "end"])  # where 16 was: rank 2 has it not
    assert newest(page) == 32


def test_a_copy_is_torn_if_any_rank_has_begun_another(page):
    for rank in (0, 2):
        write(page, rank, 7)
    reader = reader_of(page)
    reader.during = lambda: write(page, 2, 8, ["begin"])
    assert reader.read(0).number == 7
    reader.during = lambda: write(page, 2, 10, ["begin"])
    assert reader.read(0) is OVERWRITTEN


def test_a_channel_is_read_frame_by_frame_until_one_is_overwritten():
    page = page_of(3)
    reader = reader_of(page, lag=2)
    assert reader.read(0) is None
    for number in (1, 2):
        for rank in (0, 2):
            write(page, rank, number)
    assert [reader.read(than).number for than in (0, 1)] == [1, 2]
    assert reader.read(2) is None
    write(page, 0, 3, ["begin"])
    assert reader.read(2) is None
    reader.during = lambda: write(page, 0, 5, ["begin"])
    assert reader.read(0).number == 1
    assert reader.read(1) is OVERWRITTEN  # begun over during the copy
    assert reader.read(1) is OVERWRITTEN  # and before


def test_frames_that_were_copied_before_the_end_come_once_each():
    """One may have been read while the others were copied, which another thread does."""
    page = page_of(5)
    reader = reader_of(page, lag=4)
    for number in (1, 2, 3):
        for rank in (0, 2):
            write(page, rank, number)
    page.header["last"] = 4
    reader.close(0)
    assert [reader.read(than).number for than in (1, 2)] == [2, 3]
    assert reader.read(3) is None
    assert (reader.last(), reader.numbers(), reader.failed()) == (3, {0: 3, 2: 3}, [])
    reader.close(3)
    assert reader.read(0).number == 1
    assert reader.read(0) is None


def test_a_frame_that_was_overwritten_before_the_end_is_the_last():
    page = page_of(3)
    reader = reader_of(page, lag=2)
    write(page, 0, 4, ["begin"])
    reader.close(0)
    assert reader.read(0) is OVERWRITTEN


def record_of(words):
    return np.array(words + [0] * (61 - len(words)), "u8").tobytes()


def test_numbers_stand_in_whole_words():
    of_numpy = {"i": np.int32(-3), "f": np.float32(0.5), "b": np.bool_(True)}
    plain = {"time": 0.1, "step": -(1 << 63), "done": True}
    for numbers in ({}, plain, {"\u03b8" * 3: float("inf")}, of_numpy, {"n" * 457: 1}):
        found = unpack_numbers(record_of(pack_numbers("snapshot", numbers)))
        assert found == numbers
        assert {type(value) for value in found.values()} <= {int, float, bool}
    with pytest.raises(ValueError, match="take 528 bytes, of 488"):
        pack_numbers("snapshot", {"n" * 500: 1})
    with pytest.raises(ValueError, match="needs more than 64 bits"):
        pack_numbers("snapshot", {"step": 1 << 63})
    for wrong in ("text", None, 1j, [1], np.ones(1)):
        with pytest.raises(TypeError, match=r"snapshot failed: time=.* is no number: give an int"):
            pack_numbers("snapshot", {"time": wrong})


def test_forged_numbers_are_an_error():
    forged = []
    for text in (b"[1]", b"{", b'{"":""}', b'{"":[]}', b"\xff\xff"):
        forged.append([len(text), int.from_bytes(text.ljust(8), "little")])
    words = pack_numbers("snapshot", {"n": 1})
    for record in [*forged, [480, *words[1:]], [1 << 62, *words[1:]]]:
        with pytest.raises(HandleError, match="numbers beside a frame that are none"):
            unpack_numbers(record_of(record))


def test_the_whole_of_uneven_blocks_with_ghosts():
    whole = np.arange(7 * 9).reshape(7, 9)
    padded = np.pad(whole, ((1, 2), (1, 2)), constant_values=-1)
    cuts = [((0, 3), (0, 5)), ((0, 3), (5, 9)), ((3, 7), (0, 5)), ((3, 7), (5, 9))]
    parts = {2 * rank: padded[a : b + 3, c : d + 3] for rank, ((a, b), (c, d)) in enumerate(cuts)}
    frame = Frame(1, parts, {})
    assert np.array_equal(frame.whole((2, 2), width=[(1, 2), (1, 2)]), whole)
    assert np.array_equal(Frame(1, {0: whole}, {}).whole((1, 1)), whole)
    for dims, width, words in [
        ((2, 1), 0, "do not fit 4 segments"),
        ((4,), 0, "do not fit 4 segments of"),
        ((4, 1), 0, r"rank 2 at \(1, 0\) has"),
        ((2, 2), -1, "none of them negative"),
        ((2, 2), (1, 2, 3), "for each of 2 axes"),
        ((2, 2), 9, "is all ghosts"),
    ]:
        with pytest.raises(ValueError, match=words):
            frame.whole(dims, width)


def test_strides_use_all_buffers_in_turn():
    for stride in (1, 2, 4, 64, 1 << 20):
        places = [number * stride % BUFFERS for number in range(7)]
        assert {*places[:3]} == {0, 1, 2}
        assert places[:3] == places[3:6]


@pytest.mark.parametrize("sizes", [[0], [8, 8], [1 << 21, 1, 3 << 20], [5]], ids=str)
def test_blocks_lie_apart_and_behind_the_page(sizes):
    places = Places(sizes)
    offsets, end = places.blocks()
    before = places.page_nbytes()
    for offset, nbytes in zip(offsets, sizes, strict=True):
        assert offset >= before
        assert offset % (2 << 20) == 0
        before = offset + BUFFERS * whole_pages(nbytes)
    assert before <= end


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((3, 4), (32, 8), True),
        ((3, 4), (8, 24), True),
        ((2, 3, 4), (8, 64, 16), True),
        ((3, 4), (64, 8), False),
        ((3, 4), (8, 32), False),
        ((3,), (-8,), False),
        ((1, 4), (999, 8), True),
        ((0, 4), (64, 8), True),
        ((), (), True),
        ((3,), (0,), False),
    ],
    ids=str,
)
def test_dense_is_without_gaps_in_any_order(shape, strides, dense):
    assert ArrayLayout(shape, np.dtype("f8"), strides).is_dense is dense


def test_words_lie_on_the_gpu_as_here(page):
    slot = Slot(page, -1, 1 << 40, 1, ArrayLayout((1,), np.dtype("i8")))
    first = slot.address(page.slots[:1].view("u8"))
    assert first == page.slots.ctypes.data + (1 << 40)
    assert slot.address(slot.words["records"]["host"]["end"][1:]) == first + (
        page.slots.itemsize + 128 + 1024 + 8
    )
    slot.words["token"] = np.frombuffer(token := os.urandom(64), "u1")
    assert page.slots["token"].tobytes() == bytes(64) + token


class WalledGpu:
    """A backend whose driver maps the memory of all ranks but one."""

    def open(self, token, nbytes, uuid):
        if token == "walled":
            raise CudaError("cuIpcOpenMemHandle failed.", call="", code=1, name="")
        return token, nbytes, uuid


def test_memory_that_one_rank_hides_does_not_hide_that_of_the_others():
    tokens = {0: "a", 2: "walled", 3: "d"}
    layouts = {r: ArrayLayout((r,), np.dtype("i8")) for r in tokens}
    segments = [Segment(r, layouts[r], f"GPU-{r}", tokens[r]) for r in tokens]
    mapped, refused = map_on_gpu(WalledGpu(), segments)
    assert mapped == {0: ("a", 1, "GPU-0"), 3: ("d", 24, "GPU-3")}
    assert refused == {2: "cuIpcOpenMemHandle failed"}


def test_the_longest_name_and_job_fit_an_address():
    name = names.door_name(names.job_text("j" * 99), "n" * 40)
    door = FdServer()
    address = door.open(name, lambda request, _: ({}, [])).address
    door.close()
    assert len(address.replace(str(os.getuid()), "4294967295", 1)) == 106  # behind a zero


@pytest.mark.parametrize(
    ("env", "job"),
    [
        ({}, "77"),
        ({"SLURM_JOB_ID": "123"}, "123"),
        ({"PBS_JOBID": "12[3].server/x"}, "12-3-.server-x"),
        ({"SLURM_JOB_ID": ""}, "77"),
    ],
    ids=str,
)
def test_the_job_is_the_schedulers_else_the_leader(monkeypatch, env, job):
    for name in names._JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert names.job_id(77) == job


def test_a_name_that_nobody_has_says_what_is_there_and_what_may_be():
    with pytest.raises(HandleError, match="in another network namespace") as told:
        names.find("nobody-has-this", None, 5.0)
    assert "Windows that are there:" in str(told.value)


MANY = """
import os, socket, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
taken = []
for number in range(300):
    taken.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    taken[-1].bind(f"{chr(0)}mpishare/{sys.argv[2]}/window/77/many/{number:06d}")
    taken[-1].listen()
print("in", flush=True)
sys.stdin.read()
"""


@needs_two_users
def test_the_many_sockets_of_another_user_are_visited_for_a_limited_time(monkeypatch, caplog):
    """A job that gives a window a name, and a viewer, wait for no more of them."""
    visit, visited = names.FdClient, []

    def slow(*given):  # as among tens of thousands
        visited.append(given[0])
        time.sleep(0.01)
        return visit(*given)

    monkeypatch.setattr(names, "FdClient", slow)
    command = [sys.executable, "-c", MANY, str(NOBODY), str(os.getuid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as squatter:
        assert squatter.stdout.readline() == b"in\n"
        named = [window for window in names.listed() if window.name == "many"]
        begin = time.monotonic()
        found, full = names.visit_mine(named, 5.0, 0.0)
        assert time.monotonic() - begin < 1.5
        squatter.stdin.close()
    assert (found, len(named)) == ({}, 300)
    assert full == named[len(visited) :] != []
    assert f"{len(full)} of 300 sockets that are named as windows of this user" in caplog.text


GOOD = Description("host", (Segment(0, ArrayLayout((4,), np.dtype("i8"))),), "", 1).pack()
SEGMENT = GOOD["segments"][0]


@pytest.fixture
def fake():
    """A door of this process that answers as it is told, beside the files of a window of 32 B."""
    door = FdServer()
    with tempfile.TemporaryFile() as file:
        file.truncate(4 << 20)

        def open_door(reply, name="fake", files=2):
            fds = [file.fileno()] * files if isinstance(files, int) else files
            answers = itertools.chain(reply if isinstance(reply, list) else [reply] * 99)
            return door.open(f"window/77/{name}", lambda *_: (next(answers), fds))

        yield open_door
    door.close()


def test_a_door_that_is_none_of_a_job_but_tells_all_is_attached_to(fake):
    fake(GOOD)
    with mpishare.attach("fake") as there:
        assert there.array.tolist() == [0] * 4
        assert (there.job, there.ranks) == ("77", (0,))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"version": 1}, {"version": "2"}, {"version": None}, {"version": "\x1b[2J"}),
        *({"dtype": text} for text in ("__import__('os')._exit(3)", '"zz"', '"|O"', 3)),
        *({"backend": backend} for backend in ("rocm", "", None, ["host"])),
        *({"segments": segments} for segments in ([], [None], {}, "a", [SEGMENT] * 2)),
        *({"why_not_live": None}, {"why_not_live": "\x1b[2J"}, {"pid": -1}, {"pid": "1"}),
        *({"since": "now"}, {"viewers": 3}, {"viewers": ["\x1b"]}),
        *({"shape": shape} for shape in (None, [-4], ["a"], [[1]], 4, [1 << 60], [1 << 70])),
        *({"shape": shape} for shape in ([0, 1 << 40, 1 << 40], [1] * 80)),
        *({"strides": strides} for strides in ([1 << 40], [8, 8], [-8], "8", [8.0])),
        *({"rank": rank} for rank in (1 << 63, -1, "0", True, None)),
        *({"uuid": None}, {"uuid": "\n"}, {"token": None}, {"token": "zz"}, {"token": "00"}),
        {"shape": [1 << 30]},
    ],
    ids=ascii,
)
def test_a_description_that_is_wrong_is_refused_in_words(fake, wrong):
    of_segment = {key: wrong[key] for key in wrong if key in SEGMENT}
    told = GOOD | wrong | ({"segments": [SEGMENT | of_segment]} if of_segment else {})
    fake(told)
    for missing in (False, True):
        if missing and wrong.get("shape") == [1 << 30]:
            continue  # right, but for the file
        key = next(iter(wrong))
        if missing and key in SEGMENT:
            told["segments"][0].pop(key)
        elif missing:
            told.pop(key)
        with pytest.raises(HandleError, match=r"^attach\('fake'\) failed: ") as caught:
            mpishare.attach("fake")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("reply", "files", "told"),
    [
        ({}, 2, "speaks version None"),
        ([GOOD, *[{}] * 99], 0, "0 files came with the window, not 2"),
        (GOOD | {"segments": [SEGMENT | {"rank": r} for r in range(9)]}, 8, "too small"),
        (GOOD | {"version": 9}, 99, "speaks version 9"),
    ],
    ids=["nothing", "no file", "small files", "many files"],
)
def test_a_window_whose_files_are_wrong_is_refused_and_none_stays(fake, reply, files, told):
    with tempfile.TemporaryFile() as file:
        fake(reply, files=[file.fileno()] * files)
        with pytest.raises(HandleError, match=rf"^attach\('fake'\) failed: .*{told}"):
            mpishare.attach("fake", timeout_s=0.5)
        copies = 0
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the door's thread closes its own
                copies += fd.samefile(f"/proc/self/fd/{file.fileno()}")
        assert copies == 1


def test_files_that_are_too_small_are_refused(fake):
    with tempfile.TemporaryFile() as small, tempfile.TemporaryFile() as large:
        large.truncate(4 << 20)
        for number, files in enumerate([(small, large), (large, small)]):
            fake(GOOD, name=f"small-{number}", files=[file.fileno() for file in files])
            with pytest.raises(HandleError, match=r"a file of 0 B, which is too small: .* needed"):
                mpishare.attach(f"small-{number}")


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan, math.inf, 2e9, True, "10", None])
def test_a_timeout_of_attach_is_positive(timeout_s):
    error = TypeError if isinstance(timeout_s, bool | str | None) else ValueError
    with pytest.raises(error, match=r"attach failed: timeout_s must be a positive number"):
        mpishare.attach("nobody_has_it", timeout_s=timeout_s)
