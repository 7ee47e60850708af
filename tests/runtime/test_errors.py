"""The exception tree: what can be caught as what, and the facts as attributes."""

import pickle
from types import MappingProxyType

import pytest

import mpishare
from mpishare.errors import describe

TREE = {
    "CudaError": (),
    "PeerError": (),
    "MismatchError": (mpishare.PeerError, ValueError),
    "PeerTimeout": (TimeoutError,),
    "UnsupportedError": (),
    "HandleError": (ValueError,),
    "CapacityError": (),
    "ClosedError": (RuntimeError,),
    "EpochError": (RuntimeError,),
}


@pytest.mark.parametrize("name", TREE)
def test_tree(name):
    """Each is an error of mpishare, and of the builtin ones what `TREE` says."""
    error, builtin = getattr(mpishare, name), (TimeoutError, ValueError, RuntimeError, OSError)
    assert all(issubclass(error, base) for base in (mpishare.MpiShareError, *TREE[name]))
    expected = [base for base in builtin if any(issubclass(each, base) for each in TREE[name])]
    assert [base for base in builtin if issubclass(error, base)] == expected


def test_every_error_is_public_and_documented():
    errors = {
        name
        for name, item in vars(mpishare.errors).items()
        if isinstance(item, type) and issubclass(item, mpishare.MpiShareError)
    }
    assert errors == {*TREE, "MpiShareError"}
    assert errors <= set(mpishare.__all__)
    assert all(getattr(mpishare, name).__doc__ for name in errors)


FAILED = {3: "OSError: full", 1: "ValueError"}


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (
            mpishare.CudaError("full", call="cuMemAlloc", code=2, name="OUT_OF_MEMORY"),
            {"call": "cuMemAlloc", "code": 2, "name": "OUT_OF_MEMORY"},
        ),
        (
            mpishare.PeerError("two failed", failures=MappingProxyType(FAILED)),
            {"ranks": (1, 3), "failures": FAILED},
        ),
        (mpishare.MismatchError("differs", failures={1: "gives 2"}), {"ranks": (1,)}),
        (
            mpishare.PeerTimeout("late", ranks=[2, 0], timeout_s=1.5, where={2: "in a.py:1"}),
            {"ranks": (0, 2), "timeout_s": 1.5, "where": {2: "in a.py:1"}},
        ),
        (mpishare.HandleError("of another job"), {}),
    ],
    ids=str,
)
def test_errors_have_facts_and_reach_other_processes(error, facts):
    """An exception that cannot be unpickled breaks the pool of processes that it comes from."""
    assert {name: getattr(error, name) for name in facts} == facts
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_an_exception_whose_text_raises_is_told():
    class UntoldError(Exception):
        def __str__(self):
            raise RuntimeError

    assert describe(UntoldError()) == "UntoldError: (its text raised RuntimeError)"
