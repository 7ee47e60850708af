"""Dtypes as text: nothing is lost of what they are, and nothing made up becomes one."""

import numpy as np
import pytest

from mpishare import native
from mpishare.errors import HandleError, UnsupportedError
from mpishare.memory import dtypes
from mpishare.memory.numbers import ADDED, NUMBERS
from tests.helpers.compiled import WHY_NONE

SPARSE = {"names": ["b", "a"], "formats": ["f8", "i2"], "offsets": [8, 0], "itemsize": 40}
OVERLAID = {"names": ["a", "b"], "formats": ["f8", "i2"], "offsets": [0, 2], "itemsize": 40}


@pytest.mark.parametrize(
    "dtype",
    [
        *("?", "i1", "<u4", ">f8", "g", "G", "S5", "S0", "U3", "V5", "M8[25s]", "m8[us]"),
        [("place", ">f8", (3,)), ("inner", [("id", "i4")])],
        [(("a title", "name"), "f8"), ("other", "i4")],
        {"names": [], "formats": [], "itemsize": 7},
        (np.record, [("a", "f8")]),
    ],
    ids=str,
)
def test_a_dtype_comes_back(dtype):
    check(np.dtype(dtype))


def check(before):
    after = dtypes.load(dtypes.dump(before))
    assert after == before
    assert (after.type, after.itemsize) == (before.type, before.itemsize)
    assert after.fields == before.fields


def test_types_of_ml_dtypes_come_back_by_name(monkeypatch):
    """Their own text is that of other types: `<V2` of bfloat16, `<f1` of float8_e5m2."""
    library = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e5m2", "float8_e4m3fn", "int4"):
        check(np.dtype(getattr(library, name)))
    text = dtypes.dump(np.dtype(library.float8_e4m3b11fnuz))
    monkeypatch.setitem(dtypes.sys.modules, "ml_dtypes", None)
    with pytest.raises(HandleError, match=r"ml_dtypes\.float8.* which is not installed"):
        dtypes.load(text)


@pytest.mark.parametrize("dtype", ["O", [("a", "f8"), ("b", "O")], SPARSE, OVERLAID], ids=str)
def test_what_has_no_text_is_refused(dtype):
    with pytest.raises(UnsupportedError, match="Share its bytes"):
        dtypes.dump(np.dtype(dtype))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "3", "None", "'|O'", "'|O8'", "'zz'", "'<f99'", "[('a', '|O')]"),
        *("'os.system'", "__import__('os').abort()", "'ml_dtypes.finfo'", "'ml_dtypes.nothing'"),
        *("('<f8', (-1,))", "('<f8', 'a')", "('|O8', (1,))", "[" * 5000),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_dtype_is_refused(text):
    with pytest.raises(HandleError):
        dtypes.load(text)


def test_which_numbers_c_lacks():
    if WHY_NONE:
        pytest.skip(WHY_NONE)
    module = native.load()[0]
    unknown = {name for name in NUMBERS if not module.can_add(name)}
    assert unknown == {"bool", "float16"}
    for operation in ("sum", "prod", "max", "min"):
        pairs = set() if operation in ("sum", "prod") else {"complex64", "complex128"}
        missing = {name for name in NUMBERS if not module.can_reduce(f"{operation} {name}")}
        assert missing == unknown | pairs


def test_what_kernels_add_is_added_as_itself():
    assert [NUMBERS[name].added_as for name in ADDED] == [*ADDED]
