"""The handle that travels: what the receiver refuses before the driver sees it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishare import HandleError
from mpishare.memory import handle
from mpishare.memory.handle import Handle, boot_id

HANDLE = Handle(
    backend="cuda",
    token="ab" * 64,
    offset=0,
    nbytes=4096,
    capacity=2 << 20,
    uuid="GPU-1f3c",
    nonce="n1",
    boot=boot_id(),
)
WANTED = {"backend": "cuda", "nonce": "n1", "nbytes": 4096}


def test_round_trip():
    assert Handle.unpack(HANDLE.pack(), **WANTED) == HANDLE


def test_less_may_be_mapped_than_there_is():
    assert Handle.unpack(HANDLE.pack(), **{**WANTED, "nbytes": 0}) == HANDLE


@given(at=st.integers(0, len(HANDLE.pack()) - 1), character=st.characters(codec="ascii"))
def test_any_changed_character_is_refused(at, character):
    text = HANDLE.pack()
    changed = text[:at] + character + text[at + 1 :]
    if changed != text:
        with pytest.raises(HandleError):
            Handle.unpack(changed, **WANTED)


@given(length=st.integers(0, len(HANDLE.pack()) - 1))
def test_a_text_cut_short_is_refused(length):
    with pytest.raises(HandleError):
        Handle.unpack(HANDLE.pack()[:length], **WANTED)


@given(st.text())
def test_any_other_text_is_refused(text):
    with pytest.raises(HandleError):
        Handle.unpack(text, **WANTED)


@pytest.mark.parametrize(
    ("changes", "wanted", "told"),
    [
        ({"backend": "host"}, {}, "backend 'host'"),
        ({}, {"backend": "host"}, "backend 'cuda'"),
        ({"nonce": "n2"}, {}, "process 'n2'"),
        ({"boot": "another"}, {}, "machine 'another'"),
        ({"nbytes": 4095}, {}, "4095 bytes .* 4096 bytes"),
        ({}, {"nbytes": 4097}, "4096 bytes .* 4097 bytes"),
        ({"offset": -1}, {}, "exceeds"),
        ({"offset": (2 << 20) - 4095}, {}, "exceeds"),
        ({"capacity": 100}, {}, "exceeds"),
    ],
)
def test_whole_but_not_what_was_expected(changes, wanted, told):
    text = dataclasses.replace(HANDLE, **changes).pack()
    with pytest.raises(HandleError, match=told) as caught:
        Handle.unpack(text, **{**WANTED, **wanted})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "changes", [{"nbytes": "4096"}, {"offset": None}, {"other": 1}, {"kind": 3}]
)
def test_fields_of_other_kinds_are_refused(monkeypatch, changes):
    monkeypatch.setattr(handle, "asdict", lambda made: dataclasses.asdict(made) | changes)
    with pytest.raises(HandleError, match="other fields"):
        Handle.unpack(HANDLE.pack(), **WANTED)


def test_another_version_is_named(monkeypatch):
    monkeypatch.setattr(Handle, "VERSION", 2)
    text = HANDLE.pack()
    monkeypatch.undo()
    with pytest.raises(HandleError, match="version '2'"):
        Handle.unpack(text, **WANTED)
