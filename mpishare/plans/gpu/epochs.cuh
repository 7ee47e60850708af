// Epochs of calls in which streams wait for other ranks, and kernels never do.
//
// There are two buffers, for even and for odd epochs. A rank packs epoch e + 2 where it packed e,
// and only once its stream has seen the flags of e + 1 of all others, which these set after they
// had unpacked e. So a call waits for the others once.

typedef unsigned long long Word;

// The epochs that this rank's GPU has begun and done. A kernel reads one word, and writes the other
// one: so all of its blocks see the same.
struct Epochs {
    Word begun, done;
};

// The functions below return the epoch of a call. Their last argument is a word for the host. It has
// `done` from the begin of the last kernel on: memory that this reads stays, even if its owner ends.
__device__ __forceinline__ Word begin_epoch(Epochs* epochs, volatile Word* begun) {
    const Word epoch = epochs->done + 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) *begun = epochs->begun = epoch;
    return epoch;
}

__device__ __forceinline__ Word end_epoch(Epochs* epochs, volatile Word* done) {
    const Word epoch = epochs->begun;
    if (blockIdx.x == 0 && threadIdx.x == 0) *done = epochs->done = epoch;
    return epoch;
}
