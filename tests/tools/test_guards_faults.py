"""The guards of the fault tests, each seen to fail once."""

import os

import pytest

from tests.helpers import scenes
from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage, leftovers, shared_bytes


def leave_a_name(stage: Stage, folder: str) -> None:
    open(f"{folder}/mpishare-left-{stage.rank}", "w").close()  # noqa: PTH123


def test_a_name_left_in_shm_is_seen(tmp_path, monkeypatch):
    """In a folder that stands for it: other tests look there, too."""
    monkeypatch.setattr(scenes, "SHM", tmp_path)
    with pytest.raises(AssertionError, match="left in /dev/shm"):
        play(2, leave_a_name, str(tmp_path))


def keep_it_open(stage: Stage) -> None:
    report({"before": leftovers()})
    node = stage.node()
    window = node.allocate(2 << 20, dtype="u1")  # smaller ones share a file
    report({"open": leftovers(), "bytes": shared_bytes()})
    window.close()
    report({"window closed": shared_bytes()})
    node.close()
    report({"after": leftovers()})
    stage.attempt("raises", [].pop)
    stage.attempt("works", len, [])


def test_what_a_rank_still_holds_is_seen_and_what_a_call_did_is_told():
    played = play(2, keep_it_open, shared=True)
    for rank in (0, 1):
        facts = played.rank(rank)
        assert facts["before"] == facts["after"] == []
        assert "mpishare-watcher" in facts["open"]
        assert any(line.startswith("/dev/shm/") for line in facts["open"])
        assert facts["bytes"] - facts["window closed"] == 2 << 20
    played.ended_well()
    assert played.raised(1, "raises", "IndexError").text == "pop from empty list"
    played.worked([0, 1], "works")
    for words, call in (
        ("rank 0, works", lambda: played.raised(0, "works", "IndexError")),
        ("rank 1, raises", lambda: played.worked([1], "raises")),
        ("rank 2 told nothing", lambda: played.told(2, "works")),
    ):
        with pytest.raises(AssertionError, match=words):
            call()


def go_wrong(stage: Stage, way: str, folder: str) -> None:
    if stage.rank == 1 and way == "raises":
        raise ValueError("on purpose")
    if stage.rank == 1 and way == "leaves a name":
        from pathlib import Path

        from tests.helpers import launch

        launch.SHM = Path(folder)
        Path(folder, f"mpishare-{os.getpid()}-left").touch()
    report({"pid": os.getpid()})


@pytest.mark.parametrize(
    ("way", "words"), [("raises", "ValueError: on purpose"), ("leaves a name", "left in /dev/shm")]
)
def test_a_shared_scene_that_goes_wrong_is_seen_and_the_next_has_another_job(way, words, tmp_path):
    ways = ("", "", way, "")
    *right, wrong, after = (play(2, go_wrong, each, str(tmp_path), shared=True) for each in ways)
    assert words in wrong.result.stderr, wrong.describe()
    with pytest.raises(AssertionError):
        wrong.ended_well()
    for played in (*right, after):
        played.ended_well()
    first, second, last = (played.rank(0)["pid"] for played in (*right, after))
    assert first == second != last
