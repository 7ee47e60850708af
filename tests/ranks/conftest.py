"""Started as `mpirun -n N python -m pytest tests/ranks`: all ranks run all tests in lockstep."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("tests.helpers.lockstep")
    config.pluginmanager.import_plugin("tests.helpers.nodes")
    config.pluginmanager.import_plugin("tests.helpers.view_fixtures")
