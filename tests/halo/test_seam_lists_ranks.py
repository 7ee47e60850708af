"""The lists of mpishare.seams, beside grids that are laid out whole, or by points in space."""

from itertools import product

import numpy as np
import pytest

from mpishare import SeamExchange, seams
from tests.helpers.halos import on_host


def owners_of(node, *shape):
    """Blocks to ranks, one after the other, a few to one."""
    return np.arange(int(np.prod(shape))).reshape(shape) * 7 // 2 % node.size


def blocks_of(node, grids):
    """The face and the place of each of this rank's blocks."""
    places = [(f, at) for f, grid in enumerate(grids) for at in np.ndindex(grid.shape)]
    return [(f, at) for f, at in places if grids[f][at] == node.rank]


def exchanged(node, fields, listed):
    given = [node.xp.asarray(each) for each in fields]
    with SeamExchange(node.comm, given, listed, node=node, backend=node.backend) as plan:
        plan.exchange(*given)
    return [on_host(each) for each in given]


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("periods", [False, True, (False, True)])
def test_blocks_are_those_of_a_grid(node, corners, periods):
    owners, (ny, nx) = owners_of(node, 3, 4), (3, 2)
    wraps = (periods, periods) if isinstance(periods, bool) else periods
    whole = np.arange(1.0, 1 + 3 * ny * 4 * nx).reshape(3 * ny, 4 * nx)
    for axis, wrap in enumerate(wraps):
        pad = [(0, 0), (0, 0)]
        pad[axis] = (2, 1)
        whole = np.pad(whole, pad, "wrap" if wrap else "constant")
    mine = blocks_of(node, [owners])
    right, fields = [], []
    for _, (row, column) in mine:
        block = whole[row * ny : (row + 1) * ny + 3, column * nx : (column + 1) * nx + 3].copy()
        field = np.zeros_like(block)
        field[2:-1, 2:-1] = block[2:-1, 2:-1]
        if not corners:
            for y, x in product((np.s_[:2], np.s_[-1:]), repeat=2):
                block[y, x] = 0
        for each in (1, -1):  # two components
            right.append(each * block)
            fields.append(each * field)
    given = {"periods": periods, "corners": corners, "components": 2}
    listed = seams.blocks(owners, [(2, 1), (2, 1)], node.rank, **given)
    for found, expected in zip(exchanged(node, fields, listed), right, strict=True):
        assert (found == expected).all()


# The six faces of NDSL on the unit cube: the corner at which both axes begin, and the axes; their
# cross product points outwards. Its sides meet as the numbers of faces say.
FACES = (
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    ((1, 1, 0), (-1, 0, 0), (0, 0, 1)),
    ((1, 1, 1), (-1, 0, 0), (0, -1, 0)),
    ((0, 1, 1), (0, 0, -1), (0, -1, 0)),
    ((0, 0, 1), (0, 0, -1), (1, 0, 0)),
    ((0, 0, 0), (0, 1, 0), (1, 0, 0)),
)
CELLS, WIDTH = 4, 2  # of a block along each axis; a face has 2 x 2 blocks


def point(face, i, j):
    """Where a cell of a face is, and a constant vector along its axes: beyond one side rolled down.

    None beyond two sides.
    """
    origin, *axes = map(np.array, FACES[face])
    down, most = -np.cross(*axes), 2 * CELLS
    found, along = most * origin, [*axes]
    for axis, at in enumerate((i, j)):
        beyond = max(-at, at + 1 - most, 0)
        found = found + axes[axis] * min(max(at + 0.5, 0), most)
        if beyond:
            found = found + down * (beyond - 0.5)
            along[axis] = down if at > 0 else -down
    is_vertex = all(not 0 <= at < most for at in (i, j))
    return None if is_vertex else (found, [each @ (1, 10, 100) for each in along])


def fields_of_face(face, block, corners):
    """Position, and both components of the vector, of the cells of a block; 7 where none is due."""
    n = CELLS + 2 * WIDTH
    found = np.full((3, n, n, 2), 7.0)
    for y, x in product(range(n), repeat=2):
        at = [b * CELLS + each - WIDTH for b, each in zip(block, (y, x), strict=True)]
        is_corner = all(not WIDTH <= each < WIDTH + CELLS for each in (y, x))
        known = point(face, *at)
        if known is not None and (corners or not is_corner):
            found[0, y, x] = known[0] @ (1, 100, 10000)
            found[1:, y, x] = np.array(known[1])[:, None]
    return found


@pytest.mark.parametrize("corners", [False, True])
def test_a_cubed_sphere_is_a_cube(node, corners):
    """Each ghost is the cell across the edge, with levels behind, and the vector rolled over it."""
    grids = owners_of(node, 6, 2, 2)
    right, fields = [], []
    for face, block in blocks_of(node, grids):
        right += [*fields_of_face(face, block, corners)]
    for each in right:
        fields.append(np.full_like(each, 7.0))
        inner = np.s_[WIDTH:-WIDTH, WIDTH:-WIDTH]
        fields[-1][inner] = each[inner]
    given = {"corners": corners, "components": 3, "vectors": [(1, 2)]}
    listed = seams.cubed_sphere(grids, WIDTH, node.rank, **given)
    for number, found in enumerate(exchanged(node, fields, listed)):
        assert (found == right[number]).all(), number


def test_faces_have_walls_and_refuse_what_does_not_fit(node):
    owners = [np.zeros((1, 2), int), np.zeros((2, 1), int)]
    low = (0, (0, -1))
    assert seams.faces(owners, {}, 1, 0)
    with pytest.raises(ValueError, match="other numbers of blocks"):
        seams.faces(owners, {low: (1, (0, 1), False)}, 1, 0)
    fits = {low: (1, (1, 1), True)}
    assert len(seams.faces(owners, fits, 1, 0)) == len(seams.faces(owners, {}, 1, 0)) + 4
    with pytest.raises(ValueError, match="is joined to"):
        seams.faces(owners, {**fits, (1, (1, 1)): (0, (0, 1), True)}, 1, 0)


ONE = [[[0, 0]]]
WRONG = {
    "width must be": lambda: seams.faces(ONE, {}, (1, 1), 0),
    "width must be an int": lambda: seams.tripolar([0], 4, -1, 0),
    "owners must be an array of ranks": lambda: seams.blocks([0.5, 1.0], 1, 0),
    "of ranks with 2 axes": lambda: seams.faces([[0, 0]], {}, 1, 0),
    r"no face has a side \(1,": lambda: seams.faces(ONE, {(0, (0, 1)): (1, (0, -1), True)}, 1, 0),
    r"a side \(0, \(0, 2\)\)": lambda: seams.faces(ONE, {(0, (0, 2)): (0, (0, -1), True)}, 1, 0),
    "no pair of 2 components": lambda: seams.faces(ONE, {}, 1, 0, components=2, vectors=[(0, 2)]),
    "six faces, and owners has 7": lambda: seams.cubed_sphere(7 * [[[0]]], 1, 0),
    "ranks must be different": lambda: seams.tripolar([0, 0], 4, 1, 0),
}


@pytest.mark.parametrize("why", WRONG)
def test_lists_that_cannot_be(why):
    with pytest.raises(ValueError, match=why):
        WRONG[why]()


def test_without_ghosts_there_are_no_seams():
    assert seams.faces(ONE, {}, 0, 0) == seams.tripolar([0], 4, 0, 0) == []
    assert seams.blocks([0, 0], 0, 0) == []


@pytest.mark.parametrize(
    ("pivot", "skip", "meets"),
    [(0, 0, lambda i: -1 - i), (-1, 0, lambda i: -2 - i), (1, 1, lambda i: -i)],
    ids=["cells", "points shifted by half a cell", "points on the fold"],
)
def test_a_fold_meets_its_columns(node, pivot, skip, meets):
    ny, nx, w = 4, 4, 2
    columns = np.arange(node.rank * nx - w, node.rank * nx + nx + w)
    u = np.full((ny + 2 * w, nx + 2 * w), 7.0)
    u[w:-w, w:-w] = 100 * np.arange(ny)[:, None] + columns[w:-w]
    listed = seams.tripolar(range(node.size), nx, w, node.rank, pivot=pivot, skip=skip, scale=-1.0)
    (found,) = exchanged(node, [u], listed)
    rows = ny - 1 - skip - np.arange(w)
    there = meets(columns) % (node.size * nx)
    assert (found[-w:] == -(100 * rows[:, None] + there)).all()
    assert (found[:-w] == u[:-w]).all()
    assert seams.tripolar([node.rank + 1], nx, w, node.rank) == []
