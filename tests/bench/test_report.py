"""The report of a run: rows, speeds, the table, the summary, the files. No MPI."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mpishare.bench.environment import versions_of
from mpishare.bench.report import COLUMNS, Row, compare, heading, of_case, summary

HEADER = {
    "date": "2026-01-02T03:04:05+00:00",
    "hostname": "n7",
    "backend": "host",
    "host_code": "python",
    "ranks": 4,
    "nodes": 1,
    "cores": 2,
    "load": 0.2,
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


def row(arm: str, times_us: tuple[float, ...] = (), clock: str = "throughput", **more) -> Row:
    found = Row("halo1d", arm, "host", 4, 8, clock, **more)
    if times_us:
        found.fill([us * 1e-6 for us in times_us], 16)
    return found


#: By variant the times at two sizes; one did not run, and one kind is faster at each size.
TIMES_US = {
    "window fields": (4.0, 6.0),
    "private fields": (5.0, 18.0),
    "persistent": (2.0, 12.6),
    "neighborhood types": (3.0, 15.0),
    "datatypes": None,
}


def halo_rows() -> list[Row]:
    """Mpishare is slower at the first size, faster at the second."""
    own = [arm for arm in TIMES_US if arm.endswith("fields")]
    found = []
    for place, nbytes in enumerate((8, 4232)):
        of_size = []
        for arm, us in TIMES_US.items():
            for clock in ("latency", "throughput"):
                each = row(arm, () if us is None else (us[place],), clock)
                each.kind = "own" if arm in own else "rival"
                each.nbytes, each.n, each.width, each.fields, each.corners = nbytes, 4, 1, 2, False
                if us is None:
                    each.fail("the datatypes cannot be made", wrong=False)
                of_size.append(each)
        rivals = tuple(arm for arm in TIMES_US if arm not in own)
        compare(of_size, dict.fromkeys(own, rivals))
        found += of_size
    return found


def test_statistics_of_a_row() -> None:
    found = row("own")
    found.fill([1e-6] * 60 + [2e-6] * 30 + [5e-6] * 10, sent_nbytes=2000)
    assert (found.median_us, found.min_us, found.count) == pytest.approx((1, 1, 100))
    assert found.p95_us == pytest.approx(5)
    assert found.quartiles_us == pytest.approx((1, 2))
    assert found.gb_per_s == pytest.approx(2.0)
    assert found.ok
    assert tuple(found.as_dict()) == COLUMNS


@pytest.mark.parametrize(
    ("mine", "theirs", "speed"),
    [
        ((2.0, 2.1, 2.2), (4.2, 4.3, 4.4), "2.0 x faster"),
        ((4.2, 4.3, 4.4), (3.0, 3.1, 3.2), "1.4 x slower"),
        ((2.0, 2.0, 90.0, 95.0), (4.2, 4.3, 4.4), "unclear"),  # the quartiles overlap
        ((2.0, 4.4, 9.0), (2.0, 4.3, 9.0), "as fast"),  # and the medians are close
        ((2.0,), (2.02,), "as fast"),  # apart, and still the same
        ((1.0,), (36.6,), "37 x faster"),
    ],
)
def test_a_speed_has_one_direction_and_needs_quartiles_that_are_apart(mine, theirs, speed) -> None:
    found = [row("own", mine), row("isend", theirs, kind="rival")]
    compare(found, {"own": ["isend"]})
    assert (found[0].speed, found[0].fastest) == (speed, "isend")
    assert found[0].ratio == pytest.approx(found[0].median_us / found[1].median_us)
    assert found[1].speed is found[1].ratio is None


def test_the_fastest_baseline_is_of_those_against_and_of_the_same_clock() -> None:
    found = [
        row("own", (2.0,)),
        row("slow", (8.0,), kind="rival"),
        row("fast", (4.0,), kind="rival"),
        row("fast", (1.0,), "latency", kind="rival"),
        row("unrelated", (0.1,), kind="rival"),
        row("broken", kind="rival", reason="none here"),
        row("ceiling", (0.1,), kind="ceiling"),
    ]
    compare(found, {"own": ["slow", "fast", "broken", "ceiling"]})
    assert (found[0].fastest, found[0].ratio) == ("fast", 0.5)
    assert all(each.ratio is None for each in found[1:])


def test_table_says_why_there_is_no_number() -> None:
    bad, absent = row("bad"), row("absent", kind="rival")
    bad.fail("wrong result: 3 on rank 1", wrong=True)
    absent.fail("there is none", wrong=False)
    found = [row("own", (2.0,)), bad, absent]
    text = of_case("halo1d", HEADER, found) + summary(found)
    assert "wrong [1]" in text
    assert "[1] wrong result: 3 on rank 1" in text
    assert "not run [2]" in text
    assert "halo1d WRONG: bad" in text
    assert "\x1b" not in text


def test_the_heading_tells_of_a_busy_machine_and_of_one_rank() -> None:
    assert "Other programs ran" not in heading(HEADER)
    assert "Other programs ran" in heading({**HEADER, "load": 1.1})
    gpu = {"name": "H200", "uuid": "GPU-1f3c", "pci_id": "0000:06:00.0", "mps": False, "ranks": [0]}
    text = heading({**HEADER, "ranks": 1, "cores": 1, "gpus": [gpu]})
    assert "\nOne rank is its own neighbor" in text
    assert "mpirun -n 4" in text
    assert "One rank" not in heading(HEADER)
    assert "1 rank on 1 node, backend host (Python), 1 core, load" in text
    assert "GPU-1f3c at 0000:06:00.0: rank 0" in text


def test_the_heading_has_the_notes_of_the_node() -> None:
    note = "4 ranks share GPU-1f3c without the Multi-Process Service"
    assert note in " ".join(heading({**HEADER, "notes": [note]}).split())


def test_theversions_of_the_driver() -> None:
    gpus = {"580.159 (CUDA 13.0)": ("580.159", "13.0"), "CUDA 13.0": (None, "13.0")}
    for text, found in gpus.items():
        assert versions_of(SimpleNamespace(driver=text)) == found
    assert versions_of(None) == (None, None)


TABLE = """
halo1d: width 1, 2 fields, faces only

   size  variant               latency, us         speed  back to back, us         speed  GB/s
    8 B  * window fields              4.00  2.0 x slower              4.00  2.0 x slower  0.00
         * private fields             5.00  2.5 x slower              5.00  2.5 x slower  0.00
           persistent                 2.00                            2.00                0.01
           neighborhood types         3.00                            3.00                0.01
           datatypes                         not run [1]

4.1 KiB  * window fields              6.00  2.1 x faster              6.00  2.1 x faster  0.00
         * private fields             18.0  1.4 x slower              18.0  1.4 x slower  0.00
           persistent                 12.6                            12.6                0.00
           neighborhood types         15.0                            15.0                0.00
           datatypes                         not run [1]
[1] the datatypes cannot be made
"""


def test_a_table() -> None:
    header = {**HEADER, "left_out": {"halo1d": ["1 TiB left out: there is no room"]}}
    assert (
        of_case("halo1d", header, halo_rows())
        == f"{TABLE}halo1d 1 TiB left out: there is no room\n"
    )


def test_the_summary_has_a_line_per_case_with_the_fastest_variant() -> None:
    fences = [row("fence", (2.0,)), row("node.barrier", (1.0,)), row("barrier", (4.0,))]
    for each in fences:
        each.case, each.nbytes = "fence", 0
    fences[-1].kind = "rival"
    compare(fences, dict.fromkeys(("fence", "node.barrier"), ("barrier",)))
    setup = replace(row("Node", (3.0,), "latency"), case="setup")
    lines = summary([setup, *fences, *halo_rows()]).splitlines()
    assert "mpishare's fastest variant" in lines[1]
    assert "(setup: latency)" in lines[1]
    assert lines[2:] == [
        "setup  nothing to compare with",
        "fence  fence: 2.0 x faster, node.barrier: 4.0 x faster",
        "halo1d 8 B: 2.0 x slower, 4.1 KiB: 2.1 x faster",
    ]
    assert summary([]) == ""


def test_the_summary_takes_no_softer_baseline_than_the_fastest() -> None:
    """A variant with the smallest median may be set beside slower baselines of its own."""
    found = [
        row("private", (5.1,)),
        row("fewer bytes", (5.0,)),
        row("windows", (6.0,)),
        row("plain", (4.0,), kind="rival"),
        row("exact", (10.0,), kind="rival"),
    ]
    compare(found, {"private": ["plain"], "fewer bytes": ["exact"], "windows": ["plain"]})
    assert summary(found).splitlines()[2:] == ["halo1d 8 B: 1.3 x slower"]
