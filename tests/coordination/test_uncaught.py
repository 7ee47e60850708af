"""Which exception ends a program, and which line of the program is named."""

import importlib
import linecache

import numpy as np
import pytest

from mpishare.coordination import abort
from mpishare.coordination.abort import say
from mpishare.coordination.agreement import require_same
from mpishare.coordination.poll import poll
from mpishare.errors import MismatchError
from tests.helpers.children import python


def line_after(call, error):
    """The words of the line that is named."""
    with pytest.raises(error) as found:
        call()
    file, line = abort.place(found.value.__traceback__).split(", line ")
    return linecache.getline(file, int(line)).strip()


def broken():
    raise KeyError("mine")


def test_the_line_of_the_user_is_named():
    """Where it raises, or calls mpishare, Python's library or another package."""
    assert line_after(lambda: poll(broken, 1.0), KeyError) == 'raise KeyError("mine")'
    assert "here" in line_after(lambda: require_same("here", [1, 2], 0), MismatchError)
    assert "random" in line_after(lambda: np.random.default_rng(0).random(-1), ValueError)  # Cython
    assert "inv" in line_after(lambda: np.linalg.inv(np.zeros((2, 2))), np.linalg.LinAlgError)
    assert "no_such" in line_after(lambda: importlib.import_module("no_such"), ImportError)


def test_control_characters_of_other_ranks_are_not_printed(capsys):
    say("rank 1 has left:\tValueError: \x1b[2J\x07\x9b\n")
    assert capsys.readouterr().err == "rank 1 has left:\tValueError: \\x1b[2J\\x07\\x9b\n"


ENDS = """
import atexit, sys
from mpishare.coordination.abort import uncaught
atexit.register(lambda: print(repr(uncaught())))
"""
PRINTED = """
try:
    1 / 0
except ZeroDivisionError:
    sys.excepthook(*sys.exc_info())  # as some programs print an error
"""
KEPT = """
def test():
    try:
        1 / 0
    except ZeroDivisionError as error:
        sys.last_value = error  # as pytest keeps that of a test that failed
test()
"""
PROMPT = """
import code
lines = iter(["1 / 0"])
def read(_):
    for line in lines:
        return line
    raise EOFError
code.interact("", read)
"""


def test_the_exception_that_ends_a_program_is_found():
    assert python(ENDS + "raise KeyError(3)").stdout.splitlines() == ["KeyError(3)"]


@pytest.mark.parametrize("source", [PRINTED, KEPT, PROMPT], ids=["printed", "kept", "prompt"])
def test_an_exception_that_ends_no_program_is_none(source):
    ran = python(ENDS + source)
    assert ran.stdout.splitlines()[-1] == "None", ran.stderr
