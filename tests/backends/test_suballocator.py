"""The suballocator: blocks never overlap, and what is freed is allocated again."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare.backends import suballocator
from mpishare.backends.host import HostBackend
from mpishare.backends.suballocator import CHUNK_NBYTES, SMALL_NBYTES, FreeList, Suballocator
from mpishare.memory import shared
from mpishare.memory.handle import Handle
from tests.helpers.held import held


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


def handle_of(block):
    place = block.offset, block.nbytes, block.memory.nbytes
    return Handle("host", block.token, *place, "", "nonce", "boot")


@pytest.fixture
def both():
    """The suballocator of an owner, and that of a rank that opens."""
    names = held().names
    yield Suballocator(HostBackend()), Suballocator(HostBackend())
    for name in held().names - names:
        shared.forget(name)


@pytest.fixture
def mapped():
    """How many bytes more than before are mapped."""
    before = held().mapped
    return lambda: held().mapped - before


def test_small_blocks_share_a_chunk_that_is_opened_once_and_stays(both, mapped):
    owner, opener = both
    made = [owner.allocate(1000) for _ in range(3)]
    assert mapped() == CHUNK_NBYTES
    assert len({block.address for block in made}) == 3
    opened = [opener.open(handle_of(block)) for block in made]
    assert mapped() == 2 * CHUNK_NBYTES
    assert [block.offset for block in opened] == [block.offset for block in made]
    for block in (*opened, *made):
        block.close()
    assert mapped() == 2 * CHUNK_NBYTES
    assert owner.allocate(1000).address == made[0].address
    opener.release()
    owner.close()
    assert mapped() == 0


def test_what_is_large_is_allocated_alone_and_goes_when_it_is_closed(both, mapped):
    owner, opener = both
    block = owner.allocate(SMALL_NBYTES + 1)
    opened = opener.open(handle_of(block))
    assert (block.offset, opened.nbytes) == (0, SMALL_NBYTES + 1)
    opened.close()
    block.close()
    assert mapped() == 0


def test_a_full_chunk_is_followed_by_another(both, mapped):
    owner, _ = both
    made = [owner.allocate(SMALL_NBYTES) for _ in range(5)]
    assert mapped() == 2 * CHUNK_NBYTES
    spans = sorted((block.address, block.address + block.nbytes) for block in made)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    assert all(block.address % suballocator.ALIGN == 0 for block in made)
    owner.close()
