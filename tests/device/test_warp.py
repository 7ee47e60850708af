"""The header in a kernel of Warp without a GPU: that of the example compiles."""

import importlib
import re
import textwrap

import pytest

from tests.helpers.launch import ROOT

warp = pytest.importorskip("warp", reason="Warp is not installed")

IMPORTS = """
import mpishare.device
import warp
from warp import float64, int32, int64, uint64
N, BLOCK, SENT, READ = 1000, 256, 0, 1
"""


@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_the_kernel_of_the_example_compiles(architecture, tmp_path, monkeypatch):
    program = (ROOT / "scripts" / "examples" / "42_warp.py").read_text()
    kernel = program[program.index("    (folder") : program.index("\n    gpu, stream")]
    name = f"warp_of_the_example_{architecture}"
    (tmp_path / f"{name}.py").write_text(IMPORTS + textwrap.dedent(kernel))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name).shift.module
    warp.compile_aot_module(module, arch=architecture, module_dir=tmp_path, use_ptx=True)
    (ptx,) = (file.read_text(errors="replace") for file in tmp_path.glob("*.ptx"))
    assert len(re.findall(r"\bst\.release\.sys\.global\.u64", ptx)) == 2
    # The compiler may double a loop of polls.
    assert len(re.findall(r"\bld\.acquire\.sys\.global\.u64", ptx)) >= 2
    assert "ld.global.nc" not in ptx  # it might read an old line of a peer's stores
