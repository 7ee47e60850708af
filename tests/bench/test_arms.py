"""Every arm of every case of both catalogs is right on the host, and one that is wrong is found."""

import json

import pytest

from tests.helpers.benches import (
    BENCHMARKS,
    HOST,
    QUICK,
    altered,
    check_all_ok,
    checked_rows,
    measured,
    rivals,
    wrong_arms,
)
from tests.helpers.launch import run_ranks

SMALL = ("--min", "512", "--max", "512", *QUICK)
WITH_CORNERS = ("--corners", "--fields", "2", "--width", "2")
HALOS, FIELDS = ("halo1d", "halo3d"), {"window fields", "private fields"}
OF_HALOS = {"sendrecv", "isend", "persistent", "neighborhood types", "datatypes"}
TRANSPOSES, SPREAD = ("redistribute", "permuted"), {"private", "windows"}
SOLVE = ("cg", *SMALL[:4], "--repeat", "2")

#: The cases of a run, the variants of mpishare in each of them, and those beside them.
ARMS = [
    (HALOS, FIELDS, OF_HALOS),
    (TRANSPOSES, SPREAD, {"alltoallw", "alltoallv"}),
    (("allgather",), SPREAD, {"allgather"}),
    (("ring",), {"window pairwise", "window fence"}, {"isend", "persistent", "sendrecv"}),
    (("calls",), {"2 neighbors, 1 field", "26 neighbors, 16 fields"}, set()),
    (("messages1d",), {"messages", "through the host"}, {"persistent"}),
    (("rows",), {"rows", "migrate"}, {"sendrecv", "alltoallv", "migrate by hand"}),
    (
        ("fresh",),
        {"new arrays", "arrays in turn", "kept, copied", "kept array"},
        {"sendrecv"},
    ),
]
#: The cases of a job are a few: ranks may share busy cores.
JOBS = [(ranks, ARMS[part::4], ()) for ranks in (1, 2, 3) for part in range(4)]
JOBS += [(ranks, ARMS[:1], WITH_CORNERS) for ranks in (2, 4)]


def check_arms(rows: list[dict], ranks: int, options: tuple[str, ...]) -> None:
    check_all_ok(rows)
    for cases, own, others in ARMS:
        for case in cases:
            of_case = [row for row in rows if row["case"] == case]
            kinds = dict.fromkeys(own, "own") | dict.fromkeys(others, "rival")
            assert not of_case or {row["arm"]: row["kind"] for row in of_case} == kinds
    for row in rows:
        assert row["kind"] == "own" or row["ratio"] is row["speed"] is None
        assert (row["ratio"] is None) == (row["kind"] != "own") or row["case"] not in HALOS
        if row["width"] is not None:
            expected = (2, 2, True) if options else (1, 1, False)
            assert (row["width"], row["fields"], row["corners"]) == expected, row
        if row["case"] in TRANSPOSES:
            assert row["nbytes"] == 16 * row["n"] ** 3 // ranks, row


@pytest.mark.parametrize(("ranks", "arms", "options"), JOBS)
def test_every_arm_is_right(ranks: int, arms: list[tuple], options: tuple[str, ...]) -> None:
    """On three ranks parts are uneven."""
    cases = [case for cases, *_ in arms for case in cases]
    rows = checked_rows(ranks, BENCHMARKS, *cases, *SMALL, *options)
    assert {row["case"] for row in rows} == {*cases}
    check_arms(rows, ranks, options)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_conjugate_gradients(ranks: int) -> None:
    rows = checked_rows(ranks, BENCHMARKS, *SOLVE)
    assert {row["arm"]: row["ok"] for row in rows} == {"calls": True, "calls, dot": True}
    assert {(row["nbytes"], row["clock"]) for row in rows} == {(512, "throughput")}


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_ranks_by_the_host_and_why_not_by_kernels(ranks: int) -> None:
    words = ("swap", "--max", "64KiB", "--against", "nvshmem", *QUICK)
    rows = checked_rows(ranks, BENCHMARKS, *words)
    by_host = {"halo, windows", "halo", "fence", "post .. wait"}
    assert {row["arm"] for row in rows if row["ok"]} == (by_host if ranks == 2 else set())
    reasons = {row["arm"]: row["reason"] for row in rows if not row["ok"]}
    assert {"kernel, 16 blocks"} <= set(reasons)
    why = "the host backend has no kernels" if ranks == 2 else "between two ranks of one node"
    assert all(why in reason for reason in reasons.values()), reasons


@pytest.mark.timeout(150)  # JAX takes its time to compile
def test_steps_of_jax_with_and_without_the_exchange() -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    words = ("jax", "--max", "8", "--iters", "2", "--repeat", "1", "--against", "all")
    rows = {row["arm"]: row for row in measured(2, BENCHMARKS, *words, timeout_s=140)["rows"]}
    forms = {"loop", "recorded", "unrolled", "padded"}
    expected = forms | {f"{form} alone" for form in forms} | {"exchange called"}
    assert {arm for arm in rows if rows[arm]["ok"]} == set(rows) == expected, rows


def test_the_cases_of_the_package_are_there_too() -> None:
    """With the baselines that stand here, and a note on one that the backend lacks."""
    words = ("halo3d", "fence", "--max", "512", "--against", "isend,nvshmem", *QUICK)
    header = measured(2, BENCHMARKS, *words)["header"]
    assert " mpirun -n 2 python -m benchmarks halo3d fence " in header["command"]
    told = "the host backend has no baseline nvshmem of these cases"
    assert header["notes"][-1:] == [told]


def test_rows_say_what_the_block_came_to() -> None:
    words = ["--min", "8", "--max", "4KiB", "--against", "none", *QUICK, "--width", "3"]
    found: dict[str, list[tuple[int, int]]] = {}
    for row in measured(2, BENCHMARKS, *HALOS, *words)["rows"]:
        assert row["gb_per_s"] is not None
        if (row["arm"], row["clock"]) == ("private fields", "latency"):
            found.setdefault(row["case"], []).append((row["n"], row["nbytes"]))
    # n, and the bytes of a face; the smallest blocks are as large as the width, and come once.
    assert found == {
        "halo1d": [(12, 3 * 8), (12, 3 * 21 * 8), (12, 3 * 170 * 8)],
        "halo3d": [(3, 3 * 3 * 3 * 8), (5, 3 * 5 * 5 * 8), (13, 3 * 13 * 13 * 8)],
    }


def test_sizes_come_near_the_part_and_come_once() -> None:
    words = ("redistribute", "--max", "64KiB", "--against", "none", *QUICK)
    found = {row["n"] for row in measured(3, BENCHMARKS, *words)["rows"]}
    assert found == {2, 5, 9, 23}  # 8 B make 2 cells along an axis; the last rank has none of them


# The library that takes pointers to a GPU takes those to host memory too.
ON_HOST = """
import os
from mpishare import UnsupportedError
from mpishare.bench import cases, cuda_mpi

os.environ["MPISHARE_GPU_AWARE_MPI"] = "1"  # there is no GPU here
catalog.extend()
for name in ("ring", "halo1d", "redistribute", "permuted", "allgather"):
    cases.CASES[name].baselines["host"] += ("mpi",)
"""
BY_MPI = altered(ON_HOST)
IN_PLACE = altered(f"""{ON_HOST}
usages = cases.BASELINES["mpi"].usages
usages["mpi in place"] = cases.Usage("CudaMpi", in_place=True)
catalog.extend = lambda: None
""")
MISSING = altered(f"""{ON_HOST}
def require(cls, session):
    if session.comm.rank == 1:
        raise UnsupportedError("MPI: rank 1 cannot")
cuda_mpi.CudaMpi.require = classmethod(require)
""")
AGAINST = ("--against", "mpi", "--max", "512", *QUICK)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_gpus_do_moves_every_word_on_the_host(ranks: int) -> None:
    cases = ("ring", "halo1d", *TRANSPOSES, "allgather")
    found = rivals(ranks, BY_MPI, *cases, *AGAINST)
    assert {(row["case"], row["arm"]) for row in found} == {(case, "mpi") for case in cases}
    check_all_ok(found)


@pytest.mark.parametrize("ranks", [1, 3])
def test_fields_in_memory_of_a_library_are_exchanged_in_place(ranks: int) -> None:
    rows = rivals(ranks, IN_PLACE, "ring", "halo1d", *AGAINST)
    found = [row for row in rows if row["arm"] == "mpi in place"]
    # The buffers of a ring are memory of the library anyway.
    assert [row["case"] for row in found] == ["halo1d"] * 2 * 2  # sizes, clocks
    check_all_ok(found)


def test_a_library_that_one_rank_lacks_is_a_row_with_its_reason() -> None:
    rows = rivals(2, MISSING, "ring", *AGAINST)
    assert [row["reason"] for row in rows] == ["MPI: rank 1 cannot"] * 4, rows


def spoiling(after: str) -> str:
    """The benchmark whose exchanges end with this."""
    return altered(f"""
exchange, counts = mpishare.HaloExchange.exchange, {{}}

def mutant(self, *fields, stream=None):
    counts[self] = counts.get(self, 0) + 1
    corner = fields[-1][0, 0].copy()
    exchange(self, *fields)
    {after}

mpishare.HaloExchange.exchange = mutant
""")


# The sides of the first axis are taken for each other; on two ranks they have the same owner.
SIDES_SWAPPED = spoiling("for field in fields: field[[0, -1]] = field[[-1, 0]]")
FIELDS_SWAPPED = spoiling("fields[0][0], fields[1][0] = fields[1][0].copy(), fields[0][0].copy()")
A_CORNER_LESS = spoiling("fields[-1][0, 0] = corner")
# After so many steps that the checks before the timed blocks are over.
LATER = spoiling("fields[0][0] += counts[self] >= 10")

RIVAL_WITHOUT_UNPACKING = altered("""
from mpishare.bench import halo, mpi
persistent, copies_of = mpi.persistent, mpi.copies_of
def mutant(problem, *fields):
    mpi.copies_of = lambda of: (copies_of(of)[0], copies_of(of)[1][1:])
    bound = persistent(problem, *fields)
    mpi.copies_of = copies_of
    return bound
halo._MPI["persistent"] = mutant
""")

# One word of each result, as if a cell of the wrong place had come.
A_CELL_OF_ANOTHER_PLACE = altered("""
forward = mpishare.Redistribute.forward

def mutant(self, a, out=None, stream=None):
    forward(self, a, out, stream)
    words = out.view("u8").reshape(-1)
    words[0], words[-1] = words[-1], words[0].copy()

mpishare.Redistribute.forward = mutant
""")

# One rank keeps its own numbers.
WITHOUT_A_SUM = altered("""
reduce = mpishare.Allreduce.reduce

def reduce_but_on_one(self, x, stream=None):
    mine = x.copy()
    reduce(self, x, stream=stream)
    x[...] = mine if self._setup.comm.rank else x

mpishare.Allreduce.reduce = reduce_but_on_one
""")


def storing(change: str) -> str:
    """The benchmark whose rings of windows store otherwise."""
    name = "WindowRing.store"
    head = f"from benchmarks.ring import WindowRing\nstore = {name}"
    return altered(f"{head}\n{change}\n{name} = mutant")


# One neighbor never gets its face.
WITHOUT_A_FACE = storing("""
def mutant(self):
    if self.places == 1:  # between post, start, complete and wait
        del self.copies[0][1:]
    store(self)
""")

# One word of each copy is another, which no order can mend.
WITH_A_WRONG_WORD = storing("""
def mutant(self):
    store(self)
    for ghosts, _ in self.copies[self.place]:
        ghosts[-1] += 1
""")

# The ghosts of a solve never come.
WITHOUT_GHOSTS = altered("""
class Deaf(mpishare.HaloExchange):
    def start(self, *fields, stream=None):
        pass

    def wait(self, stream=None):
        pass

mpishare.HaloExchange = Deaf
""")

AGAINST_ONE = ("halo3d", *SMALL, "--against", "persistent")
WRONG = {
    "sides swapped": (2, SIDES_SWAPPED, AGAINST_ONE, FIELDS),
    "fields swapped": (2, FIELDS_SWAPPED, (*AGAINST_ONE, "--fields", "2"), FIELDS),
    "a corner less": (2, A_CORNER_LESS, (*AGAINST_ONE, "--corners", "--fields", "2"), FIELDS),
    "a rival": (2, RIVAL_WITHOUT_UNPACKING, AGAINST_ONE, {"persistent"}),
    **{
        case: (2, A_CELL_OF_ANOTHER_PLACE, (case, *SMALL), SPREAD)
        for case in (*TRANSPOSES, "allgather")
    },
    "a sum": (
        *(2, WITHOUT_A_SUM, ("allreduce", "--max", "64KiB")),
        {"reduce", "window", "complex128", "exact"},
    ),
    "a solve": (2, WITHOUT_GHOSTS, SOLVE, {"calls", "calls, dot"}),
    "a face": (4, WITHOUT_A_FACE, ("ring", "--max", "512"), {"window pairwise"}),
    "a word": (2, WITH_A_WRONG_WORD, ("swap", "--max", "8"), {"fence", "post .. wait"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_seen(name: str) -> None:
    ranks, program, words, wrong = WRONG[name]
    assert wrong_arms(ranks, program, *words) == wrong


def test_an_exchange_that_is_wrong_later_is_seen_in_a_timed_block() -> None:
    words = ["halo3d", *SMALL, "--against", "none", "--format", "json"]
    result = run_ranks(2, LATER, args=words, env=HOST)
    assert result.returncode == 1, result.describe()
    reasons = {row["reason"] for row in json.loads(result.stdout)["rows"]}
    assert all("before the timed" not in reason for reason in reasons), result.describe()
