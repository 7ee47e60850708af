"""Names of windows, and the page by which viewers know that a snapshot is whole."""

import contextlib
import functools
import itertools
import math
import mmap
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mpishare
from mpishare import HandleError
from mpishare.memory.fd_server import FdServer
from mpishare.memory.memory import ArrayLayout
from mpishare.memory.shared import whole_pages
from mpishare.view import names
from mpishare.view.page import (
    BUFFERS,
    Description,
    Page,
    Places,
    Segment,
    pack_numbers,
    unpack_numbers,
)
from mpishare.view.readers import OVERWRITTEN, Frame, HostReader


class Window:
    """The file of a window of ranks 0 and 2, of a word each, whose buffers hold their numbers."""

    def __init__(self, file, *, lag=0, backend="host"):
        layout = ArrayLayout((1,), np.dtype("i8"))
        self.description = Description(backend, (Segment(0, layout), Segment(2, layout)), "", 1)
        self.description = replace(self.description, lag=lag)
        places = self.description.places()
        file.truncate(places.blocks()[1])
        self.fd = file.fileno()
        self.page = Page(mmap.mmap(self.fd, places.page_nbytes()), places)

    def write(self, rank, number, words=("begin", "end", "mark")):
        for word in words:
            records = self.page.slots["records"]["host"][word]
            records[rank // 2, number % self.page.places.buffers] = number

    def reader(self):
        return HostReader(self.fd, self.description)


@pytest.fixture
def window():
    with tempfile.TemporaryFile() as file:
        yield functools.partial(Window, file)


def newest(window):
    frame = window.reader().read(0)
    return frame.number if frame else 0


def test_the_newest_snapshot_is_whole_on_all_ranks(window):
    window = window()
    assert newest(window) == 0
    for number in (1, 2, 3):
        window.write(0, number)
    assert newest(window) == 0
    window.write(2, 1)
    assert newest(window) == 1
    window.write(0, 4, ["begin"])
    assert newest(window) == 0  # the first is being overwritten
    window.write(2, 2)
    assert newest(window) == 2


def test_a_snapshot_whose_source_was_overwritten_does_not_count(window):
    """Of copies from a GPU, which have a mark."""
    for backend, number in (("cuda", 4), ("host", 5)):
        at = window(backend=backend)
        for rank in (0, 2):
            at.write(rank, 4)
            at.write(rank, 5)
        at.write(2, 8, ["mark"])
        assert newest(at) == number


def test_a_copy_is_torn_if_any_rank_has_begun_another(window, monkeypatch):
    window = window()
    for rank in (0, 2):
        window.write(rank, 7)
    reader, copy = window.reader(), HostReader._copy
    for begun, is_torn in ((8, False), (10, True)):

        def overwritten(reader, place, begun=begun):
            window.write(2, begun, ["begin"])
            return copy(reader, place)

        monkeypatch.setattr(HostReader, "_copy", overwritten)
        assert (reader.read(0) is OVERWRITTEN) is is_torn


def test_frames_that_were_copied_before_the_end_come_once_each(window):
    """One may have been read while the others were copied, which another thread does."""
    window = window(lag=4)
    reader = window.reader()
    for number in (1, 2, 3):
        for rank in (0, 2):
            window.write(rank, number)
    window.page.header["last"] = 4
    reader.close(0)
    assert [reader.read(than).number for than in (1, 2)] == [2, 3]
    assert reader.read(3) is None
    assert (reader.last(), reader.numbers(), reader.failed()) == (3, {0: 3, 2: 3}, [])
    assert reader.read(0).number == 1
    assert reader.read(0) is None


def test_numbers_come_back():
    of_numpy = {"i": np.int32(-3), "f": np.float32(0.5), "b": np.bool_(True)}
    plain = {"time": 0.1, "step": -(1 << 63), "done": True}
    for numbers in ({}, plain, {"\u03b8" * 3: float("inf")}, of_numpy, {"n" * 970: 1}):
        words = pack_numbers("snapshot", numbers)
        found = unpack_numbers(np.array(words + [0] * (125 - len(words)), "u8").tobytes())
        assert found == numbers
        assert {type(value) for value in found.values()} <= {int, float, bool}
    with pytest.raises(ValueError, match="take 1007 bytes as text, of 992"):
        pack_numbers("snapshot", {"n" * 1000: 1})
    for wrong in ("text", None, 1j, [1], np.ones(1)):
        with pytest.raises(TypeError, match=r"snapshot failed: time=.* is no number: give an int"):
            pack_numbers("snapshot", {"time": wrong})


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
        ((4, 1), 0, r"do not fit together as \(4, 1\)"),
        ((2, 2), -1, "none of them negative"),
        ((2, 2), (1, 2, 3), "for each of 2 axes"),
        ((2, 2), 9, "is all ghosts"),
    ]:
        with pytest.raises(ValueError, match=words):
            frame.whole(dims, width)


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
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert names.job_id(77) == job


GOOD = Description("host", (Segment(0, ArrayLayout((4,), np.dtype("i8"))),), "", 1).pack()
WINDOW = GOOD["window"]


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
    ("reply", "files", "told"),
    [
        ({}, 2, "speaks version None"),
        (GOOD | {"version": "\x1b[2J"}, 2, "speaks version"),
        (GOOD | {"window": WINDOW | {"segments": [[0]]}}, 2, "told of no window"),
        ({"version": GOOD["version"], "window": "\x1b"}, 2, "told of no window"),
        ([GOOD, *[{}] * 99], 1, "1 files of .* did not arrive"),
        (GOOD | {"window": WINDOW | {"segments": WINDOW["segments"] * 9}}, 10, "too small"),
        (GOOD | {"version": 9}, 99, "speaks version 9"),
    ],
    ids=["nothing", "version", "segments", "window", "no file", "small files", "many files"],
)
def test_a_window_whose_files_are_wrong_is_refused_and_none_stays(fake, reply, files, told):
    with tempfile.TemporaryFile() as file:
        fake(reply, files=[file.fileno()] * files)
        with pytest.raises(HandleError, match=rf"^attach\('fake'\) failed: .*{told}") as caught:
            mpishare.attach("fake", timeout_s=0.5)
        assert str(caught.value).isprintable()
        copies = 0
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the door's thread closes its own
                copies += fd.samefile(f"/proc/self/fd/{file.fileno()}")
        assert copies == 1


TIMES = [0, math.inf, 2e9, -1.0, math.nan, -math.inf, True, "10"]
ATTACH, OPEN = (mpishare.attach, "nobody-has-it"), (mpishare.open_handle, b"")


@pytest.mark.parametrize(
    ("call", "name", "words", "wrong"),
    [
        (ATTACH, "timeout_s", "attach failed: timeout_s must be a positive number", TIMES),
        (ATTACH, "wait_s", "attach failed: wait_s must be a number of seconds", TIMES[3:]),
        (OPEN, "timeout_s", "open_handle failed: timeout_s must be a positive number", TIMES),
    ],
    ids=["timeout_s of attach", "wait_s of attach", "timeout_s of open_handle"],
)
def test_a_duration_is_a_number_and_not_negative(call, name, words, wrong):
    function, argument = call
    for seconds in wrong:
        kind = TypeError if isinstance(seconds, bool | str) else ValueError
        with pytest.raises(kind, match=words):
            function(argument, **{name: seconds})
