"""The transposes of mpi4py-fft by mpishare: `use(node)` before the first `PFFT` or `DistArray`."""

import numpy as np
from mpi4py import MPI
from mpi4py_fft import pencil

import mpishare

#: The plans of a communicator, kept with it: each `DistArray.redistribute` makes a `Transfer`.
PLANS = MPI.Comm.Create_keyval()
messages = pencil.Transfer


def use(node, after=8):
    """Let transfers made from now on move arrays in the memory of `node`; None: messages.

    A plan takes milliseconds to make: in host memory that many moves of a kind are messages first.
    """
    Transfer.node = node
    Transfer.after = after if node and node.backend == "host" else 0
    pencil.Transfer = messages if node is None else Transfer


class Transfer(messages):
    """A `Transfer` of arrays of NumPy on a node of the host, of CuPy's on one with GPUs."""

    node, after = None, 0

    def __init__(self, comm, shape, dtype, subshape_a, axis_a, subshape_b, axis_b):
        super().__init__(comm, shape, dtype, subshape_a, axis_a, subshape_b, axis_b)
        self.node = Transfer.node  # `use` is for transfers that are made after it
        self._key = self.shape, self.dtype.char, axis_a, axis_b, self.node

    def forward(self, array_a, array_b):
        """Move this rank's part, cut along `axisB`, to the one cut along `axisA`."""
        self._move("forward", array_a, array_b)

    def backward(self, array_b, array_a):
        """Move it back."""
        self._move("backward", array_b, array_a)

    def _move(self, way, given, out):
        is_host = isinstance(given, np.ndarray)
        is_movable = self.dtype.itemsize <= 16 and is_host == (self.node.backend == "host")
        plan = self._plan() if is_movable else None
        if plan is None:
            getattr(super(), way)(given, out)
        elif is_host:  # a `DistArray` is a subclass, and costs mpishare a closer look
            getattr(plan, way)(np.asarray(given), np.asarray(out))
        else:
            getattr(plan, way)(given, out)

    def _plan(self):
        """Return the plan, the same on all ranks; None for the first calls."""
        plans = self.comm.Get_attr(PLANS)
        if plans is None:
            self.comm.Set_attr(PLANS, plans := {})
        plan = plans.get(self._key, self.after)  # or how many calls are still messages
        if isinstance(plan, int):
            plan = plan - 1 if plan else self._make()
            plans[self._key] = plan
        return None if isinstance(plan, int) else plan

    def _make(self):
        cut = self.axisB, self.axisA
        return mpishare.Redistribute(self.comm, self.shape, *cut, self.dtype, node=self.node)
