"""Descriptors lent by one rank to another."""

import os
from pathlib import Path

import pytest

from mpishare.errors import HandleError, UnsupportedError
from mpishare.memory.door import Door
from mpishare.memory.visit import borrow
from tests.helpers.children import python


@pytest.fixture
def door():
    door = Door()
    yield door
    door.close()


def test_a_file_is_lent_until_it_is_taken_back(door, tmp_path):
    path = Path(tmp_path, "file")
    path.write_text("bytes")
    with path.open() as file:
        tokens = [door.lend(file.fileno()) for _ in range(2)]
        fd = borrow(0, tokens[0], 5.0)
        assert os.pread(fd, 10, 0) == b"bytes"
        os.close(fd)
        door.take_back(tokens[0])
        with pytest.raises(UnsupportedError, match="KeyError"):
            borrow(0, tokens[0], 5.0)
        os.close(borrow(0, tokens[1], 5.0))
        door.take_back(tokens[1])
        with pytest.raises(HandleError, match="nobody answers"):
            borrow(0, tokens[1], 5.0)


def test_a_file_that_does_not_arrive_is_an_error(door):
    """As the kernel leaves out files for which a process has no descriptor left."""
    token = door.lend(0)
    source = f"""
import os, resource
from mpishare.memory.visit import borrow
held = [os.dup(0)]
resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, held[0] + 1))
os.close(held[0])  # for the socket
try:
    borrow(0, {token!r}, 5.0)
except ValueError as error:
    print(error)
"""
    done = python(source)
    assert "rank 0 lent a file that did not arrive" in done.stdout, done
    door.take_back(token)
