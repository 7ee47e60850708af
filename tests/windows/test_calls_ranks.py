"""Calls that make what ranks share: arguments that are refused on all ranks, and the end."""

import pickle

import numpy as np
import pytest

import mpishare
from mpishare import ClosedError, MismatchError, PeerError, UnsupportedError
from tests.helpers.windows import fails_on

TWO = pytest.mark.ranks(min=2)

# The arguments of each call that are needed.
NEEDED = {
    "allocate": {"shape": 3},
    "allocate_each": {"shape": 3},
    "share": {"source": [1]},
    "share_each": {"source": [1]},
    "event": {},
    "channel": {"shape": 4},
    "pool": {},
}

WRONG = [
    (
        "allocate allocate_each channel",
        "shape",
        ["x", 1.5, (2, None), True, np.array(1.5)],
        TypeError,
    ),
    ("allocate allocate_each channel", "shape", [-1, (2, -3), (1 << 40, 1 << 40)], ValueError),
    ("allocate allocate_each channel", "dtype", ["no dtype", object], TypeError),
    ("allocate share event pool", "owner", ["0", 1.0], TypeError),
    ("allocate share event pool", "owner", [-1, 99], ValueError),
    ("channel", "producer", ["0"], TypeError),
    ("channel", "producer", [-1, 99], ValueError),
    ("event", "waiters", [["1"], 1], TypeError),
    ("event", "waiters", [[0], [99], [1, 1]], ValueError),
    ("channel", "consumers", [["1"], 1], TypeError),
    ("channel", "consumers", [[0], [99], [1, 1]], ValueError),
    ("channel", "slots", [2.0, True], TypeError),
    ("channel", "slots", [0, -3, 1 << 60], ValueError),
    ("channel", "deal", ["no", 1], TypeError),
    ("pool", "max_nbytes", ["1", True], TypeError),
    ("pool", "max_nbytes", [0], ValueError),
    ("share share_each", "copy", [0, 1, "yes", np.True_], TypeError),
    ("allocate allocate_each share share_each", "name", [b"x", 3], TypeError),
    (
        "allocate allocate_each share share_each",
        "name",
        ["", "a b", "a/b", "x" * 41, "ä"],
        ValueError,
    ),
]


@pytest.mark.parametrize(("calls", "name", "values", "error"), WRONG, ids=str)
def test_a_wrong_argument_is_the_same_error_on_all_ranks(node, calls, name, values, error):
    for call in calls.split():
        for value in values:
            with pytest.raises(error, match=rf"^Node\.{call} failed") as caught:
                getattr(node, call)(**NEEDED[call] | {name: value})
            assert not isinstance(caught.value, MismatchError)
    assert node.allocate(1).shape == (1,)


def test_a_shape_may_be_an_array(node):
    shape = np.array([2, 3])
    assert node.allocate(shape).shape == node.allocate_each(shape).shape == (2, 3)
    assert node.channel(shape).shape == (2, 3)
    pool = node.pool()
    if node.is_leader:
        assert pool.allocate(shape).shape == (2, 3)
    assert node.allocate(np.array(4)).shape == (4,)


def test_more_than_the_machine_has_is_no_matter_of_its_folder(host_node):
    """The rank that allocates names the call, as the others do."""
    with pytest.raises((UnsupportedError, PeerError), match=r"^Node\.allocate failed") as caught:
        host_node.allocate(1 << 53, "u1")
    assert "cannot reserve 8192 TiB of shared memory: this machine has" in str(caught.value)
    assert "remount" not in str(caught.value)


@TWO
def test_an_argument_that_is_wrong_on_one_rank(node):
    odd = node.size - 1
    shape = -1 if node.rank == odd else 1
    fails_on(node.comm, [odd], ValueError, lambda: node.allocate(shape))
    with pytest.raises((ValueError, PeerError)):
        node.allocate(2, name="a b" if node.rank == 0 else "ab")
    assert node.allocate(1).shape == (1,)


DIFFERENT = [
    ("allocate", "shape", (2, 3), (3, 2), ("[2, 3]", "[3, 2]")),
    ("allocate", "dtype", "f4", "f8", ("'float32'", "'float64'")),
    ("allocate", "owner", 0, 1, ("0", "1")),
    ("allocate", "fill", 0.0, None, ("'0.0'", "None")),
    ("allocate", "fill", 0.5, -1, ("'0.5'", "'-1.0'")),
    ("allocate", "name", "n0", "n1", ("'n0'", "'n1'")),
    ("allocate_each", "dtype", "f4", "i8", ("'float32'", "'int64'")),
    ("allocate_each", "name", "n0", "n1", ("'n0'", "'n1'")),
    ("share", "owner", 0, 1, ("0", "1")),
    ("share", "copy", True, None, ("True", "None")),
    ("share", "name", "n0", None, ("'n0'", "None")),
    ("share_each", "source", np.zeros(2, "f4"), np.zeros(2, "i8"), ("'float32'", "'int64'")),
    ("share_each", "copy", True, None, ("True", "None")),
    ("share_each", "name", "n0", "n1", ("'n0'", "'n1'")),
    ("event", "owner", 0, 1, ("0", "1")),
    ("event", "waiters", [], [1], ("[]", "[1]")),
    ("channel", "shape", 4, 5, ("[4]", "[5]")),
    ("channel", "dtype", "f4", "f8", ("'float32'", "'float64'")),
    ("channel", "slots", 2, 3, ("2", "3")),
    ("channel", "producer", 0, 1, ("0", "1")),
    ("channel", "consumers", [], [1], ("[]", "[1]")),
    ("pool", "owner", 0, 1, ("0", "1")),
    ("pool", "max_nbytes", 1000, 1001, ("1000", "1001")),
]


@TWO
@pytest.mark.parametrize(("call", "name", "mine", "theirs", "shown"), DIFFERENT, ids=str)
def test_an_argument_that_differs(node, call, name, mine, theirs, shown):
    odd = node.size - 1
    value = mine if node.rank == odd else theirs
    with pytest.raises(MismatchError) as caught:
        getattr(node, call)(**NEEDED[call] | {name: value})
    assert caught.value.ranks == (tuple(range(odd)) if node.rank == odd else (odd,))
    for text in shown:
        assert f"{'dtype' if name == 'source' else name}={text}" in str(caught.value)
    assert node.allocate(1).shape == (1,)


@TWO
@pytest.mark.parametrize(
    "calls",
    [
        ["allocate", "event"],
        ["allocate", "allocate_each"],
        ["collect", "share", "allocate_each"],
        ["close", "collect"],
    ],
    ids=" meets ".join,
)
def test_different_calls_that_meet(node, calls):
    window = node.allocate(1)
    calls = [calls[rank % len(calls)] for rank in range(node.size)]
    mine = calls[node.rank]
    with pytest.raises(MismatchError) as caught:
        getattr(window if mine == "close" else node, mine)(**NEEDED.get(mine, {}))
    assert caught.value.ranks == tuple(r for r, call in enumerate(calls) if call != mine)
    for rank, text in caught.value.failures.items():
        assert (
            f"{window.name}: close" if calls[rank] == "close" else f"Node.{calls[rank]}"
        ) in text
    assert node.allocate(1).shape == (1,)
    window.close()


WINDOW = [
    lambda win: win.fence(),
    lambda win: win.complete(),
    lambda win: win.wait(),
    lambda win: win.array,
    lambda win: win.segment(0),
    lambda win: win.post([0]),
    lambda win: win.post([]),
    lambda win: win.start([0]),
    lambda win: win.snapshot(),
    lambda win: win.device,
]
CALLS = {
    "allocate": WINDOW,
    "allocate_each": WINDOW,
    "event": [lambda event: event.record(), lambda event: event.wait()],
    "channel": [
        lambda channel: channel.put(),
        lambda channel: channel.get(),
        lambda channel: channel.end(),
        lambda channel: next(iter(channel)),
    ],
    "pool": [
        lambda pool: pool.allocate(3),
        lambda pool: pool.handle(3),
        lambda pool: pool.open(b""),
    ],
}


@pytest.mark.parametrize("call", CALLS)
def test_it_is_closed_at_the_end_of_its_block_and_refuses_all_calls(node, call):
    with getattr(node, call)(**NEEDED[call]) as made:
        assert not made.is_closed
        assert repr(made).lower().startswith(f"<mpishare.{made.name}: ")
        assert "closed" not in repr(made)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(made)
    assert made.is_closed
    made.close()  # once more
    assert "closed" in repr(made)
    for use in (*CALLS[call], lambda made: made.__enter__()):
        with pytest.raises(ClosedError, match=made.name):
            use(made)


@pytest.mark.parametrize("call", [*CALLS, None], ids=str)
def test_an_exception_ends_its_node(host_node, call):
    """No barrier with ranks that may be gone, and the exception is not masked."""
    node = mpishare.Node(host_node.comm, backend="host")
    with pytest.raises(KeyError), getattr(node, call)(**NEEDED[call]) if call else node:
        raise KeyError
    with pytest.raises((ClosedError, PeerError), match="KeyError"):
        node.barrier()
    node.close()
