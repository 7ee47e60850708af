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
    from collections.abc import Iterator


class Limit(NamedTuple):
    nbytes: int
    left: int  # including the cache that the kernel can drop
    group: str  # as a path from the mount of its hierarchy


# For both versions: this process's group in /proc/self/cgroup, where groups are mounted, the files
# of the limit and of the usage, and the cache's line in memory.stat.
_VERSIONS = (
    (r"^0::/(.*)$", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        r"^\d+:(?:.*,)?memory(?:,.*)?:/(.*)$",
        "sys/fs/cgroup/memory",
        *("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
)
# Version 1 writes a number near 2^63 for no limit.
_NO_LIMIT = 1 << 60


def tightest(root: Path = Path("/")) -> Limit | None:
    """Return the tightest limit on the way up from this process's group, None without any.

    `root` has /proc and the mounts.
    """
    return min(_limits(root), key=lambda limit: limit.left, default=None)


def _limits(root: Path) -> Iterator[Limit]:
    for top, group, of_limit, of_usage, of_cache in _groups(root):
        folder = top / group
        limit = (folder / of_limit).read_text().strip()
        if limit == "max" or int(limit) >= _NO_LIMIT:
            continue  # before the statistics, which the kernel sums over all processors
        used = int((folder / of_usage).read_text())
        stat = (folder / "memory.stat").read_text()
        cache = re.search(rf"^{of_cache} (\d+)$", stat, re.MULTILINE)
        left = int(limit) - used + (int(cache[1]) if cache else 0)
        yield Limit(int(limit), max(left, 0), f"/{group}" if group.parts else "/")


@functools.cache  # pools ask at each new page, and launchers place a process before it starts
def _groups(root: Path) -> list[tuple[Path, PurePosixPath, str, str, str]]:
    """Return the groups with a limit that can be seen: the mount, the group, its files."""
    try:
        mine = (root / "proc/self/cgroup").read_text()
    except OSError:
        return []
    found = []
    for pattern, mount, of_limit, *others in _VERSIONS:
        if own := re.search(pattern, mine, re.MULTILINE):
            group, top = PurePosixPath(own[1]), root / mount
            # A container may show its own group as the top: then those above have no files here.
            above = [each for each in (group, *group.parents) if (top / each / of_limit).exists()]
            found += [(top, each, of_limit, others[0], others[1]) for each in above]
    return found
