"""Whole steps: a table of their time over the ranks."""

from pathlib import Path

from others import lines_of
from tables import table, us

#: How the faces of a step go, by the option of the program.
WAYS = {
    None: "mpishare",
    "pinned": "staged through pinned memory",
}
#: The runs of a place begin with its name.
PLACES = {
    "steps-gpus": "heat in 256 x 256 x 256 cells, H200",
    "steps-host": "heat in 96 x 96 x 96 cells, a core per rank",
}


def over_ranks(folder: Path) -> list[str]:
    """A table of the time of a step for each place."""
    rows, lines = lines_of(folder / "steps.jsonl"), []
    for name, title in PLACES.items():
        mine = [each for each in rows if each["run"].startswith(name)]
        times = {(each["ranks"], each["staged"]): each["step_us_median"] for each in mine}
        ways = {way: text for way, text in WAYS.items() if way in {of for _, of in times}}
        cells = [
            [str(ranks), *(us(times.get((ranks, way))) for way in ways)]
            for ranks in sorted({ranks for ranks, _ in times})
        ]
        lines += table([f"ranks: {title}", *(f"{text}, µs" for text in ways.values())], cells)
    return lines
