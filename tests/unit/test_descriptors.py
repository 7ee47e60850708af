"""Descriptors lent by one rank to another."""

import os
from pathlib import Path

import pytest

from mpishare.errors import HandleError, UnsupportedError
from mpishare.memory.descriptors import Descriptors


@pytest.fixture
def ranks():
    nonces = [f"test-{os.getpid()}-{rank}" for rank in range(2)]
    ranks = [Descriptors(nonces, rank) for rank in range(2)]
    yield ranks
    for descriptors in ranks:
        descriptors.close()


def test_a_file_is_lent_until_it_is_taken_back(ranks, tmp_path):
    path = Path(tmp_path, "file")
    path.write_text("bytes")
    with path.open() as file:
        tokens = [ranks[0].lend(file.fileno()) for _ in range(2)]
        fd = ranks[1].borrow(0, tokens[0], 5.0)
        assert os.pread(fd, 10, 0) == b"bytes"
        os.close(fd)
        ranks[0].take_back(tokens[0])
        with pytest.raises(UnsupportedError, match="KeyError"):
            ranks[1].borrow(0, tokens[0], 5.0)
        os.close(ranks[1].borrow(0, tokens[1], 5.0))
        ranks[0].take_back(tokens[1])
        with pytest.raises(HandleError, match="nobody answers"):
            ranks[1].borrow(0, tokens[1], 5.0)


def test_what_lends_nothing_has_no_door(ranks):
    ranks[0].close()
    with pytest.raises(HandleError, match="nobody answers"):
        ranks[1].borrow(0, "token", 5.0)
