"""The applications are right on every count of ranks, and wrong where they must be."""

import math
import re
import sys

import pytest

from tests.applications.programs import APPLICATIONS, HOST, rows_of
from tests.helpers.launch import Result, run_ranks, run_right

PROGRAMS = ("jacobi2d", "heat3d")
FORMS = ("mpishare", "naive", "pinned")
ORDERS = ("plain", "last", "first", "beside")
# Four ranks in turns on one GPU, beside other tests, took longer than 60 s.
ON_GPUS = {"env": {"MPISHARE_BACKEND": "cuda"}, "timeout_s": 180}
KEYS = ("program", "staged", "backend", "ranks", "n", "steps")
KEYS += ("step_us_median", "step_us_mean", "exchange_us_median", "checked")

# One job runs them all: a start of the ranks costs more than a run.
PREAMBLE = f"""
import sys
sys.path.insert(0, {str(APPLICATIONS)!r})
import common, heat3d, jacobi2d, mpishare
from tests.helpers.reporting import report

def run(name, *words):
    words = ["--n", "12", "--steps", "25", "--check", "--json", *words]
    return globals()[name].main(words)

def run_all(*words):
    return {{name: run(name, *words) for name in {PROGRAMS!r}}}
"""

EVERY = f"""{PREAMBLE}
for form in {FORMS!r}:
    report({{form: run_all(*(["--staged", form] if form != "mpishare" else []))}})
"""

# A step in every order, on blocks that have an interior of whole lines of memory.
EVERY_ORDER = f"""{PREAMBLE}
both, flat, cubic = map(str.split, sys.argv[1:])
for order in {ORDERS!r}:
    words = ["--n", "70", "--norm-every", "7", "--order", order]
    report({{order: [run("jacobi2d", *words, *both, *flat)]}})
    words = ["--n", "36", "--order", order]
    report({{order + " in 3 axes": [run("heat3d", *words, *both, *cubic)]}})
    wrap = [] if "--staged" in both else ["--wrap"]
    report({{order + " wrapped": [run("heat3d", *words, *both, *cubic, *wrap)]}})
"""

# Many steps in one kernel, an odd and an even number of them in a launch.
PERSISTENT = f"""{PREAMBLE}
for every in "7", "6":
    words = ["--n", "70", "--norm-every", every, "--order", "persistent", *sys.argv[1:]]
    report({{every: run("jacobi2d", *words)}})
"""

# What a plan would do whose ghosts never come.
BROKEN = f"""{PREAMBLE}
class Deaf(mpishare.HaloExchange):
    start = wait = exchange = lambda self, *fields, stream=None: None

whole = mpishare.HaloExchange
mpishare.HaloExchange = Deaf
report({{"Deaf": run_all()}})
mpishare.HaloExchange = whole
report({{"whole": run_all()}})
"""


def check_every(ranks: int, backend: str, result: Result) -> None:
    assert result.reports.keys() == set(range(ranks))
    for told in result.reports.values():
        assert told == {form: dict.fromkeys(PROGRAMS, 0) for form in FORMS}, result.describe()
    rows = rows_of(result)
    named = [(row["staged"] or "mpishare", row["program"]) for row in rows]
    assert named == [(form, program) for form in FORMS for program in PROGRAMS]
    for row in rows:
        assert {*KEYS} <= row.keys()
        assert (row["backend"], row["ranks"], row["n"], row["steps"]) == (backend, ranks, 12, 25)
        assert row["checked"] is True
        assert all(row[key] > 0 for key in KEYS if key.endswith(("_median", "_mean")))
    # The same problem is solved, however the halo travels.
    assert len({row["norm"] for row in rows if row["program"] == "jacobi2d"}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_example_is_right_with_every_exchange(ranks: int) -> None:
    check_every(ranks, "host", run_right(ranks, EVERY))


def check_orders(result: Result, *, refused: str | None = None) -> None:
    """All are right; or all are refused, where one is for this reason."""
    statuses = {0, 2} if refused and refused in result.stderr else {0}
    kinds = "", " in 3 axes", " wrapped"
    names = [f"{order}{kind}" for order in ORDERS for kind in kinds]
    for told in result.reports.values():
        assert list(told) == names
        assert {status for (status,) in told.values()} <= statuses, result.describe()
    rows = rows_of(result)
    assert all(row["checked"] for row in rows)
    norms = [row["norm"] for row in rows if "norm" in row]
    assert norms == pytest.approx(norms[:1] * len(norms), rel=1e-9)


@pytest.mark.gpu
@pytest.mark.timeout(130)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_example_is_right_on_gpus(ranks: int) -> None:
    check_every(ranks, "cuda", run_right(ranks, EVERY, **ON_GPUS))
    result = run_right(ranks, EVERY_ORDER, ["--graph", "", ""], **ON_GPUS)
    check_orders(result, refused="neighbors are served by the host")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (4, ["--steps 8", "--cells 144 --dims 4 1", "--cells 48 --dims 1 4 1"]),
        (2, ["--steps 8 --staged pinned", "", ""]),
    ],
)
def test_every_order_is_right(ranks: int, words: list[str]) -> None:
    check_orders(run_right(ranks, EVERY_ORDER, words))


@pytest.mark.gpu
@pytest.mark.timeout(130)
@pytest.mark.parametrize("dims", ["1 1", "2 1", "2 2", "4 1", "1 4"])
def test_a_kernel_exchanges_its_own_halo(dims: str) -> None:
    ranks = math.prod(map(int, dims.split()))
    result = run_right(ranks, PERSISTENT, ["--dims", *dims.split()], **ON_GPUS)
    status = 2 if "without the Multi-Process Service" in result.stderr else 0
    assert list(result.reports.values()) == [{"7": status, "6": status}] * ranks
    assert all(row["checked"] for row in rows_of(result))


def test_a_broken_exchange_is_seen() -> None:
    result = run_ranks(4, BROKEN, env=HOST)
    wrong, right = dict.fromkeys(PROGRAMS, 1), dict.fromkeys(PROGRAMS, 0)
    for told in result.reports.values():
        assert told == {"Deaf": wrong, "whole": right}, result.describe()
    assert [row["checked"] for row in rows_of(result)] == [False] * 2 + [True] * 2
    assert re.search(r"^jacobi2d: WRONG: u: \d+ of 576 cells differ", result.stderr, re.MULTILINE)
    assert "heat3d: WRONG: the slowest wave has decayed to" in result.stderr


def test_the_forms_are_compared_in_one_job() -> None:
    words = ["--n", "16", "--steps", "5", "--compare", "--json"]
    (row,) = rows_of(run_right(2, [sys.executable, APPLICATIONS / "heat3d.py", *words]))
    assert row["checked"] is None
    timed = ("exchange", "step")  # on the host nothing overlaps
    others = FORMS[1:]
    for key in (f"{form}_{name}_us" for form in FORMS for name in timed):
        assert row[key] > 0, key
    for form in others:
        ratio = row[f"{form}_exchange_us"] / row["mpishare_exchange_us"]
        assert row[f"{form}_exchange_to_mpishare"] == pytest.approx(ratio)
    fastest = min(row[f"{form}_step_us"] for form in others)
    assert row["step_to_fastest_mpi"] == pytest.approx(row["mpishare_step_us"] / fastest)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--n", "0"], "argument --n: '0' is no positive whole number"),
        (["--staged", "never"], "argument --staged: invalid choice: 'never'"),
        (["--dims", "1", "3"], "--dims: 2 numbers whose product is 2, the number of ranks"),
        (["--cells", "7"], "--cells: 7 is no multiple of the ranks along each axis, [2, 1]"),
        (["--graph"], "--graph: the host backend has no graphs"),
    ],
)
def test_a_wrong_command_line_is_said_once(words: list[str], said: str) -> None:
    command = [sys.executable, APPLICATIONS / "jacobi2d.py", *words]
    result = run_ranks(2, command, env=HOST)
    assert result.returncode == 2, result.describe()
    assert result.stderr.count(said) == 1, result.describe()
    assert result.stdout == ""
