"""How much memory this process may still take: the least that a control group above it leaves.

A job step, a container and a service each have limits on every level of their control groups, and
shared memory counts. Beyond a limit the kernel kills the process instead of refusing. So it is
checked before memory is taken. See the kernel's documentation of cgroup-v1/memory and of cgroup-v2.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Limit(NamedTuple):
    nbytes: int
    left: int  # including the cache that the kernel can drop
    group: str  # as a path from the mount of its hierarchy


# For both versions: the files of the limit and of the usage, and the cache's line in memory.stat.
_VERSIONS = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Version 1 writes a number near 2^63 for no limit.
_NO_LIMIT = 1 << 60


def tightest(root: Path = Path("/")) -> Limit | None:
    """Return the tightest limit on the way up from this process's group, None without any.

    `root` has /proc and the mounts.
    """
    limits = [limit for files, top, own in _hierarchies(root) for limit in _above(files, top, own)]
    return min(limits, key=lambda limit: limit.left, default=None)


@functools.cache  # pools ask at each new page, and launchers place a process before it starts
def _hierarchies(root: Path) -> tuple[tuple[tuple[str, ...], Path, PurePosixPath], ...]:
    """Find each mounted hierarchy with memory: its files, its mount, and this process's group."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ()
    mine = _groups_by_version(groups)
    found = {}
    for line in mounts:
        before, _, behind = line.partition(" - ")
        base, point = map(_unescaped, before.split()[3:5])
        kind, _, options = behind.split(" ", 2)
        is_of_memory = kind == "cgroup2" or "memory" in options.split(",")
        if kind in mine and is_of_memory:
            own = mine[kind]
            # A container may see the group of its process under another name than its mount.
            is_below = own.is_relative_to(base) and ".." not in own.parts
            below = own.relative_to(base) if is_below else PurePosixPath()
            found[point] = _VERSIONS[kind], root / point.lstrip("/"), below
        else:
            found.pop(point, None)  # hidden by this later mount
    return tuple(found.values())


def _groups_by_version(lines: Iterable[str]) -> dict[str, PurePosixPath]:
    """Return the groups that limit this process's memory, of /proc/self/cgroup."""
    found = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            found["cgroup"] = PurePosixPath(path)
    return found


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _above(files: Iterable[str], top: Path, own: PurePosixPath) -> Iterator[Limit]:
    """Return the limits of a group and of all above it, as far as they are mounted."""
    of_limit, of_usage, of_cache = files
    for group in (own, *own.parents):
        folder = top / group
        try:
            limit = (folder / of_limit).read_text().strip()
            if limit == "max" or int(limit) >= _NO_LIMIT:
                continue  # before the statistics, which the kernel sums over all processors
            used = int((folder / of_usage).read_text())
            stat = (folder / "memory.stat").read_text()
        except OSError:
            continue  # the top of version 2 and groups that are not mounted have no such files
        cache = re.search(rf"^{of_cache} (\d+)$", stat, re.MULTILINE)
        left = int(limit) - used + (int(cache[1]) if cache else 0)
        yield Limit(int(limit), max(left, 0), f"/{group}" if group.parts else "/")
