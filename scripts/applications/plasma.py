"""A plasma of electrons in one dimension, particle in cell: Landau damping on any number of ranks.

Lengths are in Debye lengths, times in inverse plasma frequencies. A wave of wave number 1/2 loses
its energy to electrons of its own speed: its amplitude falls as exp(-0.1533 t). In each step every
electron is pushed, goes to the rank of its cell, and adds its charge to two nodes of the grid.

    mpirun -n 2 python scripts/applications/plasma.py --particles 200000
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import mpishare

WAVE_NUMBER, RATE, AMPLITUDE = 0.5, 0.1533, 0.02
WARM_UP = 5  # steps that may compile kernels, and capture
LENGTH = 2 * np.pi / WAVE_NUMBER


class Plasma:
    """The electrons of this rank's cells, in arrays with spare rows, and the field there."""

    def __init__(self, comm, node, ncells, nparticles, dt, exact=False):
        self.comm, self.xp, self.dt, xp = comm, node.xp, dt, node.xp
        if ncells % comm.size:
            raise SystemExit(f"{ncells} cells cannot be split among {comm.size} ranks alike")
        self.cells, self.dx = ncells // comm.size, LENGTH / ncells
        self.low = comm.rank * self.cells * self.dx
        self.charge = LENGTH / nparticles  # of an electron: the density is 1
        x, v, ids = quiet_start(nparticles)
        mine = (x / self.dx).astype(int) // self.cells == comm.rank
        capacity = int(1.3 * nparticles / comm.size) + 1000
        self.count = xp.array(mine.sum(), "i8")
        self.columns = [xp.zeros(capacity), xp.zeros(capacity), xp.zeros(capacity, "i8")]
        for column, values in zip(self.columns, (x, v, ids), strict=True):
            column[: mine.sum()] = xp.asarray(values[mine])
        self.to, self.numbers = xp.zeros(capacity, "i4"), xp.arange(capacity)
        # A node on either side of the cells' own: charges go there, and fields come back.
        self.rho, self.field = xp.zeros(self.cells + 2), xp.zeros(self.cells + 2)
        self.sums, self.wave = xp.zeros(comm.size + 1), xp.zeros(3)
        self.halo = mpishare.HaloExchange(
            comm, self.rho, 1, dims=(comm.size,), periods=True, node=node
        )
        self.total = mpishare.Allreduce(comm, self.sums, exact=exact, node=node)
        self.waves = mpishare.Allreduce(comm, self.wave, exact=exact, node=node)
        columns = ["f8", "f8", "i8"]
        self.swap = mpishare.RowExchange(comm, columns, capacity // 4, node=node)
        self.migration, self.move = mpishare.Migration(self.swap), self.migrate

    def near(self):
        """The node below each electron, and how far behind it the electron is, in cells."""
        at = (self.columns[0] - self.low) / self.dx
        node = self.xp.clip(at.astype("i8"), 0, self.cells - 1)
        return node + 1, at - node

    def advance(self):
        """Make one step; nothing waits for the GPU."""
        xp, (x, v, _) = self.xp, self.columns
        node, part = self.near()
        push = (1 - part) * self.field[node] + part * self.field[node + 1]
        v -= self.dt * push
        x += self.dt * v
        x %= LENGTH
        goals = (x / (self.cells * self.dx)).astype("i4")
        self.to[...] = xp.minimum(goals, self.comm.size - 1)
        self.move()
        self.find_field()

    def migrate(self):
        """Let the electrons go to the ranks of their cells."""
        self.migration.migrate(self.columns, self.to, self.count)

    def migrate_through_host(self):
        """Do so as without mpishare: count, read the counts, send out of host memory."""
        xp, comm, n = self.xp, self.comm, int(self.count)
        leaving = xp.flatnonzero(self.to[:n] != comm.rank)
        goals = on_host(self.to[leaving])
        counts, order = np.bincount(goals, minlength=comm.size), np.argsort(goals, kind="stable")
        came = np.empty_like(counts)
        comm.Alltoall(counts, came)
        left = n - len(leaving)
        end = left + int(came.sum())
        gaps, last = leaving[leaving < left], left + xp.flatnonzero(self.to[left:n] == comm.rank)
        for column in self.columns:
            received = np.empty(end - left, column.dtype)
            comm.Alltoallv((on_host(column[leaving])[order], counts), (received, came))
            column[gaps] = column[last]
            column[left:end] = xp.asarray(received)
        self.count[...] = end

    def find_field(self):
        """Add up the charges, and solve Gauss's law: the field has no mean."""
        xp, size, rank = self.xp, self.comm.size, self.comm.rank
        node, part = self.near()
        charge = xp.where(self.numbers < self.count, self.charge / self.dx, 0.0)
        self.rho.fill(0)
        xp.add.at(self.rho, node, -charge * (1 - part))
        xp.add.at(self.rho, node + 1, -charge * part)
        self.halo.accumulate(self.rho)
        owned = (self.rho[1:-1] + 1) * self.dx
        # The field behind each node, from the first of this rank on; then those of the others.
        inner = xp.cumsum(owned) - owned / 2
        self.sums.fill(0)
        self.sums[rank] = owned.sum()
        self.total.reduce(self.sums)
        inner += self.sums[:rank].sum()
        self.sums.fill(0)
        self.sums[size] = inner.sum()
        self.total.reduce(self.sums)
        self.field[1:-1] = inner - self.sums[size] / (size * self.cells)
        self.halo.exchange(self.field)
        # Its first Fourier coefficient, and how many electrons there are.
        angle = WAVE_NUMBER * (self.low + self.dx * xp.arange(self.cells))
        self.wave[0] = (self.field[1:-1] * xp.cos(angle)).sum()
        self.wave[1] = (self.field[1:-1] * xp.sin(angle)).sum()
        self.wave[2] = self.count
        self.waves.reduce(self.wave)

    def close(self):
        for plan in (self.halo, self.total, self.waves, self.swap):
            plan.close()


def on_host(array):
    return array.get() if hasattr(array, "get") else array


def quiet_start(count):
    """Return places, velocities and ids of evenly spread electrons, whose density is a wave."""
    uniform = (np.arange(count) + 0.5) / count
    reversed_bits, digit, rest = np.zeros(count), 0.5, np.arange(count)
    while rest.any():
        reversed_bits += digit * (rest & 1)
        rest, digit = rest >> 1, digit / 2
    speeds = np.linspace(-6, 6, 20001)
    below = np.cumsum(np.exp(-(speeds**2) / 2))
    v = np.interp(reversed_bits + 0.5 / count, below / below[-1], speeds)
    places = np.linspace(0, LENGTH, 20001)
    share = places / LENGTH + AMPLITUDE / (2 * np.pi) * np.sin(WAVE_NUMBER * places)
    return np.interp(uniform, share, places), v, np.arange(count)


def damping(times, amplitudes):
    """Return the rate at which the peaks of the wave fall."""
    inner = amplitudes[1:-1]
    peaks = 1 + np.flatnonzero((inner > amplitudes[:-2]) & (inner > amplitudes[2:]))
    peaks = peaks[1:]  # the first has other modes in it
    return -np.polyfit(times[peaks], np.log(amplitudes[peaks]), 1)[0]


def main(words=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=48, help="of the grid")
    parser.add_argument("--particles", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=240, help="of 1/20 of a plasma period")
    parser.add_argument(
        "--step",
        choices=("captured", "called", "staged"),
        default="captured",
        help="one launch, kernel by kernel, or so with electrons that move through the host",
    )
    parser.add_argument(
        "--exact", action="store_true", help="round sums over the ranks once, from the exact value"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(words)
    comm = MPI.COMM_WORLD
    with mpishare.Node(comm) as node:
        plasma = Plasma(comm, node, options.cells, options.particles, 0.05, options.exact)
        plasma.find_field()
        if options.step == "staged":
            plasma.move = plasma.migrate_through_host
        captured = mpishare.capture(node, plasma.advance) if options.step == "captured" else None
        step = captured or plasma.advance
        amplitudes, begin = [], 0.0
        for number in range(options.steps):
            if number == WARM_UP:
                begin = time.perf_counter()
            step()
            cos, sin, count = plasma.wave.tolist()
            amplitudes.append(np.hypot(cos, sin))
            assert count == options.particles, f"{count} electrons"
        seconds = (time.perf_counter() - begin) / (options.steps - WARM_UP)
        plasma.migration.check()
        n = int(plasma.count)
        ids = comm.gather(plasma.columns[2][:n].tolist())
        rate = damping(0.05 * np.arange(1, options.steps + 1), np.array(amplitudes))
        routes = sorted({*plasma.swap.routes.values(), *plasma.halo.routes.values()})
        if captured:
            captured.close()
        plasma.close()
    found: dict[str, Any] = {
        "rate": float(rate),
        "expected": RATE,
        "ranks": comm.size,
        "backend": node.backend,
    }
    found |= {"step": options.step, "exact": options.exact, "routes": routes}
    found["step_us"] = 1e6 * seconds
    if comm.rank == 0:
        everyone = sorted(itertools.chain(*(ids or [])))
        assert everyone == [*range(options.particles)], "an electron was lost"
        print(json.dumps(found) if options.json else found)
    return found


if __name__ == "__main__":
    main()
