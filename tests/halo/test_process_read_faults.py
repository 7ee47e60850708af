"""Reads from a peer process that refuses them, or leaves meanwhile."""

import ctypes
import functools
import logging
import time

import numpy as np
import pytest

from tests.helpers import scenes
from tests.helpers.compiled import needs_compiled
from tests.helpers.reporting import report
from tests.helpers.stage import Stage

pytestmark = needs_compiled

NBYTES = 1048576  # of a face: more than is packed
play = functools.partial(scenes.play, env={"MPISHARE_HOST_CODE": "compiled"})


def begun(stage: Stage, how: str) -> None:
    """The others read the faces of rank 1, which does something else instead of waiting."""
    import mmap

    stage.quiet()
    node = stage.node()
    # Whole pages, which can be taken away.
    memory = mmap.mmap(-1, 4 * 1048576)
    field = np.frombuffer(memory, "f8").reshape(4, -1)
    field[...] = stage.rank
    # To the right alone: then the right neighbor waits for nothing else of rank 1's.
    halo = stage.ring(node, field, ((1, 0),), axes=(0,))
    halo.exchange(field)
    assert halo.staging_nbytes < 1048576  # faces are read from the process
    halo.start(field)
    stage.world.Barrier()  # else a slow rank hears of the end before it starts
    libc = ctypes.CDLL(None, use_errno=True)
    if stage.rank == 1:

        def leave() -> None:
            with node:
                raise KeyError("my own reason")

        def protect(rights: int) -> None:
            at = ctypes.c_void_p(field[1:].ctypes.data)
            assert libc.mprotect(at, field[1:].nbytes, rights) == 0

        if how.startswith("leaves"):
            stage.attempt("call", leave)
            if how == "leaves":
                field[...] = -1
            else:
                protect(0)
            stage.world.Send(b"", dest=2)
        else:
            protect(0)
            stage.attempt("call", halo.wait)
            protect(mmap.PROT_READ | mmap.PROT_WRITE)
    else:
        if not how.startswith("leaves"):
            time.sleep(0.5)
        elif stage.rank == 2:
            stage.world.Recv(bytearray(0), source=1)  # and at once, before it is known otherwise
        stage.attempt("call", halo.wait)
        stage.attempt("then", halo.exchange, field)
    stage.attempt("close", node.close)
    stage.end()


@pytest.mark.parametrize("how", ["leaves", "leaves and frees"] * 2)
def test_the_sender_leaves_by_an_exception(how):
    """What it does to its cells afterwards reaches no ghost, and is not given as the reason."""
    played = play(3, begun, how, shared=True)
    assert "my own reason" in played.raised(1, "call", "KeyError").text
    for rank in (0, 2):
        told = played.raised(rank, "call", "PeerError")
        assert list(told.failures) == [1]
        assert "my own reason" in told.failures[1]


def test_the_memory_of_the_sender_is_gone():
    played = play(3, begun, "takes it away", shared=True)
    why = "cells in a field of rank 1 cannot be read: Bad address"
    assert why in played.raised(2, "call", "MpiShareError").text
    for rank, call in ((1, "call"), (0, "then")):
        told = played.raised(rank, call, "PeerError")
        assert list(told.failures) == [2]
        assert why in told.text


def refused(stage: Stage) -> None:
    """Nobody may read the memory of rank 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    # What root may do in spite of all (capset(2), version 3 of it).
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for which in (0, 1):  # effective, permitted
        sets[which] &= ~(1 << 19)  # CAP_SYS_PTRACE
    assert libc.capset(header, sets) == 0
    if stage.rank == 1:
        assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
    said = []
    log = logging.getLogger("mpishare.halo")
    log.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    with stage.node() as node:
        report({"unreadable": node.report().unreadable})
        fields = [np.zeros((4, 1048576 // 8)) for _ in range(2)]
        with stage.ring(node, fields[0], axes=(0,)) as halo:
            for step in range(20):
                field = fields[step % 2]
                field[1:3] = 100 * step + stage.rank
                halo.exchange(field)
                for side, other in ((0, -1), (-1, 1)):
                    owner = (stage.rank + other) % stage.size
                    assert (field[side] == 100 * step + owner).all(), f"step {step}, side {side}"
            report({"staging": halo.staging_nbytes})
    report({"said": said})


def test_a_process_that_may_not_be_read():
    played = play(3, refused)
    assert played.result.returncode == 0, played.describe()
    for rank in range(3):
        told = played.rank(rank)
        why = "Operation not permitted"
        assert told["unreadable"] == [[0, 1, why], [2, 1, why]]
        refusals = [text for text in told["said"] if "copied twice" in text]
        assert len(refusals) == (rank != 1), played.describe()
        assert told["staging"] > 4 * NBYTES  # two copies of both faces of rank 1
    (text,) = [text for text in played.rank(0)["said"] if "copied twice" in text]
    assert "large faces of rank 1" in text
    assert "Operation not permitted" in text
