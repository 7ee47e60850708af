"""`run_ranks` itself: reports, exit status, the deadline, and nothing left alive."""

import pytest

from tests.helpers import launch
from tests.helpers.launch import remove_unused, run_ranks

pytestmark = pytest.mark.both_mpis

IMPORTS = "import os, subprocess, sys, time\nfrom tests.helpers.reporting import my_rank, report\n"


def test_a_hang_ends_at_the_deadline_with_tracebacks_and_reports():
    source = IMPORTS + "report({'began': True})\ndef stuck(): time.sleep(100)\nstuck()\n"
    result = run_ranks(2, source, timeout_s=6)
    assert result.timed_out
    assert result.seconds < 60
    assert "stuck" in result.stderr, result.describe()
    assert result.reports == {0: {"began": True}, 1: {"began": True}}


def test_a_process_that_outlives_its_job_is_found_and_killed(monkeypatch):
    monkeypatch.setattr(launch, "GONE_S", 1)
    source = IMPORTS + (
        "quiet = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)\n"
        "if my_rank() == 0:\n"
        "    program = [sys.executable, '-c', 'import time; time.sleep(100)']\n"
        "    child = subprocess.Popen(program, start_new_session=True, **quiet)\n"
        "    report({'child': child.pid})\n"
    )
    with pytest.raises(AssertionError, match="outlived mpirun"):
        run_ranks(2, source)
    result = run_ranks(2, source, check_survivors=False)
    assert [line.split()[0] for line in result.survivors] == [str(result.reports[0]["child"])]


def test_segments_that_a_job_beside_this_one_is_making_stay(tmp_path):
    """Between making a file in /dev/shm and mapping it, a rank of that job has it open."""
    left, opened = tmp_path / "left", tmp_path / "opened"
    left.touch()
    with opened.open("w"):
        remove_unused({left, opened})
    assert (left.exists(), opened.exists()) == (False, True)
