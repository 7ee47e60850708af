"""The kernels of the applications compile for every architecture, as those of mpishare do."""

import pytest

import mpishare.device
from tests.applications.programs import APPLICATIONS
from tests.helpers.nvrtc import ARCHITECTURES, check_compiles

#: Those that are compiled with boxes.cu before them.
ALONE = ("boxes", "poisson")
NAMES = sorted(path.stem for path in APPLICATIONS.glob("*.cu") if path.stem not in ALONE)


def test_every_source_has_its_program():
    files = APPLICATIONS.glob("*.py")
    assert sorted(path.stem for path in files if "boxes.kernels(" in path.read_text()) == NAMES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_compiles(name, architecture):
    source = (APPLICATIONS / "boxes.cu").read_text() + (APPLICATIONS / f"{name}.cu").read_text()
    check_compiles(source, architecture, *mpishare.device.include())
