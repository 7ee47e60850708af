"""Many arrays shared at once: a tree of windows, in one allocation or in place."""

import logging
from collections import OrderedDict, namedtuple
from functools import partial

import numpy as np
import pytest

from mpishare import UnsupportedError
from tests.helpers.windows import fails_on, nothing_leaked, some, values_of

Pair = namedtuple("Pair", "weight bias")


@pytest.mark.parametrize("owner", [None, -1], ids=["leader", "last"])
def test_the_tree_comes_back_with_windows_at_its_leaves(node, owner):
    rank = 0 if owner is None else node.size - 1
    first, order = some((3, 5), "i4"), np.asfortranarray(some((4, 2), "f8"))
    tree = OrderedDict(
        first=node.xp.asarray(first),
        layers=[Pair(first[1:], some(7, "u1")), (node.xp.asarray(order),)],
    )
    tree[3] = np.zeros((0, 2), "f4")
    windows = node.share_all(tree if node.rank == rank else None, owner=rank)
    assert list(windows) == ["first", "layers", 3]
    pair, (last,) = windows["layers"]
    assert np.array_equal(values_of(windows["first"].array), first)
    assert np.array_equal(values_of(pair.weight.array), first[1:])
    assert np.array_equal(values_of(pair.bias.array), some(7, "u1"))
    assert np.array_equal(values_of(last.array), order)
    assert last.array.flags.f_contiguous
    assert (windows[3].shape, windows[3].dtype) == ((0, 2), np.dtype("f4"))
    assert windows["first"].owner == rank
    pair.bias.fence()
    if node.rank == node.size - 1:
        pair.bias.array[...] = 250
    pair.bias.fence()
    assert np.array_equal(values_of(pair.bias.array), np.full(7, 250))
    # Its neighbors in the allocation are as they were.
    assert np.array_equal(values_of(pair.weight.array), first[1:])
    assert np.array_equal(values_of(last.array), order)


def test_a_field_that_namedtuple_renamed_keeps_its_name(node):
    kind = namedtuple("Kind", "class bias", rename=True)
    found = node.share_all(kind(some(3, "u1"), some(2, "u1")))
    assert found._fields == ("_0", "bias")
    assert np.array_equal(values_of(found[0].array), some(3, "u1"))


def test_tied_weights_stay_tied(node):
    first = node.xp.asarray(some((2, 3), "f4"))
    found = node.share_all({"in": first, "out": first, "again": first[:], "flat": first.reshape(6)})
    assert found["in"] is found["out"] is found["again"]
    assert found["flat"] is not found["in"]


def test_a_state_dict(node):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    windows = node.share_all(model.state_dict())
    assert list(windows) == ["weight", "bias"]
    expected = node.comm.bcast(model.bias.detach().numpy())
    assert np.array_equal(values_of(windows["bias"].array), expected)


def test_memory_goes_with_the_last_window(node):
    def share():
        found = node.share_all([np.ones(100_000), np.zeros(3), np.arange(5)])
        found[0].close()
        assert values_of(found[2].array).tolist() == [0, 1, 2, 3, 4]
        found[2].close()
        found[1].close()

    share()
    with nothing_leaked(node):
        share()
        node.share_all({})


def test_in_place(node):
    base = node.allocate(12, "i8")
    parts = [base.array[:4], {"odd": base.array[5::2]}]
    shared = node.share_all(parts if node.is_leader else None, copy=False)
    base.fence()
    if node.is_leader:
        base.array[...] = node.xp.arange(12)
    base.fence()
    assert values_of(shared[0].array).tolist() == [0, 1, 2, 3]
    assert values_of(shared[1]["odd"].array).tolist() == [5, 7, 9, 11]


def test_some_in_place_and_some_copied(node, caplog):
    base = node.allocate(4, "i8", fill=3)
    with caplog.at_level(logging.WARNING, "mpishare.window"):
        shared = node.share_all([np.arange(3), base.array, np.arange(2)], copy=None)
    assert [values_of(each.array).tolist() for each in shared] == [[0, 1, 2], [3] * 4, [0, 1]]
    texts = [text for text in caplog.messages if "copied" in text]
    assert len(texts) == int(node.is_leader)
    assert all("2 arrays were copied" in text for text in texts)


def within_itself():
    tree = {"a": [np.ones(2)]}
    tree["a"].append((tree["a"],))
    return tree


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"layer3": [np.ones(3), 1.5]}, "source['layer3'][1] failed: float '1.5' is not an array"),
        ([np.array([object()])], "source[0] failed: dtype object holds Python objects"),
        ({"a": {(1, 2): np.ones(2)}}, "source['a'] has the key (1, 2)"),
        (within_itself(), "source['a'][1][0] is a list that contains itself"),
    ],
    ids=["float", "objects", "key", "circle"],
)
def test_what_is_wrong_in_a_tree_is_named_by_its_path(node, tree, words):
    with nothing_leaked(node):
        given = tree if node.is_leader else None
        fails_on(node.comm, [0], TypeError, lambda: node.share_all(given), words)


def test_what_cannot_be_shared_in_place_is_named(node):
    tree = {"a": np.zeros(0), "b": [np.ones(3)[::-1]]}
    with nothing_leaked(node):
        words = "source['b'][0] failed: the array cannot be shared in place"
        share = partial(node.share_all, tree, copy=False)
        fails_on(node.comm, [0], UnsupportedError, share, words)
