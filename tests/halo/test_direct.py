"""Which parts go straight into ghosts on the same GPU: the same on all ranks, without a GPU."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from mpishare.errors import ClosedError
from mpishare.plans import fields
from mpishare.plans.cells import Box
from mpishare.plans.exchange.cuda.direction import DirectParts
from mpishare.plans.exchange.cuda.records import GHOSTS_RECORD, PACK, PUT_LL, READY, UNPACK
from mpishare.plans.exchange.cuda.staging import staging_layout
from mpishare.plans.exchange.cuda.work_items import Ghosts, Slot, WorkList, chunks
from mpishare.plans.fields import locations
from mpishare.plans.layout import FieldLayout
from mpishare.plans.message import MessageInfo, Part, PartInfo, PartKey
from mpishare.runtime.context import Location

N = 1 << 19
LAYOUT = FieldLayout((4, N), (8 * N, 8), np.dtype("f8"), 0)
SENT, GHOST = Box((1, 0), (2, N)), Box((3, 0), (4, N))
KEY = PartKey(0, 1, 0, 0)
ADDRESS = 1 << 40


class Memory:
    """A segment of a window, mapped at `ADDRESS`."""

    address, nbytes, holders = ADDRESS, 1 << 30, 0

    def array(self, shape, dtype):
        self.holders += 1
        return shape, dtype


def setup(
    *, uuids=("a", "a"), nbytes=8 * N, box=GHOST, place=(1, 1, 256), route="fused", memory=None
):
    """Rank 0 sends a face to rank 1, whose field lies in a window."""
    found = SimpleNamespace(
        context=SimpleNamespace(uuids=list(uuids), segment_memory=lambda window, rank: memory),
        comm=SimpleNamespace(ranks_here={0: 0, 1: 1}),
        layouts=[[LAYOUT], [LAYOUT]],
        locations=[[None], [place and Location(*place)]],
        recvs=[[], [MessageInfo(0, 0, (PartInfo(0, nbytes, box),), route)]],
    )
    return found, [[MessageInfo(1, 0, (PartInfo(0, nbytes, SENT),), route)], []]


def test_a_large_face_for_a_window_on_the_same_gpu_goes_straight():
    memory = Memory()
    found = DirectParts(*setup(memory=memory))
    assert found.keys == {KEY}
    part, layout, address = found.ghosts(KEY)
    assert (part.box, layout, address) == (GHOST, LAYOUT, ADDRESS + 256)
    assert memory.holders == 1


@pytest.mark.parametrize(
    "other",
    [{"uuids": "ab"}, {"nbytes": 4096}, {"box": None}, {"place": None}, {"route": "copy"}],
    ids=lambda other: next(iter(other)),
)
def test_no_other_part_does(other):
    assert DirectParts(*setup(**other)).keys == set()


def test_a_window_that_was_closed_is_named():
    with pytest.raises(ClosedError, match="rank 1"):
        DirectParts(*setup(memory=None)).ghosts(KEY)


@pytest.mark.parametrize(
    ("mps", "uuids", "where", "is_found"),
    [
        (True, "aa", 0, True),
        (True, "aba", 0, True),
        (True, "aba", 1, False),  # the window is on another GPU
        (True, "ab", 0, False),  # nobody shares the GPU
        (False, "aa", 0, False),  # they take turns
    ],
)
def test_fields_are_located_where_others_could_store_into_them(mps, uuids, where, is_found):
    place = Location(7, where, 64)
    context = SimpleNamespace(
        backend=SimpleNamespace(device=SimpleNamespace(mps=mps)),
        uuids=list(uuids),
        rank=0,
        locate=lambda address, nbytes: place if (address, nbytes) == (99, 32 * N) else None,
    )
    with mock.patch.object(fields, "_addresses", lambda given, _: given):
        assert locations(context, [99], [LAYOUT]) == [place if is_found else None]
        assert locations(context, [98], [LAYOUT]) == [None]


def test_a_sender_has_a_flag_for_each_such_part():
    _, messages = setup()
    routes = [{1: "fused"}, {0: "fused"}]
    layouts = [staging_layout(messages, routes, range(2), rank, direct={KEY}) for rank in (0, 1)]
    plain = [staging_layout(messages, routes, range(2), rank) for rank in (0, 1)]
    assert (set(layouts[0].ready), layouts[1].ready) == ({KEY}, {})
    assert layouts[1] == plain[1]
    offsets = [at for each in layouts[0].flags.values() for at in each]
    assert layouts[0].ready[KEY] not in offsets
    assert layouts[0].ready[KEY] + 8 <= layouts[0].nbytes


def work_of(kinds, address):
    """Items for a face by flags whose other end may be ghosts, and a small one by LL."""
    loaded = {}

    def upload(array):
        loaded[(len(loaded) + 1) << 20] = array
        return len(loaded) << 20

    work = WorkList([LAYOUT], [16], upload)
    flags = list(range(1, 1 + chunks(8 * N, shares_gpu=True)[0]))
    part = Part.of_box(0, LAYOUT, SENT)
    ghosts = Ghosts(Part.of_box(0, LAYOUT, GHOST), LAYOUT, address, 4242)
    work.add_copy(PUT_LL, Part.of_box(0, LAYOUT, Box((1, 0), (2, 2))), Slot(8))
    for kind in kinds:
        work.add_copy(kind, part, Slot(64, 128, flags, ghosts, shares_gpu=True))
    return work.records(), loaded


def test_the_receiver_says_first_that_its_ghosts_may_be_written():
    records, loaded = work_of([UNPACK, PACK], ADDRESS)
    kinds = records["kind"].tolist()
    assert kinds.index(READY) == 0
    assert kinds.count(READY) == 1
    ghosts = loaded[int(records["target"][0])]
    assert ghosts.dtype == GHOSTS_RECORD
    assert (int(ghosts["field"][0]), int(ghosts["ready"][0])) == (ADDRESS, 4242)
    assert int(ghosts["part"]["first"][0]) == 3 * 8 * N
    assert set(records["target"][records["kind"] == PUT_LL].tolist()) == {0}


@pytest.mark.parametrize(("address", "unit"), [(ADDRESS, 16), (ADDRESS + 8, 8)])
def test_a_sender_moves_units_that_both_ends_allow(address, unit):
    records, loaded = work_of([PACK], address)
    packs = records[records["kind"] == PACK]
    assert set(packs["part"]["unit"].tolist()) == {unit}
    assert int(loaded[int(packs["target"][0])]["part"]["unit"][0]) == unit
