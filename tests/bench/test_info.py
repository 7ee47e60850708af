"""``python -m mpishare.info`` as its users start it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.helpers.launch import OF_A_JOB, run_ranks, run_right

INFO = (sys.executable, "-m", "mpishare.info")
HOST = {"MPISHARE_BACKEND": "host"}

SHARING_NOTHING = """
import sys
from mpishare.tools.info import main
from mpishare.runtime.report import Report

Report.can_share = property(lambda self: False)
sys.exit(main(sys.argv[1:]))
"""


def test_json_has_every_pair() -> None:
    result = run_right(2, [*INFO, "--json"])
    (node,) = json.loads(result.stdout)["nodes"]
    assert node["backend"] == "host"
    assert len(node["pairs"]) == 4
    assert all(pair["memory"] for pair in node["pairs"])
    assert node["host_code"] == ("python" if node["native_missing"] else "compiled")
    assert "one rank" not in result.stdout


def test_one_rank_alone_is_no_failure_and_names_mpirun() -> None:
    result = run_right(1, INFO)
    told = "\none rank: start it by mpirun to see which ranks share memory\n"
    assert result.stdout.endswith(told), result.describe()


def test_a_forced_route_is_told() -> None:
    result = run_right(2, INFO, env={**HOST, "MPISHARE_ROUTE": "mpi"})
    told = "\nMPISHARE_ROUTE=mpi: halo exchanges inside a node send MPI messages\n"
    assert result.stdout.endswith(told), result.describe()


@pytest.mark.parametrize(
    ("route", "told"),
    [("nonsense", "not 'nonsense'"), ("fused", "MPISHARE_ROUTE=fused: fields in host memory ")],
)
def test_a_route_that_plans_would_refuse_is_refused(route: str, told: str) -> None:
    result = run_ranks(1, INFO, env={**HOST, "MPISHARE_ROUTE": route})
    assert result.returncode == 1, result.describe()
    assert told in result.stderr, result.describe()


def test_a_route_that_differs_between_ranks_is_refused() -> None:
    program = (
        "import os, sys\nfrom mpi4py import MPI\nfrom mpishare.tools.info import main\n"
        "if MPI.COMM_WORLD.rank:\n    os.environ['MPISHARE_ROUTE'] = 'mpi'\nsys.exit(main([]))\n"
    )
    result = run_ranks(2, program, env=HOST)
    assert result.returncode == 1, result.describe()
    assert "rank 0: MPISHARE_ROUTE=None; rank 1: MPISHARE_ROUTE='mpi'" in result.stderr


def test_status_1_when_nothing_can_be_shared() -> None:
    result = run_ranks(2, SHARING_NOTHING, env=HOST)
    assert result.returncode == 1, result.describe()
    assert "No two ranks" in result.stdout, result.describe()


def test_a_node_that_cannot_be_made_is_one_message() -> None:
    # What a launch with the wrong --mpi= looks like: many tasks, and each of them alone.
    kept = {name: text for name, text in os.environ.items() if not name.startswith(OF_A_JOB)}
    for module in ("mpishare.info", "mpishare.bench"):
        done = subprocess.run(
            [sys.executable, "-m", module],
            env={**kept, **HOST, "SLURM_STEP_NUM_TASKS": "4"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done
        assert done.stderr.count(f"python -m {module}: ") == 1, done.stderr
        assert "--mpi=" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert not done.stdout.strip(), done.stdout


@pytest.mark.skipif(find_spec("mpi4py._mpiabi") is None, reason="mpi4py is built for one MPI")
@pytest.mark.parametrize(
    "words",
    [["-m", "mpishare.info"], ["-m", "mpishare.bench"], ["-c", "import mpishare; mpishare.Node()"]],
)
def test_without_an_mpi_one_line_says_so(words) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "MPI4PY_LIBMPI": "/nothing"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    *before, last = done.stderr.splitlines()
    assert "pip install mpich" in last
    # Of a program of the user Python prints where it was.
    assert before == [] if words[0] == "-m" else before[0].startswith("Traceback")
