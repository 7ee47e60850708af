"""What test_slurm_leftovers_faults.py ends by a signal; it runs where it is asked for."""

import contextlib
import time

import pytest

from tests.slurm.cluster import Cluster


def test_holds_until_it_is_ended(request: pytest.FixtureRequest, free: Cluster):
    """All daemons are there, and a job is running."""
    if request.config.option.keyword != "test_holds_until_it_is_ended":
        pytest.skip("it never ends: tests/tools/test_slurm_leftovers_faults.py runs it")
    with contextlib.suppress(pytest.skip.Exception):  # then no control group can be left
        request.getfixturevalue("confined")
    job = free.write("srun -N2 -n2 sh -c 'echo up; exec sleep 100'", "-N2")
    free.until_said(job, "up")
    print("holding", flush=True)
    time.sleep(100)
