"""Which ranks share memory, and what is said of those that could."""

import pytest

from mpishare.runtime.places import Place, elsewhere, here, mates_of


def test_here_is_one_place():
    assert here(0, 0) == here(0, 1)
    assert here(0, 0).boot


SHM = (7, 1)
ELSEWHERE = "the machine of rank 0 also runs rank 2 of the given communicator"


@pytest.mark.parametrize(
    ("places", "mates", "words"),
    [
        ([Place(0, "a", SHM)] * 3, [0, 1, 2], []),
        # Several /dev/shm on one machine, whether MPI calls them shared or not.
        *(
            ([Place(0, "a", SHM)] * 2 + [Place(group, "a", folder)], [0, 1], [ELSEWHERE, "--ipc"])
            for folder in ((8, 1), (7, 2))  # another device, a folder inside
            for group in (0, 2)
        ),
        # Equal numbers of devices mean nothing on another kernel, and no option would help.
        *(([Place(0, "a", SHM), Place(group, "b", SHM)], [1], []) for group in (0, 1)),
        ([Place(0, "a", SHM), Place(1, "a", SHM)], [1], []),  # MPI is believed where it parts ranks
        ([Place(0, "", (0,)), Place(0, "", (1,))], [1], []),  # no /dev/shm
    ],
)
def test_which_ranks_share_memory_and_which_could(places, mates, words):
    assert mates_of(1, places) == mates
    notes = elsewhere(1, places)
    assert len(notes) == bool(words)
    assert all(word in notes[0] for word in words)
    assert not words or ("--ipc=host" in notes[0]) == ("--ipc" in words)
