"""The GPUs of a node in words: who sees which, how they are linked, what looks odd."""

import json
from dataclasses import replace
from itertools import combinations

from mpishare.backends import Device
from mpishare.runtime.report import Member, Report, host_pairs
from mpishare.tools.hardware import Hardware, RankView
from mpishare.tools.nvml import Gpu, Link
from tests.helpers.hardware import gpu

NO_P2P = 1
SYS, SWITCH = 50, 10


def link(first, second, **changes):
    values = {"level": SYS, "nvlinks": 18, "nvlink_version": 6, "read": 0, "write": 0}
    return Link(first.pci_id, second.pci_id, **{**values, **changes})


def view(gpus, *, visible=None, variable=None, why_not=None, listed=None, **of_links):
    """What a rank sees that NVML shows `gpus`, and CUDA `visible` of them, all by default."""
    return RankView(
        why_not=why_not,
        gpus=tuple(gpus),
        links=tuple(link(*pair, **of_links) for pair in combinations(gpus, 2)),
        visible=tuple(each.pci_id for each in (gpus if visible is None else visible)),
        listed={
            each.pci_id: (each.uuid, each.name) for each in (gpus if listed is None else listed)
        },
        variable=variable,
    )


def report(gpus, *, mps=False, route="fused"):
    """Of a node whose ranks use these GPUs."""
    members = tuple(
        Member(
            rank=rank,
            given_rank=rank,
            host="n7",
            pid=100 + rank,
            device=Device(0, each.uuid, each.pci_id, each.name, mps, "9.0", "580 (CUDA 13.0)"),
        )
        for rank, each in enumerate(gpus)
    )
    pairs = tuple(replace(pair, route=route) for pair in host_pairs(len(gpus)))
    return Report("cuda", None, 0, members, pairs, ())


TWO = gpu(0), gpu(1)
FOUR = tuple(gpu(number) for number in range(4))


def lines(*views, **of_report):
    found = of_report.pop("report", None)
    return str(Hardware(views, found)).splitlines()


def recorded():
    """What a rank saw on a virtual machine with two H200, driver 580.159.04."""
    at = "0000:00:06.0", "0000:00:07.0"
    uuids = "GPU-4b2dadc3-f826-23d9-6463-43285d5cbb3a", "GPU-577f0906-991d-2d85-fabf-48c259b3b517"
    gpus = tuple(
        Gpu(uuid, "NVIDIA H200", place, False, "default", 5, 16, 18)
        for uuid, place in zip(uuids, at, strict=True)
    )
    return RankView(
        why_not=None,
        gpus=gpus,
        links=(Link(*at, level=30, nvlinks=18, nvlink_version=6, read=0, write=0),),
        visible=at,
        listed={place: (uuid, "NVIDIA H200") for uuid, place in zip(uuids, at, strict=True)},
        variable="0,1",
    )


def test_a_row_for_each_gpu_and_one_line_for_links_of_a_kind():
    seen = recorded()
    assert lines(seen, seen, report=report(seen.gpus)) == [
        "  GPUs of the node, by NVML; every rank sees all of them",
        "  #0  GPU-4b2dadc3  NVIDIA H200  at 0000:00:06.0  PCIe 5.0 x16  18 NVLinks  rank 0",
        "  #1  GPU-577f0906  NVIDIA H200  at 0000:00:07.0  PCIe 5.0 x16  18 NVLinks  rank 1",
        "  #0-#1: 18 NVLinks of generation 4 (NV18); P2P reads and writes",
    ]


def test_who_hides_a_gpu_from_whom():
    masked = [
        view(TWO, visible=TWO[:1], variable="0"),
        view(TWO, visible=TWO[1:], variable="1"),
        view(TWO),
    ]
    found = lines(*masked, report=report([*TWO, TWO[0]]))
    assert "  rank 0 does not see #1, hidden by CUDA_VISIBLE_DEVICES=0" in found
    assert "  rank 1 does not see #0, hidden by CUDA_VISIBLE_DEVICES=1" in found
    assert found[0] == "  GPUs of the node, by NVML"
    assert found[1].endswith("ranks 0, 2")


def test_a_cgroup_hides_gpus_from_nvml_too():
    """SLURM's: each rank has the device files of its own GPU; the kernel's list has all."""
    confined = [view([each], variable="0", listed=FOUR) for each in TWO]
    found = lines(*confined, report=report(TWO))
    cause = "hidden by a device cgroup or the container, from NVML too"
    assert f"  rank 0 does not see #1, #2, #3, {cause}" in found
    assert f"  rank 1 does not see #0, #2, #3, {cause}" in found
    assert "#2 GPU-00000002 NVIDIA H200 at 0000:08:00.0 no rank" in [
        " ".join(line.split()) for line in found
    ]
    assert not any("-#" in line for line in found)  # nobody can ask how they are linked


def test_a_pair_without_p2p_names_the_reason_and_the_route():
    found = lines(
        *[view(TWO, nvlinks=0, read=NO_P2P, write=NO_P2P)] * 2, report=report(TWO, route="pinned")
    )
    assert "  #0-#1: across sockets (SYS); no P2P: chipset not supported (CNS)" in found
    assert "  rank 0 and rank 1: no P2P between #0 and #1, so that halos go by `pinned`" in found


def test_mig_says_what_to_do():
    (note,) = Hardware([view([gpu(0), gpu(1, mig=True)])]).notes
    assert note.startswith("#1 in MIG mode: GPU instances share no memory")
    assert "`nvidia-smi -i 0000:07:00.0 -mig 0`" in note


def test_exclusive_gpus_need_mps():
    exclusive = [gpu(number, compute_mode="exclusive process") for number in range(2)]
    (note,) = Hardware([view(exclusive)]).notes
    assert note.startswith("#0, #1 in compute mode exclusive process, for one process alone")
    assert "python -m mpishare.mps" in note
    views = [view(exclusive)] * 2
    assert Hardware(views, report(exclusive[:1] * 2, mps=True)).notes[1:] == []
    assert "#0 in compute" in Hardware(views, report(exclusive[:1] * 2)).notes[0]


def test_without_nvml_one_line_and_what_the_kernel_lists():
    blind = replace(view([], why_not="there is no cuda.bindings.nvml"), listed={})
    assert lines(replace(blind, visible=())) == [
        "  no links, P2P and MIG: rank 0: there is no cuda.bindings.nvml"
    ]
    shown = view([], visible=TWO[:1], why_not="no NVML", listed=TWO, variable="0")
    assert lines(shown) == [
        "  no links, P2P and MIG: rank 0: no NVML",
        "  GPUs of the node, by the kernel",
        "  #0  GPU-00000000  NVIDIA H200  at 0000:06:00.0",
        "  #1  GPU-00000001  NVIDIA H200  at 0000:07:00.0",
        "  rank 0 does not see #1, hidden by CUDA_VISIBLE_DEVICES=0",
    ]


def test_as_data():
    masked = view(TWO, visible=TWO[:1], variable="0")
    data = json.loads(json.dumps(Hardware([masked] * 2, report([TWO[0]] * 2)).as_dict()))
    assert data["why_not"] is None
    assert [each["ranks"] for each in data["gpus"]] == [[0, 1], []]
    assert data["gpus"][1]["compute_mode"] == "default"
    (pair,) = data["links"]
    assert pair["gpus"] == [0, 1]
    assert pair["p2p"] == "P2P reads and writes"
    assert pair["nvlinks"] == 18
    assert data["hidden"] == [{"ranks": [0, 1], "gpus": [1], "by": "CUDA_VISIBLE_DEVICES=0"}]
