"""The GPUs of a node for `python -m mpishare.info`: their links, and the ranks that see them."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from mpishare.backends import nvml
from mpishare.backends.nvml import mode_cure
from mpishare.errors import UnsupportedError, name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mpishare.backends.nvml import Gpu, Link
    from mpishare.runtime.report import Report

#: nvmlGpuTopologyLevel_t, with the letters of `nvidia-smi topo -m`.
_LEVELS = {
    0: "one board",
    10: "one PCIe switch (PIX)",
    20: "several PCIe switches (PXB)",
    30: "a PCIe host bridge (PHB)",
    40: "several host bridges of one NUMA node (NODE)",
    50: "across sockets (SYS)",
}
#: nvmlNvlinkVersion_t.
_NVLINK_GENERATIONS = {1: "1", 2: "2", 3: "2.2", 4: "3", 5: "3.1", 6: "4", 7: "5", 8: "6"}
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_CGROUP = "a device cgroup or the container, from NVML too"
_UNKNOWN = "CUDA alone: cuInit fails, or an MPS daemon shows fewer"


@dataclass(frozen=True)
class RankView:
    host: str
    why_not: str | None  # the error of NVML; then `gpus` and `links` are empty
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    visible: tuple[str, ...] | None  # PCI addresses for CUDA; None without a driver
    listed: Mapping[str, tuple[str, str]]  # the kernel's, by PCI address: UUID and model
    variable: str | None  # CUDA_VISIBLE_DEVICES


def look() -> RankView:
    """Return the GPUs that this rank sees; takes a tenth of a second where there is a driver."""
    why_not, gpus, links = None, (), ()
    try:
        gpus, links = nvml.look()  # type: ignore[assignment]
    except UnsupportedError as error:
        why_not = str(error)
    return RankView(
        host=socket.gethostname(),
        why_not=why_not,
        gpus=gpus,
        links=links,
        visible=nvml.visible_to_cuda(),
        listed=nvml.of_the_kernel(),
        variable=os.environ.get(_VARIABLE),
    )


@dataclass(frozen=True)
class Hidden:
    """GPUs that ranks do not see, by their numbers in `Hardware`, and the cause."""

    ranks: tuple[int, ...]
    gpus: tuple[int, ...]
    by: str


class Hardware:
    """The GPUs of a node, merged from the views of its ranks, by rank in ``node.comm``.

    A GPU's number is its index in `addresses`, the PCI addresses in ascending order. `report` is
    None if the node could not be made.
    """

    def __init__(self, views: Sequence[RankView], report: Report | None = None) -> None:
        self._views = views
        self._report = report
        self._gpus = {gpu.pci_id: gpu for view in views for gpu in view.gpus}
        self._links = {(link.first, link.second): link for view in views for link in view.links}
        self._names = {at: names for view in views for at, names in view.listed.items()}
        self._names |= {at: (gpu.uuid, gpu.name) for at, gpu in self._gpus.items()}
        self.addresses = sorted(self._names)
        self._users: dict[str, list[int]] = {}
        for member in report.members if report is not None else ():
            if member.device is not None:
                self._users.setdefault(member.device.pci_id, []).append(member.rank)

    @property
    def hidden(self) -> list[Hidden]:
        """GPUs of the node that are hidden from ranks, each with the cause."""
        ranks: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for rank, view in enumerate(self._views):
            if view.visible is None:
                continue
            causes: dict[str, list[int]] = {}
            seen = {gpu.pci_id for gpu in view.gpus}
            for number, at in enumerate(self.addresses):
                if at not in view.visible:
                    cause = _cause(view, is_seen=at in seen)
                    causes.setdefault(cause, []).append(number)
            for cause, numbers in causes.items():
                ranks.setdefault((tuple(numbers), cause), []).append(rank)
        return [Hidden(tuple(those), gpus, by) for (gpus, by), those in ranks.items()]

    @property
    def notes(self) -> list[str]:
        """Oddities, each with its remedy."""
        return [*self._unlike(), *self._modes(), *self._without_p2p(), *self._unused()]

    def as_dict(self) -> dict[str, Any]:
        return {
            "why_not": self._why_not(),
            "gpus": [
                {
                    "number": number,
                    "pci_id": at,
                    "uuid": self._names[at][0],
                    "name": self._names[at][1],
                    "ranks": self._users.get(at, []),
                    **(asdict(self._gpus[at]) if at in self._gpus else {}),
                }
                for number, at in enumerate(self.addresses)
            ],
            "links": [
                {
                    "gpus": list(pair),
                    "link": _describe_link(link),
                    "p2p": nvml.describe_p2p(link),
                    **asdict(link),
                }
                for pair, link in self._pairs()
            ],
            "hidden": [asdict(each) for each in self.hidden],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        """Write it for people, each line indented as in the report; empty without a driver."""
        why_not = self._why_not()
        has_driver = bool(self._names) or any(view.visible is not None for view in self._views)
        lines = [f"  {why_not}"] if why_not and has_driver else []
        if self.addresses:
            lines += [self._title(), *self._rows(), *self._describe_links()]
            lines += [f"  {_describe_hidden(each, len(self._views))}" for each in self.hidden]
            lines += [f"  {note}" for note in self.notes]
        return "".join(f"{line}\n" for line in lines)

    def _title(self) -> str:
        is_asked = all(view.visible is not None for view in self._views)
        seen = "; every rank sees all of them" if is_asked and not self.hidden else ""
        return f"  GPUs of the node, by {'the kernel' if self._why_not() else 'NVML'}{seen}"

    def _rows(self) -> list[str]:
        return _aligned([self._row(number) for number in range(len(self.addresses))])

    def _why_not(self) -> str | None:
        """Return why NVML could not be asked, on the first rank where it could not."""
        for rank, view in enumerate(self._views):
            if view.why_not is not None:
                return f"no links, P2P and MIG: rank {rank}: {view.why_not}"
        return None

    def _row(self, number: int) -> list[str]:
        at = self.addresses[number]
        uuid, name = self._names[at]
        gpu, ranks = self._gpus.get(at), self._users.get(at)
        cells = [f"#{number}", uuid[:12], name, f"at {at}", _pcie(gpu), _nvlinks(gpu)]
        if self._report is not None:
            cells.append(name_ranks(ranks) if ranks else "no rank")
        return cells

    def _pairs(self) -> list[tuple[tuple[int, int], Link]]:
        numbers = combinations(range(len(self.addresses)), 2)
        places = {pair: tuple(self.addresses[number] for number in pair) for pair in numbers}
        return [(pair, self._links[at]) for pair, at in places.items() if at in self._links]

    def _describe_links(self) -> list[str]:
        """Return a line for each kind of link, with its pairs of GPUs."""
        kinds: dict[str, list[str]] = {}
        pairs = self._pairs()
        for (first, second), link in pairs:
            text = f"{_describe_link(link)}; {nvml.describe_p2p(link)}"
            kinds.setdefault(text, []).append(f"#{first}-#{second}")
        if len(kinds) == 1 and len(pairs) > 1:
            return [f"  all {len(pairs)} pairs: {text}" for text in kinds]
        return [f"  {', '.join(those)}: {text}" for text, those in kinds.items()]

    def _unlike(self) -> list[str]:
        """Name GPUs whose links are slower than those of others of their model."""
        notes = []
        for what, speed in (("PCIe", _pcie), ("NVLink", _nvlinks)):
            models: dict[str, dict[str, list[int]]] = {}
            for number, at in enumerate(self.addresses):
                if (gpu := self._gpus.get(at)) is not None:
                    models.setdefault(gpu.name, {}).setdefault(speed(gpu), []).append(number)
            for name, speeds in models.items():
                if len(speeds) > 1:
                    each = ", ".join(f"{_name(those)} {text}" for text, those in speeds.items())
                    notes.append(f"{what} differs between GPUs {name}: {each}")
        return notes

    def _modes(self) -> list[str]:
        known = [self._gpus[at] for at in self.addresses if at in self._gpus]
        notes = []
        if in_mig := [gpu for gpu in known if gpu.mig]:
            notes.append(
                f"{self._name(in_mig)} in MIG mode: GPU instances share no memory with each other "
                "or with other GPUs, so that their ranks exchange through host memory (`pinned`). "
                "Ask for whole GPUs, or leave the mode while the GPU is idle: "
                f"`nvidia-smi -i {in_mig[0].pci_id} -mig 0` as root"
            )
        modes: dict[str | None, list[Gpu]] = {}
        for gpu in known:
            if self._may_need_mps(gpu.pci_id):
                modes.setdefault(gpu.compute_mode, []).append(gpu)
        cures = [mode_cure(gpus, self._name(gpus)) for gpus in modes.values()]
        return notes + [cure for cure in cures if cure]

    def _may_need_mps(self, at: str) -> bool:
        """Whether ranks use a GPU without the Multi-Process Service, as far as is known."""
        if self._report is None:
            return True
        devices = [member.device for member in self._report.members]
        return any(each is not None and each.pci_id == at and not each.mps for each in devices)

    def _name(self, gpus: Iterable[Gpu]) -> str:
        return _name(self.addresses.index(gpu.pci_id) for gpu in gpus)

    def _without_p2p(self) -> list[str]:
        """Name the routes of ranks whose GPUs have no P2P."""
        notes = []
        for (first, second), link in self._pairs():
            theirs = [self._users.get(self.addresses[number], []) for number in (first, second)]
            if link.read == link.write == 0 or self._report is None or not all(theirs):
                continue
            routes = {
                pair.route
                for pair in self._report.pairs
                if pair.origin in theirs[0] and pair.target in theirs[1]
            }
            named = ", ".join(f"`{route}`" for route in sorted(routes))
            notes.append(
                f"{name_ranks(theirs[0])} and {name_ranks(theirs[1])}: no P2P between #{first} and "
                f"#{second}, so that halos go by {named}"
            )
        return notes

    def _unused(self) -> list[str]:
        """Note that all ranks use one GPU though all of them see others."""
        count = len(self._views)
        if count < 2 or len(self._users) != 1:
            return []
        (used,) = self._users
        free = [
            number
            for number, at in enumerate(self.addresses)
            if at != used and all(view.visible and at in view.visible for view in self._views)
        ]
        if not free:
            return []
        number = self.addresses.index(used)
        return [
            f"every rank uses #{number}, though all of them see {_name(free)} too: a library has "
            "chosen it before Node(); Node(device=...) chooses another"
        ]


def _cause(view: RankView, *, is_seen: bool) -> str:
    """Return the reason why a GPU is hidden from a rank; `is_seen`: NVML shows it there."""
    has_nvml = view.why_not is None
    if view.variable is not None and (is_seen or not has_nvml):
        return f"{_VARIABLE}={view.variable}"
    return _CGROUP if not is_seen else _UNKNOWN


def _describe_hidden(hidden: Hidden, count: int) -> str:
    verb = "does not see" if len(hidden.ranks) == 1 else "do not see"
    is_all = len(hidden.ranks) == count > 1
    who = "no rank sees" if is_all else f"{name_ranks(hidden.ranks)} {verb}"
    return f"{who} {_name(hidden.gpus)}, hidden by {hidden.by}"


def _describe_link(link: Link) -> str:
    level = "unknown" if link.level is None else _LEVELS.get(link.level, f"level {link.level}")
    if not link.nvlinks:
        return level
    generation = _NVLINK_GENERATIONS.get(link.nvlink_version or 0)
    of = f" of generation {generation}" if generation else ""
    return f"{link.nvlinks} NVLinks{of} (NV{link.nvlinks})"


def _pcie(gpu: Gpu | None) -> str:
    if gpu is None or gpu.pcie_generation is None or gpu.pcie_width is None:
        return ""
    return f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}"


def _nvlinks(gpu: Gpu | None) -> str:
    return "" if gpu is None else f"{gpu.nvlinks} NVLinks"


def _name(gpus: Iterable[int]) -> str:
    return ", ".join(f"#{number}" for number in gpus)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        ("  " + "  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
