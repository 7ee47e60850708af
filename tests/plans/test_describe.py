"""The form by which a call is known again, which C makes of what it is given."""

import numpy as np
import pytest

from mpishare.native import load

describe = getattr(load()[0], "describe", None)
pytestmark = pytest.mark.skipif(describe is None, reason="the compiled part is not built")


def test_ints_alone_may_differ():
    x, y, n = np.zeros(3), np.zeros((2, 2)), np.zeros((), "i8")
    key, arrays, ints = describe(("start", [x, y], {(0, 1): (3, n), 1: (x, 5)}, None))
    assert [*map(id, arrays)] == [*map(id, (x, y, n, x))]
    assert ints == (3, 5)
    assert describe(("start", [x, y], {(0, 1): (4, n), 1: (x, 6)}, None))[0] == key
    others = (
        ("wait", [x, y], {(0, 1): (3, n), 1: (x, 5)}, None),
        ("start", (x, y), {(0, 1): (3, n), 1: (x, 5)}, None),
        ("start", [y, x], {(0, 1): (3, n), 1: (x, 5)}, None),
        ("start", [x, y], {(0, 2): (3, n), 1: (x, 5)}, None),
        ("start", [x, y], {1: (3, n), (0, 1): (x, 5)}, None),
        ("start", [x, y], {(0, 1): (3, 3), 1: (x, 5)}, None),
        ("start", [x, y], {(0, 1): (3, n), 1: (x, None)}, None),
        ("start", [x, y.reshape(4)], {(0, 1): (3, n), 1: (x, 5)}, None),
    )
    assert len({key, *(describe(each)[0] for each in others)}) == 1 + len(others)


def test_what_is_no_call():
    assert describe(("start", [object()])) is None
    endless = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        describe(endless)
    with pytest.raises(ZeroDivisionError):
        describe([type("Wrong", (), {"shape": property(lambda _: 1 // 0)})()])
