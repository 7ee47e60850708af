"""Which frames of an uncaught exception are printed, and which line of the program is named."""

import importlib
import linecache
import re
import traceback

import numpy as np
import pytest

from mpishare.backends.host import HostBackend
from mpishare.coordination import uncaught
from mpishare.coordination.abort import say
from mpishare.coordination.agreement import require_same
from mpishare.coordination.poll import poll
from mpishare.errors import MismatchError
from mpishare.memory import shared
from tests.helpers.children import python


def caught(call, error):
    with pytest.raises(error) as found:
        call()
    return found.value


def frames_after(call, error):
    """The functions that a shortened traceback names."""
    found = caught(call, error)
    return [
        frame.name
        for frame in traceback.extract_tb(uncaught._shortened(found, found.__traceback__))
    ]


def line_after(call, error):
    """The words of the line that is named."""
    file, line = uncaught._place(caught(call, error).__traceback__).split(", line ")
    return linecache.getline(file, int(line)).strip()


def test_an_error_of_mpishare_ends_at_the_call_of_the_user():
    assert frames_after(lambda: require_same("f", [1, 2], 0), MismatchError)[-1] == "require_same"
    names = frames_after(lambda: HostBackend().publish(None), TypeError)
    assert names[-1] == "publish"


def broken():
    raise KeyError("mine")


def test_an_error_of_a_callable_of_the_user_shows_no_frame_of_mpishare():
    assert frames_after(lambda: poll(broken, 1.0), KeyError)[-2:] == ["<lambda>", "broken"]


def test_what_nobody_foresaw_keeps_all_frames(monkeypatch):
    monkeypatch.setattr(shared, "FOLDER", __file__)
    token = f"mpishare-1-{0:032x}"
    names = frames_after(lambda: HostBackend().open(token, 8, ""), NotADirectoryError)
    assert names[-2:] == ["attach", "open_file"]


def test_the_line_of_the_user_is_named():
    """Where it raises, or calls mpishare, Python's library or another package."""
    assert line_after(lambda: poll(broken, 1.0), KeyError) == 'raise KeyError("mine")'
    assert "here" in line_after(lambda: require_same("here", [1, 2], 0), MismatchError)
    assert "inv" in line_after(lambda: np.linalg.inv(np.zeros((2, 2))), np.linalg.LinAlgError)
    assert "no_such" in line_after(lambda: importlib.import_module("no_such"), ImportError)


def test_control_characters_of_other_ranks_are_not_printed(capsys):
    say("rank 1 has left:\tValueError: \x1b[2J\x07\x9b\n")
    assert capsys.readouterr().err == "rank 1 has left:\tValueError: \\x1b[2J\\x07\\x9b\n"


HOOK = """
import code, os, sys
from mpishare.coordination import uncaught
sys.excepthook = lambda kind, error, trace: print("previous hook:", error, flush=True)
uncaught.install()
"""
PRINTED = """
try:
    1 / 0
except ZeroDivisionError:
    sys.excepthook(*sys.exc_info())  # as some programs print an error
"""
ENDS = "import atexit\natexit.register(lambda: print(repr(uncaught.uncaught())))\n"
PROMPT = """
lines = iter(["1 / 0"])
def read(_):
    for line in lines:
        return line
    raise EOFError
code.interact("", read)
"""
PUT_BACK = """
if os.fork() == 0:
    print(sys.excepthook is uncaught._print, flush=True)
    os._exit(0)
os.wait()
uncaught.restore()
print(sys.excepthook is uncaught._print)
uncaught.install()
sys.excepthook = mine = print
uncaught.restore()
print(sys.excepthook is mine)
"""


def test_the_exception_that_ends_a_program_is_named_and_given_to_the_previous_hook():
    ran = python(HOOK + ENDS + "raise KeyError(3)")
    assert ran.stdout.splitlines() == ["previous hook: 3", "KeyError(3)"]
    (line,) = ran.stderr.splitlines()
    assert re.fullmatch(r"mpishare: rank 0: <string>, line \d+: KeyError: 3", line)


@pytest.mark.parametrize("source", [PRINTED, PROMPT], ids=["printed by hand", "prompt"])
def test_an_exception_that_ends_no_program_is_left_to_the_previous_hook(source):
    ran = python(HOOK + ENDS + source)
    assert ran.stdout.splitlines()[0].startswith("previous hook: "), ran.stderr
    assert ran.stdout.splitlines()[-1] == "None"
    assert "mpishare:" not in ran.stderr


def test_the_hook_before_is_put_back_also_in_a_forked_child():
    ran = python(HOOK + PUT_BACK)
    assert ran.stdout.split() == ["False", "False", "True"], ran.stderr
