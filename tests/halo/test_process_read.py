"""Reading from a peer process: the bytes that are read, and the errors of those that cannot be."""

import contextlib
import ctypes
import errno
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from mpishare.memory.process_memory import Token, try_read
from mpishare.plans.cells import Box
from mpishare.plans.exchange.host import process_read
from mpishare.plans.exchange.host.parts import Extent
from mpishare.plans.layout import FieldLayout, host_layout

PAGE = mmap.PAGESIZE
NO_PROCESS = 1 << 22  # Linux numbers processes up to one less


def at(array):
    return array.__array_interface__["data"][0]


def test_a_token():
    token = Token()
    pid, address, text = token.offer
    assert try_read(pid, address, text) == 0
    assert try_read(pid, address, text[::-1]) is None  # that process is another here


class Pages:
    """Memory whose pages can be taken away one by one."""

    def __init__(self, count):
        self.memory = mmap.mmap(-1, count * PAGE)
        self.nbytes = count * PAGE
        self.begin = at(np.frombuffer(self.memory, "u1"))

    @contextlib.contextmanager
    def without(self, page):
        """The address of the page, which is not there until the end of the block."""
        address = self.begin + page * PAGE
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert protect(ctypes.c_void_p(address), PAGE, 0) == 0
        yield address
        assert protect(ctypes.c_void_p(address), PAGE, mmap.PROT_READ) == 0


def test_a_page_that_is_not_there():
    pages = Pages(2)
    with pages.without(1):
        for offset in (PAGE, PAGE - 8):  # where it ends early errno is as the one before left it
            assert try_read(NO_PROCESS, pages.begin, "") == errno.ESRCH
            assert try_read(os.getpid(), pages.begin + offset, "") == errno.EFAULT


def test_long_runs_with_wide_gaps_are_read_one_by_one():
    """And what lies between them is not."""
    shape = (3, 40, 300)
    layout = host_layout(np.empty(shape), "field")
    mine = host_layout(np.empty((3, 20, 300)), "field")
    box, target = Box((0, 10, 0), (3, 30, 300)), Box((0, 0, 0), (3, 20, 300))
    blocks = list(process_read._blocks(layout, mine, box, target.slices))
    runs = [Extent((at * 40 + 10) * 2400, 20 * 2400) for at in range(3)]
    assert [block.extents for block in blocks] == [(run,) for run in runs]
    assert all(block.strides is None for block in blocks)


def test_axes_that_lie_in_each_other_are_cut_to_the_end(monkeypatch):
    """The slowest axis may be shorter than what is along a faster one."""
    monkeypatch.setattr(process_read, "_BLOCK_NBYTES", 300)
    shape, strides = (2, 5, 2), (100, 64, 8)
    theirs, mine = (
        FieldLayout(shape, each, np.dtype("f4"), None) for each in (strides, (40, 8, 4))
    )
    box = Box((0, 0, 0), shape)
    blocks = list(process_read._blocks(theirs, mine, box, box.slices))
    extents = [extent for block in blocks for extent in block.extents]
    assert all(0 <= offset <= offset + nbytes <= 368 for offset, nbytes in extents)
    assert all(extent.nbytes <= 300 for extent in extents)
    count = np.zeros(shape, int)
    for block in blocks:
        count[block.key] += 1
    assert (count == 1).all()


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("order", [(1, 2, 0), (2, 1, 0), (0, 2, 1), (0, 1, 2)])
def test_planes_in_another_order_are_read_several_at_a_time(monkeypatch, order, gap):
    """So that whole cache lines are stored; each cell comes from its place, and is read once."""
    monkeypatch.setattr(process_read, "_BLOCK_NBYTES", 2000)
    source = np.arange(6 * (9 + gap) * 7).reshape(6, 9 + gap, 7) * (1 + 1j)
    box = Box((0, gap, 0), source.shape)
    target = np.zeros(np.array(box.shape)[[*order]], complex).transpose(np.argsort(order))
    layouts = [FieldLayout(each.shape, each.strides, each.dtype, None) for each in (source, target)]
    blocks = list(process_read._blocks(*layouts, box, Box((0, 0, 0), box.shape).slices))
    nbytes = source.reshape(-1).view("u1")
    for block in blocks:
        read = np.concatenate([nbytes[at : at + count] for at, count in block.extents])
        part = target[block.key]
        assert not part.any()
        part[...] = np.ndarray(part.shape, complex, read, strides=block.strides)
    assert (target == source[box.slices]).all()
    assert (max(len(block.extents) for block in blocks) > 1) == (order[2] == 0)


def test_a_process_that_is_gone():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert try_read(process.pid, at(np.zeros(8)), "") == errno.ESRCH
