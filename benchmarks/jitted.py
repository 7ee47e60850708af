"""``jax``: an exchange in each of a hundred steps of one compiled program.

A step adds to each cell of a block its neighbors along the first axis. XLA runs *loop*, a
plain `scan`, with a call of Python for each exchange. On a GPU it can record steps in a command
buffer and replay them without Python: *recorded* is the same loop with the option for that, and
*unrolled*, ten steps at a time, has enough in a row to be recorded without. All three write the
new cells into the old block, for which XLA copies them out first; *padded* is unrolled too, and
pads them to a new block, in one kernel. Beside them the same programs without the exchange, the
exchange alone as it is called without JAX. Times are of one step.

What arrives is compared with the same steps on the whole, with `jax.numpy.pad` for the exchange.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import mpishare
from mpishare.bench.cases import Case
from mpishare.bench.check import Tally
from mpishare.bench.comparison import Comparison, Variant
from mpishare.bench.session import Session

Step = Callable[[Any], Any]


_STEPS = 100
_ROWS = 8  # of each rank, each as large as a face
_ENDS = ((1, 1), (0, 0))  # a row before and one behind


class _Form(NamedTuple):
    """How the program of a hundred steps is written."""

    unroll: int = 1
    is_padded: bool = False
    options: tuple[tuple[str, int], ...] = ()  # of XLA


_FORMS = {
    "loop": _Form(),
    "recorded": _Form(options=(("xla_gpu_graph_min_graph_size", 1),)),
    "unrolled": _Form(10),
    "padded": _Form(10, is_padded=True),
}


def run(session: Session, case: Case) -> None:
    jax, unfit = session.attempt(partial(_import_jax, session))
    for nbytes in session.sizes(case, _ROWS + 2):
        problem = _Problem(session, jax, nbytes)
        comparison = Comparison(
            session,
            case,
            nbytes=nbytes,
            sent_nbytes=2 * nbytes,
            unfit=unfit,
            clocks=("throughput",),
        )
        against = ("exchange called",)
        for name, form in _FORMS.items():
            comparison.add(name, partial(_Jitted, problem, problem.exchange, form), against=against)
        for name, form in _FORMS.items():
            comparison.add_baseline("alone", partial(_Jitted, problem, None, form), f"{name} alone")
        comparison.add_baseline("called", partial(_Called, problem), "exchange called")
        comparison.run()
        problem.close()


def _import_jax(session: Session) -> Any:
    """Return JAX, which computes where the node shares memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
    except ImportError as error:
        raise mpishare.UnsupportedError(f"jax cannot be imported: {error}") from error
    device = session.node.device
    if device is None:
        jax.config.update("jax_platforms", "cpu")
        return jax
    try:
        jax.config.update("jax_default_device", jax.devices("cuda")[device.ordinal])
    except RuntimeError as error:
        raise mpishare.UnsupportedError(f"JAX has no GPU: {error}") from error
    # To find its GPUs JAX makes another one the current one.
    session.node.xp.cuda.Device(device.ordinal).use()
    return jax


class _Problem:
    """The ring of blocks, and what a program must make of it. Collective."""

    def __init__(self, session: Session, jax: Any, nbytes: int) -> None:
        self.session, self.jax = session, jax
        self.comm, node = session.comm, session.node
        self.shape = _ROWS + 2, nbytes // 4
        like, ring = mpishare.Layout(self.shape, "u4"), (self.comm.size,)
        self.halo = mpishare.HaloExchange(
            self.comm, like, 1, axes=(0,), dims=ring, periods=True, node=node
        )
        first = _ROWS * self.comm.rank
        self._mine = slice(first, first + _ROWS)

    def exchange(self, u: Any) -> Any:
        from mpishare.jax import exchange

        return exchange(self.halo, u)

    def block(self, token: int) -> Any:
        """Return this rank's block at the start; wrong ghosts are in it."""
        return np.pad(self._whole(token)[self._mine], _ENDS)

    def is_right(self, u: Any, token: int, steps: int, *, is_exchanged: bool) -> bool:
        """Whether a block is what so many steps make of that start, with or without exchange."""
        whole = self._whole(token)
        start, mine = (whole, self._mine) if is_exchanged else (whole[self._mine], slice(None))
        right = self._reference(start, steps, is_exchanged=is_exchanged)
        return np.array_equal(np.asarray(right)[mine], np.asarray(u)[1:-1])

    @functools.cached_property
    def _reference(self) -> Callable[..., Any]:
        """The same steps on the whole, or on a block whose ghosts stay wrong."""
        jnp, lax = self.jax.numpy, self.jax.lax

        def reference(start: Any, steps: int, *, is_exchanged: bool) -> Any:
            def step(_: int, u: Any) -> Any:
                padded = jnp.pad(u, _ENDS, mode="wrap" if is_exchanged else "constant")
                return padded[:-2] + padded[1:-1] + padded[2:]

            return lax.fori_loop(0, steps, step, start)

        return self.jax.jit(reference, static_argnames="is_exchanged")  # type: ignore[no-any-return]

    def has_ghosts(self, u: Any, token: int) -> bool:
        """Whether the ghosts of a block are the rows of that start beside it."""
        whole = self._whole(token)
        ends = whole[self._mine.start - 1], whole[self._mine.stop % len(whole)]
        found = u if isinstance(u, np.ndarray) else u.get()
        return np.array_equal(found[[0, -1]], np.stack(ends))

    def _whole(self, token: int) -> Any:
        shape = _ROWS * self.comm.size, self.shape[1]
        return np.random.default_rng(token).integers(1 << 32, size=shape, dtype="u4")

    def close(self) -> None:
        """Close the plan, once JAX has forgotten the programs that hold it. Collective."""
        if self.jax is not None:
            self.jax.clear_caches()
        self.halo.close()


class _Jitted(Variant):
    """A program of a hundred steps, with or without an exchange in each."""

    steps = _STEPS
    _u: Any  # this rank's block
    _programs: int  # since the start

    def __init__(self, problem: _Problem, exchange: Step | None, form: _Form) -> None:
        self.problem, self.check = problem, Tally(np)
        self._is_exchanged = exchange is not None
        jax = problem.jax

        def step(u: Any, _: Any) -> tuple[Any, None]:
            u = u if exchange is None else exchange(u)
            cells = u[:-2] + u[1:-1] + u[2:]
            return jax.numpy.pad(cells, _ENDS) if form.is_padded else u.at[1:-1].set(cells), None

        def program(u: Any) -> Any:
            return jax.lax.scan(step, u, None, length=_STEPS, unroll=form.unroll)[0]

        self._run = jax.jit(program, donate_argnums=0, compiler_options=dict(form.options))
        self._wait = jax.block_until_ready
        self.fill(0)

    def step(self) -> None:
        self._u = self._wait(self._run(self._u))
        self._programs += 1

    def fill(self, token: int) -> None:
        self._u = self.problem.jax.numpy.asarray(self.problem.block(token))
        self._programs = 0

    def verify(self, token: int) -> None:
        steps, is_exchanged = self._programs * _STEPS, self._is_exchanged
        self.check.add(not self.problem.is_right(self._u, token, steps, is_exchanged=is_exchanged))


class _Called(Variant):
    """As many exchanges, called one after the other without JAX, and nothing between them."""

    steps = _STEPS

    def __init__(self, problem: _Problem) -> None:
        self.problem, self.check = problem, Tally(np)
        self.fill(0)

    def step(self) -> None:
        exchange, u = self.problem.halo.exchange, self._u
        for _ in range(_STEPS):
            exchange(u)
        self.problem.session.synchronize()

    def fill(self, token: int) -> None:
        self._u = self.problem.session.node.xp.asarray(self.problem.block(token))

    def verify(self, token: int) -> None:
        self.check.add(not self.problem.has_ghosts(self._u, token))
