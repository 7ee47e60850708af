// The kernels of kernels.cuh by NVSHMEM's functions for kernels.
#include <nvshmem.h>
#include <nvshmemx.h>

extern "C" __global__ void ping(const uint64_t* source, uint64_t* here, uint64_t* signal,
                                long long rounds, int rank, const uint64_t* expected,
                                uint64_t* wrong, uint64_t* launches) {
  const uint64_t before = *launches * rounds;
  uint64_t bad = 0;
  for (long long k = 0; k < rounds; ++k) {
    const uint64_t number = before + k + 1;
    if (rank == 1) nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, number);
    nvshmem_uint64_put_signal(here + k, source + k, 1, signal, number, NVSHMEM_SIGNAL_SET, 1 - rank);
    if (rank == 0) nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, number);
    if (expected) bad += *(volatile uint64_t*)(here + k) != expected[k];
  }
  *wrong += bad;
  *launches += 1;
}

// A signal whose upper half is the number of the round, and whose lower half is the word.
extern "C" __global__ void ping_word(uint64_t* signal, unsigned mine, unsigned theirs,
                                     long long rounds, int rank, uint64_t* wrong,
                                     uint64_t* launches) {
  const uint64_t before = *launches * rounds;
  uint64_t bad = 0;
  for (long long k = 0; k < rounds; ++k) {
    const uint64_t number = (before + k + 1) << 32;
    uint64_t got = 0;
    if (rank == 1) got = nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, number);
    nvshmemx_signal_op(signal, number | (mine + (unsigned)k), NVSHMEM_SIGNAL_SET, 1 - rank);
    if (rank == 0) got = nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, number);
    bad += (unsigned)got != theirs + (unsigned)k;
  }
  *wrong += bad;
  *launches += 1;
}

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
