"""Whether a GPU can be used: asked of a driver that is not there, or is a stand-in."""

import ctypes
import os
from types import SimpleNamespace

import pytest

from mpishare import UnsupportedError
from mpishare.backends import presence
from mpishare.runtime import preflight


class Driver:
    """Answers as libcuda.so.1 does."""

    def __init__(self, *, init=0, count=1, version=13000):
        self.init, self.count, self.version = init, count, version

    def cuInit(self, flags):  # noqa: N802  the driver's name
        return self.init

    def cuDeviceGetCount(self, pointer):  # noqa: N802
        pointer._obj.value = self.count
        return 0

    def cuDriverGetVersion(self, pointer):  # noqa: N802
        pointer._obj.value = self.version
        return 0


def forget():
    presence.library.cache_clear()
    presence.why_no_gpu.cache_clear()


@pytest.fixture
def use(monkeypatch):
    def use(driver, versions=("13.3.1", 13)):
        def load(name):
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("no such file")
            return driver

        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(preflight, "_package_versions", lambda: versions)
        forget()

    yield use
    forget()


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (None, "libcuda.so.1"),
        (Driver(init=100), "no GPU is visible"),
        (Driver(init=999), "999"),
        (Driver(count=0), "no GPU"),
    ],
)
def test_no_gpu_that_could_be_used(use, driver, words):
    use(driver, (None, None))
    assert words in preflight.missing()


def test_wsl_has_a_gpu_that_no_node_uses(use, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="6.6.87-Microsoft-WSL2"))
    use(Driver())
    assert preflight.missing() == presence.ON_WSL


def test_a_gpu_with_all_it_needs(use):
    """CUDA's drivers run programs of older majors."""
    for version, versions in ((13000, ("13.3.1", 13)), (13000, ("12.9.0", 12))):
        use(Driver(version=version), versions)
        assert preflight.missing() is None


@pytest.mark.parametrize(
    ("version", "versions", "told", "extra"),
    [
        (13000, (None, None), "no CuPy", 13),
        (13000, ("12.9.0", None), "no CuPy", 12),
        (13000, (None, 12), "no cuda-bindings", 12),
        (13000, ("12.9.0", 13), "cuda-bindings 12.9.0", 13),
        (13000, ("13.3.1", 12), "CuPy for CUDA 12", 12),
        (12080, ("13.3.1", 13), "driver of CUDA 12", 12),
        (12080, ("13.3.1", 12), "cuda-bindings 13.3.1", 12),
    ],
)
def test_a_gpu_without_the_packages_is_an_error_with_the_pip_line(
    use, version, versions, told, extra
):
    use(Driver(version=version), versions)
    with pytest.raises(UnsupportedError, match=told) as caught:
        preflight.missing()
    assert f"python -m pip install 'mpishare[cu{extra}]'" in str(caught.value)
