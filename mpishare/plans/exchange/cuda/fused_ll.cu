// Route fused where all parts are small: the same protocol as fused.cu by a smaller kernel.
//
// An exchange of small parts is a chain of latencies. So there is a block per chunk, which takes no
// ticket; items come as a parameter instead of by a dependent read of memory; and each block counts
// the epochs for itself, which needs no atomics.
#define ADD_DEPTH 1
#include "ll_items.cuh"

#ifndef NITEMS
#define NITEMS 16
#endif
#ifndef CHUNK_NBYTES
#define CHUNK_NBYTES 4096
#endif

// Whole parts: parts to send come first, and blocks start in that order.
struct Items {
    Item at[NITEMS];
};

// Each part has 1 << log_chunks blocks, some of which may have nothing to do.
extern "C" __global__ void __launch_bounds__(512) fused_ll(
    const __grid_constant__ Fields fields, const __grid_constant__ Items items, unsigned log_chunks,
    Word* epochs, unsigned* aborted, const volatile Word* abort
) {
    const Word epoch = *const_cast<volatile Word*>(epochs + blockIdx.x) + 1;
    const Item& item = items.at[blockIdx.x >> log_chunks];
    const unsigned per_chunk = CHUNK_NBYTES >> (__ffs(packed_unit(item.part)) - 1);
    const unsigned first = (blockIdx.x & ((1 << log_chunks) - 1)) * per_chunk;
    if (first >= item.nunits) return;
    char* packed = packed_of(item, epoch);
    const Range range = {first, min(per_chunk, item.nunits - first)};
    const Wait wait({item.stalled_on, abort}, aborted, epoch);
    run_ll(item, range, fields.at[item.part.field], packed, wait);
    __syncthreads();
    if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;
}
