"""A pytest plugin: `--share 2/5` runs the second of five shares of the tests that were chosen.

Processes beside each other, one per share, run every test once. The shares are about equally long
by the seconds of the GPU evidence; tests without any are dealt out in turn. The tests of a share
keep their order.
"""

from collections.abc import Mapping, Sequence

import pytest

from tests.gpu import evidence

UNKNOWN_S = 3


def parse(text: str) -> tuple[int, int]:
    """Return the number of a share, from 0, and how many there are."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--share takes NUMBER/COUNT, as 2/5, not {text}")
    return int(number) - 1, int(count)


def deal(tests: Sequence[str], seconds: Mapping[str, int], count: int) -> list[set[str]]:
    """Deal tests out, the longest first, each to the share that is the shortest so far."""
    shares, lengths = [set[str]() for _ in range(count)], [0] * count
    for test in sorted(tests, key=lambda test: -seconds.get(test, UNKNOWN_S)):
        shortest = lengths.index(min(lengths))
        shares[shortest].add(test)
        lengths[shortest] += max(1, seconds.get(test, UNKNOWN_S))
    return shares


def known_seconds() -> dict[str, int]:
    """How long each test took in the slowest of its runs on GPUs."""
    seconds: dict[str, int] = {}
    for run in evidence.load()["runs"]:
        for test, result in run["tests"].items():
            seconds[test] = max(result["seconds"], seconds.get(test, 0))
    return seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", help="run one of several shares of the tests, as 2/5")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--share") is None:
        return
    number, count = parse(config.getoption("--share"))
    mine = deal([item.nodeid for item in items], known_seconds(), count)[number]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
    items[:] = [item for item in items if item.nodeid in mine]
