"""The suballocator: blocks never overlap, and what is freed is allocated again."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.backends import suballocator
from mpishare.backends.host_pool import Region
from mpishare.backends.suballocator import CHUNK_NBYTES, SMALL_NBYTES, FreeList, Suballocator
from mpishare.memory import shared
from mpishare.memory.handle import Handle


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_spans_are_allocated_once_and_found_again_once_freed(calls):
    free_list, taken = FreeList(100), {}
    for is_allocating, nbytes in calls:
        if is_allocating or not taken:
            begin = free_list.allocate(nbytes)
            free = sorted(set(range(100)).difference(*(range(b, b + n) for b, n in taken.items())))
            fits = any(set(range(at, at + nbytes)) <= set(free) for at in free)
            assert (begin is not None) == fits
            if begin is not None:
                assert set(range(begin, begin + nbytes)) <= set(free)
                taken[begin] = nbytes
        else:
            begin = sorted(taken)[nbytes % len(taken)]
            free_list.free(begin, taken.pop(begin))
    for begin, nbytes in taken.items():
        free_list.free(begin, nbytes)
    assert free_list.allocate(100) == 0


class Allocations:
    """Counts what is allocated and opened; there is no memory behind it."""

    name = "cuda"

    def __init__(self):
        self.alive = []

    def allocate(self, nbytes):
        return self.add("own", nbytes)

    def open(self, token, nbytes, uuid):
        return self.add(token, nbytes)

    def publish(self, memory):
        return f"token of {memory.address}"

    def add(self, what, nbytes):
        made = Allocation(self, what, nbytes)
        self.alive.append(made)
        return made


class Allocation:
    def __init__(self, all_of_them, what, nbytes):
        self.all, self.what, self.nbytes = all_of_them, what, nbytes
        self.address = CHUNK_NBYTES * (1 + len(all_of_them.alive))

    def close(self):
        self.all.alive.remove(self)
        return True


def handle_of(block):
    place = block.offset, block.nbytes, block.memory.nbytes
    return Handle("cuda", block.token, *place, "GPU-0", "nonce", "boot")


def test_small_blocks_share_a_chunk_that_is_opened_once_and_stays():
    mine, theirs = Allocations(), Allocations()
    owner, opener = Suballocator(mine), Suballocator(theirs)
    made = [owner.allocate(1000) for _ in range(3)]
    assert len(mine.alive) == 1
    assert len({block.address for block in made}) == 3
    opened = [opener.open(handle_of(block)) for block in made]
    assert [each.what for each in theirs.alive] == ["token of 2097152"]
    assert [block.offset for block in opened] == [block.offset for block in made]
    for block in opened:
        block.close()
    first = made[0]
    for block in made:
        block.close()
    assert len(mine.alive) == len(theirs.alive) == 1
    assert owner.allocate(1000).address == first.address
    opener.release()
    owner.close()
    assert mine.alive == theirs.alive == []


def test_what_is_large_is_allocated_alone_and_goes_when_it_is_closed():
    mine, theirs = Allocations(), Allocations()
    block = Suballocator(mine).allocate(SMALL_NBYTES + 1)
    opened = Suballocator(theirs).open(handle_of(block))
    assert (block.offset, opened.nbytes) == (0, SMALL_NBYTES + 1)
    opened.close()
    block.close()
    assert mine.alive == theirs.alive == []


def test_a_full_chunk_is_followed_by_another():
    mine = Allocations()
    owner = Suballocator(mine)
    made = [owner.allocate(SMALL_NBYTES) for _ in range(5)]
    assert len(mine.alive) == 2
    spans = sorted((block.address, block.address + block.nbytes) for block in made)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    assert all(block.address % suballocator.ALIGN == 0 for block in made)


def test_an_interrupt_amid_a_change_takes_no_block_twice(monkeypatch):
    """Nor does any later call fail: what was half changed is left, and what is freed is given."""
    memory = shared.create(1 << 16, is_sparse=True)
    region = Region(memory, 0, 1 << 16, 1 << 12)
    first, second = region.allocate(1000), region.allocate(1000)
    with monkeypatch.context() as patch:
        patch.setattr(FreeList, "_forget", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            region.allocate(1000)
    assert region.allocate(1000) is None
    region.free(first, 1000)
    assert region.allocate(1000) == first != second
    memory.close()


def raise_interrupt(*_):
    raise KeyboardInterrupt
