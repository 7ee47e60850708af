"""GPUs as NVML describes them, made up."""

from mpishare.tools.nvml import Gpu


def gpu(number=0, **changes):
    """One of a node's GPUs as NVML would describe it."""
    values = {
        "uuid": f"GPU-{number:08x}-aaaa",
        "name": "NVIDIA H200",
        "pci_id": f"0000:{6 + number:02x}:00.0",
        "mig": False,
        "compute_mode": "default",
        "pcie_generation": 5,
        "pcie_width": 16,
        "nvlinks": 18,
    }
    return Gpu(**{**values, **changes})
