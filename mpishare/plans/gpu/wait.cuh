// Kernels that wait for other ranks: flags, the epochs of launches, waits that a death ends.

typedef unsigned long long Word;

__device__ __forceinline__ void store_release(Word* flag, Word epoch) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(epoch) : "memory");
}

__device__ __forceinline__ Word load_acquire(const Word* flag) {
    Word seen;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
    return seen;
}

// Whether a flag is still below a value. Epochs compare cyclically.
__device__ __forceinline__ bool is_below(const Word* flag, Word value) {
    return static_cast<long long>(load_acquire(flag) - value) < 0;
}

// Device memory that stays from one launch to the next. The blocks of a launch together add EPOCH
// to `arrived`: every thread derives the epoch from it at its start, and no block waits for others
// at its end.
struct State {
    Word arrived;
    unsigned tickets;
    unsigned aborted; // not 0 once a thread has seen the host's abort flag
};

const Word EPOCH = 1 << 20;

__device__ __forceinline__ Word epoch_of(State* state) {
    return *const_cast<volatile Word*>(&state->arrived) / EPOCH + 1;
}

// Call it in one thread of each block, after the whole block has read the epoch.
__device__ __forceinline__ void count_launch(State* state) {
    atomicAdd(&state->arrived, blockIdx.x ? 1 : EPOCH - (gridDim.x - 1));
}

// Host memory of a wait: polled and written.
struct Host {
    volatile Word* stalled_on; // a word per peer: not 0 during a long wait for it
    const volatile Word* abort;
};

// Polls between two looks at host memory, which is slow to poll: all threads of the grid would
// queue there. Only a wait of some milliseconds publishes its peer and reads the abort flag. A
// thread that sees it sets `aborted` in device memory, which ends all other waits, those of later
// launches too.
const unsigned POLLS_PER_ABORT_CHECK = 1 << 8, POLLS_PER_HOST_CHECK = 1 << 14;

struct Wait {
    Host host;
    volatile unsigned* aborted;
    Word epoch;
    unsigned polls;

    __device__ __forceinline__ Wait(const Host& host, unsigned* aborted, Word epoch)
        : host(host), aborted(aborted), epoch(epoch), polls(0) {}
    // Returns false once the wait is to be given up.
    __device__ __forceinline__ bool keep_waiting(int peer = 0) {
        if (++polls % POLLS_PER_ABORT_CHECK) return true;
        if (*aborted) return false;
        if (polls % POLLS_PER_HOST_CHECK) return true;
        host.stalled_on[peer] = epoch;
        if (!*host.abort) return true;
        *aborted = 1;
        return false;
    }
    // Other threads may still wait for the same peers: they publish it again.
    __device__ __forceinline__ void end(int peers = 1) {
        if (polls >= POLLS_PER_HOST_CHECK)
            for (int peer = 0; peer < peers; ++peer) host.stalled_on[peer] = 0;
    }
};
