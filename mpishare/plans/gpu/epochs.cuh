// Epochs of calls in which streams wait for other ranks, and kernels never do.
//
// There are two buffers, for even and for odd epochs. A rank packs epoch e + 2 where it packed e,
// and only once its stream has seen the flags of e + 1 of all others, which these set after they
// had unpacked e. So a call waits for the others once.

typedef unsigned long long Word;

// The epochs that this rank's GPU has begun and done. A kernel reads one word, and writes the other
// one: so all of its blocks see the same. `ended` counts the blocks of a kernel that are done.
struct Epochs {
    Word begun, done, ended;
};

// Returns the epoch of a call; `begun` is a word for the host.
__device__ __forceinline__ Word begin_epoch(Epochs* epochs, volatile Word* begun) {
    const Word epoch = epochs->done + 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) *begun = epochs->begun = epoch;
    return epoch;
}

// Returns the epoch that a kernel ends.
__device__ __forceinline__ Word end_epoch(Epochs* epochs) {
    const Word epoch = epochs->begun;
    if (blockIdx.x == 0 && threadIdx.x == 0) epochs->done = epoch;
    return epoch;
}

// Stores the epoch for the host, once all blocks have read the others' memory: then its owner may
// end. For all threads of a block, at the end.
__device__ __forceinline__ void publish_epoch(Epochs* epochs, volatile Word* done, Word epoch) {
    __syncthreads();
    if (threadIdx.x || atomicAdd(&epochs->ended, 1ull) + 1 < gridDim.x) return;
    epochs->ended = 0;
    __threadfence_system();
    *done = epoch;
}
