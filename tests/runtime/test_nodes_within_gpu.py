"""Nodes on GPUs of ranks that are in another node already, whose probe they take over."""

import pytest

from mpishare import Node
from mpishare.runtime import create

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["all", "reversed", "every second"])
def test_no_pair_is_probed_anew(host_node, node, comm, kind, monkeypatch):
    """The pairs are as a node finds them that looks itself; one on the host has found none."""
    assert host_node.backend == "host"
    assert node.backend == "cuda"
    color, key = {
        "all": (0, comm.rank),
        "reversed": (0, -comm.rank),
        "every second": (comm.rank % 2, comm.rank),
    }[kind]
    some = comm.Split(color, key)
    with monkeypatch.context() as patch:
        patch.setattr(create, "known_to_all", lambda *_: None)
        alone = Node(some)
    monkeypatch.setattr(create, "probe_cuda", lambda *_: pytest.fail("pairs are probed"))
    within = Node(some)
    assert within.report().pairs == alone.report().pairs
    window = within.allocate_each(2, fill=float(within.rank))
    window.fence()
    other = (within.rank + 1) % within.size
    assert window.segment(other).get().tolist() == [other] * 2
    window.fence()
    within.close()
    alone.close()
    some.Free()
