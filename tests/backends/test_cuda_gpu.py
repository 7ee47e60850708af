"""The CUDA backend: real CuPy arrays on the rank's own GPU, whoever's memory they are."""

import gc
import subprocess

import numpy as np
import pytest

from mpishare import HaloExchange, Node, PeerError, UnsupportedError
from tests.helpers.held import gpu_free
from tests.helpers.windows import fails_on

MIB = 1 << 20


def uuids(node):
    return [member.device.uuid for member in node.report().members]


def test_device_is_the_current_one_as_nvidia_smi_describes_it(node, cupy):
    device = node.device
    assert cupy.cuda.Device().id == device.ordinal
    assert device.pci_id == cupy.cuda.runtime.deviceGetPCIBusId(device.ordinal).lower()
    assert uuids(node)[node.rank] == device.uuid
    assert device.uuid in repr(node)
    # Not CuPy's word for it, which ends at the first byte of 0.
    query = ["nvidia-smi", f"--id={device.uuid}", "--format=csv,noheader"]
    query.append("--query-gpu=name,driver_version,compute_cap")
    said = subprocess.run(query, capture_output=True, text=True, check=True)
    name, version, capability = said.stdout.strip().split(", ")
    assert (device.name, device.compute_capability) == (name, capability)
    assert device.driver.startswith(f"{version} (CUDA ")
    assert f"compute capability {capability}" in str(node.report())


def test_ranks_are_spread_over_the_gpus(node, cupy):
    """As even as it can be: each GPU that the ranks see, in turn."""
    seen = node.comm.allgather(cupy.cuda.runtime.getDeviceCount())
    counts = [uuids(node).count(uuid) for uuid in set(uuids(node))]
    if min(seen) >= node.size:
        assert counts == [1] * node.size
    assert max(counts) - min(counts) <= 1 or min(seen) == 1


def test_report_is_what_this_machine_must_give(node, cupy):
    """What the pairs are follows from which GPU each rank has and sees; all of it must work."""
    from mpishare.backends import driver

    count = cupy.cuda.runtime.getDeviceCount()
    visible = {driver.uuid_of(ordinal) for ordinal in range(count)}
    visible_of = node.comm.allgather(visible)
    members = node.report().members
    is_shared = any(uuids(node).count(m.device.uuid) > 1 and not m.device.mps for m in members)
    for pair in node.report().pairs:
        mine, theirs = uuids(node)[pair.origin], uuids(node)[pair.target]
        assert (pair.memory, pair.copy, pair.kernel, pair.counters, pair.events) == (True,) * 5
        assert pair.reason is None
        if pair.origin == pair.target:
            assert (pair.link, pair.route) == ("self", "copy")
            continue
        if mine == theirs:
            assert pair.link == "same GPU"
        elif theirs in visible_of[pair.origin]:
            assert pair.link in ("NVLink", "PCIe")
        else:
            assert pair.link == "peer"
        assert pair.route == ("copy" if is_shared else "fused")
    text = str(node.report())
    assert ("python -m mpishare.mps" in text) == is_shared
    assert all(uuid[:12] in text for uuid in uuids(node))
    assert node.report().why_host is None
    assert node.report().can_share


@pytest.mark.parametrize("form", ["ordinal", "uuid", "cupy"])
def test_device_as_an_argument(node, form, cupy):
    ordinal = node.device.ordinal
    device = {"ordinal": ordinal, "uuid": node.device.uuid, "cupy": cupy.cuda.Device(ordinal)}[form]
    with Node(device=device) as other:
        assert other.device == node.device


@pytest.mark.parametrize(
    ("device", "error"),
    [(99, ValueError), (-1, ValueError), ("GPU-none", ValueError), (1.5, TypeError)],
)
def test_wrong_device(node, device, error):
    with pytest.raises(error):
        Node(device=device)
    last = node.size - 1
    given = device if node.rank == last else None
    fails_on(node.comm, [last], error, lambda: Node(device=given))
    assert node.allocate(2, fill=1).array.tolist() == [1, 1]


def test_memory_is_plain_and_outside_of_the_pool(node, cupy):
    pool = cupy.get_default_memory_pool()
    node.barrier()
    before, used = gpu_free(), pool.total_bytes()
    node.barrier()
    win = node.allocate_each(64 * MIB + 1, "u1")
    assert gpu_free() <= before - 64 * MIB
    assert pool.total_bytes() == used
    assert {win.segment(rank).data.ptr % 512 for rank in range(node.size)} == {0}
    node.barrier()
    win.close()
    gc.collect()
    node.barrier()
    assert gpu_free() >= before - 32 * MIB


@pytest.mark.parametrize(
    "dtype", ["S3", "M8[s]", ">f8", "V4", [("a", "i4")], np.longdouble], ids=str
)
def test_dtype_that_cupy_has_not(node, dtype):
    for call in (node.allocate, node.allocate_each):
        with pytest.raises(UnsupportedError, match="CuPy has no dtype"):
            call(3, dtype)
    source = np.zeros(3, dtype)
    with pytest.raises(UnsupportedError if node.is_leader else PeerError):
        node.share(source)
    assert node.allocate(2, fill=1).array.tolist() == [1, 1]


def test_more_operations_than_the_driver_takes_at_once(node, cupy):
    """Each word is written and waited for with a value of its own."""
    from mpishare.backends.driver import CudaSignals

    count = 600
    win = node.allocate_each(count, "u8", fill=0)
    places = [win.array.data.ptr + 8 * index for index in range(count)]
    stream = cupy.cuda.Stream(non_blocking=True)
    for first in (1, 1000):
        values = range(first, first + count)
        for kind in ("write", "wait"):
            signals = CudaSignals([(kind, place) for place in places], 0, "test")
            signals.enqueue(stream.ptr, values)
        node.synchronize(stream)
        with stream:
            assert win.array.tolist() == list(values)


def test_share_of_a_gpu_array_on_a_side_stream(node, cupy):
    """The copy comes after what was put on the current stream, and is there when share returns."""
    with cupy.cuda.Stream(non_blocking=True):
        source = cupy.zeros(4 * MIB, "f4")
        for _ in range(50):
            source += 1
        win = node.share(source)
        source[...] = 0
    assert bool((win.array == 50).all())


def test_pinned_memory_of_nodes_that_were_left_is_in_nobodys_way():
    """Unmapped while it is pinned, its address would be given to memory that cannot be pinned."""

    def leave():
        with Node(timeout_s=40) as node:
            node.allocate_each(1000, name="left").snapshot()
            cart = node.comm.Create_cart([node.size], [True])
            u = node.xp.zeros((4, 9))
            HaloExchange(cart, u, 1, axes=0, node=node).exchange(u)
            node.synchronize()
            node.barrier()
            raise ZeroDivisionError

    for _ in range(6):
        with pytest.raises(ZeroDivisionError):
            leave()
        gc.collect()
