"""A function captured into CUDA graphs: called like the function, by one launch."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, SupportsIndex, TypeVar, overload

from mpishare.errors import closed
from mpishare.graphs.runs import Runs, Work
from mpishare.node import require_node
from mpishare.runtime.context import NodeObject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.node import Node


P = ParamSpec("P")
R = TypeVar("R")


class Step(NodeObject, Generic[P, R]):
    """A function that runs as a CUDA graph; `capture` makes it.

    Attributes
    ----------
    iterations : array or None
        One int64: the runs of the function in the last call with ``until``. On CUDA in GPU memory
        and stream-ordered, so that ``int(step.iterations[0])`` waits for the call. None for a step
        without ``until``.
    """

    _closes_first = True  # its graphs use plans and windows
    _is_local = True

    def __init__(
        self,
        node: Node,
        function: Callable[P, R],
        until: Callable[..., Any] | None,
        at_most: SupportsIndex | None,
    ) -> None:
        require_node("capture", node)
        if not callable(function):
            raise TypeError(f"capture failed: {function!r} cannot be called")
        name = self.name = f"capture({_name_of(function)})"
        if until is not None and not callable(until):
            raise TypeError(
                f"{name} failed: until={until!r} cannot be called: give a function of the same "
                "arguments, until=lambda *_: flag"
            )
        if (until is None) != (at_most is None):
            raise TypeError(
                f"{name} failed: until= and at_most= go together: the most runs of a call, since a "
                "GPU cannot be interrupted"
            )
        try:
            count = 1 if at_most is None else operator.index(at_most)
        except TypeError:
            raise TypeError(f"{name} failed: at_most must be an int, not {at_most!r}") from None
        if count < 1:
            raise ValueError(f"{name} failed: at_most={at_most} is less than 1")
        context = self._context = node._context
        context.agreement.check()
        context.note_dropped()
        kind = Runs
        if node.backend == "cuda":
            from mpishare.graphs.cuda import CudaRuns

            kind = CudaRuns
        self._runs = kind(context, name, Work(function, until, count))
        self._run = self._runs.bind()
        context.register(self)

    @property
    def iterations(self) -> Any:
        """The runs of the function in the last call with ``until``: an array of one int64."""
        return self._runs.iterations

    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> R:
        """Run the function on these arguments.

        Stream-ordered on CUDA, on the current stream of the library that the arguments come from;
        the first call with new arguments runs the function, the second captures it. On the host
        backend it calls the function.

        Parameters
        ----------
        *arguments
            Arrays in GPU memory, tuples and lists of them, and hashable values. A graph is kept
            for each of the last 64 combinations of addresses, layouts and values.

        Returns
        -------
        object
            The result of the function: None, or arrays, in tuples, lists or dicts. Arrays that the
            function made are in the same memory at every replay.

        Raises
        ------
        UnsupportedError
            If the function cannot be captured; nothing was enqueued.
        TypeError
            If an argument cannot be hashed, or is given by its name, or the result is not arrays.
        ClosedError
            If the step, the node, or a plan that the graph uses is closed.
        PeerError, PeerTimeout
            If a rank is gone.
        """
        if keywords:
            raise TypeError(f"{self.name} failed: its arguments have no names: {[*keywords]}")
        return self._run(arguments)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Destroy the graphs and free their memory.

        Local; if the function allocates, host-blocking until the GPU has done its enqueued work.
        Closing twice has no effect. The node closes it too, and a step without references at the
        next `capture`, or when an object of the node is next made or closed.
        """
        if not self._is_closed:
            self._abandon()
            self._runs.close()

    def _abandon(self) -> None:
        self._is_closed = True
        self._run = self._refuse
        self._context.unregister(self)

    def _is_over(self) -> bool:
        return self._runs.is_over()

    def _refuse(self, _: Sequence[Any]) -> Any:
        self._context.agreement.check()
        raise closed(self.name)

    def __repr__(self) -> str:
        return f"<mpishare.{self.name}{self._state()}>"


@overload
def capture(node: Node, function: Callable[P, R]) -> Step[P, R]: ...
@overload
def capture(
    node: Node,
    function: Callable[P, R],
    *,
    until: Callable[..., Any] | None,
    at_most: SupportsIndex | None,
) -> Step[P, R]: ...
def capture(
    node: Node,
    function: Callable[P, R],
    *,
    until: Callable[..., Any] | None = None,
    at_most: SupportsIndex | None = None,
) -> Step[P, R]:
    """Make a function run as one CUDA graph: exchanges, kernels and all, in one launch.

    Local, without communication. The step is called in the function's place, on all ranks as the
    function would be.

    Parameters
    ----------
    node : Node
        Its backend decides. On the host backend the function is called.
    function : callable
        Takes arrays, puts work on the current stream, and never waits for it. It is run by Python
        twice for each combination of arguments; afterwards its work is enqueued again, and no
        Python of it runs. Values that change from call to call must therefore be arguments, or
        stand in arrays: other arrays and numbers are baked in.
    until : callable, optional
        Takes the same arguments after each run of the function, and returns an array of one
        boolean or integer; the function runs again on the same arguments until that is not 0. On
        CUDA this loop is in the graph; if it cannot be, a warning gives the reason, and the host
        checks after each run. The result must be the same on all ranks that exchange, as that of
        an `Allreduce` is.
    at_most : int, optional
        The most runs of a call; with `until`, and then always.

    Returns
    -------
    Step
        Callable, with `close()` and `iterations`.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.

    Notes
    -----
    Memory that the function allocates from CuPy or PyTorch belongs to the step. Calls that need
    the host cannot be captured and are refused by name: routes ``mpi`` and ``pinned``, windows,
    events and channels, and all calls that wait for the GPU.

    Examples
    --------
    >>> step = mpishare.capture(node, advance)
    >>> for _ in range(1000):
    ...     step(u, v)
    ...     u, v = v, u
    """
    return Step(node, function, until, at_most)


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
