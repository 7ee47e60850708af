from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpishare(PythonPackage, CudaPackage):
    """Halo exchanges, shared windows and reductions for MPI programs on GPUs: the ranks of a node
    map each other's GPU memory by CUDA IPC, and all work is ordered on CUDA streams. Without a GPU
    the same program runs on shared host memory."""

    # No homepage, url or checksum before the first release: packaging/README.md.

    license("BSD-3-Clause")

    version("0.2.0")

    depends_on("c", type="build")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))

    with when("+cuda"):
        depends_on("cuda@12:", type=("build", "run"))
        depends_on("py-cupy@13.4:+cuda", type=("build", "run"))
        depends_on("py-cuda-bindings@12:", type=("build", "run"))
        for arch in CudaPackage.cuda_arch_values:
            cupy = f"py-cupy cuda_arch={arch}"
            depends_on(cupy, when=f"cuda_arch={arch}", type=("build", "run"))

    import_modules = ["mpishare", "mpishare.halo", "mpishare.windows", "mpishare.reduction"]

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        # Without a compiler the build would go on, and exchanges on the host would be slower.
        env.set("MPISHARE_HOST_CODE", "compiled")
