"""Transposes and time steps of Dedalus by FFTW and by mpishare, in turns: bits compared, and timed.

PYTHONPATH=../lib mpirun -n 2 python -m mpi4py dedalus_times.py [ROUNDS]
"""

import logging

import numpy as np
from dedalus.tools.config import config
from in_turns import comm, compare, nothing, print_head

config["transforms-fftw"]["PLANNING_RIGOR"] = "estimate"  # one plan, and so the same bits, in both

import dedalus.public as d3  # noqa: E402
from dedalus.core import distributor  # noqa: E402
from dedalus.core.mpishare_transposes import MpishareTranspose  # noqa: E402
from dedalus.core.transposes import FFTWTranspose  # noqa: E402

PLANNERS = {"fftw": FFTWTranspose, "mpishare": MpishareTranspose}
PLANES = (256, 64), (512, 128), (1024, 256), (2048, 512)
CUBES = (32, 32, 32), (64, 64, 64), (128, 128, 128)
FIELDS = (
    (["scalar"], float),
    (["vector"], float),
    (["vector", "scalar"], float),
    (["scalar"], complex),
)


def use(name):
    """Let distributors that are made from now on transpose by a library."""
    distributor.TRANSPOSE_LIBRARY, distributor.TransposePlanner = name, PLANNERS[name]


def transpose(shape, kinds, dtype):
    """Return a call that transposes fields there and back, and what they are in between."""
    coords = d3.CartesianCoordinates(*"xyz"[: len(shape)])
    dist = d3.Distributor(coords, dtype=dtype)
    periodic = d3.RealFourier if dtype is float else d3.ComplexFourier
    *across, last = coords.coords
    bases = [periodic(c, n, (0, 1)) for c, n in zip(across, shape, strict=False)]
    bases.append(d3.Chebyshev(last, shape[-1], (0, 1)))
    fields = [
        dist.Field(bases=bases) if kind == "scalar" else dist.VectorField(coords, bases=bases)
        for kind in kinds
    ]
    path = next(each for each in dist.paths if isinstance(each, distributor.Transpose))
    random = np.random.default_rng(comm.rank)

    def there_and_back():
        path.increment(fields)
        path.decrement(fields)

    for field in fields:
        field.preset_layout(path.layout0)
        field.data[...] = random.random(field.data.shape)
    there_and_back()
    path.increment(fields)
    found = [field.data.copy() for field in fields]
    path.decrement(fields)
    return there_and_back, found


def convection(shape):
    """Return a step of Rayleigh-Benard convection, and its buoyancy after five."""
    coords = d3.CartesianCoordinates("x", "z")
    dist = d3.Distributor(coords, dtype=float)
    x = d3.RealFourier(coords["x"], shape[0], (0, 4), dealias=3 / 2)
    z = d3.ChebyshevT(coords["z"], shape[1], (0, 1), dealias=3 / 2)
    p, b = (dist.Field(bases=(x, z)) for _ in range(2))
    u = dist.VectorField(coords, bases=(x, z))
    tau_p, tau_b1, tau_b2 = dist.Field(), dist.Field(bases=x), dist.Field(bases=x)
    tau_u1, tau_u2 = (dist.VectorField(coords, bases=x) for _ in range(2))
    up, edge = coords.unit_vector_fields(dist)[1], z.derivative_basis(1)
    terms = {
        "lift": lambda tau: d3.Lift(tau, edge, -1),
        "grad_u": d3.grad(u) + up * d3.Lift(tau_u1, edge, -1),
        "grad_b": d3.grad(b) + up * d3.Lift(tau_b1, edge, -1),
        "nu": 1e-3,
    }
    unknown = [p, b, u, tau_p, tau_b1, tau_b2, tau_u1, tau_u2]
    problem = d3.IVP(unknown, namespace=vars(d3) | locals() | terms)
    for equation in (
        "trace(grad_u) + tau_p = 0",
        "dt(b) - nu*div(grad_b) + lift(tau_b2) = - u@grad(b)",
        "dt(u) - nu*div(grad_u) + grad(p) - b*up + lift(tau_u2) = - u@grad(u)",
        "b(z=0) = 1",
        "u(z=0) = 0",
        "b(z=1) = 0",
        "u(z=1) = 0",
        "integ(p) = 0",
    ):
        problem.add_equation(equation)
    solver = problem.build_solver(d3.RK222)
    heights = dist.local_grids(x, z)[1]
    b["g"] = 1 - heights + 1e-3 * np.random.default_rng(comm.rank).random(b["g"].shape)
    for _ in range(5):
        solver.step(1e-3)
    return lambda: solver.step(1e-3), [b["g"].copy()]


logging.disable(logging.INFO)
print_head("Dedalus", PLANNERS, "numpy", "dedalus")
for extents in PLANES + CUBES:
    for kinds, dtype in FIELDS:
        name = f"{' x '.join(map(str, extents))} {dtype.__name__}, {' and '.join(kinds)}"
        compare(name, PLANNERS, transpose, extents, kinds, dtype, use=use, drain=nothing)
for extents in PLANES[:2]:
    name = f"step of {' x '.join(map(str, extents))}"
    compare(name, PLANNERS, convection, extents, use=use, drain=nothing)
