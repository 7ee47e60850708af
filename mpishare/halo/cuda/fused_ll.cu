// Route fused where all parts are small: the same protocol as fused.cu by a smaller kernel.
//
// An exchange of small parts is a chain of latencies. So there is a block per item, which takes no
// ticket; items come as a parameter instead of by a dependent read of memory; and each block counts
// the epochs for itself, which needs no atomics.
#include "ll.cuh"

#ifndef NITEMS
#define NITEMS 16
#endif

struct Items {
    Item at[NITEMS];
};

// Items are ordered as for fused.cu, and blocks start in that order.
extern "C" __global__ void __launch_bounds__(512) fused_ll(
    const __grid_constant__ Fields fields, const __grid_constant__ Items items, Word* epochs,
    unsigned* aborted, const volatile Word* abort
) {
    const Word epoch = *const_cast<volatile Word*>(epochs + blockIdx.x) + 1;
    const Item& item = items.at[blockIdx.x];
    char* packed = item.packed + (epoch & 1 ? item.parity_offset : 0);
    run_ll(item, fields.at[item.part.field], packed, Wait(item, abort, aborted, epoch));
    __syncthreads();
    if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;
}
