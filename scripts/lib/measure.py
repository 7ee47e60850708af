"""Measure all figures of the pages that this machine and this MPI can, a run at a time.

A run that is there is made again only if a file that it measures has changed since: so several
calls of a few minutes each, with --seconds, measure everything. The runs with GPUs want an
environment of `scripts/bench --cuda-aware`, with NCCL, nccl4py, nvshmem4py and PyTorch; those
without want one for each MPI. `scripts/results` makes tables and figures of what this leaves.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = "mpi,nccl,nccl4py,nvshmem,torch"
AFTER_S = 60  # what a run may take to begin and to end, beside its --seconds


@dataclass(frozen=True)
class Run:
    """A command: the words behind python, and where it can be run.

    A case of the bench writes the JSON of its name. A program prints lines of JSON, which go into
    the .jsonl of the first word of its name.
    """

    ranks: int
    words: str
    seconds: int
    gpus: int = 0  # with one rank each, or shared: under MPS, unless ranks are to take turns
    in_turns: bool = False
    mpi: str = ""  # the only one that it is of

    @property
    def is_bench(self) -> bool:
        return self.words.startswith("-m benchmarks")

    @property
    def measured(self) -> list[str]:
        """The places of the code that it measures, as git takes them."""
        cases = self.words.partition(" --")[0].split()[2:] if self.is_bench else []
        found = {place for case in cases or [""] for place in FOLDERS.get(case, EXCHANGES)}
        mine, others = (OF_GPUS, OF_HOSTS) if self.gpus else (OF_HOSTS, OF_GPUS)
        return [
            *(f"mpishare/{place}" for place in sorted(found | {mine[0]})),
            *(f":(exclude)mpishare/{place}" for place in others),
        ]

    def command(self) -> list[str]:
        is_shared = self.gpus and self.ranks > self.gpus and not self.in_turns
        start = ["scripts/with-mps"] if is_shared else []
        bind = "none" if self.gpus else "core"
        start += ["mpirun", "-n", str(self.ranks), "--bind-to", bind, sys.executable]
        return [*start, *self.words.split()]


def bench(ranks: int, words: str, seconds: int, **where: object) -> Run:
    return Run(ranks, f"-m benchmarks {words} --seconds {seconds}", seconds, **where)


def program(ranks: int, name: str, words: str, **where: object) -> Run:
    return Run(ranks, f"scripts/applications/{name}.py {words}", 10, **where)


#: Where a case runs, in mpishare; all but windows are plans.
EXCHANGES = ("halo", "plans")
FOLDERS = {
    **dict.fromkeys(("ring", "fence"), ("windows",)),
    **dict.fromkeys(("allreduce", "cg"), ("reduction", *EXCHANGES)),
    **dict.fromkeys(("redistribute", "permuted", "allgather"), ("redistribution", "plans")),
    "setup": ("memory", "runtime", "windows", "plans"),
    "swap": ("device", "windows"),
    "rows": ("rows", "plans"),
    "jax": ("jax", *EXCHANGES),
}
OF_HOSTS, OF_GPUS = (
    ("native", "plans/exchange/host", "reduction/host.py"),
    ("backends", "plans/gpu", "plans/exchange/cuda", "reduction/cuda"),
)
EXCHANGED, SUMMED = "halo1d ring calls", "allreduce cg halo3d setup"
SPREADS = "redistribute permuted allgather"
RUNS = {
    # Two by an Open MPI that takes GPU memory. It ends in a fault where it is to add up such
    # memory, or to gather it: those runs are of MPICH.
    "mpi-gpus2": bench(
        2, f"{EXCHANGED} halo3d --repeat 2 --against {LIBRARIES}", 45, gpus=2, mpi="Open MPI"
    ),
    "messages-gpus2": bench(
        2, "messages1d messages3d --repeat 1 --against mpi,nccl", 10, gpus=2, mpi="Open MPI"
    ),
    "gpus2": bench(
        2, f"{EXCHANGED} --repeat 2 --against staged,{LIBRARIES}", 35, gpus=2, mpi="MPICH"
    ),
    "sums-gpus2": bench(
        2,
        f"{SUMMED} --repeat 2 --against staged,float,ceilings,{LIBRARIES}",
        45,
        gpus=2,
        mpi="MPICH",
    ),
    "applications-jacobi2d": program(2, "jacobi2d", "--compare --json", gpus=2),
    "applications-heat3d": program(2, "heat3d", "--compare --json", gpus=2),
    "applications-jacobi2d-graph": program(
        2, "jacobi2d", "--cells 1024 --steps 1000 --graph --bench --json", gpus=2
    ),
    "applications-heat3d-graph": program(
        2, "heat3d", "--n 256 --steps 200 --wrap --graph --bench --json", gpus=2
    ),
    "onegpu-ranks4-mps": bench(
        4, "halo1d allreduce ring halo3d --max 16MiB --repeat 2 --against staged,float", 18, gpus=1
    ),
    "onegpu-ranks4": bench(
        4,
        "halo1d allreduce --max 16MiB --repeat 2 --iters 20 --against staged,float",
        10,
        gpus=1,
        in_turns=True,
    ),
    "redistribute-gpus2": bench(
        2, f"{SPREADS} --max 64MiB --repeat 2 --against staged,{LIBRARIES}", 22, gpus=2, mpi="MPICH"
    ),
    "gpus4": bench(
        4,
        f"{EXCHANGED} {SUMMED} --repeat 2 --against staged,float,ceilings,{LIBRARIES}",
        90,
        gpus=4,
    ),
    "redistribute-gpus4": bench(
        4, f"{SPREADS} --max 512MiB --repeat 3 --against staged,{LIBRARIES}", 85, gpus=4
    ),
    "rows-gpus2": bench(2, "rows --repeat 3 --against nccl,staged,ceilings", 10, gpus=2),
    "fresh-gpus2": bench(2, "fresh", 8, gpus=2),
    "jax-gpus2": bench(2, "jax", 12, gpus=2),
    "kernels-gpus2": bench(2, "swap --against all", 22, gpus=2),
    **{
        f"steps-gpus{gpus}-{way or 'mpishare'}": program(
            gpus,
            "heat3d",
            f"--cells 256 --steps 200 --json {f'--staged {way}' if way else '--graph'}",
            gpus=gpus,
        )
        for gpus in (1, 2)
        for way in ("", "pinned")
    },
    **{
        f"steps-host{ranks}-{way or 'mpishare'}": program(
            ranks,
            "heat3d",
            f"--cells 96 --steps 8 --json {way and f'--staged {way}'}",
            mpi="MPICH",
        )
        for ranks in (1, 2, 4, 8, 16, 32)
        for way in ("", "pinned")
    },
    **{
        f"cpu32-{name}-ranks{ranks}": bench(
            ranks, "halo3d halo1d fence --max 1MiB --repeat 4 --warmup 1", seconds, mpi=mpi
        )
        for name, mpi in (("mpich", "MPICH"), ("openmpi", "Open MPI"))
        for ranks, seconds in ((8, 8), (32, 12))
    },
    **{
        f"redistribute-host-ranks{ranks}": bench(
            ranks, "redistribute permuted --max 64MiB --repeat 2", 14, mpi="MPICH"
        )
        for ranks in (8, 28)
    },
    **{
        f"rows-host-ranks{ranks}": bench(
            ranks, "rows --repeat 3 --against sendrecv,alltoallv", 5, mpi="MPICH"
        )
        for ranks in (2, 8)
    },
    "fresh-host": bench(2, "fresh", 5, mpi="MPICH"),
    "jax-host": bench(2, "jax", 10, mpi="MPICH"),
}


def git(*words: str, root: Path = ROOT) -> str | None:
    """What git answers; None where it refuses."""
    asked = ["git", "-C", str(root), *words]
    done = subprocess.run(asked, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def revision_here() -> str:
    """The revision of the sources; `scripts/results` refuses to quote one with changes."""
    is_dirty = git("status", "--porcelain", "--", "mpishare", "benchmarks", "scripts/applications")
    return f"{git('rev-parse', 'HEAD')}{'-dirty' if is_dirty else ''}"


def newer(run: Run, revision: str, root: Path = ROOT) -> list[str]:
    """The files that a run of this revision measured and that have changed since."""
    changed = git("diff", "--name-only", revision, "HEAD", "--", *run.measured, root=root)
    return ["all of it"] if changed is None else changed.split()  # git knows no such revision


def vendor() -> str:
    """The MPI of this environment."""
    asked = [sys.executable, "-c", "from mpi4py import MPI; print(MPI.get_vendor()[0])"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


def gpus_here() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return listed.stdout.count("GPU ")


def why_not(run: Run, gpus: int, mpi: str) -> str | None:
    """Why a run cannot be made here."""
    cores = len(os.sched_getaffinity(0))
    if run.gpus > gpus:
        return f"wants {run.gpus} GPUs of {gpus}"
    if not run.gpus and run.ranks > cores:
        return f"wants {run.ranks} cores of {cores}"
    return None if run.mpi in ("", mpi) else f"is of {run.mpi}"


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def target(folder: Path, name: str) -> Path:
    return folder / (f"{name}.json" if RUNS[name].is_bench else f"{name.partition('-')[0]}.jsonl")


def revision_of(folder: Path, name: str) -> str | None:
    """The revision that a run was made of, if it is there."""
    file = target(folder, name)
    if not RUNS[name].is_bench:
        return next((each["revision"] for each in lines_of(file) if each.get("run") == name), None)
    if not file.exists():
        return None
    header = json.loads(file.read_text())["header"]
    return None if header.get("interrupted") else header["git_revision"]


def measure(name: str, folder: Path, revision: str) -> bool:
    """Make one run, and say whether it ended well."""
    run, file = RUNS[name], target(folder, name)
    command = run.command()
    if run.is_bench:
        command += ["--revision", revision, "--output", str(file)]
    print(f"{name}: {shlex.join(command)}", flush=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if not run.gpus:
        env["MPISHARE_BACKEND"] = "host"
    elif run.ranks > run.gpus:
        env.setdefault("CUDA_VISIBLE_DEVICES", "0")
    output = None if run.is_bench else subprocess.PIPE
    limit_s = run.seconds + AFTER_S
    try:
        done = subprocess.run(
            command, check=False, cwd=ROOT, env=env, stdout=output, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: ended after {limit_s} s", file=sys.stderr)
        return False
    if done.returncode == 0 and not run.is_bench:
        made = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        kept = [each for each in lines_of(file) if each.get("run") != name]
        about = {"run": name, "revision": revision}
        rows = [*kept, *(about | each for each in made)]
        file.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return done.returncode == 0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--list", action="store_true", help="measure nothing; say what is old")
    parser.add_argument("--check", action="store_true", help="the same, and fail if anything is")
    parser.add_argument("--seconds", type=float, help="begin no run that would last longer")
    parser.add_argument("--into", type=Path, default=ROOT / "docs/results", metavar="FOLDER")
    parser.add_argument("--revision", help="of the sources, where git does not know it")
    options = parser.parse_args(words)
    if strange := set(options.names) - set(RUNS):
        parser.error(f"unknown: {', '.join(sorted(strange))}")
    names = options.names or list(RUNS)
    if options.list or options.check:
        return int(tell(names, options.into) and options.check)
    revision = options.revision or revision_here()
    begin, gpus, mpi, failed = time.monotonic(), gpus_here(), vendor(), False
    for name in names:
        left_s = (options.seconds or float("inf")) - (time.monotonic() - begin)
        made = revision_of(options.into, name)
        reason = why_not(RUNS[name], gpus, mpi)
        if made and (made == revision or not newer(RUNS[name], made)):
            reason = "is there"
        elif RUNS[name].seconds > left_s:
            reason = f"wants {RUNS[name].seconds} s of {left_s:.0f}"
        if reason:
            print(f"{name}: {reason}")
        else:
            failed |= not measure(name, options.into, revision)
    return int(failed)


def tell(names: list[str], folder: Path) -> bool:
    """Say of each run how many files that it measured are newer, and whether any is."""
    texts = []
    for name in names:
        made = revision_of(folder, name)
        files = newer(RUNS[name], made) if made else []
        rest = f" and {len(files) - 1} more" if len(files) > 1 else ""
        texts.append(f"older than {files[0]}{rest}" if files else "current" if made else "missing")
        print(f"{name}: {texts[-1]}")
    return any(text != "current" for text in texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
