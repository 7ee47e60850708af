// The kernel of kernels.cuh by NVSHMEM's functions for kernels.
#include <nvshmem.h>
#include <nvshmemx.h>

extern "C" __global__ void __launch_bounds__(512)
    swap(const uint64_t* source, uint64_t* halves, uint64_t* signals, long long words, int rank,
         uint64_t* turns) {
  const uint64_t launch = turns[blockIdx.x] + 1;
  const long long first = words * blockIdx.x / gridDim.x, end = words * (blockIdx.x + 1) / gridDim.x;
  uint64_t* to = halves + (launch - 1) % 2 * words + first;
  uint64_t* signal = signals + blockIdx.x;
  nvshmemx_putmem_signal_block(to, source + first, (end - first) * sizeof(uint64_t), signal, launch,
                               NVSHMEM_SIGNAL_SET, 1 - rank);
  if (threadIdx.x == 0) nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, launch);
  __syncthreads();
  if (threadIdx.x == 0) turns[blockIdx.x] = launch;
}
