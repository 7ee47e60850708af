// An exchange by NCCL's interface for kernels: stores into the windows of other ranks, and barriers.
//
// Block b of all ranks moves the same words of each transfer and has a barrier of its own, so a
// block waits for its namesakes alone.
#include <nccl_device.h>

static_assert(sizeof(ncclDevComm) == DEV_COMM_NBYTES, "nccl4py is of another version of NCCL");

struct Transfer {
  const unsigned long long* out;
  unsigned long long* into;  // null where the words land where they belong
  ncclWindow_t window;
  unsigned long long offset;  // in the window of `to`, and of every other rank, in bytes
  long long words;
  long long to;
};

__device__ bool is_aligned(const void* address) {
  return reinterpret_cast<unsigned long long>(address) % sizeof(ulonglong2) == 0;
}

// Two words at a time: the same ones in each thread on all ranks, whatever their addresses.
__device__ void copy(unsigned long long* to, const unsigned long long* from, long long words) {
  const long long all = (long long)gridDim.x * blockDim.x;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const bool is_wide = is_aligned(to) && is_aligned(from);
  for (long long i = 2 * first; i < words; i += 2 * all) {
    if (is_wide && i + 1 < words) {
      *reinterpret_cast<ulonglong2*>(to + i) = *reinterpret_cast<const ulonglong2*>(from + i);
    } else {
      to[i] = from[i];
      if (i + 1 < words) to[i + 1] = from[i + 1];
    }
  }
}

extern "C" __global__ void __launch_bounds__(512)
    exchange(ncclDevComm comm, const Transfer* transfers, int count, int is_ready_first,
             long long half, unsigned int* steps) {
  ncclCoopCta block;
  ncclLsaBarrierSession<ncclCoopCta> barrier(block, comm, ncclTeamTagLsa(), blockIdx.x);
  const unsigned int step = steps[blockIdx.x];
  const unsigned long long turn = (step & 1) * half;
  if (is_ready_first) barrier.sync(block, cuda::memory_order_acq_rel);
  for (int k = 0; k < count; ++k) {
    const Transfer each = transfers[k];
    void* there = ncclGetLsaPointer(each.window, each.offset + turn, (int)each.to);
    copy(static_cast<unsigned long long*>(there), each.out, each.words);
  }
  barrier.sync(block, cuda::memory_order_acq_rel);
  for (int k = 0; k < count; ++k) {
    const Transfer each = transfers[k];
    if (each.into == nullptr) continue;
    const void* here = ncclGetLocalPointer(each.window, each.offset + turn);
    copy(each.into, static_cast<const unsigned long long*>(here), each.words);
  }
  // All threads have read it, since the barrier waited for them.
  if (threadIdx.x == 0) steps[blockIdx.x] = step + 1;
}

// The same for a few words: each travels beside a number, which the receiver waits for.
extern "C" __global__ void __launch_bounds__(512)
    exchange_words(ncclDevComm comm, const Transfer* transfers, int count, unsigned int buffer,
                   unsigned int slots) {
  ncclCoopCta block;
  const ncclTeam team = ncclTeamLsa(comm);
  const ncclLLA2AHandle handle = {buffer, slots};
  ncclLLA2ASession<ncclCoopCta> session(block, comm, team, handle, blockIdx.x, (int)slots);
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  // Two buffers take turns. A rank must hear from all others before it uses one again.
  const int last = count * blockDim.x;
  const int rank = threadIdx.x;
  if (rank < team.nRanks) session.send(rank, last + team.rank, (unsigned long long)0);
  for (int k = 0; k < count; ++k) {
    const Transfer each = transfers[k];
    if (i < each.words) session.send((int)each.to, k * blockDim.x + threadIdx.x, each.out[i]);
  }
  for (int k = 0; k < count; ++k) {
    const Transfer each = transfers[k];
    if (i < each.words) {
      each.into[i] = session.recv<unsigned long long>(k * blockDim.x + threadIdx.x);
    }
  }
  if (rank < team.nRanks) session.recv<unsigned long long>(last + rank);
  session.endEpoch(block);
}
