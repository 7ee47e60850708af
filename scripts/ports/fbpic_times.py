"""Compare FBPIC's exchanges and steps by mpishare with those by messages: their bits, their times.

PYTHONPATH=../lib FBPIC_ENABLE_MPISHARE=1 mpirun -n 2 python -m mpi4py fbpic_times.py --nz 512

Both ways take turns in one process. Times are those of the slowest rank, in µs, medians of the
rounds; a ratio is the median of those of each round, with its quartiles. Needs FBPIC with
docs/ports/fbpic.patch. It computes on GPUs where FBPIC finds them, a rank on each or under MPS.
"""

import argparse
import functools
import time

import in_turns
import numpy as np
import pyfftw
from fbpic.boundaries.boundary_communicator import BufferHandler
from fbpic.main import Simulation
from fbpic.utils.cuda import GpuMemoryManager, cuda_installed
from in_turns import comm, compare_bits, nothing, on_host, print_head, print_line, slowest_us
from mpi4py import MPI

if cuda_installed:
    import cupy

# Plans of FFTW that are timed differ between simulations, and with them the last bits.
pyfftw.FFTW = functools.partial(pyfftw.FFTW, flags=("FFTW_ESTIMATE",))

WAYS = "messages", "mpishare"
FIELDS = {"E": "replace", "B": "replace", "J": "add", "rho": "add"}
PARTICLES = "x", "y", "z", "ux", "uy", "uz", "inv_gamma", "w"
C = 299792458.0


class Case:
    """A hot plasma in a periodic box, whose exchanges go either way."""

    def __init__(self, given):
        """Make the simulation, the same in every case."""
        length, self.rng = given.nz * 0.1e-6, np.random.default_rng(comm.rank)
        np.random.seed(comm.rank)  # for the angles of the particles
        self.sim = Simulation(
            given.nz, length, given.nr, given.nr * 0.2e-6, given.modes, length / given.nz / C,
            zmin=0.0, p_zmin=0.0, p_zmax=length, p_rmin=0.0, p_rmax=given.nr * 0.18e-6, p_nz=2,
            p_nr=2, p_nt=given.angles, n_e=1e24, n_order=given.order, use_cuda=cuda_installed,
            boundaries={"z": "periodic", "r": "reflective"}, verbose_level=0,
        )  # fmt: skip
        self.of, self.species, grid = self.sim.comm, self.sim.ptcl[0], self.sim.comm
        self.on_gpu = self.sim.use_cuda
        self.drain = cupy.cuda.runtime.deviceSynchronize if self.on_gpu else nothing
        self.of.mpi_buffers = BufferHandler(
            grid.n_guard, grid.get_Nr(with_damp=True), grid.Nm, grid.left_proc, grid.right_proc,
            grid.use_pml,
        )  # fmt: skip
        self.exchanges = {"messages": None, "mpishare": self.of.mpishare_exchange}
        momenta = self.rng.normal(0, 0.2, (3, self.species.Ntot))
        self.species.ux, self.species.uy, self.species.uz = momenta.copy()
        self.species.inv_gamma = 1 / np.sqrt(1 + (momenta**2).sum(0))

    def go_by(self, way):
        """Let the exchanges go by messages, or by mpishare."""
        self.of.mpishare_exchange = self.exchanges[way]

    def fields(self, kind):
        """Return the names and the objects of all fields of a kind."""
        names = ["rho"] if kind == "rho" else [kind + axis for axis in "rtz"]
        return [(grid, name) for grid in self.sim.fld.interp for name in names]


def compare_fields(case, kind, rounds, calls=10):
    """Compare an exchange of the fields of a kind."""
    fields, method = case.fields(kind), FIELDS[kind]
    start = [case.rng.normal(size=(*getattr(*each).shape, 2)) for each in fields]
    start = [each.view(np.complex128)[..., 0] for each in start]

    def exchange():
        case.of.exchange_fields(case.sim.fld.interp, kind, method)

    found, times = {}, {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way in WAYS:
            case.go_by(way)
            for each, values in zip(fields, start, strict=True):
                getattr(*each)[...] = cupy.asarray(values) if case.on_gpu else values
            if turn:
                times[way].append(slowest_us(exchange, calls, case.drain))
            else:
                exchange()
                found[way] = [on_host(getattr(*each)) for each in fields]
    nbytes = (1 + (method == "add")) * case.of.n_guard * start[0][0].nbytes * len(fields)
    name = f"`exchange_fields` {kind} {method}, {nbytes / 1e6:.2g} MB a side"
    print_line(name, times, compare_bits(*found.values()))


def compare_particles(case, rounds, cells):
    """Compare an exchange of particles that have moved by up to so many cells."""
    species, xp = case.species, cupy if case.on_gpu else np
    species.z += xp.asarray(case.rng.uniform(-cells, cells, species.Ntot) * case.of.dz)
    if case.on_gpu:
        species.sort_particles(fld=case.sim.fld)
        species.prefix_sum_shift = 0
    start, number = {name: getattr(species, name).copy() for name in PARTICLES}, species.Ntot
    found, times = {way: [] for way in WAYS}, {way: [] for way in WAYS}

    def exchange():
        case.of.exchange_particles(species, case.sim.fld, 0.0)

    for turn in range(rounds + 3):
        for way in WAYS:
            case.go_by(way)
            for name in PARTICLES:
                setattr(species, name, start[name].copy())
            species.Ntot, species.sorted = number, True
            lasted = slowest_us(exchange, drain=case.drain)
            if turn >= 3:  # first ones compile, and make slots that are large enough
                times[way].append(lasted)
            if turn in {0, rounds + 2}:
                found[way] += [on_host(getattr(species, name)) for name in PARTICLES]
            if case.on_gpu:  # as FBPIC does after each
                cupy.get_default_memory_pool().free_all_blocks()
    swap = case.exchanges["mpishare"].get_swap(species)
    name = f"`exchange_particles`, {sum(swap.sent().values())} of {number} leave"
    print_line(name, times, compare_bits(*found.values()))


class StepTimes(list):
    """The times at which steps begin: a diagnostic of FBPIC."""

    def __init__(self, case):
        """Look at the clock in every step of a case."""
        super().__init__()
        self.case = case

    def write(self, _iteration):
        """Note the time, once the GPU has done all."""
        self.case.drain()
        self.append(time.perf_counter())


def compare_steps(cases, rounds):
    """Compare steps of two simulations, from one exchange of particles to the next."""
    period, times = cases["messages"].of.exchange_period, {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way, case in cases.items():
            case.go_by(way)
            case.sim.diags, case.sim.iteration = [clock := StepTimes(case)], 0
            comm.Barrier()
            case.sim.step(period + 1, show_progress=False)
            lasted = comm.allreduce(1e6 * (clock[-1] - clock[0]) / period, MPI.MAX)
            if turn:
                times[way].append(lasted)
    all_of = {
        way: [on_host(getattr(case.species, name)) for name in PARTICLES]
        + [on_host(getattr(*each)) for kind in FIELDS for each in case.fields(kind)]
        for way, case in cases.items()
    }
    bits = compare_bits(*all_of.values())  # on GPUs charges are added by atomics, in any order
    print_line(f"a step; particles are exchanged every {period}", times, bits)


def compare(given):
    """Print the table of a size."""
    cases = {way: Case(given) for way in WAYS}
    case = cases["messages"]
    size = f"{given.nz} x {given.nr} cells, {given.modes} modes, {case.of.n_guard} guard cells"
    title = f"FBPIC{' on GPUs' if case.on_gpu else ''}, {size}"
    print_head(title, WAYS, "numpy", "numba", "pyfftw")
    compare_steps(cases, given.rounds)
    with GpuMemoryManager(case.sim):
        for kind in FIELDS:
            compare_fields(case, kind, given.rounds)
        for cells in 1, case.of.exchange_period:  # the latter as fast as light
            compare_particles(case, 3 * given.rounds, cells)


def main():
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--nz", type=int, nargs="+", default=[256], help="cells of all ranks")
    parser.add_argument("--nr", type=int, nargs="+", default=[64], help="cells, for each nz")
    parser.add_argument("--modes", type=int, default=2)
    parser.add_argument("--angles", type=int, default=4, help="particles of a cell, over 4")
    parser.add_argument("--order", type=int, default=16, help="of the solver: sets the guard cells")
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    in_turns.rounds = given.rounds
    for size in zip(given.nz, given.nr, strict=True):
        given.nz, given.nr = size
        compare(given)


if __name__ == "__main__":
    main()
