"""Windows inside kernels of Triton: puts, signals, waits, words, barriers and atomics."""

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
device = pytest.importorskip("mpishare.device.triton")


@triton.jit
def ring(d, source, n, rounds, errors, block: tl.constexpr):
    right = (device.rank(d) + 1) % device.size(d)
    left = (device.rank(d) + device.size(d) - 1) % device.size(d)
    mine = device.at(d, device.rank(d), tl.float64)
    number = (device.epoch(d, 0) - 1) * rounds
    i = tl.arange(0, block)
    ok = True
    for _ in range(rounds):
        number += 1
        if ok:
            tl.store(source + i, (1000 * number + 100 * device.rank(d) + i).to(tl.float64), i < n)
            if number > 1:
                ok = device.wait(d, right, 1, number - 1)
            device.put_signal(d, right, 1, source, n, 0, number)
            ok = device.wait(d, left, 0, number) & ok
            got = tl.load(mine + 1 + i, i < n, 0.0)
            wrong = (got != (1000 * number + 100 * left + i).to(tl.float64)) & (i < n)
            tl.atomic_add(errors, tl.sum(wrong.to(tl.int32)))
            device.signal(d, left, 1, number)
    if not device.barrier(d, 2) & ok:
        tl.store(errors, -1)


@triton.jit
def words(d, rounds, errors):
    right = (device.rank(d) + 1) % device.size(d)
    left = (device.rank(d) + device.size(d) - 1) % device.size(d)
    number = (device.epoch(d, 0) - 1) * rounds
    for _ in range(rounds):
        number += 1
        device.put_word(d, right, 0, 0.5 * number.to(tl.float32) + device.rank(d), number)
        first, word = device.get_word(d, left, 0, number, tl.float32)
        device.put_word(d, left, 1, word, number)
        second, back = device.get_word(d, right, 1, number, tl.float32)
        half = 0.5 * number.to(tl.float32)
        is_right = first & second & (word == half + left) & (back == half + device.rank(d))
        tl.atomic_add(errors, (not is_right).to(tl.int32))


@triton.jit
def add(d, n, block: tl.constexpr):
    i = tl.arange(0, block)
    for peer in range(device.size(d)):
        tl.atomic_add(device.at(d, peer, tl.int32) + i, 1, i < n, scope="sys")
    device.barrier(d, 0)


@triton.jit
def count(d, launch, errors):
    tl.atomic_add(errors, (device.epoch(d, 0) != launch).to(tl.int32))


@pytest.fixture
def errors(node):
    if node.report().time_sliced_gpus:
        pytest.skip("ranks share a GPU without MPS, where kernels that wait never end")
    found = torch.zeros(1, dtype=torch.int32, device="cuda")
    yield found
    node.synchronize()
    assert int(found) == 0
    node.barrier()


def test_a_ring_of_puts(node, errors):
    n, rounds, launches = 200, 50, 4
    with node.allocate_each(n + 1, "f8", signals=3) as window:
        source = torch.zeros(n, dtype=torch.float64, device="cuda")
        for _ in range(launches):
            ring[(1,)](int(window.device["self"]), source, n, rounds, errors, block=256)
        node.synchronize()
        left, last = (node.rank - 1) % node.size, rounds * launches
        expected = 1000 * last + 100 * left + torch.arange(n, device="cuda")
        assert (torch.from_dlpack(window.array)[1:] == expected).all()
        node.barrier()


def test_words_come_with_their_epochs(node, errors):
    with node.allocate_each(1, signals=2) as window:
        for _ in range(3):
            words[(1,)](int(window.device["self"]), 200, errors)
        node.synchronize()
        node.barrier()


def test_epochs_of_more_programs_than_are_resident(node, errors):
    with node.allocate_each(1, signals=1) as window:
        for launch, programs in enumerate([3, (1 << 20) + 2, 1 << 22, 1], start=1):
            count[(programs,)](int(window.device["self"]), launch, errors)
        node.synchronize()
        node.barrier()


def test_remote_atomics_add_up(node, errors):
    with node.allocate_each(100, "i4", fill=0, signals=1) as window:
        add[(1,)](int(window.device["self"]), 100, block=128)
        node.synchronize()
        assert (torch.from_dlpack(window.array) == node.size).all()
        node.barrier()
