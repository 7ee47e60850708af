"""Owners by global ids, against dicts: each rank's part of the work, one after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpishare.halo.rendezvous import Ids, homes_of, require_owners, search

IDS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 30)


def alltoallv(given_parts):
    """What each rank gets, as MPI has it."""
    parts = [np.split(n, np.cumsum(counts)[:-1]) for n, counts in given_parts]
    columns = list(zip(*parts, strict=True))
    return [(np.concatenate(each), np.array([len(p) for p in each])) for each in columns]


def searched(owned, ghosts):
    """The whole search, rank after rank: the places that each sends from, and receives to."""
    size = len(owned)
    searches = [
        search(Ids(np.array(a + b, np.int64), len(a), len(a + b)), size)
        for a, b in zip(owned, ghosts, strict=True)
    ]
    brought = [None] * size

    def step():
        return [each.send(found) for each, found in zip(searches, brought, strict=True)]

    for _ in range(3):
        brought = alltoallv(step())
    require_owners("a call", step())
    brought = alltoallv(map(next, searches))
    return zip(*step(), strict=True)


@st.composite
def meshes(draw):
    """For each rank the ids that it owns, and those of its ghosts."""
    size = draw(st.integers(1, 5))
    owner = draw(st.dictionaries(IDS, st.integers(0, size - 1), max_size=30))
    owned = [[each for each in owner if owner[each] == rank] for rank in range(size)]
    known = st.sampled_from(sorted(owner)) if owner else st.nothing()
    ghosts = [draw(st.lists(known, max_size=12)) if owner else [] for _ in range(size)]
    return owned, ghosts


@settings(deadline=None)
@given(meshes())
def test_every_ghost_meets_the_place_of_its_owner(mesh):
    owned, ghosts = mesh
    places = {each: (rank, at) for rank, ids in enumerate(owned) for at, each in enumerate(ids)}
    sends, recvs = searched(owned, ghosts)
    for rank, targets_by_peer in enumerate(recvs):
        sources = {
            int(to): (peer, int(at))
            for peer, targets in targets_by_peer.items()
            for to, at in zip(targets, sends[peer][rank], strict=True)
        }
        right = {len(owned[rank]) + at: places[each] for at, each in enumerate(ghosts[rank])}
        assert sources == right
        assert all(rank in recvs[peer] for peer in sends[rank])


@settings(deadline=None)
@given(meshes(), st.data())
def test_a_mesh_with_a_flaw_is_refused(mesh, data):
    owned, ghosts = mesh
    rank = data.draw(st.integers(0, len(owned) - 1))
    other = data.draw(st.integers(0, len(owned) - 1).filter(lambda each: each != rank)) if (
        len(owned) > 1
    ) else None  # fmt: skip
    if other is not None and owned[other] and data.draw(st.booleans()):
        twice = data.draw(st.sampled_from(owned[other]))
        owned[rank].append(twice)
        one, two = sorted([rank, other])
        with pytest.raises(ValueError, match=f"id {twice} by ranks {one} and {two}"):
            searched(owned, ghosts)
    else:
        known = {each for ids in owned for each in ids}
        orphan = data.draw(IDS.filter(lambda each: each not in known))
        ghosts[rank].append(orphan)
        with pytest.raises(ValueError, match=f"nobody owns id {orphan}, a ghost of rank {rank}"):
            searched(owned, ghosts)


@given(st.lists(IDS, min_size=1, max_size=40), st.integers(1, 1000))
def test_a_home_depends_on_nothing_but_the_id(ids, size):
    homes = homes_of(np.array(ids, np.int64), size)
    assert all(0 <= home < size for home in homes)
    assert [int(homes_of(np.array([each], np.int64), size)[0]) for each in ids] == homes.tolist()


@pytest.mark.parametrize("step", [1, 2, 3, 4, 64, 1000, 1 << 20, 1 << 32, 1 << 40])
@pytest.mark.parametrize("size", [2, 3, 4, 64])
def test_homes_are_even_whatever_the_numbering(step, size):
    count = 20_000
    homes = homes_of(np.arange(count, dtype=np.int64) * step, size)
    counts = np.bincount(homes, minlength=size)
    assert counts.max() < 1.5 * count / size
