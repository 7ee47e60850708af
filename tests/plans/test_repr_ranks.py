"""What plans show of themselves: a line with the cells, the fields and the routes."""

import numpy as np

import mpishare


def shown(plan):
    """The words of a plan after its name, with its routes by `routes`; it is closed then."""
    text = repr(plan)
    routes = {}
    for rank, route in plan.routes.items():
        routes.setdefault(route, []).append(str(rank))
    named = ", ".join(
        f"{route} to rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        for route, ranks in routes.items()
    )
    before, _, after = text.partition(f"routes={named or 'none'}")
    assert after == ">", text
    assert "\n" not in text
    plan.close()
    assert repr(plan) == text[:-1] + ", closed>"
    return before.removeprefix(f"<mpishare.{plan.name}: ").removesuffix(", ")


def grid(node, fields, width):
    options = {"dims": (node.size, 1), "periods": (True, False), "axes": (0, 1), "node": node}
    return mpishare.HaloExchange(node.comm, fields, width, **options)


def test_a_halo(node):
    xp = node.xp
    fields = [xp.zeros((5, 6)), xp.zeros((5, 6)), xp.zeros((5, 6, 2), "i4")]
    assert shown(grid(node, fields, ((1, 2), 1))) == (
        "owned=(2, 4), ghosts=((1, 2), (1, 1)), periodic=(True, False), "
        "fields=2 x float64(5, 6) + int32(5, 6, 2)"
    )


def test_a_halo_of_staggered_fields(node):
    fields = node.xp.zeros((5, 6)), node.xp.zeros((6, 6))
    assert shown(grid(node, fields, [1, ((1, 2), 1)])) == (
        "owned=((3, 4), (3, 4)), ghosts=(((1, 1), (1, 1)), ((1, 2), (1, 1))), "
        "periodic=(True, False), fields=float64(5, 6) + float64(6, 6)"
    )


def test_a_halo_of_any_fields(node):
    halo = grid(node, mpishare.Layout.any((5, 6)), 1)
    halo.exchange(node.xp.zeros((5, 6)))
    assert shown(halo) == (
        "owned=(3, 4), ghosts=((1, 1), (1, 1)), periodic=(True, False), any fields, 1 seen"
    )


def test_a_mesh(node):
    nxt, before = ((node.rank + step) % node.size for step in (1, -1))
    mesh = mpishare.NeighborExchange(
        node.comm, {nxt: [1, 2]}, {before: [4, 3]}, node.xp.zeros((2, 5)), axis=1, node=node
    )
    assert shown(mesh) == "sent=2, ghosts=2, axis=1, fields=float64(2, 5)"


def test_a_mesh_without_neighbors(node):
    mesh = mpishare.NeighborExchange(node.comm, {}, {}, node.xp.zeros(5), node=node)
    assert shown(mesh) == "sent=0, ghosts=0, axis=0, fields=float64(5,)"


def test_a_redistribution(node):
    n, r = node.size, node.rank
    plan = mpishare.Redistribute(node.comm, (n, n), 0, 1, "f4", node=node)
    assert shown(plan) == (
        f"source=({r}, 0) to ({r + 1}, {n}), target=(0, {r}) to ({n}, {r + 1}), dtype=float32"
    )


def test_routes_to_many_ranks_are_counted(host_node, monkeypatch):
    """Here to more than none, since many are as in a grid of three axes with corners."""
    monkeypatch.setattr("mpishare.plans.base_plan._MOST_NAMED", 0)
    with grid(host_node, np.zeros((5, 6)), 1) as halo:
        assert repr(halo).endswith(f"routes=host to {len(halo.routes)} ranks>")
