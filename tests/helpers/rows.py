"""Fields of four rows on a periodic ring of ranks: a ghost, two owned, a ghost."""

import numpy as np


def values(field, rank, row, step):
    """What tells rank, row, place and step, made by NumPy, which compiles nothing."""
    numbers = np.arange(field.shape[1]) * 7 + 31 * rank + 3 * row + 101 * step
    return (numbers % 2039 if field.dtype.kind == "f" else numbers).astype(field.dtype)


def fill(xp, field, rank, step):
    """Write the owned rows, and ghosts that are none."""
    ghost = np.full(field.shape[1], 99, field.dtype)
    mine = [values(field, rank, row, step) for row in (1, 2)]
    field[...] = xp.asarray(np.stack([ghost, *mine, ghost]))


def wrong(field, rank, size, step):
    """How many ghosts are not what the neighbors filled."""
    found = field.copy().get()
    low = values(field, (rank - 1) % size, 2, step)
    high = values(field, (rank + 1) % size, 1, step)
    return int((found[0] != low).sum()) + int((found[3] != high).sum())
