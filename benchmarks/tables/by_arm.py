"""Tables of cases that have a few arms and no rival at every size: a line per size and arm."""

from tables import CLOCKS, by_size, medians, pair, size, sizes, table, us

#: The forms of the program of the case jax.
FORMS = ("loop", "recorded", "unrolled", "padded")


def fresh(rows: list[dict]) -> list[str]:
    """Arrays that are new at each call, beside kept ones and messages; both clocks."""
    found = medians(rows, "fresh")
    messages = next(arm for _, arm, _ in found if arm in ("staged", "sendrecv"))
    columns = {
        "new arrays, µs": ("new arrays", None),
        "of kept, copied": ("new arrays", "kept, copied"),
        f"of {messages}": ("new arrays", messages),
        "arrays in turn, µs": ("arrays in turn", None),
        "of kept array": ("arrays in turn", "kept array"),
    }
    return by_size(["faces", *columns], found, columns.values())


def messages(rows: list[dict], case: str) -> list[str]:
    """Messages out of GPU memory, beside those by hand and those through the host; both clocks."""
    found = medians(rows, case)
    others = {f"by hand, {'in place' if case == 'messages1d' else 'packed'}": "mpi"}
    if all((nbytes, "mpi packed", CLOCKS[0]) in found for nbytes in sizes(found)):
        others["by hand, packed"] = "mpi packed"
    others["through the host"] = "through the host"
    columns = {"out of GPU memory, µs": ("messages", None)}
    columns |= {f"{name}, µs": (arm, None) for name, arm in others.items()}
    columns |= {f"of {name}": ("messages", arm) for name, arm in others.items()}
    return by_size(["faces", *columns], found, columns.values())


def mixed(found: list[dict]) -> list[str]:
    """Plans that mix messages with kernels, and sums over two nodes: lines of mixed_nodes.py."""
    pairs = {
        "fused alone, µs": "fused",
        "messages alone, µs": "messages",
        "both in one plan, µs": "mixed",
    }
    single = {
        "its kernel, µs": "fused part of mixed",
        "the kernel alone": "fused part alone",
        "interior, µs": "interior",
        "beside the exchange": "interior beside mixed",
    }
    cells = [
        [
            size(each["face_nbytes"]),
            *(pair(each[name]) for name in pairs.values()),
            *(us(each[name]) for name in single.values()),
        ]
        for each in found
        if "face_nbytes" in each
    ]
    lines = table(["faces", *pairs, *single], cells)
    arms = ("on GPUs", "through the host", "staged by hand")
    sums = [each for each in found if "sum_nbytes" in each]
    cells = [[size(each["sum_nbytes"]), *(us(each[arm]) for arm in arms)] for each in sums]
    heads = ["sum", "packed on GPUs, µs", "packed on the host, µs", "staged `MPI_Allreduce`, µs"]
    return [*lines, *table(heads, cells)]


def jax(rows: list[dict]) -> list[str]:
    """A step with an exchange, the same without it, and with that of mpi4jax where it ran."""
    found = {key[:2]: time for key, time in medians(rows, "jax").items()}
    has_mpi4jax = any(arm.startswith("mpi4jax") for _, arm in found)
    heads = ["faces", "step", "with exchange, µs", "without, µs", "difference"]
    heads += ["with mpi4jax, µs", "mpishare over mpi4jax"] * has_mpi4jax
    heads += ["exchange called, µs"]
    cells = []
    for nbytes in sizes(found):
        for form in FORMS:
            step, alone = found[nbytes, form], found[nbytes, f"{form} alone"]
            line = [size(nbytes), form, us(step), us(alone), us(step - alone)]
            if has_mpi4jax:
                theirs = found[nbytes, f"mpi4jax, {form}"]
                line += [us(theirs), f"{step / theirs:.2f}"]
            cells.append([*line, us(found[nbytes, "exchange called"])])
    return table(heads, cells)
