"""What the context of a node asks of the objects that it watches and closes."""

import pytest

import mpishare

PLANS = [mpishare.Allreduce, mpishare.HaloExchange, mpishare.NeighborExchange]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            mpishare.Node,
            "allocate allocate_each backend barrier channel close collect device event is_closed "
            "is_leader launch leader pool rank report share share_all share_each size "
            "synchronize xp",
        ),
        (
            mpishare.Window,
            "array close complete device export fence is_closed post segment snapshot start wait",
        ),
        (mpishare.Event, "close is_closed is_done record wait"),
        (mpishare.Channel, "close end get is_closed put"),
        (mpishare.Pool, "allocate close handle is_closed malloc open"),
        (mpishare.Allreduce, "close dot is_closed reduce"),
        (
            mpishare.HaloExchange,
            "accumulate close exchange interior is_closed of owned routes shell shifted "
            "staging_nbytes start wait",
        ),
    ],
)
def test_only_what_is_api_is_public(kind, names):
    """The rest begins with an underscore, out of `dir` and `help`."""
    assert " ".join(name for name in dir(kind) if not name.startswith("_")) == names


def test_the_package_shows_its_public_names_alone():
    import mpishare

    assert set(dir(mpishare)) - {"device", "ranges", "seams"} == set(mpishare.__all__)
    assert all(hasattr(mpishare, name) for name in dir(mpishare))
