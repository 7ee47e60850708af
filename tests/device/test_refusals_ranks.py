"""Windows inside kernels are refused where there are none, with the remedy, on all ranks."""

import numpy as np
import pytest

from mpishare import MismatchError, UnsupportedError
from tests.helpers.windows import values_of


def test_the_host_has_no_kernels(node):
    with node.allocate_each(4, fill=node.rank, signals=8) as window:
        assert values_of(window.array).sum() == 4 * node.rank
        if node.backend == "cuda":
            assert window.device["rank"] == node.rank
            return
        with pytest.raises(UnsupportedError, match=r"host backend has no kernels.*fence\(\)"):
            _ = window.device
        with pytest.raises(UnsupportedError, match=r"Node\.launch failed: the host backend"):
            node.launch(None, (1,), (1,), ())


def test_a_window_without_signals_has_no_device(node):
    for make in (node.allocate, node.allocate_each):
        with make(4) as window, pytest.raises(UnsupportedError, match=r"allocate_each|fence\(\)"):
            _ = window.device


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None, "8"])
def test_signals_must_be_a_number(node, wrong):
    with pytest.raises(ValueError, match="is not a number of signals: give an int"):
        node.allocate_each(4, signals=wrong)
    node.barrier()


def test_numpys_integers_are_numbers(node):
    node.allocate_each(4, signals=np.int64(2)).close()


@pytest.mark.ranks(min=2)
def test_signals_must_be_the_same_on_all_ranks(node):
    with pytest.raises(MismatchError, match="signals=1"):
        node.allocate_each(4, signals=1 + (node.rank == 1))
