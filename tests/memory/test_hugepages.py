"""Files are mapped where huge pages fit, which are taken where there are any."""

import ctypes
import logging
import os
import re
from pathlib import Path

import pytest

from mpishare.memory import shared
from tests.helpers.children import python

HUGE = shared.huge_nbytes()
PAGE = os.sysconf("SC_PAGESIZE")

needs_huge = pytest.mark.skipif(not HUGE, reason="this kernel has no huge pages")


@pytest.fixture
def memory(request, caplog):
    caplog.set_level(logging.DEBUG, "mpishare.window")
    made = shared.create(request.param)
    yield made
    made.close()


def mapped_as_huge(memory) -> int:
    """Bytes that the kernel maps by huge pages, of what is mapped at this address."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    mine = next(part for part in parts if part.startswith(f"{memory.address:x}-"))
    return 1024 * int(re.search(r"^ShmemPmdMapped:\s+(\d+) kB", mine, re.M)[1])


def reserved(memory) -> int:
    return 512 * os.fstat(memory.fd).st_blocks


@needs_huge
@pytest.mark.parametrize("memory", [HUGE, 3 * HUGE + PAGE], indirect=True)
def test_large_memory_is_at_the_start_of_a_huge_page(memory):
    assert memory.address % HUGE == 0


@needs_huge
@pytest.mark.parametrize("memory", [4 * HUGE + 3 * PAGE], indirect=True)
def test_it_is_of_huge_pages_for_every_rank(memory, caplog):
    if "no huge pages" in "".join(each.message for each in caplog.get_records("setup")):
        pytest.skip("none to be had: Linux before 6.1, or memory in fragments")
    name = shared.publish(memory)
    other = shared.attach(name, memory.nbytes)
    shared.forget(name)
    try:
        assert other.address % HUGE == 0
        for mine in (memory, other):
            ctypes.memset(mine.address, 7, memory.nbytes)
            assert mapped_as_huge(mine) == 4 * HUGE
    finally:
        other.close()


@needs_huge
@pytest.mark.parametrize("memory", [HUGE - PAGE, HUGE, 4 * HUGE + 3 * PAGE], indirect=True)
def test_all_of_it_is_reserved(memory):
    assert reserved(memory) == memory.nbytes


@needs_huge
def test_without_huge_pages_it_is_reserved_all_the_same(monkeypatch, caplog):
    monkeypatch.setattr(shared, "_MADV_COLLAPSE", 9999)
    caplog.set_level(logging.DEBUG, "mpishare.window")
    memory = shared.create(2 * HUGE)
    assert reserved(memory) == memory.nbytes
    assert f"no huge pages for {2 * HUGE} bytes" in caplog.text
    ctypes.memset(memory.address, 7, memory.nbytes)
    assert mapped_as_huge(memory) == 0
    memory.close()


def test_a_file_that_cannot_be_mapped_leaves_nothing(tmp_path):
    read_only = tmp_path / "file"
    read_only.write_bytes(bytes(PAGE))
    before = Path("/proc/self/maps").read_text()
    fd = os.open(read_only, os.O_RDONLY)
    with pytest.raises(PermissionError):
        shared.map_file(fd, PAGE)
    os.close(fd)
    assert str(read_only) not in Path("/proc/self/maps").read_text()
    assert str(read_only) not in before


def test_no_limit_on_the_memory_of_a_process_counts_what_is_shared():
    program = (
        "import resource\nfrom mpishare.memory import shared\n"
        f"resource.setrlimit(resource.RLIMIT_DATA, ({48 << 20}, {48 << 20}))\n"
        f"shared.create({56 << 20}).close()\n"
    )
    done = python(program)
    assert done.returncode == 0, done
