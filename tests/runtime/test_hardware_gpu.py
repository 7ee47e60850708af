"""What NVML tells of this machine's GPUs, beside what CUDA and nvidia-smi tell of them."""

import os
import subprocess
import time

import pytest

from mpishare.backends.presence import visible_addresses
from mpishare.tools import hardware, nvml
from mpishare.tools.hardware import Hardware
from tests.helpers.children import python

pytestmark = pytest.mark.usefixtures("node")
_WIDTH = "pcie.link.width.current"
_FIELDS = ("uuid", "name", "pci.bus_id", "compute_mode", "mig.mode.current")


@pytest.fixture(autouse=True)
def _nvml(node):
    pytest.importorskip("cuda.bindings.nvml", reason="came with cuda-bindings 12.9.6 and 13.2")


def open_legacy_handle(*arguments):
    from mpishare.backends import cuda_memory  # imports CuPy

    return cuda_memory.open_legacy_handle(*arguments)


def smi(*arguments):
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_gpus_are_those_of_nvidia_smi():
    """The same that it lists, described alike."""
    gpus, _ = nvml.look()
    fields = (*_FIELDS, "pcie.link.gen.max", _WIDTH)
    rows = smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader").splitlines()
    said = {}
    for row in rows:
        uuid, name, address, mode, mig, generation, width = row.split(", ")
        said[uuid] = (
            name,
            nvml.pci_id(address),
            mode.lower().replace("_", " "),
            mig,
            generation,
            width,
        )
    assert {gpu.uuid for gpu in gpus} == set(said)
    for gpu in gpus:
        name, address, mode, mig, generation, width = said[gpu.uuid]
        assert (gpu.name, gpu.pci_id, gpu.compute_mode) == (name, address, mode)
        assert gpu.mig == {"Enabled": True, "Disabled": False}.get(mig)
        assert [str(gpu.pcie_generation), str(gpu.pcie_width)] == [generation, width]


def test_links_are_those_of_nvidia_smi():
    """`nvidia-smi topo -m` says NV18 where we count 18 NVLinks."""
    gpus, links = nvml.look()
    rows = [line.split() for line in smi("topo", "-m").splitlines()]
    cells = {row[0]: row[1:] for row in rows if row and row[0].startswith("GPU") and "X" in row}
    assert len(cells) == len(gpus)
    numbers = {gpu.pci_id: number for number, gpu in enumerate(gpus)}
    for link in links:
        shown = cells[f"GPU{numbers[link.first]}"][numbers[link.second]]
        text = hardware._describe_link(link)
        assert f"({shown})" in text, (shown, text)


def test_p2p_is_what_cuda_says(cupy):
    """For each pair of GPUs that this process sees by CUDA."""
    _, links = nvml.look()
    addresses = [
        cupy.cuda.runtime.deviceGetPCIBusId(ordinal).lower()
        for ordinal in range(cupy.cuda.runtime.getDeviceCount())
    ]
    assert list(visible_addresses()) == addresses
    found = {frozenset((link.first, link.second)): link for link in links}
    for mine, first in enumerate(addresses):
        for other, second in enumerate(addresses):
            if mine != other:
                can = cupy.cuda.runtime.deviceCanAccessPeer(mine, other)
                link = found[frozenset((first, second))]
                assert bool(can) == (link.read == link.write == 0), link


def test_a_link_by_nvlink_is_seen_by_the_probe_too(node):
    views = node.comm.allgather(hardware.look())
    links = {frozenset((link.first, link.second)): link for view in views for link in view.links}
    places = [member.device.pci_id for member in node.report().members]
    for pair in node.report().pairs:
        link = links.get(frozenset((places[pair.origin], places[pair.target])))
        if link is not None and pair.link in ("NVLink", "PCIe"):
            assert (link.nvlinks > 0) == (pair.link == "NVLink"), (link, pair)


def test_the_node_as_its_ranks_see_it(node):
    views = node.comm.allgather(hardware.look())
    found = Hardware(views, node.report())
    data = found.as_dict()
    assert data["why_not"] is None
    used = {rank: gpu["uuid"] for gpu in data["gpus"] for rank in gpu["ranks"]}
    assert used == {member.rank: member.device.uuid for member in node.report().members}
    # Every GPU is seen by a rank, or named as hidden from it.
    for rank, view in enumerate(views):
        hidden = [number for each in found.hidden if rank in each.ranks for number in each.gpus]
        seen = [found.addresses.index(address) for address in view.visible]
        assert sorted(hidden + seen) == list(range(len(found.addresses)))
    text = str(found)
    for gpu in data["gpus"]:
        assert f"{gpu['uuid'][:12]}  {gpu['name']}" in text


def test_cuda_visible_devices_hides_a_gpu_from_cuda_alone():
    """NVML shows as many as without; asked in a process of its own, as CUDA reads it once."""
    gpus, _ = nvml.look()
    code = (
        "from mpishare.backends.presence import visible_addresses\n"
        "from mpishare.tools import nvml\nprint(len(nvml.look()[0]), visible_addresses())\n"
    )
    done = python(code, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout.split() == [str(len(gpus)), "()"]


def test_it_is_not_slow():
    """Milliseconds: `info` and errors wait for it."""
    nvml.look()
    begin = time.perf_counter()
    for _ in range(5):
        hardware.look()
    assert (time.perf_counter() - begin) / 5 < 0.25
