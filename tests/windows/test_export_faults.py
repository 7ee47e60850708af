"""A rank is killed whose window a C program would open, and one that has opened it."""

import pytest

from tests.helpers.c_program import LANGUAGES, compile_program
from tests.helpers.nvcc import find_cuda_include
from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage


def killed(stage: Stage, program: str) -> None:
    from pathlib import Path

    from mpishare.coordination.poll import poll
    from tests.helpers.c_program import run_program

    node = stage.node()
    window = node.allocate_each(1000, "f8", fill=stage.rank, name="exported")
    window.fence()
    found = window.export(1)
    line = str(found)
    if stage.rank == 0:
        report({"alive": run_program(program, line)})
    node.barrier()
    if stage.rank == 1:
        stage.die(0.2)
    stage.attempt("fence", window.fence)
    # Its lock is gone before the kernel has closed its files.
    poll(lambda: not Path(found.path).exists(), 20.0)
    report({"dead": run_program(program, line)})
    stage.end()


def test_a_killed_owner_is_an_error_of_the_program(tmp_path):
    program = compile_program(tmp_path, "c99")
    played = play(2, killed, str(program), backend="host", survivable=True)
    assert played.raised(0, "fence", "PeerTimeout").ranks == [1]
    assert played.rank(0)["alive"] == [0, "1000"]
    assert played.rank(0)["dead"] == [1, "2: the window or its process is gone"]


def killing(stage: Stage, program: str) -> None:
    """A program that has just begun is killed, and the job goes on."""
    import subprocess

    node = stage.node()
    window = node.allocate(1000, "f8", fill=1, name="exported")
    for _ in range(5):
        window.fence()
        with subprocess.Popen([program, str(window.export()), "write"]) as opened:
            opened.kill()
    window.fence()
    report({"sum": float(window.array.sum()) >= 1000})
    window.close()
    stage.end()


def test_killed_programs_have_no_effect_on_the_job(tmp_path):
    program = compile_program(tmp_path, "c99")
    played = play(2, killing, str(program), backend="host")
    assert [played.rank(rank)["sum"] for rank in range(2)] == [True, True]


@pytest.mark.skipif(find_cuda_include() is None, reason="there is no cuda.h")
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_header_compiles_with_cuda(tmp_path, language):
    assert compile_program(tmp_path, language, with_cuda=True, is_linked=False).exists()
