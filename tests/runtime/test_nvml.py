"""What becomes of the answers of NVML, which test_hardware_gpu.py of tests/runtime asks itself."""

import sys

import pytest

from mpishare import UnsupportedError
from mpishare.tools import nvml
from mpishare.tools.nvml import Link, NvLink, count_nvlinks, describe_p2p, pci_id
from tests.helpers.hardware import gpu

GPU_TYPE, SWITCH = 0, 2
ONE, TWO = "0000:06:00.0", "0000:07:00.0"


def link(read=0, write=0):
    return Link(ONE, TWO, level=50, nvlinks=0, nvlink_version=None, read=read, write=write)


def test_links_are_counted_to_the_other_gpu():
    """Four bridges between two GPUs, and as many to a third."""
    mine = [NvLink(GPU_TYPE, TWO)] * 4 + [NvLink(GPU_TYPE, "0000:08:00.0")] * 4
    theirs = [NvLink(GPU_TYPE, ONE)] * 4
    assert count_nvlinks(mine, theirs, TWO) == 4


def test_links_through_switches_are_those_that_both_have():
    assert count_nvlinks([NvLink(SWITCH)] * 18, [NvLink(SWITCH)] * 16, TWO) == 16


def test_what_is_not_told_is_taken_for_a_switch():
    assert count_nvlinks([NvLink(None)] * 18, [NvLink(None)] * 18, TWO) == 18
    assert count_nvlinks([], [], TWO) == 0


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:06:00.0", ONE),
        ("0000:06:00.0", ONE),
        ("00010000:C1:00.0", "10000:c1:00.0"),
        ("0001:C1:00.0", "0001:c1:00.0"),
    ],
)
def test_addresses_are_those_of_cuda(text, address):
    assert pci_id(text) == address


@pytest.mark.parametrize(
    ("codes", "text"),
    [
        ((0, 0), "P2P reads and writes"),
        ((1, 1), "no P2P: chipset not supported (CNS)"),
        ((4, 4), "no P2P: disabled by a registry key of the driver (DR)"),
        ((0, 3), "P2P reads: OK, writes: topology not supported (TNS)"),
        ((None, None), "no P2P: unknown (U)"),
        ((99, 99), "no P2P: unknown (U)"),
    ],
)
def test_p2p_in_words(codes, text):
    assert describe_p2p(link(*codes)) == text


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("default", None),
        (None, None),
        ("prohibited", "which lets no process in: `nvidia-smi -i 0000:06:00.0 -c DEFAULT`"),
        ("exclusive process", "several ranks there need the Multi-Process Service"),
    ],
)
def test_the_cure_for_a_compute_mode(mode, words):
    said = nvml.mode_cure([gpu(compute_mode=mode)], "#0")
    assert said is None if words is None else words in said


def test_gpus_of_the_kernel(tmp_path):
    """As the driver 580 writes it."""
    (tmp_path / ONE).mkdir()
    (tmp_path / ONE / "information").write_text(
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 38\nGPU UUID: \t GPU-9ac72b82-0000\n"
        "Bus Location: \t 0000:06:00.0\n"
    )
    assert nvml.of_the_kernel(tmp_path) == {ONE: ("GPU-9ac72b82-0000", "NVIDIA H200")}
    assert nvml.of_the_kernel(tmp_path / "nothing") == {}


def test_without_bindings_it_says_which_have_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match=r"cuda-bindings 12\.9\.6 and 13\.2"):
        nvml.look()
