"""The blocks of a pool: whatever the order of calls, nobody's bytes are reused while they are held.

One process plays all ranks: they share the table and the memory file, as ranks do.
"""

import hashlib
import os
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mpishare.backends.host import HostBackend
from mpishare.errors import EpochError, HandleError, UnsupportedError
from mpishare.memory.block_table import OpenedTable, OwnTable
from mpishare.memory.memory import ArrayLayout
from mpishare.windows.pool_blocks import Block, OpenBlocks, OwnBlocks
from mpishare.windows.pool_handle import pack, unpack

KEY = b"pool"
DOOR = "mpishare/4294967295/pool/a-_Z09"
SIZE = 3


def opened(table, holder, memory_barrier=int):
    """The table as another process maps it."""
    fd = table.open_file()
    try:
        return OpenedTable([fd, table.add_row(holder)], memory_barrier)
    finally:
        os.close(fd)


class Ranks:
    """An owner and two other ranks, on the host backend."""

    def __init__(self, max_nbytes=1 << 20):
        backend = HostBackend()
        table = OwnTable(int)
        memory = HostBackend().create_pool(max_nbytes)
        fd = memory.export()
        self.own = OwnBlocks(backend, memory, table)
        self.others = [
            OpenBlocks(backend, HostBackend().import_pool(fd), opened(table, rank))
            for rank in range(1, SIZE)
        ]
        os.close(fd)

    def allocate(self, count):
        return self.own.allocate(ArrayLayout((count,), np.dtype("i8")), 0, None)

    def handle(self, array):
        block, offset = self.own.find(array)
        layout = ArrayLayout(array.shape, array.dtype, array.strides, offset)
        return pack(KEY, DOOR, block, self.own.publish(block), layout)

    def open(self, rank, handle):
        return self.others[rank].open(*unpack(KEY, handle), 0, None)


@settings(max_examples=25, stateful_step_count=40, deadline=None)
class Model(RuleBasedStateMachine):
    """Random calls of all ranks; every array keeps the number that was written into it."""

    def __init__(self):
        super().__init__()
        self.ranks = Ranks()
        self.number = 0
        self.arrays = {}  # number: the owner's array
        self.handles = {}  # number: handle, of arrays that may be gone
        self.opened = []  # (rank, number, array)

    @rule(count=st.integers(0, 2000))
    def allocate(self, count):
        self.number += 1
        try:
            array = self.ranks.allocate(count)
        except UnsupportedError:
            assert sum(array.size for array in self.all()) > 0
            return
        array[...] = self.number
        self.arrays[self.number] = array

    @precondition(lambda self: self.arrays)
    @rule(pick=st.integers(0))
    def publish(self, pick):
        number = sorted(self.arrays)[pick % len(self.arrays)]
        self.handles[number] = self.ranks.handle(self.arrays[number])

    @precondition(lambda self: self.handles)
    @rule(pick=st.integers(0), rank=st.integers(0, 1))
    def open(self, pick, rank):
        number = sorted(self.handles)[pick % len(self.handles)]
        if number in self.arrays:
            self.opened.append((number, self.ranks.open(rank, self.handles[number])))
        else:
            with pytest.raises(HandleError, match="dropped"):
                self.ranks.open(rank, self.handles[number])

    @precondition(lambda self: self.arrays)
    @rule(pick=st.integers(0))
    def drop(self, pick):
        del self.arrays[sorted(self.arrays)[pick % len(self.arrays)]]

    @precondition(lambda self: self.opened)
    @rule(pick=st.integers(0))
    def let_go(self, pick):
        del self.opened[pick % len(self.opened)]

    @invariant()
    def every_array_is_whole(self):
        for number, array in [*self.arrays.items(), *self.opened]:
            assert (array == number).all()

    def all(self):
        return [*self.arrays.values(), *(array for _, array in self.opened)]

    def teardown(self):
        self.arrays.clear()
        self.opened.clear()
        self.ranks.own.give_back()
        assert self.ranks.own.is_empty
        assert all(other.is_empty for other in self.ranks.others)


TestModel = Model.TestCase


def test_where_there_is_no_room_all_of_limbo_is_looked_at():
    ranks = Ranks(1 << 16)
    arrays = [ranks.allocate(512) for _ in range(16)]
    opened = [ranks.open(0, ranks.handle(array)) for array in arrays]
    arrays.clear()
    del opened[10]
    assert ranks.allocate(512).size == 512


def test_arrays_dropped_by_another_thread():
    ranks = Ranks(4096)
    arrays = [ranks.allocate(512)]
    opened = [ranks.open(0, ranks.handle(arrays[0]))]
    for dropping in (arrays, opened):
        thread = threading.Thread(target=dropping.clear)
        thread.start()
        thread.join()
    assert ranks.others[0].is_empty
    ranks.allocate(512)


def test_the_table_announces_before_it_looks():
    """Dekker: the owner ends a generation in the moment between; the rank must see it."""
    owner = OwnTable(int)
    slot, generation = owner.begin()
    seen = []

    def between():
        if not seen:
            seen.append(None)
            owner.end(slot, generation)
            seen.append(owner.is_held(slot))

    other = opened(owner, "other", between)
    assert not other.hold(slot, generation)
    assert seen[1]
    assert not owner.is_held(slot)


def test_another_process_cannot_cut_the_row_that_the_owner_reads():
    owner = OwnTable(int)
    row = owner.add_row("opener")
    with pytest.raises(PermissionError):
        os.ftruncate(row, 0)
    slot, _ = owner.begin()
    assert not owner.is_held(slot)  # else SIGBUS
    owner.remove_row("opener")
    owner.close()


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "is_right"),
    [
        (0, (4,), (8,), True),
        (8, (4,), (8,), False),
        (24, (4,), (-8,), True),
        (16, (4,), (-8,), False),
        (0, (2, 2), (16, 8), True),
        (0, (2, 3), (16, 8), False),
        (0, (), (), True),
        (25, (), (), False),
        (32, (0, 5), (8, 8), True),
        (33, (0, 5), (8, 8), False),
        (-8, (0, 5), (8, 8), False),
        (31, (), (), False),
    ],
)
def test_a_layout_inside_its_block(offset, shape, strides, is_right):
    assert ArrayLayout(shape, np.dtype("f8"), strides, offset).is_inside(32) == is_right


ARRAY = ArrayLayout((2, 3), np.dtype("f8"), (24, 8), 8)
BLOCK = Block(0, 64, 5, 3)
HANDLE = pack(KEY, DOOR, BLOCK, bytes(8), ARRAY)


def test_a_handle_comes_back():
    for layout in (ARRAY, ARRAY._replace(shape=(), strides=(), dtype=np.dtype("S3"))):
        block, found = unpack(KEY, bytearray(pack(KEY, DOOR, BLOCK, b"token", layout)))
        assert found == layout
        assert (block.nbytes, block.slot, block.generation, block.token) == (64, 5, 3, b"token")
    assert unpack(KEY, memoryview(HANDLE).cast("B", (1, len(HANDLE))))[1] == ARRAY


@given(at=st.integers(0, len(HANDLE) - 1), bit=st.integers(0, 7))
def test_any_changed_bit_is_refused(at, bit):
    changed = bytearray(HANDLE)
    changed[at] ^= 1 << bit
    with pytest.raises(HandleError, match="digest"):
        unpack(KEY, changed)


class Evil:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize("key", [b"", b"another"])
@given(body=st.one_of(st.binary(max_size=99), st.just(HANDLE[16:]), st.just(pickle.dumps(Evil()))))
def test_what_does_not_know_the_key_is_refused(key, body):
    forged = hashlib.blake2b(body, digest_size=16, key=key).digest() + body
    with pytest.raises(HandleError, match="digest"):
        unpack(KEY, forged)


@pytest.mark.parametrize("token", [b"\xff" * 8, b"\xff" * 255, b"\1", b"\0\0\x10"], ids=repr)
def test_a_block_that_is_not_in_the_pool_is_not_opened(token):
    memory = HostBackend().create_pool(1 << 20)
    with pytest.raises(HandleError, match="not in the pool"):
        memory.open(token, 8)
    with pytest.raises(HandleError, match="not in the pool"):
        memory.open(bytes(8), (1 << 20) + 1)
    memory.close()


def test_a_call_amid_another_is_refused(monkeypatch):
    """As of a handler of a signal: it must neither wait for that call, nor change its tables."""
    ranks = Ranks()
    first, second = (ranks.allocate(10) for _ in range(2))
    blocks, inside = ranks.others[0], ranks.handle(second)
    memory = blocks.memory
    open_block = memory.open

    def interrupted(*arguments):
        for call in (lambda: ranks.open(0, inside), lambda: blocks.is_held, blocks.finish):
            with pytest.raises(EpochError, match="handler of a signal"):
                call()
        return open_block(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "open", interrupted)
        opened = [ranks.open(0, ranks.handle(first))]
    opened.append(ranks.open(0, inside))
    assert blocks.is_held
    opened.clear()
    blocks.finish()
    assert blocks.is_empty
