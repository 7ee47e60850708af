"""The word that the kernel marks: none waits for it in vain, and the C library keeps its list."""

import ctypes
import time
from types import SimpleNamespace

import pytest

from mpishare.coordination import robust_futex
from mpishare.coordination.control_block import ControlBlock, State
from mpishare.coordination.watchdog import PERIOD_S, Watchdog
from mpishare.memory import shared

pytestmark = pytest.mark.skipif(robust_futex._FUTEX is None, reason="a machine without its numbers")


def test_a_wait_that_the_kernel_refuses_says_so():
    words = (ctypes.c_uint32 * 2)()
    assert robust_futex.wait(ctypes.addressof(words), 0.001)
    assert not robust_futex.wait(ctypes.addressof(words) + 1, 60)  # not aligned: EINVAL


def test_the_list_of_the_c_library_is_given_back():
    def registered() -> int | None:
        head, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        number = robust_futex._GET_ROBUST_LIST
        assert not robust_futex._syscall(number, 0, ctypes.byref(head), ctypes.byref(nbytes))
        return head.value

    before, word = registered(), ctypes.c_uint32()
    assert before
    with robust_futex.holding(ctypes.addressof(word)):
        assert registered() != before
    assert registered() == before


def test_a_rank_that_was_killed_after_it_had_left_wakes_nobody_again_and_again():
    block = ControlBlock(shared.create(ControlBlock.nbytes_for(2)), 0, 2)
    agreement = SimpleNamespace(block=block, failure=None)
    watchdog = Watchdog(agreement, releases=False)
    ctypes.c_uint32.from_address(block.life_address(1)).value = robust_futex.DIED
    block.words[block.state_address(1) - block.memory.address >> 3] = State.EXITED
    assert block.state(1) is State.EXITED
    begin = time.monotonic()
    assert not watchdog._pause()
    assert time.monotonic() - begin >= PERIOD_S
    block.close()
