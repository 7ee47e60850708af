"""The header by nvcc, without a GPU: it compiles without a warning, and in the promised order."""

from pathlib import Path

import pytest

from tests.device.test_order import KINDS, PROMISED, SOURCE
from tests.helpers.nvcc import compile_by_nvcc, find_nvcc
from tests.helpers.ptx import orders_of

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["kernels.cu", "litmus.cu"])
def test_it_compiles_without_a_warning(name, architecture, tmp_path):
    file = Path(__file__).with_name(name)
    for to in (tmp_path / "it.cubin", tmp_path / "it.o"):
        assert compile_by_nvcc(file, to, f"-arch={architecture}") == (0, "")
        assert to.read_bytes().startswith(b"\x7fELF")


def test_the_compiled_order_is_the_promised_one(tmp_path):
    (tmp_path / "it.cu").write_text(SOURCE)
    status, said = compile_by_nvcc(tmp_path / "it.cu", tmp_path / "it.ptx", "-arch=compute_90")
    assert (status, said) == (0, "")
    assert orders_of((tmp_path / "it.ptx").read_text(), KINDS) == PROMISED
