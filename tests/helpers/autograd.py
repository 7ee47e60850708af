"""The functions for PyTorch that the example and the page show, so that tests try what is copied.

PyTorch is passed in: what imports it is skipped where it is not.
"""

import ast
import re
from types import ModuleType
from typing import Any

from tests.helpers.launch import ROOT

EXAMPLE = ROOT / "scripts/examples/21_torch_training.py"
PAGE = ROOT / "docs/pytorch.md"
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def source_of(program: str, name: str) -> str | None:
    """The text of a class or function of a program, None where none has that name."""
    for node in ast.parse(program).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_source_segment(program, node)
    return None


def functions(torch: ModuleType) -> tuple[Any, Any, Any]:
    """`Exchange`, `ExchangeInPlace` and `gradients_in_one_array`, as they are shown."""
    # The first block of the page has the example's function too, as tests/docs sees to.
    shown = [EXAMPLE.read_text(), *PROGRAM.findall(PAGE.read_text())[1:]]
    found: dict[str, Any] = {"torch": torch}
    names = ("Exchange", "ExchangeInPlace", "gradients_in_one_array")
    for name in names:
        (text,) = filter(None, (source_of(each, name) for each in shown))
        exec(text, found)
    exchange, in_place, in_one_array = (found[name] for name in names)
    return exchange, in_place, in_one_array
