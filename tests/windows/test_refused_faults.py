"""What one rank cannot do fails on all, leaves nothing, and the node goes on."""

import pytest

import mpishare
from tests.helpers.reporting import report
from tests.helpers.scenes import BACKENDS, play
from tests.helpers.stage import Stage, leftovers, shared_bytes


def out_of_memory(stage: Stage, owner: int, nbytes: int, available: int) -> None:
    node = stage.node()
    if available:
        mpishare.memory.shared.available_nbytes = lambda: available
    before = shared_bytes()
    stage.attempt("allocate", lambda: node.allocate(nbytes, dtype="u1", owner=owner))
    each = nbytes if stage.rank == owner else 16
    stage.attempt("allocate_each", lambda: node.allocate_each(each, dtype="u1"))
    report({"kept bytes": shared_bytes() - before})
    mpishare.memory.shared.available_nbytes = lambda: 1 << 30
    stage.attempt("go on", lambda: node.allocate(16, fill=1.0).fence())
    stage.attempt("close", node.close)
    stage.second_node(stage.world)
    report({"leftovers": leftovers()})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("owner", [0, 2])
def test_an_owner_out_of_memory(owner, backend):
    played = play(3, out_of_memory, owner, 1 << 45, 0, backend=backend)
    check_out_of_memory(played, owner, backend, "of memory left")


def test_an_owner_with_room_in_shm_but_no_memory():
    played = play(3, out_of_memory, 0, 4 << 20, 1 << 20)
    check_out_of_memory(played, 0, "host", "of memory left")


def check_out_of_memory(played, owner, backend, words):
    for call in ("allocate", "allocate_each"):
        if backend == "host":
            assert words in played.raised(owner, call, "UnsupportedError").text
        else:
            told = played.raised(owner, call, "CudaError")
            assert told.name == "CUDA_ERROR_OUT_OF_MEMORY"
        for rank in {0, 1, 2} - {owner}:
            told = played.raised(rank, call, "PeerError")
            assert list(told.failures) == [owner]
            assert told.seconds < 5
    for rank in range(3):
        assert played.rank(rank)["kept bytes"] == 0
        assert played.rank(rank)["leftovers"] == []
    played.worked(range(3), "go on", "close", "second node")
    played.ended_well()


def bad_share(stage: Stage) -> None:
    def fail() -> None:
        return {}["no such key"]

    def leave() -> None:
        sys.exit("enough")  # noqa: F821  imported where this is played

    node = stage.node()
    called = []
    stage.attempt("raises", lambda: node.share(fail, owner=1))
    stage.attempt("exits", lambda: node.share(leave, owner=1))
    stage.attempt("objects", lambda: node.share(lambda: [object()], owner=1))
    stage.attempt("go on", lambda: node.share(lambda: called.append(1) or [1.0, 2.0], owner=1))
    report({"calls": len(called)})
    stage.attempt("close", node.close)
    report({"leftovers": leftovers()})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_callable_given_to_share_raises(backend):
    played = play(3, bad_share, backend=backend, shared=True)
    for call, error in (("raises", "KeyError"), ("exits", "SystemExit"), ("objects", "TypeError")):
        played.raised(1, call, error)
        for rank in (0, 2):
            told = played.raised(rank, call, "PeerError")
            assert list(told.failures) == [1]
            assert told.failures[1].startswith(error)
    assert [played.rank(rank)["calls"] for rank in range(3)] == [0, 1, 0]
    played.worked(range(3), "go on", "close")
    assert all(played.rank(rank)["leftovers"] == [] for rank in range(3))
    played.ended_well()


TAMPERED = ("digest", "version", "empty", "backend", "nonce", "boot", "nbytes", "offset", "token")


def tampered(stage: Stage, kinds: list[str]) -> None:
    import dataclasses

    node = stage.node()
    pack = mpishare.memory.handle.Handle.pack

    def replaced(**fields: object) -> object:
        return lambda handle: pack(dataclasses.replace(handle, **fields))

    ways = {
        "digest": lambda handle: pack(handle).replace('"offset": 0', '"offset": 8'),
        "version": lambda handle: "9" + pack(handle)[1:],
        "empty": lambda handle: "",
        "backend": replaced(backend="hip"),
        "nonce": replaced(nonce="0" * 16),
        "boot": replaced(boot="another machine"),
        "nbytes": replaced(nbytes=8),
        "offset": replaced(offset=1 << 30),
        "token": replaced(token="../etc/passwd"),
    }
    before = shared_bytes()
    for kind in kinds:
        if stage.rank == 0:
            mpishare.memory.handle.Handle.pack = ways[kind]
        stage.attempt(kind, lambda: node.allocate(64))
    mpishare.memory.handle.Handle.pack = pack
    report({"kept bytes": shared_bytes() - before})
    stage.attempt("go on", lambda: node.allocate(64, fill=1.0).fence())
    stage.attempt("close", node.close)
    stage.second_node(stage.world)
    report({"leftovers": leftovers()})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tampered_handle_is_refused_before_it_is_opened(backend):
    # A GPU's token is 64 opaque bytes: only the driver can tell.
    kinds = [kind for kind in TAMPERED if backend == "host" or kind != "token"]
    played = play(3, tampered, kinds, backend=backend, shared=True)
    for kind in kinds:
        told = played.raised(0, kind, "PeerError")
        assert sorted(told.failures) == [1, 2]
        assert all(text.startswith("HandleError: ") for text in told.failures.values())
        for rank in (1, 2):
            played.raised(rank, kind, "HandleError")
    for rank in range(3):
        assert played.rank(rank)["kept bytes"] == 0
        assert played.rank(rank)["leftovers"] == []
    played.worked(range(3), "go on", "close", "second node")
    played.ended_well()
