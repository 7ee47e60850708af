"""The order of accesses of windows in PTX."""

import re

RELEASE, ACQUIRE = "st.release.sys.global.u64", "ld.acquire.sys.global.u64"


def orders_of(ptx, kinds):
    """By kernel: its instructions of these `kinds`, without repetitions.

    `kinds`: patterns, each with the name of its matches; None: the match itself.
    """
    found = {}
    for line in ptx.splitlines():
        if entry := re.search(r"\.entry (\w+)", line):
            mine = found[entry[1]] = []
        for pattern, name in kinds.items():
            if hit := re.match(rf"(?:\t| )*(?:@!?%?\w+ )?{pattern}\s", line):
                told = name or hit[1]
                if mine[-1:] != [told]:
                    mine.append(told)
    return found
