"""The GPUs of a node for `python -m mpishare.info`: their links, and the ranks that see them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mpishare.backends.presence import visible_addresses
from mpishare.errors import UnsupportedError, grouped, name_ranks
from mpishare.tools import nvml
from mpishare.tools.cli import aligned
from mpishare.tools.nvml import mode_cure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mpishare.backends import Device
    from mpishare.runtime.report import Report
    from mpishare.tools.nvml import Gpu, Link

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
        why_not=why_not,
        gpus=gpus,
        links=links,
        visible=visible_addresses(),
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
        self._names = {at: names for view in views for at, names in view.listed.items()}
        self._names |= {at: (gpu.uuid, gpu.name) for at, gpu in self._gpus.items()}
        self.addresses = sorted(self._names)
        links = {(link.first, link.second): link for view in views for link in view.links}
        number = self.addresses.index
        self._links = {(number(a), number(b)): link for (a, b), link in sorted(links.items())}
        self._devices = _devices_of(report)
        self._users = grouped((device.pci_id, rank) for rank, device in self._devices)

    @property
    def hidden(self) -> list[Hidden]:
        """GPUs of the node that are hidden from ranks, each with the cause."""
        found = grouped(
            ((tuple(numbers), cause), rank)
            for rank, view in enumerate(self._views)
            for cause, numbers in grouped(self._hidden_from(view)).items()
        )
        return [Hidden(tuple(ranks), gpus, by) for (gpus, by), ranks in found.items()]

    def _hidden_from(self, view: RankView) -> Iterator[tuple[str, int]]:
        """Yield the GPUs that a rank does not see, each behind the cause."""
        seen = {gpu.pci_id for gpu in view.gpus}
        for number, at in enumerate(self.addresses):
            if view.visible is not None and at not in view.visible:
                cause = _UNKNOWN if at in seen else _CGROUP
                if view.variable is not None and (at in seen or view.why_not is not None):
                    cause = f"{_VARIABLE}={view.variable}"
                yield cause, number

    @property
    def notes(self) -> list[str]:
        """Oddities, each with its remedy."""
        return [*self._unlike(), *self._modes(), *self._without_p2p()]

    def as_dict(self) -> dict[str, Any]:
        return {
            "why_not": self._why_not,
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
                for pair, link in self._links.items()
            ],
            "hidden": [asdict(each) for each in self.hidden],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        """Write it for people, each line indented as in the report; empty without a driver."""
        has_driver = bool(self._names) or any(view.visible is not None for view in self._views)
        lines = [self._why_not] if self._why_not and has_driver else []
        if self.addresses:
            rows = [*map(self._row, range(len(self.addresses)))]
            lines += [self._title(), *aligned(rows, range(len(rows[0])))]
            lines += self._describe_links()
            lines += [_describe_hidden(each, len(self._views)) for each in self.hidden]
            lines += self.notes
        return "".join(f"  {line}\n" for line in lines)

    def _title(self) -> str:
        is_asked = all(view.visible is not None for view in self._views)
        seen = "; every rank sees all of them" if is_asked and not self.hidden else ""
        return f"GPUs of the node, by {'the kernel' if self._why_not else 'NVML'}{seen}"

    @property
    def _why_not(self) -> str | None:
        """Why NVML could not be asked, on the first rank where it could not."""
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

    def _describe_links(self) -> list[str]:
        """Return a line for each kind of link, with its pairs of GPUs."""
        kinds = grouped(
            (f"{_describe_link(link)}; {nvml.describe_p2p(link)}", f"#{first}-#{second}")
            for (first, second), link in self._links.items()
        )
        if len(kinds) == 1 and len(self._links) > 1:
            return [f"all {len(self._links)} pairs: {text}" for text in kinds]
        return [f"{', '.join(pairs)}: {text}" for text, pairs in kinds.items()]

    def _unlike(self) -> Iterator[str]:
        """Name GPUs whose links are slower than those of others of their model."""
        models = grouped((gpu.name, gpu) for gpu in self._known())
        for what, speed in (("PCIe", _pcie), ("NVLink", _nvlinks)):
            for name, gpus in models.items():
                speeds = grouped((speed(gpu), gpu) for gpu in gpus)
                if len(speeds) > 1:
                    each = ", ".join(
                        f"{self._name(those)} {text}" for text, those in speeds.items()
                    )
                    yield f"{what} differs between GPUs {name}: {each}"

    def _modes(self) -> Iterator[str]:
        if in_mig := [gpu for gpu in self._known() if gpu.mig]:
            yield (
                f"{self._name(in_mig)} in MIG mode: GPU instances share no memory with each other "
                "or with other GPUs, so that their ranks exchange through host memory (`pinned`). "
                "Ask for whole GPUs, or leave the mode while the GPU is idle: "
                f"`nvidia-smi -i {in_mig[0].pci_id} -mig 0` as root"
            )
        # GPUs whose ranks have no Multi-Process Service; all where there is no report.
        without = {device.pci_id for _, device in self._devices if not device.mps}
        modes = grouped(
            (gpu.compute_mode, gpu)
            for gpu in self._known()
            if self._report is None or gpu.pci_id in without
        )
        yield from filter(None, (mode_cure(gpus, self._name(gpus)) for gpus in modes.values()))

    def _known(self) -> list[Gpu]:
        return [self._gpus[at] for at in self.addresses if at in self._gpus]

    def _name(self, gpus: Iterable[Gpu]) -> str:
        return _name(self.addresses.index(gpu.pci_id) for gpu in gpus)

    def _without_p2p(self) -> Iterator[str]:
        """Name the routes of ranks whose GPUs have no P2P."""
        pairs = () if self._report is None else self._report.pairs
        for (first, second), link in self._links.items():
            ends = [self._users.get(end, []) for end in (link.first, link.second)]
            routes = {
                pair.route for pair in pairs if pair.origin in ends[0] and pair.target in ends[1]
            }
            if routes and not link.read == link.write == 0:
                origins, targets = map(name_ranks, ends)
                yield (
                    f"{origins} and {targets}: no P2P between #{first} and #{second}, so that "
                    f"halos go by {', '.join(f'`{route}`' for route in sorted(routes))}"
                )


def _devices_of(report: Report | None) -> list[tuple[int, Device]]:
    members = [] if report is None else report.members
    return [(each.rank, each.device) for each in members if each.device is not None]


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
