"""A platform that empties memory when its IPC handle is taken, as was seen on WSL2; pretended here.

The driver's calls are the real ones. After each that takes a handle the block is set to zero.
"""

import numpy as np
import pytest
from mpi4py import MPI

from mpishare import HaloExchange, Node, PeerError, UnsupportedError


@pytest.fixture
def emptying(monkeypatch, node):
    """A node on that platform."""
    from mpishare.backends import driver

    call = driver.call

    def call_and_empty(name, *arguments, **options):
        found = call(name, *arguments, **options)
        if name == "cuIpcGetMemHandle":
            start, nbytes = call("cuMemGetAddressRange", arguments[0])
            call("cuMemsetD8", start, 0, nbytes)
            call("cuCtxSynchronize")
        return found

    monkeypatch.setattr(driver, "call", call_and_empty)
    # Else it would take over what the other node has found out.
    monkeypatch.setattr("mpishare.runtime.create.known_to_all", lambda *_: None)
    with Node(node.comm) as other:
        yield other


def test_the_probe_says_so(node, emptying):
    assert all(member.keeps_values for member in node.report().members)
    assert not any(member.keeps_values for member in emptying.report().members)
    assert "emptied when its handle is taken" in str(emptying.report())
    assert "emptied" not in str(node.report())


def test_what_windows_are_made_with_arrives(emptying):
    filled = emptying.allocate((3, 4), "f4", fill=7.5)
    assert bool((filled.array == 7.5).all())
    each = emptying.allocate_each(5, "i8", fill=10 + emptying.rank)
    for rank in range(emptying.size):
        assert each.segment(rank).tolist() == [10 + rank] * 5
    last = emptying.size - 1
    shared = emptying.share(np.arange(6.0).reshape(2, 3), owner=last)
    assert shared.array.tolist() == [[0, 1, 2], [3, 4, 5]]
    shared.fence()


@pytest.mark.parametrize("call", ["share", "share_each", "share_all"])
def test_filled_memory_is_not_shared_in_place(emptying, call):
    source = emptying.xp.arange(5.0)
    given = [source] if call == "share_all" else source
    with pytest.raises((UnsupportedError, PeerError), match="would empty it on this machine"):
        getattr(emptying, call)(given, copy=False)
    assert source.tolist() == [0, 1, 2, 3, 4]
    window = emptying.share_each(emptying.allocate_each(3, fill=2.0).array, copy=False)
    assert window.array.tolist() == [2.0] * 3


def test_what_an_exchange_sends_arrives(emptying):
    xp, rank, size = emptying.xp, emptying.rank, emptying.size
    cart = emptying.comm.Create_cart([size], periods=[True])
    assert isinstance(cart, MPI.Cartcomm)
    for cells in (8, 1 << 18):
        u = xp.full(cells + 2, -1.0)
        halo = HaloExchange(cart, u, 1, node=emptying)
        for step in range(3):
            u[1:-1] = 100 * step + rank
            halo.exchange(u)
            assert u[[0, -1]].tolist() == [
                100 * step + (rank - 1) % size,
                100 * step + (rank + 1) % size,
            ]
        halo.close()
    cart.Free()
