"""Which frames of an uncaught exception are printed."""

import traceback

import pytest

from mpishare.backends.host import HostBackend
from mpishare.coordination.abort import say
from mpishare.coordination.agreement import require_same
from mpishare.coordination.poll import poll
from mpishare.coordination.uncaught import shorten
from mpishare.errors import MismatchError
from mpishare.memory import shared


def frames_after(call, error):
    """The functions that a shortened traceback names."""
    with pytest.raises(error) as caught:
        call()
    short = shorten(caught.value, caught.value.__traceback__)
    return [frame.name for frame in traceback.extract_tb(short)]


def test_an_error_of_mpishare_ends_at_the_call_of_the_user():
    assert frames_after(lambda: require_same("f", [1, 2], 0), MismatchError)[-1] == "require_same"
    names = frames_after(lambda: HostBackend().publish(None), TypeError)
    assert names[-1] == "publish"


def test_an_error_of_a_callable_of_the_user_shows_no_frame_of_mpishare():
    def fail():
        raise KeyError("mine")

    names = frames_after(lambda: poll(fail, 1.0), KeyError)
    assert names[-2:] == ["<lambda>", "fail"]
    assert "poll" not in names


def test_what_nobody_foresaw_keeps_all_frames(monkeypatch):
    monkeypatch.setattr(shared, "FOLDER", __file__)
    token = f"mpishare-1-{0:032x}"
    names = frames_after(lambda: HostBackend().open(token, 8, ""), NotADirectoryError)
    assert names[-2:] == ["attach", "open_file"]


def test_control_characters_of_other_ranks_are_not_printed(capsys):
    say("rank 1 has left:\tValueError: \x1b[2J\x07\x9b\n")
    assert capsys.readouterr().err == "rank 1 has left:\tValueError: \\x1b[2J\\x07\\x9b\n"
