"""Names of windows, and the page by which viewers know that a snapshot is whole."""

import os

import pytest

from mpishare import HandleError
from mpishare.errors import CudaError
from mpishare.viewers import names
from mpishare.viewers import page as layout
from mpishare.viewers.live import map_on_gpu
from mpishare.viewers.page import BEGIN, BUFFERS, END, HOST, MARK
from mpishare.viewers.readers import Segment


@pytest.fixture
def page():
    return memoryview(bytearray(layout.page_nbytes(3))).cast("Q")


STARTS = [layout.slot(0) + HOST, layout.slot(2) + HOST]


def write(page, rank, number, words=(BEGIN, END, MARK)):
    for word in words:
        page[layout.slot(rank) + HOST + word + number % BUFFERS] = number


def newest(page, checked=(BEGIN, END)):
    return layout.newest(page, STARTS, checked)


def test_the_newest_snapshot_is_whole_on_all_ranks(page):
    assert newest(page) == 0
    for number in (1, 2, 3):
        write(page, 0, number)
    assert newest(page) == 0
    write(page, 2, 1)
    assert newest(page) == 1
    write(page, 0, 4, [BEGIN])
    assert newest(page) == 0  # the first is being overwritten
    write(page, 2, 2)
    assert newest(page) == 2


def test_a_snapshot_whose_source_was_overwritten_does_not_count(page):
    for rank in (0, 2):
        write(page, rank, 4)
        write(page, rank, 5)
    page[STARTS[1] + MARK + 5 % BUFFERS] = 8
    assert newest(page, (BEGIN, END, MARK)) == 4
    assert newest(page) == 5


def test_snapshots_with_gaps(page):
    for rank in (0, 2):
        for number in (8, 16, 32):
            write(page, rank, number)
    assert newest(page) == 32
    write(page, 2, 64, [BEGIN])  # where 16 was
    assert newest(page) == 32
    write(page, 0, 256, [BEGIN, END])  # where 16 was: rank 2 has it not
    assert newest(page) == 32


def test_a_copy_is_torn_if_any_rank_has_begun_another(page):
    for rank in (0, 2):
        write(page, rank, 7)
    assert not layout.is_begun_over(page, STARTS, 7)
    write(page, 2, 8, [BEGIN])
    assert not layout.is_begun_over(page, STARTS, 7)
    write(page, 2, 10, [BEGIN])
    assert layout.is_begun_over(page, STARTS, 7)


def test_strides_use_all_buffers_in_turn():
    for stride in (1, 2, 4, 64, 1 << 20):
        places = [number * stride % BUFFERS for number in range(7)]
        assert {*places[:3]} == {0, 1, 2}
        assert places[:3] == places[3:6]


@pytest.mark.parametrize(
    "segments", [[0], [8, None, 8], [1 << 21, 1, None, 3 << 20], [None, 5]], ids=str
)
def test_blocks_lie_apart_and_behind_the_page(segments):
    offsets, end = layout.block_offsets(segments)
    before = layout.page_nbytes(len(segments))
    for offset, nbytes in zip(offsets, segments, strict=True):
        if nbytes is not None:
            assert offset >= before
            assert offset % (2 << 20) == 0
            before = offset + BUFFERS * layout.buffer_nbytes(nbytes)
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
    assert layout.is_dense(shape, strides, 8) is dense


def test_a_token_comes_back(page):
    token = os.urandom(64)
    layout.write_token(page, 1, token)
    assert layout.token_bytes(page, 1) == token
    assert layout.token_bytes(page, 0) == layout.token_bytes(page, 2) == bytes(64)


class WalledGpu:
    """A backend whose driver maps the memory of all ranks but one."""

    def open(self, token, nbytes, uuid):
        if token == "walled":
            raise CudaError("cuIpcOpenMemHandle failed.", call="", code=1, name="")
        return token, nbytes, uuid


def test_memory_that_one_rank_hides_does_not_hide_that_of_the_others():
    segments = [Segment(rank, (2,), None, 8 * rank, f"GPU-{rank}") for rank in (0, 2, 3)]
    mapped, refused = map_on_gpu(WalledGpu(), segments, ["a", "", "walled", "d"])
    assert mapped == {0: ("a", 1, "GPU-0"), 3: ("d", 24, "GPU-3")}
    assert refused == {2: "cuIpcOpenMemHandle failed"}


def test_the_longest_name_and_job_fit_an_address():
    from mpishare.memory.door import _address

    door = names.door_name(names.job_text("j" * 99), "n" * 40)
    assert len(_address(door).replace(str(os.getuid()).encode(), b"4294967295", 1)) <= 107


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
        names.find("nobody-has-this", None)
    assert "Windows that are there:" in str(told.value)
