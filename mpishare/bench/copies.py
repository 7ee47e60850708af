"""Copies of cells on a rank: what packs and unpacks around messages, as one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpishare.bench.session import Session, do_nothing

Copies = Sequence[tuple[Any, Any]]
"""Pairs of target and source, as views that were made once."""

_BLOCK = 256
#: Thread blocks per pair: enough of them to fill a GPU; larger pairs loop.
_MAX_BLOCKS = 1024
_AXES = 4


def copy(copies: Copies) -> None:
    for target, source in copies:
        np.copyto(target, source)


def copy_all(session: Session, copies: Copies) -> Callable[[], None]:
    """Return the call that makes these copies: on CUDA one kernel, stream-ordered. Local.

    It holds the arrays. On CUDA all have cells of one size, 8 or 16 bytes.
    """
    copies = [pair for pair in copies if pair[0].size]
    if not session.on_cuda:
        return partial(copy, copies)
    if not copies:
        return do_nothing
    xp, (cell_nbytes,) = session.node.xp, {array.itemsize for pair in copies for array in pair}
    module = xp.RawModule(code=Path(__file__).with_suffix(".cu").read_text())
    rows = [box_row(int(to.data.ptr), int(source.data.ptr), to, source) for to, source in copies]
    boxes = xp.asarray(np.array(rows, "i8"))
    blocks = min(-(-max(int(to.size) for to, _ in copies) // _BLOCK), _MAX_BLOCKS)
    kernel = module.get_function(f"copy{cell_nbytes}")
    launch = (blocks, len(copies)), (_BLOCK,), (boxes,)

    def run(_held: Copies = copies) -> None:
        kernel(*launch)  # which has addresses only

    # Load the kernel now: loading it later would wait for whatever the stream waits for.
    run()
    session.synchronize()
    return run


def box_row(to: int, source: int, target: Any, other: Any) -> list[int]:
    """Return a box as the kernel reads it: two addresses, extents, steps of both in bytes.

    Its last axis is that along which the target is contiguous, so that threads that are neighbors
    store to neighbors; axes that both have in one piece are one.
    """
    axes: list[tuple[int, int, int]] = []
    strides = zip(target.shape, target.strides, other.strides, strict=True)
    for n, to_step, step in sorted(strides, key=lambda axis: -axis[1]):
        if axes and axes[-1][1:] == (n * to_step, n * step):
            axes[-1] = axes[-1][0] * n, to_step, step
        elif n > 1:
            axes.append((n, to_step, step))
    if len(axes) > _AXES or prod(target.shape) >= 1 << 31:
        raise ValueError(f"a box of shape {target.shape} is more than the kernel copies")
    axes = [(1, 0, 0)] * (_AXES - len(axes)) + axes
    return [to, source, *(number for numbers in zip(*axes, strict=True) for number in numbers)]
