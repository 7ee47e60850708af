"""Processes that run a share of the tests each run every test once."""

import subprocess
import sys

import pytest

from tests.helpers import shares
from tests.helpers.launch import ROOT
from tests.helpers.outcomes import read


@pytest.mark.parametrize("count", [1, 3, 7, 40])
def test_every_test_is_in_one_share(count):
    tests = [f"t{i}" for i in range(30)]
    dealt = shares.deal(tests, {"t3": 50, "t7": 0}, count)
    assert len(dealt) == count
    assert sorted(test for share in dealt for test in share) == sorted(tests)


def test_samples_have_some_parameters_of_every_test_and_together_all():
    tests = ["a[1]", "a[2]", "b", "a[3]", "c[x]", "c[y]", "a[4]"]
    first, second = (shares.sample(tests, number, 2) for number in (0, 1))
    assert first == {"a[1]", "a[3]", "b", "c[x]"}
    assert second == {"a[2]", "a[4]", "b", "c[y]"}


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "/2", "a/b"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(pytest.UsageError, match="NUMBER/COUNT"):
        shares.parse(text)


def test_shares_of_a_folder(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "def test_a(): pass\ndef test_b(): pass\ndef test_c(): pass"
    )
    ran = []
    for share in ("1/2", "2/2"):
        file = tmp_path / "outcomes"
        options = ["-p", "tests.helpers.shares", "-p", "tests.helpers.outcomes", "--outcomes", file]
        command = [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", *options]
        subprocess.run([*command, "--share", share, tmp_path], cwd=ROOT, check=True, timeout=60)
        ran.append(sorted(test.rpartition("::")[2] for test in read(file)))
    assert ran == [["test_a", "test_c"], ["test_b"]]
