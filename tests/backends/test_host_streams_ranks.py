"""What `stream=` takes: the same on a GPU and where nothing is ordered on streams."""

from types import SimpleNamespace as Stream

import numpy as np
import pytest

from mpishare import Allreduce, HaloExchange

NO_STREAMS = ["0", -1, 1.5, True, np.ones(3)]


def is_refused(call, *arguments):
    with pytest.raises(TypeError, match="stream must be None"):
        call(*arguments)


@pytest.mark.parametrize("stream", NO_STREAMS, ids=repr)
def test_what_is_no_stream(node, stream):
    """Each call refuses it before anything is done: what comes after is as if it was not made."""
    rank = node.rank
    window, event = node.allocate_each(2, "i8", fill=0, name="streams"), node.event(0)
    for call in (window.fence, window.snapshot, node.synchronize):
        is_refused(call, stream)
    window.post([rank])
    is_refused(window.start, [rank], stream)
    window.start([rank])
    is_refused(window.complete, stream)
    window.complete()
    is_refused(window.wait, stream)
    window.wait()
    is_refused(event.record if rank == event.owner else event.wait, stream)
    pool = node.pool(owner=0, max_nbytes=1 << 20)
    if rank == 0:
        is_refused(lambda: pool.allocate(2, stream=stream))
    window.fence()
    node.synchronize()
    for each in (window, event, pool):
        each.close()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("stream", NO_STREAMS, ids=repr)
def test_channels_take_no_such_thing(host_node, stream):
    channel = host_node.channel(2)
    is_producer = host_node.rank == channel.producer
    if is_producer and hasattr(stream, "shape"):
        with pytest.raises(TypeError, match="it takes no frame, but a stream"):
            channel.put(stream)
    else:
        is_refused(channel.put if is_producer else channel.get, stream)
    channel.close()


@pytest.mark.parametrize("stream", NO_STREAMS, ids=repr)
def test_plans_take_no_such_thing(host_node, stream):
    """The slip of everybody among them: the array once more, in `wait`."""
    node = host_node
    u = np.full(6, node.rank, float)
    with HaloExchange(node.comm, u, 1, dims=(node.size,), periods=True, node=node) as halo:
        for _ in range(2):  # as well when the array was seen before
            is_refused(lambda: halo.exchange(u, stream=stream))
            halo.start(u)
            is_refused(halo.wait, stream)
            halo.wait()
        is_refused(lambda: halo.start(u, stream=stream))
        is_refused(lambda: halo.accumulate(u, stream=stream))
        halo.exchange(u, stream=7)
        assert [u[0], u[-1]] == [(node.rank + step) % node.size for step in (-1, 1)]
    with Allreduce(node.comm, u, node=node) as total:
        is_refused(total.reduce, u, stream)
        is_refused(total.dot, u, u, None, stream)
        assert total.dot(np.ones(2), np.ones(2)) == 2 * node.size


@pytest.mark.parametrize(
    "stream",
    [0, 7, Stream(ptr=7), Stream(cuda_stream=7), Stream(__cuda_stream__=lambda: (0, 7))],
    ids=["0", "7", "CuPy", "PyTorch", "protocol"],
)
def test_streams_of_all_kinds_are_taken(host_node, stream):
    """A program that passes streams runs on both backends."""
    window = host_node.allocate_each(2, "i8", fill=0)
    window.fence(stream)
    host_node.synchronize(stream)
    window.close()
