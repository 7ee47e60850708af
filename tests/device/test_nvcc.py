"""The header by nvcc, without a GPU: it compiles without a warning, and in the promised order."""

from pathlib import Path

import pytest

from tests.helpers.nvcc import compile_by_nvcc, find_nvcc

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["kernels.cu", "litmus.cu"])
def test_it_compiles_without_a_warning(name, architecture, tmp_path):
    file = Path(__file__).with_name(name)
    for to in (tmp_path / "it.cubin", tmp_path / "it.o"):
        assert compile_by_nvcc(file, to, f"-arch={architecture}") == (0, "")
        assert to.read_bytes().startswith(b"\x7fELF")
