"""The figures of sharing between processes: every way runs, and reads what was written."""

import json
import sys

import pytest

from tests.helpers.launch import ROOT, run_right

PROGRAM = f"""
import sys

sys.path.insert(0, {str(ROOT / "scripts" / "lib")!r})
import sharing_times

# In the child that is spawned, too.
sharing_times.SIZES, sharing_times.COUNT, sharing_times.ROUNDS = (100,), 3, 1
sharing_times.FRAMES, sharing_times.FRAME_ROUNDS = 2, 1
sharing_times.HAS["ucxx"] = False  # its first connection takes seconds
if __name__ == "__main__":
    sharing_times.main()
"""


@pytest.mark.parametrize(("part", "ranks"), [("ranks", 2), ("child", 1)])
def test_every_way_has_its_times(tmp_path, part, ranks):
    program, results = tmp_path / "few.py", tmp_path / "few.jsonl"
    program.write_text(PROGRAM)
    result = run_right(ranks, [sys.executable, "-m", "mpi4py", program, part, results])
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert lines == [json.loads(line) for line in result.stdout.splitlines()]
    tasks = {line["what"] for line in lines}
    assert tasks == {"open a handle", "deal a frame", "share 200 arrays"}
    assert all(0 < line["least_us"] <= line["median_us"] for line in lines)
