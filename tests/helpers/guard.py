"""A pytest plugin: a test that takes too long ends its process, after every thread's traceback.

The timer is faulthandler's: it fires while the main thread sits in an MPI call or holds the GIL.
The limit is 60 s; `@pytest.mark.limit(seconds)` sets another.
"""

import faulthandler
import os
from collections.abc import Generator

import pytest

DEFAULT_S = 60.0
real_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # Behind pytest's capture, which would swallow what a dying process says.
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        config.stash[real_stderr] = os.dup(2)


def arm(config: pytest.Config, seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[real_stderr])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    mark = item.get_closest_marker("limit")
    arm(item.config, float(mark.args[0]) if mark else DEFAULT_S)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
