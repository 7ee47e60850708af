"""Windows that a C program opens by one line of text, on the host, and lines that are wrong."""

import os
import random
import tempfile

import numpy as np
import pytest

from mpishare import ClosedError, UnsupportedError
from tests.helpers.c_program import LANGUAGES, compile_program, run_program

N = 1000  # float64 elements
NO_PROCESS = 1 << 22  # Linux numbers processes up to one less


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request, tmp_path_factory):
    return compile_program(tmp_path_factory.mktemp("program"), request.param)


@pytest.mark.both_mpis
def test_a_c_program_reads_and_writes_any_segment(host_node, program):
    node = host_node
    win = node.allocate_each(N, "f8", fill=1 + node.rank, name="exported")
    win.fence()
    for rank in range(node.size):
        found = win.export(rank)
        assert (found.kind, len(found.handle), found.uuid) == ("host-file", 64, "")
        assert (found.offset, found.nbytes) == (0, 8 * N)
        assert run_program(program, found) == (0, str(N * (1 + rank)))
    win.fence()
    right = (node.rank + 1) % node.size
    assert run_program(program, win.export(right), "write")[0] == 0
    win.fence()
    assert (win.array == 2 + node.rank).all()
    win.close()


def test_a_window_of_one_rank(host_node, program):
    win = host_node.allocate(N, "f8", fill=3, owner=host_node.size - 1, name="exported")
    win.fence()
    assert run_program(program, win.export()) == (0, str(3 * N))
    if host_node.size > 1:
        with pytest.raises(ValueError, match="rank 0 has no segment"):
            win.export(0)
    win.close()


def test_a_mapped_file_needs_no_name(host_node, program):
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        source = np.memmap(file, "f8", shape=2 * N)[N - 7 : -7]
    source[...] = 5
    win = host_node.share_each(source, copy=False)
    win.fence()
    for rank in range(host_node.size):
        found = win.export(rank)
        assert found.offset == 8 * (N - 7)
        assert run_program(program, found) == (0, str(5 * N))
    win.fence()
    win.close()


def test_a_closed_window_is_not_opened(host_node, program):
    node = host_node
    win = node.allocate_each(N, "f8", name="exported")
    line = str(win.export())
    of_a_killed_rank = line.replace(f"/proc/{os.getpid()}/", f"/proc/{NO_PROCESS}/")
    gone = 1, "2: the window or its process is gone"
    assert run_program(program, of_a_killed_rank) == gone
    win.close()
    with pytest.raises(ClosedError):
        win.export()
    status, told = run_program(program, line)
    assert status == 1
    assert "gone" in told or "closed" in told
    others = [node.allocate_each(N, "f8", name=f"other-{i}") for i in range(3)]
    status, told = run_program(program, line)  # its descriptor is another window's now
    assert status == 1
    assert "another file is there" in told or "gone" in told
    for other in others:
        other.close()


def test_what_is_not_exported_says_why(host_node):
    node = host_node
    base = node.allocate_each(8, "f8")
    part = node.share_each(base.array[2:], copy=False)
    empty = node.share_each(np.zeros(0), copy=False)
    for win, words in (
        (base, r"Make the window with name='\.\.\.'"),
        (part, rf"it is a part of {base.name}: export that one"),
        (empty, "it has no elements"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            win.export()
    with pytest.raises(ValueError, match="no segment"):
        base.export(node.size)


def forged(line):
    """Lines that no export is, or that lie about the file."""
    word = line.split()
    for place, texts in {
        0: ["mpishare"],
        1: ["2"],
        2: ["cuda-ipc", "x" * 100],
        3: ["-1", "8191", "18446744073709551615"],
        4: ["0", "100000", "18446744073709551608"],
        6: ["00", "f" * 128, "zz"],
        7: ["/etc/passwd", "/proc/1/fd/../../self/mem", "/proc/self/fd/0", "-", "/" * 200],
    }.items():
        for text in texts:
            yield " ".join([*word[:place], text, *word[place + 1 :]])
    yield from (line + " more", line[:-1] + "x", line[: len(line) // 2], "")


def test_forged_lines_are_refused(host_node, program):
    win = host_node.allocate_each(N, "f8", fill=1, name="exported")
    line = str(win.export())
    assert run_program(program, line) == (0, str(N))
    for text in forged(line):
        status, told = run_program(program, text)
        assert status in (1, 2), (text, told)
        assert told
    chance = random.Random(host_node.rank)
    for _ in range(100):
        at = chance.randrange(len(line))
        text = line[:at] + chr(chance.randrange(33, 127)) + line[at + 1 :]
        assert run_program(program, text)[0] in (0, 1, 2), text
    win.fence()
    assert (win.array == 1).all()
    win.close()
