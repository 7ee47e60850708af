"""A pytest plugin: `--share 2/5` runs the second of five shares of the tests that were chosen.

Processes beside each other, one per share, run every test once. The shares are about equally long
by the seconds of the GPU evidence; tests without any are dealt out in turn. The tests of a share
keep their order. `--sample 2/3` runs every third of the parameters of each test, from the second
on, and at least one of each: for runs that repeat others on another number of ranks.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest

from tests.gpu import evidence

UNKNOWN_S = 3


def parse(text: str) -> tuple[int, int]:
    """Return the number of a share, from 0, and how many there are."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"a share is NUMBER/COUNT, as 2/5, not {text}")
    return int(number) - 1, int(count)


def deal(tests: Sequence[str], seconds: Mapping[str, int], count: int) -> list[set[str]]:
    """Deal tests out, the longest first, each to the share that is the shortest so far."""
    shares, lengths = [set[str]() for _ in range(count)], [0] * count
    for test in sorted(tests, key=lambda test: -seconds.get(test, UNKNOWN_S)):
        shortest = lengths.index(min(lengths))
        shares[shortest].add(test)
        lengths[shortest] += max(1, seconds.get(test, UNKNOWN_S))
    return shares


def sample(tests: Sequence[str], number: int, count: int) -> set[str]:
    """Return every `count`-th parameter set of each test, from that of the number on."""
    by_name = defaultdict[str, list[str]](list)
    for test in tests:
        by_name[test.partition("[")[0]].append(test)
    return {test for sets in by_name.values() for test in sets[number % len(sets) :: count]}


def known_seconds() -> dict[str, int]:
    """How long each test took in the slowest of its runs on GPUs."""
    seconds: dict[str, int] = {}
    for run in evidence.load()["runs"]:
        for test, result in run["tests"].items():
            seconds[test] = max(result["seconds"], seconds.get(test, 0))
    return seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", help="run one of several shares of the tests, as 2/5")
    parser.addoption("--sample", help="run some of the parameters of each test, as 2/3")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sample") is not None:
        number, count = parse(config.getoption("--sample"))
        keep(config, items, sample([item.nodeid for item in items], number, count))
    if config.getoption("--share") is not None:
        number, count = parse(config.getoption("--share"))
        keep(config, items, deal([item.nodeid for item in items], known_seconds(), count)[number])


def keep(config: pytest.Config, items: list[pytest.Item], mine: set[str]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
    items[:] = [item for item in items if item.nodeid in mine]
