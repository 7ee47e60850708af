"""The header by which a C program opens a window: how it is compiled, and whom it believes."""

import os
import subprocess

import pytest

import mpishare.device
from tests.helpers.c_program import LANGUAGES, compile_program, compiler, run_program
from tests.helpers.nvcc import find_cuda_include
from tests.helpers.planted import NOBODY, listening, needs_two_users


@pytest.mark.parametrize("standard", ["c99", "gnu17"])
def test_a_header_included_before_it_is_an_error_that_says_so(tmp_path, standard):
    source = tmp_path / "late.c"
    source.write_text("#include <stdio.h>\n#include <mpishare_open.h>\nint main(void) {}\n")
    command = [*compiler("c99"), f"-std={standard}", *mpishare.device.include(), "-c", source]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "include mpishare_open.h before other headers" in done.stderr
    assert subprocess.run([*command, "-D_GNU_SOURCE"], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.skipif(find_cuda_include() is None, reason="there is no cuda.h")
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_header_compiles_with_cuda(tmp_path, language):
    assert compile_program(tmp_path, language, with_cuda=True, is_linked=False).exists()


def borrowed(program, uid, *, answers=0):
    """What a C program says of an address that a user has, and what that user read there."""
    address = f"mpishare/rank/{os.getpid()}"
    with listening(address, uid, answers=answers) as heard:
        _, told = run_program(program, f"{address}/{'0' * 16}", "borrow")
        return told, heard()


@needs_two_users
def test_a_descriptor_is_borrowed_from_this_user_alone(tmp_path):
    """The address of an owner that has ended is free for everybody."""
    program = compile_program(tmp_path, "c99")
    request = b'b\'{"key": "%s"}\'' % (b"0" * 16)
    assert borrowed(program, os.getuid(), answers=1) == ("lent", request)
    assert borrowed(program, NOBODY, answers=1) == ("-", b"b''")
    # Of two descriptors one would stay open.
    assert borrowed(program, os.getuid(), answers=2) == ("lent", request)


def test_an_owner_that_is_silent_is_waited_for_until_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -DMPISHARE_ANSWER_S=1")
    assert borrowed(compile_program(tmp_path, "c99"), os.getuid())[0] == "-"
