"""The benchmark without MPI: statistics, sizes, the command line, the pattern, the report."""

import csv
import io
import json
import re
from time import perf_counter

import numpy as np
import pytest

from mpishare.bench.cases import BASELINES, CASES, DEFAULT_CASES
from mpishare.bench.cli import case_list
from mpishare.bench.comparison import Variant, Wrapper
from mpishare.bench.environment import command, crowded, notes
from mpishare.bench.measure import BLOCK_S, block_size, time_batches, time_each
from mpishare.bench.options import Options, parse, parse_nbytes
from mpishare.bench.problems.check import POISON, Pattern, word
from mpishare.bench.report import compare
from mpishare.bench.report.render import of_case, render
from mpishare.bench.report.rows import COLUMNS, Row, set_ratios
from mpishare.cli import UsageError

HEADER = {
    "date": "2026-01-02T03:04:05+00:00",
    "hostname": "n7",
    "backend": "host",
    "host_code": "python",
    "ranks": 4,
    "nodes": 1,
    "cores": 2,
    "gpus": [],
    "links": [],
    "driver": None,
    "cuda": None,
    "mpi_library": "Some MPI 1.0",
    "versions": {"mpishare": "0", "cupy": None},
    "git_revision": None,
    "options": {"check": True},
    "notes": [],
    "left_out": {},
}


def row(arm: str, clock: str = "latency", **found: object) -> Row:
    return Row("ring", arm, "host", 4, 8, clock, **found)


def spin(seconds: float) -> None:
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


# --- clocks and statistics


def test_latency_clock_counts_the_synchronize_of_each_step() -> None:
    calls = []
    samples = time_each(lambda: calls.append("step"), lambda: spin(1e-3), 4)
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
    assert block_size(None, BLOCK_S / 100).iters == pytest.approx(100, abs=1)
    assert block_size(None, 10.0).iters == 5
    assert block_size(None, 0.0).iters == 1000
    found = block_size(7, 10.0)
    assert (found.iters, found.batches, found.batch) == (7, 5, 1)
    assert block_size(1, 1.0).batches == 1


def test_statistics_of_a_row() -> None:
    found = row("own")
    found.fill([1e-6] * 90 + [5e-6] * 10, sent_nbytes=2000)
    assert (found.median_us, found.min_us, found.count) == pytest.approx((1, 1, 100))
    assert found.p95_us == pytest.approx(5)
    assert found.gb_per_s == pytest.approx(2.0)
    assert found.ok
    found.fail("wrong", wrong=True)
    assert (found.median_us, found.p95_us, found.min_us, found.gb_per_s) == (None,) * 4
    assert not found.ok


def test_ratios_are_to_the_fastest_of_the_other_side_on_the_same_clock() -> None:
    rows = [
        row("own", median_us=2.0),
        row("slower own", median_us=3.0),
        row("slow", median_us=8.0, kind="rival"),
        row("fast", median_us=4.0, kind="rival"),
        row("fast", "throughput", median_us=1.0, kind="rival"),
        row("unrelated", median_us=0.1, kind="rival"),
        row("broken", kind="rival", reason="none here"),
        row("ceiling", median_us=0.1, kind="ceiling"),
    ]
    beside = ["slow", "fast", "broken", "ceiling"]  # a ceiling is no rival, whoever names it
    set_ratios(rows, {"own": beside, "slower own": beside})
    assert [each.ratio for each in rows] == [0.5, 0.75, 0.25, 0.5, None, None, None, None]


# --- the command line


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("16B", 16), ("64KiB", 1 << 16), ("1 MiB", 1 << 20)]
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "words",
    [
        ["nosuch"],
        ["ring", "--nosuch"],
        ["--min", "1MB"],
        ["--min", "12"],
        ["--max", "0"],
        ["--max", "-8"],
        ["--min", "1MiB", "--max", "64KiB"],
        ["--iters", "0"],
        ["--iters", "1.5"],
        ["--warmup", "-1"],
        ["--repeat", "0"],
        ["--against", "nosuch"],
        ["--format", "xml"],
        ["--timeout-s", "nan"],
        ["--timeout-s", "0"],
        ["--timeout-s", "1e300"],
        ["--width", "0"],
        ["--width", "1.5"],
        ["halo3d", "--width", "-1"],
        ["--fields", "0"],
        ["halo2d", "--fields", "17"],
        ["--fields", "two"],
        ["halo1d", "--corners=yes"],
        ["ring", "--corners"],  # it would change nothing
        ["ring", "fence", "--width", "2"],
        ["event", "--fields", "2"],
        ["--iter", "5"],  # no abbreviations: they break when an option is added
    ],
)
def test_wrong_words_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(words)


def test_a_row_of_a_table_leads_to_its_baseline() -> None:
    with pytest.raises(UsageError, match=r"'persistent waitany': 'persistent' runs all its forms"):
        parse(["--against", "isend,persistent waitany"])


def test_words_are_understood() -> None:
    assert parse([]).cases == DEFAULT_CASES
    assert parse(["all"]).cases == tuple(CASES)
    assert parse(["ring", "fence", "ring"]).cases == ("ring", "fence")
    assert parse(["fence", "--iters", "3", "ring"]).cases == ("fence", "ring")
    assert parse(["all"]).full
    assert parse(["--against", "none"]).against == ()
    assert parse(["--against", "isend, barrier"]).against == ("isend", "barrier")
    assert parse([]).against is None
    assert parse(["--against", "all"]).wants("naive", unasked=False)
    assert not parse([]).wants("naive", unasked=False)
    assert parse(["--against", "nccl,staged"]).wants("nccl", unasked=False)
    assert not parse(["--against", "nccl,staged"]).wants("isend")
    assert not parse(["--no-check"]).check
    found = parse(["ring", "halo2d", "--width", "3", "--fields", "16", "--corners"])
    assert (found.width, found.fields, found.corners) == (3, 16, True)
    assert (parse([]).width, parse([]).fields, parse([]).corners) == (1, 1, False)
    assert parse(["--corners"]).corners  # a halo case is among the defaults
    assert parse(["list", "--corners"]).cases == ("list",)
    assert found.as_dict()["width"] == 3


def test_sizes_of_a_run() -> None:
    assert Options().sizes("host")[-1] == 1 << 20
    assert Options().sizes("cuda")[-1] == 64 << 20
    assert Options(full=True).sizes("host") == Options(full=True).sizes("cuda")
    assert Options(min_nbytes=24, max_nbytes=5000).sizes("host") == (24, 512, 4096, 5000)
    assert Options(min_nbytes=1 << 30).sizes("host") == (1 << 30,)
    assert Options(max_nbytes=8).sizes("cuda") == (8,)


def test_sizes_of_a_case() -> None:
    assert Options().sizes("host", "ring") == Options().sizes("host")
    assert Options().sizes("host", "halo1d") == Options().sizes("host")
    assert Options().sizes("host", "halo3d") == (4 << 10, 64 << 10)
    # A block has the cube of a face: gigabytes run only where they are named.
    assert Options(full=True).sizes("cuda", "halo3d")[-1] == 1 << 20
    assert Options(max_nbytes=16 << 20).sizes("cuda", "halo3d")[-2:] == (1 << 20, 16 << 20)
    assert Options(min_nbytes=64 << 10).sizes("host", "halo2d") == (64 << 10,)
    # Of several cases in one run each has its own limit, on the host.
    four = Options(max_nbytes=4 << 20)
    assert four.sizes("host", "halo1d")[-2:] == (1 << 20, 4 << 20)
    assert four.sizes("host", "halo3d")[-2:] == (64 << 10, 1 << 20)
    assert Options(min_nbytes=4 << 20).sizes("host", "halo3d") == (4 << 20,)


def test_the_header_says_by_which_command() -> None:
    words = ["ring", "--output", "/tmp/a.json", "--max", "64 KiB", "--plot=b.svg"]
    found = command(4, words, {"MPISHARE_BACKEND": "host", "HOME": "/root"})
    assert found == "MPISHARE_BACKEND=host mpirun -n 4 python -m mpishare.bench ring --max '64 KiB'"


# --- the pattern


def test_pattern_tells_owner_side_step_and_place() -> None:
    pattern = Pattern(np, 4)
    words = np.empty(4, "u8")
    pattern.fill(words, 3, 1, 7)
    pattern.verify(words, 3, 1, 7)
    assert pattern.wrong() == 0
    for other in ((2, 1, 7), (3, 0, 7), (3, 1, 8)):
        pattern.verify(words, *other)
        assert pattern.wrong() == 4
    pattern.verify(np.roll(words, 1), 3, 1, 7)
    assert pattern.wrong() == 4
    words[2] += 1
    pattern.verify(words, 3, 1, 7)
    pattern.verify(words, 3, 1, 7)
    assert pattern.wrong() == 2
    assert pattern.wrong() == 0
    pattern.poison(words)
    assert (words == POISON).all()


def test_no_pattern_has_the_poison_in_it() -> None:
    assert word(0x7FFF, 0xF, 0xFFF) + 0xFFFF_FFFF < POISON


# --- the report


def a_run() -> list[Row]:
    good, bad, rival, absent = (row(arm) for arm in ("own", "bad", "rival", "absent"))
    good.fill([1e-6, 2e-6, 3e-6], 8)
    rival.fill([4e-6], 8)
    rival.kind = "rival"
    bad.fail("wrong result: 3 on rank 1", wrong=True)
    absent.fail("there is none", wrong=False)
    set_ratios([good, rival], {"own": ["rival"]})
    return [good, bad, rival, absent]


def test_json_has_the_header_and_every_row() -> None:
    found = json.loads(render("json", HEADER, a_run()))
    assert found["header"] == HEADER
    assert [tuple(each) for each in found["rows"]] == [COLUMNS] * 4
    assert found["rows"][0]["median_us"] == pytest.approx(2)
    assert found["rows"][0]["ratio"] == pytest.approx(0.5)


def test_csv_has_the_same_columns() -> None:
    found = list(csv.reader(io.StringIO(render("csv", HEADER, a_run()))))
    assert tuple(found[0]) == COLUMNS
    assert len(found) == 5


def test_table_says_why_there_is_no_number() -> None:
    text = render("table", HEADER, a_run())
    assert "4 ranks on 1 node, backend host (Python), 2 cores, n7" in text
    assert "wrong [1]" in text
    assert "[1] wrong result: 3 on rank 1" in text
    assert "not run [2]" in text
    assert "0.50" in text
    assert "\x1b" not in text


def test_table_says_what_a_halo_case_was_of() -> None:
    found = row("own")
    found.fill([1e-6], 8)
    found.case, found.nbytes = "halo3d", 66248
    found.n, found.width, found.fields, found.corners = 91, 1, 2, True
    text = render("table", HEADER, [found])
    title = "halo3d: width 1, 2 fields, with corners; cells: of a rank, along an axis"
    assert title in text.splitlines()
    assert text.split().count("91") == 1


def test_one_rank_is_counted_as_one() -> None:
    gpu = {"name": "H200", "uuid": "GPU-1f3c", "pci_id": "0000:06:00.0", "mps": False, "ranks": [0]}
    alone = {**HEADER, "ranks": 1, "cores": 1, "gpus": [gpu]}
    text = render("table", alone, a_run())
    assert "\nOne rank is its own neighbor" in text
    assert "mpirun -n 4" in text
    assert "One rank" not in render("table", HEADER, a_run())
    assert "1 rank on 1 node, backend host (Python), 1 core, n7" in text
    assert "GPU-1f3c at 0000:06:00.0: rank 0" in text
    assert ", 1 rank," in compare._origin(alone)


def test_a_case_whose_names_do_not_tell_explains_them() -> None:
    found = row("new arrays")
    found.fill([1e-6], 8)
    found.case = "fresh"
    note = " ".join(CASES["fresh"].note.split())
    assert note in " ".join(render("table", HEADER, [found]).split())
    assert note in " ".join(case_list().split())
    case = CASES["fresh"]
    assert {f"'{name}'" for name in case.variants} == set(re.findall(r"'.*?'", note))
    assert not any(name in note for names in case.baselines.values() for name in names)


@pytest.mark.parametrize("baseline", ["alone", "called", "ceilings", "first axis", "packed"])
def test_the_list_says_what_a_baseline_is(baseline: str) -> None:
    _, _, told = case_list().partition("baselines whose names")
    assert f"\n{baseline} " in told
    assert baseline in BASELINES


def test_the_heading_tells_of_more_ranks_than_cores() -> None:
    def seen(hostname: str, *affinities: list[int]) -> list[dict[str, object]]:
        return [{"hostname": hostname, "affinity": cores} for cores in affinities]

    bound, roomy = seen("a", [0], [1]), seen("b", [0, 1], [0, 1])
    assert crowded([*bound, *roomy]) == []
    (note,) = crowded([*bound, *seen("c", [0, 1], [0, 1], [0, 1])])
    assert note.startswith("3 ranks share 2 cores of c: ")


def test_the_heading_tells_of_a_gpu_shared_without_mps() -> None:
    shared = {"uuid": "GPU-1f3c", "ranks": [0, 1, 2, 3], "mps": False}
    alone = {**shared, "ranks": [0]}
    assert notes([{**shared, "mps": True}, alone]) == []
    (note,) = notes([alone, shared])
    assert "GPU-1f3c" in note
    assert "nvidia-cuda-mps-control -d" in note
    text = render("table", {**HEADER, "notes": [note]}, a_run())
    assert note in " ".join(text.split())


def test_a_wrapped_variant_is_checked_as_the_innermost_one() -> None:
    """An upper bound that moves nothing has a check of its own, however it is wrapped."""
    checked = []

    class Empty(Variant):
        def check_around(self, step, token) -> None:
            step()
            checked.append(token)

        def step(self) -> None:
            checked.append("step of the innermost")

    class Other(Wrapper):
        def step(self) -> None:
            checked.append(type(self.inner).__name__)

    Other(Other(Empty())).checked_step(7)
    assert checked == ["Other", 7]


def halo_rows() -> list[Row]:
    """Two sizes: mpishare is slower at the first, faster at the second; one baseline is absent."""
    times_us = {
        ("window fields", "own"): (4.0, 6.0),
        ("private fields", "own"): (5.0, 18.0),
        ("persistent", "rival"): (2.0, 12.6),
        ("neighborhood packed", "rival"): (3.0, 15.0),
        ("persistent waitany", "rival"): None,
    }
    rows = []
    for place, nbytes in enumerate((8, 64 << 10)):
        found = []
        for (arm, kind), us in times_us.items():
            for clock in ("latency", "throughput"):
                each = Row("halo1d", arm, "host", 4, nbytes, clock, kind=kind)
                each.n, each.width, each.fields, each.corners = 4, 1, 1, False
                if us is None:
                    each.fail("it spins, and 4 ranks share 2 cores", wrong=False)
                else:
                    each.fill([us[place] * 1e-6], 2 * nbytes)
                found.append(each)
        rivals = [arm for arm, kind in times_us if kind == "rival"]
        set_ratios(found, {"window fields": rivals, "private fields": rivals})
        rows += found
    return rows


AT_80 = """
halo1d: width 1, 1 field, faces alone; cells: of a rank, along an axis

                                      latency, us          back to back, us
  size  cells  variant                median   p95  ratio  median   GB/s  ratio
   8 B      4  * window fields          4.00  4.00   2.00    4.00   0.00   2.00
               * private fields         5.00  5.00   2.50    5.00   0.00   2.50
                 persistent             2.00  2.00   2.00    2.00   0.01   2.00
                 neighborhood packed    3.00  3.00   1.33    3.00   0.01   1.33
                 persistent waitany   not run [1]

64 KiB      4  * window fields          6.00  6.00   0.48    6.00  21.85   0.48
               * private fields         18.0  18.0   1.43    18.0   7.28   1.43
                 persistent             12.6  12.6   0.48    12.6  10.40   0.48
                 neighborhood packed    15.0  15.0   0.40    15.0   8.74   0.40
                 persistent waitany   not run [1]
[1] it spins, and 4 ranks share 2 cores
Left out at 80 columns: min, p95 back to back.

halo1d 8 B: 0.5, 64 KiB: 2.1 times as fast as the best MPI form (window fields)
halo1d 8 B: 0.4, 64 KiB: 0.7 times as fast as the best MPI form (private fields)
"""


def test_a_table_at_80_columns() -> None:
    text = of_case("halo1d", HEADER, halo_rows(), 80)
    assert text == AT_80
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 80, 100])
def test_columns_are_left_out_until_a_table_fits(width: int) -> None:
    rows = halo_rows()
    for each in rows:
        if each.ok:
            each.fill([max(each.median_us, 2000.0) * 1e-6], 16)
    text = of_case("halo1d", HEADER, rows, width)
    lines = text.splitlines()
    assert max(map(len, lines[2:])) <= max(width, 68)  # what remains
    assert f"Left out at {width} columns: " in text or width == 100
    assert "2,000" in text


def test_the_speed_is_said_where_mpishare_wins_and_where_it_loses() -> None:
    """In front of one baseline by its name; of several, of the best; only what was compared."""

    def lines(times_us: list[tuple[str, float]]) -> list[str]:
        rows = [row(arm, "throughput", median_us=us, p95_us=us, min_us=us) for arm, us in times_us]
        for each in rows:
            each.kind = "own" if each.arm in ("ring", "slow") else "rival"
        rivals = [each.arm for each in rows if each.kind == "rival"]
        set_ratios(rows, dict.fromkeys(("ring", "slow"), rivals))
        return [text for text in of_case("ring", HEADER, rows).splitlines() if " times " in text]

    assert lines([("ring", 2.0), ("isend", 4.2)]) == ["ring 8 B: 2.1 times as fast as isend"]
    assert lines([("ring", 4.0), ("isend", 3.0)]) == ["ring 8 B: 0.75 times as fast as isend"]
    assert lines([("ring", 2.0), ("isend", 3.0), ("sendrecv", 9.0)]) == [
        "ring 8 B: 1.5 times as fast as the best MPI form"
    ]
    assert lines([("slow", 2.0), ("isend", 3.0), ("nccl", 1.0)]) == [
        "ring 8 B: 0.5 times as fast as the best baseline (slow)"
    ]
    assert lines([("ring", 2.0)]) == []


@pytest.mark.parametrize(
    ("noisy", "is_told"), [("ring", True), ("isend", True), ("sendrecv", False), ("", False)]
)
def test_a_speed_out_of_noise_is_marked(noisy: str, is_told: bool) -> None:
    """Where it is that of the variant itself, or of the baseline that it is compared with."""
    rows = [
        row(arm, "throughput", median_us=us, p95_us=us * (3.5 if arm == noisy else 3.0), min_us=us)
        for arm, us in (("ring", 2.0), ("isend", 3.0), ("sendrecv", 9.0))
    ]
    for each in rows[1:]:
        each.kind = "rival"
    set_ratios(rows, {"ring": ("isend", "sendrecv")})
    shown = "1.5 (noisy)" if is_told else "1.5"
    told = f"\nring 8 B: {shown} times as fast as the best MPI form\n"
    assert told in of_case("ring", HEADER, rows)
