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


def plans_with_words(node):
    """Plans, each with what it shows."""
    xp, n, r = node.xp, node.size, node.rank
    fields = [xp.zeros((5, 6)), xp.zeros((5, 6)), xp.zeros((5, 6, 2), "i4")]
    yield (
        grid(node, fields, ((1, 2), 1)),
        (
            "owned=(2, 4), ghosts=((1, 2), (1, 1)), periodic=(True, False), "
            "fields=2 x float64(5, 6) + int32(5, 6, 2)"
        ),
    )
    halo = grid(node, mpishare.Layout.any((5, 6)), 1)
    halo.exchange(xp.zeros((5, 6)))
    words = "owned=(3, 4), ghosts=((1, 1), (1, 1)), periodic=(True, False), any fields, 1 seen"
    yield halo, words
    sides = {(r + 1) % n: [1, 2]}, {(r - 1) % n: [4, 3]}
    mesh = mpishare.NeighborExchange(node.comm, *sides, xp.zeros((2, 5)), axis=1, node=node)
    yield mesh, "sent=2, ghosts=2, axis=1, fields=float64(2, 5)"
    yield (
        mpishare.Redistribute(node.comm, (n, n), 0, 1, "f4", node=node),
        (f"source=({r}, 0) to ({r + 1}, {n}), target=(0, {r}) to ({n}, {r + 1}), dtype=float32"),
    )
    if node.report().time_sliced_gpus:  # where rows are refused
        return
    swap = mpishare.RowExchange(node.comm, ["f8", ("f4", (3,))], 8, node=node)
    yield swap, f"columns=['float64', 'float32[3]'], room=8, {n} peers"


def test_what_plans_show(node):
    for plan, words in plans_with_words(node):
        assert shown(plan) == words


def test_routes_to_many_ranks_are_counted(host_node, monkeypatch):
    """Here to more than none, since many are as in a grid of three axes with corners."""
    monkeypatch.setattr("mpishare.plans.base_plan._MOST_NAMED", 0)
    with grid(host_node, np.zeros((5, 6)), 1) as halo:
        assert repr(halo).endswith(f"routes=host to {len(halo.routes)} ranks>")
