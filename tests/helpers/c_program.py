"""The program of tests/windows/open.c, compiled as C99 and as C++17."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import mpishare.device
from tests.helpers.launch import ROOT
from tests.helpers.nvcc import find_cuda_include

STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2")
LANGUAGES = {"c99": ("CC", "cc", "-std=c99"), "c++17": ("CXX", "c++", "-std=c++17", "-xc++")}


def compiler(language):
    """Return the words that start the compiler of a language; skips where there is none."""
    variable, default, *_ = LANGUAGES[language]
    words = shlex.split(os.environ.get(variable, default))
    if shutil.which(words[0]) is None:
        pytest.skip(f"no compiler: {words[0]} is not on PATH")
    return words


def compile_program(folder, language, *, with_cuda=False, is_linked=True):
    """Return the path of the program, or of its object file."""
    to = Path(folder, "open")
    command = [*compiler(language), *LANGUAGES[language][2:], *STRICT]
    command += [*mpishare.device.include(), "-o", to, ROOT / "tests" / "windows" / "open.c"]
    if with_cuda:
        command += ["-DMPISHARE_WITH_CUDA", "-isystem", find_cuda_include()]
        command += ["-xnone", "-l:libcuda.so.1"] if is_linked else ["-c"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return to


def run_program(program, line, *more):
    """Return the status and the line that it printed."""
    done = subprocess.run(
        [program, str(line), *more], capture_output=True, text=True, check=False, timeout=30
    )
    assert not done.stderr
    return done.returncode, done.stdout.strip()
