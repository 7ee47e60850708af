"""The nodes of captured graphs: those of the host, those of NCCL, and kernels that nothing follows.

By ctypes, since cuda.bindings takes edges in another way from CUDA 13 on.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from typing import TYPE_CHECKING

from mpishare.backends.driver import Step, error, is_capturing
from mpishare.backends.presence import library

if TYPE_CHECKING:
    from collections.abc import Collection

    from mpishare.backends.driver import Enqueued, Launch

_HOST, _WAIT, _RECORD = 3, 6, 7
_EVENT_OF = {_WAIT: "cuGraphEventWaitNodeGetEvent", _RECORD: "cuGraphEventRecordNodeGetEvent"}


def _call(name: str, *arguments: object) -> None:
    if code := getattr(library(), name)(*arguments):
        raise error(name, code, "a graph")


def _list(name: str, owner: int) -> list[int]:
    """Return the nodes that a function of the driver lists."""
    count = c_size_t(0)
    _call(name, c_void_p(owner), None, byref(count))
    found = (c_void_p * count.value)()
    if found:
        _call(name, c_void_p(owner), found, byref(count))
    return [*found]


def _kind_of(node: int) -> int:
    kind = c_int(-1)
    _call("cuGraphNodeGetType", c_void_p(node), byref(kind))
    return kind.value


def _events(graph: int) -> list[tuple[int, int]]:
    """Return the nodes that record events or wait for them, with the events."""
    found, event = [], c_void_p()
    for node in _list("cuGraphGetNodes", graph):
        if name := _EVENT_OF.get(_kind_of(node)):
            _call(name, c_void_p(node), byref(event))
            found.append((node, event.value or 0))
    return found


def events_of(graph: int) -> set[int]:
    """Return the events that a graph records or waits for."""
    return {event for _, event in _events(graph)}


def remove_events(graph: int, events: Collection[int]) -> bool:
    """Remove the nodes of some events from a graph; what they ordered stays ordered.

    By these NCCL orders the graphs of a communicator, whoever launches them. Ours are in order
    anyway, are faster without them, and no loop may have them. Not where the graph has functions of
    the host, as for messages over a network, which NCCL orders, too: then return False.
    """
    if _HOST in map(_kind_of, _list("cuGraphGetNodes", graph)):
        return False
    for node, event in _events(graph):
        if event in events:
            for before in _list("cuGraphNodeGetDependencies", node):
                for after in _list("cuGraphNodeGetDependentNodes", node):
                    if before not in _list("cuGraphNodeGetDependencies", after):
                        ends = byref(c_void_p(before)), byref(c_void_p(after))
                        _call("cuGraphAddDependencies", c_void_p(graph), *ends, c_size_t(1))
            _call("cuGraphDestroyNode", c_void_p(node))
    return True


class _Parameters(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v1``."""

    _fields_ = (
        ("function", c_void_p),
        ("sizes", c_uint * 7),  # of the grid, of a block, of its shared memory
        ("arguments", c_void_p),
        ("extra", c_void_p),
    )


class Asides:
    """Launches that may be aside in a program's captures, where later ones do not wait for them.

    Those aside follow each other. Outside of captures they are launches as others, and in those on
    the stream `own`: graphs of a call alone, which nodes aside would slow down.
    """

    def __init__(self) -> None:
        self.own = 0
        self._last = 0, 0  # the capture and its last node aside

    def of(self, launch: Launch, *, is_aside: bool) -> Enqueued:
        """Return what enqueues one of them."""
        return Step(partial(self._add if is_aside else self._join, launch))

    def _join(self, launch: Launch, stream: int) -> None:
        """Enqueue a launch as others, behind the last one aside."""
        if self._last[1] and self._last[0] == _capture_of(stream)[0]:
            last = byref(c_void_p(self._last[1]))
            _call("cuStreamUpdateCaptureDependencies", c_void_p(stream), last, c_size_t(1), 0)
        launch.enqueue(stream)

    def _add(self, launch: Launch, stream: int) -> None:
        if stream == self.own or not is_capturing(stream):
            launch.enqueue(stream)
            return
        capture, graph, before = _capture_of(stream)
        if self._last[0] == capture:
            before.add(self._last[1])
        function, *sizes = launch.shape
        parameters = _Parameters(function, (c_uint * 7)(*sizes), launch.places, None)
        node, ends = c_void_p(), (c_void_p * len(before))(*before)
        added = c_void_p(graph), ends, c_size_t(len(before)), byref(parameters)
        _call("cuGraphAddKernelNode", byref(node), *added)
        self._last = capture, node.value or 0


def _capture_of(stream: int) -> tuple[int, int, set[int]]:
    """Return the number of a stream's capture, 0 for none, its graph, and its last nodes there."""
    status, number, graph, nodes = c_int(), c_uint64(), c_void_p(), c_void_p()
    count = c_size_t()
    found = byref(status), byref(number), byref(graph), byref(nodes), byref(count)
    _call("cuStreamGetCaptureInfo_v2", c_void_p(stream), *found)
    last = {*(c_void_p * count.value).from_address(nodes.value)} if nodes.value else set()
    return number.value, graph.value or 0, last
