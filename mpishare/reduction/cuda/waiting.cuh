// Epochs of launches, and waits for other ranks that a death ends.

// Device memory that stays from one launch to the next. The blocks of a launch together add EPOCH
// to `arrived`: every thread derives the epoch from it at its start, and no block waits for others
// at its end.
struct State {
    Word arrived;
    unsigned tickets;
    unsigned aborted; // not 0 once a thread has seen the host's abort flag
};

const Word EPOCH = 1 << 20;

// The buffer of each rank, as this process maps it.
struct Peers {
    char* at[RANKS];
};

// Host memory of a wait: polled and written.
struct Host {
    volatile Word* stalled_on; // a word per rank, in order
    const volatile Word* abort;
};

__device__ __forceinline__ Word epoch_of(State* state) {
    return *const_cast<volatile Word*>(&state->arrived) / EPOCH + 1;
}

// Call it in one thread of each block, after the whole block has read the epoch.
__device__ __forceinline__ void count_launch(State* state) {
    atomicAdd(&state->arrived, blockIdx.x ? 1 : EPOCH - (gridDim.x - 1));
}

// Host memory is slow to poll: only a wait of some milliseconds publishes its peer and reads
// the abort flag. A thread that sees it sets `aborted` in device memory, which ends all other
// waits, those of later launches too.
const unsigned POLLS_PER_ABORT_CHECK = 1 << 8, POLLS_PER_HOST_CHECK = 1 << 14;

struct Wait {
    const Host& host;
    volatile unsigned* aborted;
    Word epoch;
    unsigned polls;

    __device__ Wait(const Host& host, State* state, Word epoch)
        : host(host), aborted(&state->aborted), epoch(epoch), polls(0) {}
    // Returns false once the wait is to be given up.
    __device__ __forceinline__ bool keep_waiting(int rank) {
        if (++polls % POLLS_PER_ABORT_CHECK) return true;
        if (*aborted) return false;
        if (polls % POLLS_PER_HOST_CHECK) return true;
        host.stalled_on[rank] = epoch;
        if (!*host.abort) return true;
        *aborted = 1;
        return false;
    }
    // Other threads may still wait for the same ranks: they publish it again.
    __device__ __forceinline__ void end() {
        if (polls >= POLLS_PER_HOST_CHECK)
            for (int rank = 0; rank < RANKS; ++rank) host.stalled_on[rank] = 0;
    }
};
