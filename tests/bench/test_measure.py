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
from mpishare.bench.options import Options, parse, parse_nbytes
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
    ("text", "nbytes"), [("8", 8), ("16B", 16), ("64KiB", 1 << 16), ("1 MiB", 1 << 20)]
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch"],
        ["fence", "--nosuch"],
        ["--min", "1MB"],
        ["--min", "12"],
        ["--max", "0"],
        ["--max", "-8"],
        ["--min", "1MiB", "--max", "64KiB"],
        ["--iters", "0"],
        ["--iters", "1.5"],
        ["--repeat", "0"],
        ["--against", "nosuch"],
        ["--format", "csv"],
        ["--timeout-s", "nan"],
        ["--timeout-s", "0"],
        ["--timeout-s", "1e300"],
        ["--width", "0"],
        ["--width", "1.5"],
        ["halo3d", "--width", "-1"],
        ["--fields", "0"],
        ["halo3d", "--fields", "17"],
        ["--fields", "two"],
        ["halo1d", "--corners=yes"],
        ["fence", "--corners"],  # it would change nothing
        ["setup", "fence", "--width", "2"],
        ["--iter", "5"],  # no abbreviations: they break when an option is added
    ],
)
def test_wrong_words_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(words)


def test_words_are_understood() -> None:
    assert parse([]).cases == default_cases()
    assert parse(["all"]).cases == tuple(CASES)
    assert parse(["setup", "fence", "setup"]).cases == ("setup", "fence")
    assert parse(["fence", "--iters", "3", "setup"]).cases == ("fence", "setup")
    assert parse(["all"]).full
    assert parse(["--against", "none"]).against == ()
    assert parse(["--against", "isend, barrier"]).against == ("isend", "barrier")
    assert parse([]).against is None
    assert parse(["--against", "all"]).wants("mpi", unasked=False)
    assert not parse([]).wants("mpi", unasked=False)
    assert parse(["--against", "nccl,staged"]).wants("nccl", unasked=False)
    assert not parse(["--against", "nccl,staged"]).wants("isend")
    assert not parse(["--no-check"]).check
    found = parse(["setup", "halo3d", "--width", "3", "--fields", "16", "--corners"])
    assert (found.width, found.fields, found.corners) == (3, 16, True)
    assert (parse([]).width, parse([]).fields, parse([]).corners) == (1, 1, False)
    assert parse(["--corners"]).corners  # a halo case is among the defaults
    assert parse(["list", "--corners"]).cases == ("list",)
    assert found.as_dict()["width"] == 3


def test_sizes_of_a_run() -> None:
    assert Options().sizes("host", "halo1d")[-1] == 1 << 20
    assert Options().sizes("cuda", "halo1d")[-1] == 64 << 20
    assert Options(full=True).sizes("host", "halo1d") == Options(full=True).sizes("cuda", "halo1d")
    assert Options(min_nbytes=24, max_nbytes=5000).sizes("host", "halo1d") == (24, 512, 4096, 5000)
    assert Options(min_nbytes=1 << 30).sizes("host", "halo1d") == (1 << 30,)
    assert Options(max_nbytes=8).sizes("cuda", "halo1d") == (8,)


def test_sizes_of_a_case() -> None:
    assert Options().sizes("host", "halo3d") == (4 << 10, 64 << 10)
    # A block has the cube of a face: gigabytes run only where they are named.
    assert Options(full=True).sizes("cuda", "halo3d")[-1] == 1 << 20
    assert Options(max_nbytes=16 << 20).sizes("cuda", "halo3d")[-2:] == (1 << 20, 16 << 20)
    assert Options(min_nbytes=1 << 20).sizes("host", "halo3d") == (1 << 20,)
    # Of several cases in one run each has its own limit, on the host.
    four = Options(max_nbytes=4 << 20)
    assert four.sizes("host", "halo1d")[-2:] == (1 << 20, 4 << 20)
    assert four.sizes("host", "halo3d")[-2:] == (64 << 10, 1 << 20)
    assert Options(min_nbytes=4 << 20).sizes("host", "halo3d") == (4 << 20,)


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
