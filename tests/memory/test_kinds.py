"""Kinds of GPU memory that exists already: what each travels as, or what is to be done instead."""

import pytest

from mpishare.memory.kinds import (
    FREED,
    Kind,
    MemoryType,
    PointerAttributes,
    Refusal,
    classify,
)

PLAIN = PointerAttributes(
    memory_type=MemoryType.DEVICE,
    ordinal=1,
    is_managed=False,
    has_legacy_handle=False,
    handle_types=0,
    pool=0,
    start=1 << 40,
    nbytes=2 << 20,
    buffer_id=7,
)


def found(**changes):
    return classify(PLAIN._replace(**changes), 1)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"has_legacy_handle": True}, Kind.BLOCK),
        ({"handle_types": 1, "pool": 5}, Kind.POOL),
        ({"handle_types": 1}, Kind.CHUNKS),
        ({"handle_types": 9}, Kind.CHUNKS),  # a fabric handle too
    ],
)
def test_what_travels(changes, kind):
    assert found(**changes) == kind


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_managed": True, "has_legacy_handle": True}, "cudaMallocManaged"),
        ({"memory_type": MemoryType.HOST}, "pinned host memory"),
        ({"memory_type": MemoryType.HOST, "is_managed": True}, "cudaMallocManaged"),
        ({"ordinal": 0, "has_legacy_handle": True}, "GPU 0"),
        ({"pool": 5}, "cudaMallocAsync"),
        ({"pool": 5, "handle_types": 2}, "cudaMallocAsync"),
        ({}, "without a handle"),
    ],
)
def test_what_does_not(changes, words):
    refusal = found(**changes)
    assert isinstance(refusal, Refusal)
    assert words in refusal.why
    assert "copy=True" in refusal.remedy


def test_no_memory_at_all():
    assert found(memory_type=MemoryType.UNKNOWN) is FREED
