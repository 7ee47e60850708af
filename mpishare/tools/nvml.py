"""NVML's description of the GPUs of a machine: links, P2P status and reasons, MIG, compute modes.

It sees the GPUs that `CUDA_VISIBLE_DEVICES` hides, and like CUDA none that a device cgroup hides.
Numbers are those of nvml.h (NVML API Reference), as versions of cuda-bindings name them
differently.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.errors import UnsupportedError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_KERNEL_GPUS = Path("/proc/driver/nvidia/gpus")
_READ, _WRITE, _NVLINK = 0, 1, 2  # nvmlGpuP2PCapsIndex_t
_UNKNOWN = 6  # nvmlGpuP2PStatus_t
_MOST_LINKS = 64
_GPU, _SWITCH = 0, 2  # nvmlIntNvLinkDeviceType_t

#: nvmlGpuP2PStatus_t, with the letters of `nvidia-smi topo -p2p`.
P2P_STATUS = {
    0: "OK",
    1: "chipset not supported (CNS)",
    2: "GPU not supported (GNS)",
    3: "topology not supported (TNS)",
    4: "disabled by a registry key of the driver (DR)",
    5: "not supported (NS)",
    6: "unknown (U)",
}
#: nvmlComputeMode_t.
COMPUTE_MODES = {
    0: "default",
    1: "exclusive thread",
    2: "prohibited",
    3: "exclusive process",
}


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML describes it; None where NVML has no answer."""

    uuid: str
    name: str
    pci_id: str
    mig: bool | None
    compute_mode: str | None  # of `COMPUTE_MODES`
    pcie_generation: int | None  # the highest in this machine: an idle GPU runs slower
    pcie_width: int | None  # lanes in use
    nvlinks: int  # up


@dataclass(frozen=True)
class Link:
    """How two GPUs are connected."""

    first: str  # PCI address, the smaller one of both
    second: str
    level: int | None  # nvmlGpuTopologyLevel_t: 0, 10, ... 50, from one board to across sockets
    nvlinks: int  # between them, directly or through switches
    nvlink_version: int | None  # nvmlNvlinkVersion_t
    read: int | None  # nvmlGpuP2PStatus_t
    write: int | None


class NvLink(NamedTuple):
    """The device at the other end of an NVLink that is up; its address, if that is a GPU."""

    remote_type: int | None
    remote_pci: str | None = None


_Seen = tuple[Gpu, int, list[NvLink]]  # with its handle, and the ends of its NVLinks


def look() -> tuple[tuple[Gpu, ...], tuple[Link, ...]]:
    """Return NVML's GPUs and the link of each pair, or raise `UnsupportedError`."""
    with _asked() as nvml:
        found: list[_Seen] = []
        for index in range(nvml.device_get_count_v2()):
            handle = nvml.device_get_handle_by_index_v2(index)
            ends = _nvlinks(nvml, handle)
            found.append((_describe(nvml, handle, len(ends)), handle, ends))
        found.sort(key=lambda each: each[0].pci_id)
        links = [_link(nvml, mine, theirs) for mine, theirs in combinations(found, 2)]
        return tuple(gpu for gpu, *_ in found), tuple(links)


def _link(nvml: Any, mine: _Seen, theirs: _Seen) -> Link:
    (first, handle, ends), (second, other, other_ends) = mine, theirs
    read, write, by_nvlink = (
        _ask(nvml.device_get_p2p_status, handle, other, kind) for kind in (_READ, _WRITE, _NVLINK)
    )
    count = count_nvlinks(ends, other_ends, second.pci_id) if by_nvlink == 0 else 0
    return Link(
        first=first.pci_id,
        second=second.pci_id,
        level=_ask(nvml.device_get_topology_common_ancestor, handle, other),
        nvlinks=count,
        # Of the first one: all of a GPU are alike.
        nvlink_version=_ask(nvml.device_get_nvlink_version, handle, 0) if count else None,
        read=read,
        write=write,
    )


def count_nvlinks(mine: Sequence[NvLink], theirs: Sequence[NvLink], their_pci: str) -> int:
    """Return the number of NVLinks between two GPUs that reach each other by NVLink.

    Counted are links that end at the other GPU; without any, links of both into switches. In a
    virtual machine the device at the other end may be unknown: it is taken for a switch.
    """
    direct = sum(link.remote_pci == their_pci for link in mine)
    if direct:
        return direct
    return min(sum(link.remote_type in (_SWITCH, None) for link in ends) for ends in (mine, theirs))


def mode_cure(gpus: Sequence[Gpu], names: str) -> str | None:
    """Return the restriction of a common compute mode and a remedy; None for the default."""
    mode = gpus[0].compute_mode
    said = f"{names} in compute mode {mode}"
    back = f"`nvidia-smi -i {gpus[0].pci_id} -c DEFAULT` as root"
    if mode == COMPUTE_MODES[2]:
        return f"{said}, which lets no process in: {back}"
    if mode in (COMPUTE_MODES[1], COMPUTE_MODES[3]):
        return (
            f"{said}, for one process alone: several ranks there need the Multi-Process Service, "
            f"`python -m mpishare.mps mpirun ...`, or {back}"
        )
    return None


def describe_p2p(link: Link) -> str:
    """Describe whether two GPUs read and write each other's memory, with NVML's reason if not."""
    read, write = (
        P2P_STATUS.get(_UNKNOWN if code is None else code, P2P_STATUS[_UNKNOWN])
        for code in (link.read, link.write)
    )
    if read == write:
        return "P2P reads and writes" if read == "OK" else f"no P2P: {read}"
    return f"P2P reads: {read}, writes: {write}"


def of_the_kernel(folder: Path = _KERNEL_GPUS) -> dict[str, tuple[str, str]]:
    """Return UUID and model of the GPUs that the kernel's driver lists, by PCI address.

    A device cgroup hides none of them; a container often shows its own alone.
    """
    found = {}
    for path in sorted(folder.glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in path.read_text().splitlines())
        found[pci_id(path.parent.name)] = (
            lines.get("GPU UUID", "").strip(),
            lines.get("Model", "").strip(),
        )
    return found


def pci_id(text: str) -> str:
    """Return a PCI address as CUDA writes it; NVML's has a domain of eight digits."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


@contextlib.contextmanager
def _asked() -> Iterator[Any]:
    """Load NVML for the calls inside."""
    try:
        from cuda.bindings import nvml
    except ImportError:
        raise UnsupportedError(
            "there is no cuda.bindings.nvml: it came with cuda-bindings 12.9.6 and 13.2"
        ) from None
    try:
        nvml.init_v2()
    except (nvml.NvmlError, RuntimeError) as error:  # the latter if there is no library
        raise UnsupportedError(f"NVML does not start: {describe(error)}") from error
    try:
        yield nvml
    except (nvml.NvmlError, RuntimeError) as error:  # the latter if the library is too old
        raise UnsupportedError(f"NVML failed: {describe(error)}") from error
    finally:
        nvml.shutdown()


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer as a plain number or text; None if it has none."""
    from cuda.bindings.nvml import NvmlError

    try:
        value = function(*arguments)
    except NvmlError:  # not on this GPU, in this virtual machine, by this driver
        return None
    return int(value) if isinstance(value, int) else value


def _describe(nvml: Any, handle: int, nvlinks: int) -> Gpu:
    mig = _ask(nvml.device_get_mig_mode, handle)
    mode = _ask(nvml.device_get_compute_mode, handle)
    return Gpu(
        uuid=nvml.device_get_uuid(handle),
        name=nvml.device_get_name(handle),
        pci_id=pci_id(nvml.device_get_pci_info_v3(handle).bus_id),
        mig=None if mig is None else bool(mig[0]),
        compute_mode=None if mode is None else COMPUTE_MODES.get(mode, f"mode {mode}"),
        pcie_generation=_ask(nvml.device_get_max_pcie_link_generation, handle),
        pcie_width=_ask(nvml.device_get_curr_pcie_link_width, handle),
        nvlinks=nvlinks,
    )


def _nvlinks(nvml: Any, handle: int) -> list[NvLink]:
    """Return the NVLinks of a GPU that are up."""
    found = []
    for number in range(_MOST_LINKS):
        try:
            is_up = nvml.device_get_nvlink_state(handle, number)
        except nvml.InvalidArgumentError:
            break  # beyond the last one
        except nvml.NvmlError:
            is_up = False  # of a model without NVLink, or without this one
        if is_up:
            kind = _ask(nvml.device_get_nvlink_remote_device_type, handle, number)
            # In a virtual machine a switch has no address.
            remote = None
            if kind == _GPU:
                remote = _ask(nvml.device_get_nvlink_remote_pci_info_v2, handle, number)
            found.append(NvLink(kind, None if remote is None else pci_id(remote.bus_id)))
    return found
