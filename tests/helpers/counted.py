"""Fields that kernels write and check, so that the host need not look between the steps."""

import numpy as np

_EVERY = r"""
extern "C" {
__global__ void next(long long* step) { ++*step; }
__global__ void idle(long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles) {}
}
}
"""


class Counted:
    """A step and a count of errors on the GPU, and the kernels of a test, which use both."""

    def __init__(self, source, *names, options=()):
        import cupy

        self.step, self.errors = cupy.ones(1, "i8"), cupy.zeros(1, "u8")
        module = cupy.RawModule(code=source + _EVERY, options=options)
        # Loaded before anything waits.
        for name in (*names, "next", "idle"):
            setattr(self, f"_{name}", module.get_function(name))
        self.idle(1)
        self.go_on()

    def forget(self):
        """Begin anew, once each kernel has run."""
        import cupy

        cupy.cuda.get_current_stream().synchronize()
        self.step.fill(1)
        self.errors.fill(0)
        cupy.cuda.get_current_stream().synchronize()

    def go_on(self):
        self._next((1,), (1,), (self.step,))

    def idle(self, microseconds):
        self._idle((1,), (1,), (np.int64(1500 * microseconds),))

    def is_right_after(self, steps):
        """Whether so many steps were made, and nothing was wrong in any of them."""
        return (int(self.step[0]), int(self.errors[0])) == (steps + 1, 0)
