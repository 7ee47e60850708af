"""The benchmark without MPI: clocks, sizes, the command line, the pattern, the notes."""

from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

from mpishare.bench.cases import CASES, default_cases
from mpishare.bench.check import POISON, Check, Part, word
from mpishare.bench.comparison import Variant
from mpishare.bench.copies import box_row
from mpishare.bench.environment import command, crowded
from mpishare.bench.library import captured
from mpishare.bench.measure import BLOCK_S, batches_of, iterations, time_batches
from mpishare.bench.options import Options, parse
from mpishare.tools.cli import UsageError


def spin(seconds: float) -> None:
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def test_latency_clock_counts_the_synchronize_of_each_step() -> None:
    calls = []
    samples = time_batches(lambda: calls.append("step"), lambda: spin(1e-3), 4)
    assert calls == ["step"] * 4
    assert len(samples) == 4
    assert min(samples) >= 1e-3


def test_throughput_clock_has_one_synchronize_a_batch() -> None:
    calls = []
    samples = time_batches(
        lambda: calls.append("step"), lambda: (calls.append("sync"), spin(4e-3))[0], 2, 4
    )
    assert calls == (["step"] * 4 + ["sync"]) * 2
    assert len(samples) == 2
    assert min(samples) >= 1e-3  # a quarter of the batch


def test_plan_fits_the_time_of_a_block() -> None:
    assert iterations(BLOCK_S / 100) == pytest.approx(100, abs=1)
    assert iterations(10.0) == 5
    assert iterations(0.0) == 1000
    assert batches_of("latency", 7) == (7, 1)
    assert batches_of("throughput", 7) == (5, 1)
    assert batches_of("throughput", 1000) == (5, 200)
    assert batches_of("throughput", 1) == (1, 1)


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch"],
        ["--min", "1MB"],
        ["--min", "12"],
        ["--max", "0"],
        ["--min", "1MiB", "--max", "64KiB"],
        ["--iters", "0"],
        ["--iters", "1.5"],
        ["--against", "nosuch"],
        ["--against", "none,isend"],
        ["--timeout-s", "nan"],
        ["--timeout-s", "0"],
        ["--fields", "17"],
        ["fence", "--corners"],  # it would change nothing
        ["setup", "fence", "--width", "2"],
        ["--iter", "5"],  # no abbreviations: they break when an option is added
    ],
)
def test_wrong_words_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(words)


def test_words_are_understood() -> None:
    texts = {"8": 8, "16B": 16, "64KiB": 1 << 16, "1 MiB": 1 << 20}
    assert {text: parse(["--min", text]).min_nbytes for text in texts} == texts
    assert parse([]).cases == default_cases()
    assert parse(["all"]).cases == tuple(CASES)
    assert parse(["fence", "--iters", "3", "setup", "fence"]).cases == ("fence", "setup")
    assert parse(["list", "--corners"]).cases == ("list",)
    assert parse(["all"]).full
    assert parse(["--against", "none"]).against == ()
    assert parse(["--against", "isend, barrier"]).against == ("isend", "barrier")
    for words, is_asked, is_wanted in (([], False, True), (["--against", "all"], True, True),
                                       (["--against", "nccl,mpi"], True, False)):  # fmt: skip
        found = parse(words)
        assert found.wants("mpi", unasked=False) == is_asked
        assert found.wants("isend") == is_wanted
    assert not parse(["--no-check"]).check
    assert parse(["--corners"]).corners  # a halo case is among the defaults
    assert parse(["halo3d", "--width", "3"]).as_dict()["width"] == 3


K, M = 1 << 10, 1 << 20
SIZES = [  # of a run, on a backend and of a case
    ({}, "host", "halo1d", (8, 4 * K, 64 * K, M)),
    ({"min_nbytes": 24, "max_nbytes": 5000}, "host", "halo1d", (24, 512, 4096, 5000)),
    ({"min_nbytes": 1 << 30}, "host", "halo1d", (1 << 30,)),
    ({"max_nbytes": 8}, "cuda", "halo1d", (8,)),
    ({"full": True}, "host", "halo1d", (8, 512, 4 * K, 64 * K, M, 16 * M, 64 * M)),
    ({}, "host", "halo3d", (4 * K, 64 * K)),
    # A block has the cube of a face: gigabytes run only where they are named.
    ({"full": True}, "cuda", "halo3d", (8, 512, 4 * K, 64 * K, M)),
    ({"max_nbytes": 16 * M}, "cuda", "halo3d", (8, 512, 4 * K, 64 * K, M, 16 * M)),
    # Of several cases in one run each has its own limit, on the host.
    ({"max_nbytes": 4 * M}, "host", "halo1d", (8, 512, 4 * K, 64 * K, M, 4 * M)),
    ({"max_nbytes": 4 * M}, "host", "halo3d", (8, 512, 4 * K, 64 * K, M)),
    ({"min_nbytes": 4 * M}, "host", "halo3d", (4 * M,)),
]


@pytest.mark.parametrize(("given", "backend", "case", "sizes"), SIZES)
def test_sizes(given: dict, backend: str, case: str, sizes: tuple[int, ...]) -> None:
    assert Options(**given).sizes(backend, case) == sizes


def test_the_header_says_by_which_command() -> None:
    words = ["halo1d", "--output", "/tmp/a.json", "--max", "64 KiB", "--revision=b"]
    found = command("python -m b", 4, words, {"MPISHARE_BACKEND": "host", "HOME": "/root"})
    assert found == "MPISHARE_BACKEND=host mpirun -n 4 python -m b halo1d --max '64 KiB'"


def test_a_check_tells_owner_part_step_and_place() -> None:
    def check(owner: int, number: int) -> Check:
        parts = [Part(0, ..., np.arange(4, dtype="u8") + np.uint64(word(owner, 0, 0)), number)]
        return Check(np, [np.zeros(4, "u8")], parts, parts, [(0, ...)])

    mine, fields = check(3, 1), [np.empty(4, "u8")]

    def wrong(of: Check, step: int) -> int:
        of.verify(fields, step)
        return of.wrong()

    mine.fill(fields, 7)
    assert wrong(mine, 7) == 0
    assert wrong(mine, 8) == 4
    assert wrong(check(2, 1), 7) == wrong(check(3, 0), 7) == 4
    fields[0] = np.roll(fields[0], 1)
    assert wrong(mine, 7) == 4
    mine.fill(fields, 7)
    fields[0][2] += 1
    mine.verify(fields, 7)
    assert wrong(mine, 7) == 2
    assert mine.wrong() == 0
    mine.poison(fields)
    assert (fields[0] == POISON).all()


def test_no_pattern_has_the_poison_in_it() -> None:
    assert word(0x7FFF, 0xF, 0xFFF) + 0xFFFF_FFFF < POISON


def test_the_heading_tells_of_more_ranks_than_cores() -> None:
    def seen(hostname: str, *affinities: list[int]) -> list[dict[str, object]]:
        return [{"hostname": hostname, "affinity": cores} for cores in affinities]

    bound, roomy = seen("a", [0], [1]), seen("b", [0, 1], [0, 1])
    assert crowded([*bound, *roomy]) == []
    (note,) = crowded([*bound, *seen("c", [0, 1], [0, 1], [0, 1])])
    assert note.startswith("3 ranks share 2 cores of c: ")


def test_a_captured_variant_is_checked_as_it_is_by_the_launch_of_its_graph() -> None:
    """An upper bound that moves nothing has a check of its own."""
    seen: list[object] = []
    graph = SimpleNamespace(launch=lambda stream: seen.append("launch"))
    stream = SimpleNamespace(begin_capture=lambda: None, end_capture=lambda: graph)
    session = SimpleNamespace(stream=stream, synchronize=lambda: None)

    class Empty(Variant):
        def checked_step(self, token) -> None:
            self.step()
            seen.append(token)

        def step(self) -> None:
            seen.append("call")

    made = captured(session, Empty)()
    assert seen == ["call", "call"]  # once before it is captured
    made.checked_step(7)
    assert seen[2:] == ["launch", 7]


@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_the_kernel_copies_each_cell_to_its_place(dtype: str) -> None:
    """What the kernel does with a row of its table, by NumPy."""
    rng = np.random.default_rng(1)
    for shape in ((6,), (5, 7), (4, 5, 6), (1, 1, 1), (3, 2, 4, 2)):
        whole = rng.random(tuple(n + 2 for n in shape)).astype(dtype)
        source = whole[tuple(slice(1, n + 1) for n in shape)]
        for order in (range(len(shape)), [*range(1, len(shape)), 0]):
            out = np.zeros([shape[axis] for axis in order], dtype)
            target = out.transpose(np.argsort([*order]))
            ends = out.ctypes.data, source.ctypes.data
            _, _, *numbers = box_row(*ends, target, source)
            n, to, steps = numbers[:4], numbers[4:8], numbers[8:]
            assert n[-1] == 1 or to[-1] == target.itemsize  # threads store side by side
            flat = whole.view("u1").reshape(-1)
            first = source.ctypes.data - whole.ctypes.data
            for at in np.ndindex(*n):
                begin = first + int(np.dot(at, steps))
                place = int(np.dot(at, to))
                cell = flat[begin : begin + whole.itemsize]
                out.view("u1").reshape(-1)[place : place + out.itemsize] = cell
            assert (target == source).all(), (shape, order)
