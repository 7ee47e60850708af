"""As tests/ranks, for tests that need a GPU whatever they test."""

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("tests.helpers.lockstep")
    config.pluginmanager.import_plugin("tests.helpers.nodes")
    config.pluginmanager.import_plugin("tests.helpers.view_fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
