"""What the context of a node asks of the objects that it watches and closes."""

import pytest

import mpishare
from mpishare.runtime.context import NodeObject

PLANS = [mpishare.Allreduce, mpishare.HaloExchange, mpishare.NeighborExchange]


@pytest.mark.parametrize("kind", [mpishare.Window, mpishare.Channel, *PLANS])
def test_an_object_that_waits_on_streams_says_for_which_ranks(kind):
    """A base class that answers in its place would hide every rank that is late on a stream."""
    assert kind._pending is not NodeObject._pending


@pytest.mark.parametrize(
    "kind", [mpishare.Window, mpishare.Event, mpishare.Pool, mpishare.Channel, *PLANS]
)
def test_an_object_of_a_node_can_be_closed_and_abandoned(kind):
    assert kind.close is not NodeObject.close
    assert kind._abandon is not NodeObject._abandon
    assert kind.__exit__.__qualname__.split(".")[0] in ("NodeObject", "BasePlan")


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

    assert set(dir(mpishare)) - {"device", "ranges"} == set(mpishare.__all__)
    assert all(hasattr(mpishare, name) for name in dir(mpishare))
