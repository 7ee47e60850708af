"""A process outside the job that runs what a test tells it, line by line, and answers in JSON.

Also a pytest plugin of tests in lockstep: the fixtures `viewer` and `view`.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from mpishare.view.names import attachable
from tests.helpers.launch import ROOT

LOOP = """
import functools, gc, json, os, sys, time
import numpy as np
import mpishare
from mpishare.view.names import job_id

# The windows of the process that started this one, whatever other jobs there are.
attach = functools.partial(mpishare.attach, job=job_id(os.getppid()))

def host(array):
    return np.asarray(array.get() if hasattr(array, "get") else array).tolist()

def reset():
    for value in list(here.values()):
        if type(value).__module__ == "mpishare.view.attached" and hasattr(value, "close"):
            value.close()
    here.clear()
    here.update(first)
    gc.collect()

first = dict(globals())
here = dict(first)
for line in sys.stdin:
    source = json.loads(line)
    try:
        try:
            code = compile(source, "viewer", "eval")
        except SyntaxError:
            exec(source, here)
            answer = {"value": None}
        else:
            answer = {"value": eval(code, here)}
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)
"""


def facts_of(name: str) -> dict[str, Any]:
    """What is told of the window of that name of this process."""
    [found] = [w for w in attachable() if w["name"] == name and w.get("pid") == os.getpid()]
    return found


class Remote:
    """`viewer("expression or statements")` returns its value."""

    def begin(self, source: str) -> None:
        raise NotImplementedError

    def told(self) -> dict[str, Any]:
        """Return what came of that: {"value"}, or {"error", "text"}."""
        raise NotImplementedError

    def __call__(self, source: str) -> Any:
        self.begin(source)
        return self.answer()

    def answer(self) -> Any:
        told = self.told()
        assert "value" in told, told
        return told["value"]

    def raises(self, error: str, source: str, *words: str) -> None:
        """Require that source raises this error, with all of the words."""
        self.begin(source)
        told = self.told()
        assert told.get("error") == error, told
        assert all(each in told["text"] for each in words), told


class Viewer(Remote):
    """A process that waits for source, until the end of the block."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOP],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def begin(self, source: str) -> None:
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def told(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the viewer ended with status {self.process.wait(10)}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> int:
        self.process.stdin.close()
        status = self.process.wait(20)
        self.process.stdout.close()
        return status

    def __enter__(self) -> "Viewer":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None and exception[0] is not None:
            self.process.kill()
        self.close()


@contextlib.contextmanager
def viewing(node: Any, env: Mapping[str, str] | None = None) -> Iterator["SharedViewer"]:
    """A viewer of rank 0 in this environment, until the end of the block."""
    with contextlib.ExitStack() as stack:
        yield SharedViewer(node, stack.enter_context(Viewer(env)) if node.rank == 0 else None)


class SharedViewer(Remote):
    """A viewer of rank 0. Calls are collective, and every rank gets the value.

    All that was done before is over by then.
    """

    def __init__(self, node: Any, viewer: Viewer | None) -> None:
        self.node = node
        self.viewer = viewer

    def begin(self, source: str) -> None:
        self.node.synchronize()
        self.node.barrier()
        self.send(source)

    def send(self, source: str) -> None:
        """Let it run source, whatever is not over yet."""
        if self.viewer:
            self.viewer.begin(source)

    def told(self) -> dict[str, Any]:
        return self.node.comm.bcast(self.viewer.told() if self.viewer else None, 0)

    def reset(self) -> None:
        """Let it close what it attached to, and forget all names."""
        if self.viewer:
            self.viewer("reset()")
        if not self.node.is_closed:  # by a test that failed
            # Before that nobody may come to a call that closes dropped windows.
            self.node.comm.barrier()
