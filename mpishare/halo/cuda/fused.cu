// Route fused: one launch packs, stores into the neighbors' memory, signals, waits and unpacks.
//
// Two packed copies in turn, by the parity of the epoch. A rank stores epoch e + 2 over epoch e only
// after it has heard epoch e + 1 from that neighbor, which began that one after it had unpacked e:
// so every neighbor is told something at every epoch, if only by a flag.
//
// Small parts travel as words of 64 bits, data below and the epoch above: who sees the epoch has
// the data, and nothing is fenced. Larger ones travel as they are, with a flag for each item.
#include "work_items.cuh"

typedef unsigned long long Word;

// What stays from one launch to the next. All blocks of a launch add LAUNCH together: so each of
// them can tell the epoch at its beginning, and none waits for another at its end.
struct State {
    Word arrived;
    unsigned tickets;
    unsigned over; // not 0 once the host was seen to have given the node up
};

const Word LAUNCH = 1 << 20;

__device__ __forceinline__ void raise(Word* flag, Word epoch) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(epoch) : "memory");
}

__device__ __forceinline__ Word look(const Word* flag) {
    Word seen;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
    return seen;
}

// A wait. Only one of some milliseconds speaks with the host, whose words are far away, and whom
// all threads of the grid ask one after the other: it says for whom it is, and ends where the host
// has given the node up. What one has seen ends all others, of later launches too.
const unsigned SHORT = 1 << 8, LONG = 1 << 14;

struct Wait {
    volatile Word* late;
    const volatile Word* ended;
    volatile unsigned* over;
    Word epoch;
    unsigned looks;

    __device__ Wait(const Item& item, const volatile Word* ended, State* state, Word epoch)
        : late(item.late), ended(ended), over(&state->over), epoch(epoch), looks(0) {}
    __device__ __forceinline__ bool again() {
        if (++looks % SHORT) return true;
        if (*over) return false;
        if (looks % LONG) return true;
        *late = epoch;
        if (!*ended) return true;
        *over = 1;
        return false;
    }
    // Others may still wait for the same rank: they will say so again.
    __device__ __forceinline__ void end() {
        if (looks >= LONG) *late = 0;
    }
};

// Whether the flag was raised.
__device__ bool await(const Word* flag, Wait wait) {
    while (static_cast<long long>(look(flag) - wait.epoch) < 0)
        if (!wait.again()) return false;
    wait.end();
    return true;
}

// A unit as words: stored at once, and read back once all of them are of this epoch.
template <class Unit>
struct PinnedFlags;

template <>
struct PinnedFlags<unsigned> {
    static __device__ void say(char* packed, unsigned unit, unsigned cell, Word epoch) {
        Word* to = reinterpret_cast<Word*>(packed) + unit;
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(epoch | cell) : "memory");
    }
    static __device__ bool hear(const char* packed, unsigned unit, unsigned& cell, Word epoch) {
        const Word* at = reinterpret_cast<const Word*>(packed) + unit;
        Word seen;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
        cell = static_cast<unsigned>(seen);
        return (seen ^ epoch) >> 32 == 0;
    }
};

template <>
struct PinnedFlags<Word> {
    static __device__ void say(char* packed, unsigned unit, Word cell, Word epoch) {
        Word* to = reinterpret_cast<Word*>(packed) + 2ull * unit;
        Word low = epoch | static_cast<unsigned>(cell), high = epoch | cell >> 32;
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high)
                     : "memory");
    }
    static __device__ bool hear(const char* packed, unsigned unit, Word& cell, Word epoch) {
        const Word* at = reinterpret_cast<const Word*>(packed) + 2ull * unit;
        Word low, high;
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(low), "=l"(high) : "l"(at) : "memory");
        cell = high << 32 | static_cast<unsigned>(low);
        return ((low ^ epoch) | (high ^ epoch)) >> 32 == 0;
    }
};

template <class Unit>
__device__ void say(const Item& item, char* field, char* packed, Word epoch) {
    for (unsigned i = threadIdx.x; i < item.count; i += blockDim.x) {
        unsigned unit = item.first + i;
        Unit cell = *reinterpret_cast<Unit*>(field + place_of(item.part, unit));
        PinnedFlags<Unit>::say(packed, unit, cell, epoch << 32);
    }
}

template <class Unit>
__device__ void hear(const Item& item, char* field, const char* packed, Wait wait) {
    for (unsigned i = threadIdx.x; i < item.count; i += blockDim.x) {
        unsigned unit = item.first + i;
        Unit* to = reinterpret_cast<Unit*>(field + place_of(item.part, unit));
        Unit cell;
        while (!PinnedFlags<Unit>::hear(packed, unit, cell, wait.epoch << 32))
            if (!wait.again()) return;
        *to = cell;
    }
    wait.end();
}

__device__ void serve(
    const Item& item, const Fields& fields, Word epoch, State* state, const volatile Word* ended
) {
    char* packed = item.packed + (epoch & 1 ? item.turn : 0);
    char* field = fields.at[item.part.field];
    const bool is_wide = item.part.unit == 8;
    switch (item.kind) {
        case PUT_LL:
            if (is_wide) say<Word>(item, field, packed, epoch);
            else say<unsigned>(item, field, packed, epoch);
            break;
        case GET_LL:
            if (is_wide) hear<Word>(item, field, packed, Wait(item, ended, state, epoch));
            else hear<unsigned>(item, field, packed, Wait(item, ended, state, epoch));
            break;
        case UNPACK: {
            bool is_there = threadIdx.x || await(item.flag, Wait(item, ended, state, epoch));
            if (__syncthreads_and(is_there)) carry(item, fields, packed);
            break;
        }
        default:
            carry(item, fields, packed);
            __syncthreads();
            // What the other threads stored is released too: the barrier came between.
            if (threadIdx.x == 0 && item.flag) raise(item.flag, epoch);
    }
}

// Items stand in an order in which each is pushed before it is waited for, on all ranks alike. So
// that one resident block a rank suffices, blocks take them in that order: by their own number
// where there is a block for each, since they begin in the order of their numbers; else by tickets.
extern "C" __global__ void __launch_bounds__(512, 2) fused(
    const __grid_constant__ Fields fields, const Item* items, unsigned count, State* state,
    const volatile Word* ended
) {
    __shared__ Item item;
    __shared__ unsigned ticket;
    const Word epoch = *const_cast<volatile Word*>(&state->arrived) / LAUNCH + 1;
    const bool is_one_each = count <= gridDim.x;
    unsigned turn = blockIdx.x;
    while (true) {
        if (!is_one_each) {
            if (threadIdx.x == 0) ticket = atomicAdd(&state->tickets, 1);
            __syncthreads();
            turn = ticket;
        }
        if (turn >= count) break;
        if (threadIdx.x < sizeof(Item) / sizeof(uint4))
            reinterpret_cast<uint4*>(&item)[threadIdx.x] =
                reinterpret_cast<const uint4*>(items + turn)[threadIdx.x];
        __syncthreads();
        serve(item, fields, epoch, state, ended);
        if (is_one_each) break;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        // The last of all tickets, since each block takes one in vain.
        if (!is_one_each && turn == count + gridDim.x - 1) state->tickets = 0;
        atomicAdd(&state->arrived, blockIdx.x ? 1 : LAUNCH - (gridDim.x - 1));
    }
}
