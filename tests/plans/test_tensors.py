"""Which tensors a replay takes as they are, tested in host memory: its device has number -1."""

import numpy as np
import pytest

from mpishare.plans.gpu.tensors import TensorAddresses
from mpishare.plans.layout import FieldLayout

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def layout(shape, dtype, strides=None):
    like = np.empty([max(extent, 1) for extent in shape], dtype)
    return FieldLayout(shape, strides or like.strides, like.dtype, -1)


def test_addresses_are_those_at_the_call():
    addresses = TensorAddresses([layout((4, 8), "f8"), layout((0, 5), "f4")])
    full, empty = torch.zeros(4, 8, dtype=torch.float64), torch.zeros(0, 5)
    before = full.data_ptr(), empty.data_ptr()
    assert addresses.of([full, empty]) == before
    full.set_(torch.ones(4, 8, dtype=torch.float64))
    assert addresses.of([full, empty]) == (full.data_ptr(), empty.data_ptr()) != before
    assert addresses.of([full, torch.zeros(5, 0).T]) is not None  # an empty one has any strides


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(8, 4, dtype=torch.float64),
        lambda: torch.zeros(8, 4, dtype=torch.float64).T,
        lambda: torch.zeros(4, 8),
        # NumPy has no such dtypes, and None equals float64.
        lambda: torch.zeros(4, 8, dtype=torch.float8_e4m3fnuz),
        lambda: torch.zeros(4, 8, dtype=torch.float64).to_sparse(),
        lambda: torch.zeros(4, 8, dtype=torch.float64, requires_grad=True),
        lambda: torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.float64)),
        lambda: torch.zeros(4, 8, dtype=torch.complex128).conj().imag,
        lambda: np.zeros((4, 8)),
        lambda: None,
    ],
)
def test_others_need_the_slow_path(make):
    assert TensorAddresses([layout((4, 8), "f8")]).of([make()]) is None


def test_complex_ones():
    addresses = TensorAddresses([layout((6,), "c8")])
    tensor = torch.zeros(6, dtype=torch.complex64)
    assert addresses.of([tensor]) == (tensor.data_ptr(),)
    assert addresses.of([tensor.conj()]) is None
    assert addresses.of([tensor, tensor]) is None
    # No tensor has strides that are no multiple of its element.
    assert TensorAddresses([layout((6,), "c8", (12,))]).of([tensor]) is None
    assert TensorAddresses([]).of([tensor]) is None
