"""For programs that `run_ranks` starts: facts for the test, through a file of this rank.

A file and not stdout, which a job that loses a rank may not deliver.
"""

import json
import os
from pathlib import Path

# Set by mpich, Open MPI and srun, in this order of trust.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_facts: dict[str, object] = {}


def my_rank() -> int:
    """This process's rank without starting MPI; 0 when it was started alone."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def report(facts: dict[str, object]) -> None:
    """Add to what this rank has reported; on disk, and whole, when this returns."""
    _facts.update(facts)
    file = Path(os.environ["REPORT_DIR"]) / f"{my_rank()}.json"
    unfinished = file.with_suffix(".new")
    with unfinished.open("w") as stream:
        json.dump(_facts, stream)
    unfinished.replace(file)


def facts_of(rank: int) -> dict[str, object]:
    """What that rank has reported so far."""
    file = Path(os.environ["REPORT_DIR"]) / f"{rank}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def begin(folder: Path) -> None:
    """Forget what was reported; what comes goes to another folder."""
    _facts.clear()
    os.environ["REPORT_DIR"] = str(folder)
