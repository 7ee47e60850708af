"""nvcc: that of the system, or of the wheels nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-crt."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import mpishare.device

FLAGS = ("-std=c++17", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror")


def find_nvcc():
    """The path of nvcc, or None."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else [])]
    wheels = [folder / "cu13" / "bin" / "nvcc" for folder in folders]
    found = [str(path) for path in wheels if path.exists()]
    return shutil.which("nvcc") or next(iter(found), None)


def find_cuda_include():
    """The folder of cuda.h, of the system or of the wheels nvidia-cuda-*, or None."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) for folder in (spec.submodule_search_locations if spec else [])]
    folders = [wheel / name / "include" for wheel in wheels for name in ("cu13", "cuda_runtime")]
    folders.append(Path("/usr/local/cuda/include"))
    found = [str(folder) for folder in folders if (folder / "cuda.h").exists()]
    return next(iter(found), None)


def compile_by_nvcc(file, to, *more):
    """Compile a file to what the name `to` ends in; what the compiler said, and its status."""
    kind = {".ptx": "-ptx", ".cubin": "-cubin", ".o": "-c"}[Path(to).suffix]
    command = [find_nvcc(), kind, *FLAGS, *more, *mpishare.device.include(), "-o", to, file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
