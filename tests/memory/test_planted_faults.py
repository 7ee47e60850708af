"""Another user puts things into /dev/shm under names like mpishare's: no job is stopped by them."""

import pytest

from tests.helpers.mounts import mount_before_jobs
from tests.helpers.planted import needs_two_users
from tests.helpers.reporting import report
from tests.helpers.scenes import play
from tests.helpers.stage import Stage


def robbed(stage: Stage, is_planted_first: bool) -> None:
    import contextlib

    from mpishare.coordination.poll import poll
    from mpishare.memory import shared
    from tests.helpers.launch import SHM
    from tests.helpers.planted import names_in, planted

    survivors = stage.world.Split(stage.rank == 1)
    publish = shared.publish

    def publish_and_die(memory: object) -> None:
        publish(memory)
        stage.die()

    with contextlib.ExitStack() as stack:
        names = set()

        def plant() -> None:
            names.update(stack.enter_context(planted()) if stage.rank == 0 else ())
            stage.world.Barrier()

        if is_planted_first:
            plant()
        node = stage.node(timeout_s=10.0)
        if not is_planted_first:
            plant()
        if stage.rank == 1:
            shared.publish = publish_and_die
        stage.attempt("allocate", lambda: node.allocate(8, owner=1))
        if stage.rank == 0:
            # As before the abort: the name that rank 1 has left goes, and what was planted stays.
            def is_clean() -> bool:
                shared.remove_abandoned()
                return names_in(SHM) == names

            report({"cleaned": poll(is_clean, 5, pause_s=0.01)})
        survivors.Barrier()


@needs_two_users
@pytest.mark.parametrize("is_planted_first", [True, False], ids=["job", "death"])
def test_planted_before_a(is_planted_first, monkeypatch, tmp_path):
    """Of all kinds: the job begins, the dead rank is named, and its end is that of the job."""
    mount_before_jobs(monkeypatch, tmp_path, "mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
    played = play(3, robbed, is_planted_first, survivable=True)
    played.missed(1, "allocate", of=(0, 2))
    assert played.rank(0)["cleaned"], played.describe()
    assert played.result.returncode != 0
    assert "aborts the job: rank 1 of 3 died" in played.stderr[0], played.describe()
