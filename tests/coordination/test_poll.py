"""A long wait of the host costs little, and sees what comes in time; the rounds of a fence."""

import threading
import time

import pytest

from mpishare.coordination import poll as module
from mpishare.coordination.poll import poll, rounds


def test_a_long_wait_burns_no_core_and_ends_at_the_deadline():
    begin, end = time.process_time(), time.monotonic() + 20
    assert not poll(bool, 0.5)
    assert time.process_time() - begin < 0.15
    assert time.monotonic() < end


def test_it_sleeps_for_a_share_of_its_time_at_most(monkeypatch):
    """What comes is seen late by no more than that share, however long it took."""
    begin, slept = time.monotonic(), []

    class Time:
        monotonic = time.monotonic

        @staticmethod
        def sleep(seconds):
            slept.append((seconds, time.monotonic() - begin))
            time.sleep(seconds)

    monkeypatch.setattr(module, "time", Time)
    assert not poll(bool, 0.4)
    assert slept
    assert all(seconds <= waited_s / 32 for seconds, waited_s in slept)
    assert max(seconds for seconds, _ in slept) <= 2e-3
    assert slept[0][1] > 1e-3  # what is over by then was waited for without a sleep


def test_it_does_not_sleep_where_checks_move_messages_on(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda _: pytest.fail("it slept"))
    assert not poll(bool, 0.2, sleeps=False)


def test_what_comes_ends_it():
    come = threading.Event()
    timer = threading.Timer(0.1, come.set)
    timer.start()
    assert poll(come.is_set, 60)
    timer.join()


def heard(size, radix):
    """Of which ranks each rank has heard in the end."""
    all_rounds = [rounds(rank, size, radix) for rank in range(size)]
    known = [{rank} for rank in range(size)]
    for number in range(len(all_rounds[0])):
        before = [{*each} for each in known]
        for rank, each in enumerate(all_rounds):
            assert rank not in each[number]
            known[rank].update(*(before[source] for source in each[number]))
    return known


@pytest.mark.parametrize("radix", [2, 3, 4, 8, 64])
def test_each_rank_hears_of_all(radix):
    for size in range(1, 64):
        assert heard(size, radix) == [{*range(size)}] * size


@pytest.mark.parametrize(
    ("size", "radix", "waits"), [(4, 8, [3]), (32, 8, [7, 3]), (32, 2, [1] * 5)]
)
def test_so_many_waits_in_so_many_rounds(size, radix, waits):
    assert [*map(len, rounds(0, size, radix))] == waits


def test_a_rank_alone_waits_for_nobody():
    assert rounds(0, 1) == [[]]
