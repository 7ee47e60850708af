// Route fused: one kernel packs, stores into the neighbors' memory, signals, waits and unpacks.
//
// Receive buffers are double-buffered by the parity of the epoch. A rank overwrites the buffer of
// epoch e at epoch e + 2, and only once it has received epoch e + 1 from that neighbor, which the
// neighbor sends after it has unpacked e. So something goes to every neighbor at every epoch: where
// there is no data, a flag.
//
// Small parts travel by LL, as in NCCL: each 64-bit store carries 32 bits of data and 32 bits of
// epoch, so that the reader needs no fence. Larger parts travel by plain stores, with one flag per
// chunk (release at the sender, acquire at the receiver).
#include "work_items.cuh"

typedef unsigned long long Word;

// Device memory that stays from one launch to the next. The blocks of a launch together add EPOCH
// to `arrived`: every block derives the epoch from it at its start, and none waits for others at
// its end.
struct State {
    Word arrived;
    unsigned tickets;
    unsigned aborted; // not 0 once a thread has seen the host's abort flag
};

const Word EPOCH = 1 << 20;

__device__ __forceinline__ void store_release(Word* flag, Word epoch) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(epoch) : "memory");
}

__device__ __forceinline__ Word load_acquire(const Word* flag) {
    Word seen;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
    return seen;
}

// Polls between two looks at host memory, which is slow to poll: all threads of the grid would
// queue there. Only a wait of some milliseconds publishes `stalled_on` and reads the abort flag. A
// thread that sees it sets `aborted` in device memory, which ends all other waits, those of later
// launches too.
const unsigned POLLS_PER_ABORT_CHECK = 1 << 8, POLLS_PER_HOST_CHECK = 1 << 14;

struct Wait {
    volatile Word* stalled_on;
    const volatile Word* abort;
    volatile unsigned* aborted;
    Word epoch;
    unsigned polls;

    __device__ Wait(const Item& item, const volatile Word* abort, State* state, Word epoch)
        : stalled_on(item.stalled_on), abort(abort), aborted(&state->aborted), epoch(epoch),
          polls(0) {}
    __device__ __forceinline__ bool keep_waiting() {
        if (++polls % POLLS_PER_ABORT_CHECK) return true;
        if (*aborted) return false;
        if (polls % POLLS_PER_HOST_CHECK) return true;
        *stalled_on = epoch;
        if (!*abort) return true;
        *aborted = 1;
        return false;
    }
    // Other threads may still wait for the same rank: they publish it again.
    __device__ __forceinline__ void end() {
        if (polls >= POLLS_PER_HOST_CHECK) *stalled_on = 0;
    }
};

// Returns whether the flag reached the epoch; false: aborted. Epochs compare cyclically.
__device__ bool wait_for(const Word* flag, Wait wait) {
    while (static_cast<long long>(load_acquire(flag) - wait.epoch) < 0)
        if (!wait.keep_waiting()) return false;
    wait.end();
    return true;
}

// One unit by LL: 4 bytes in one word, 8 bytes in two that are stored at once.
template <class Unit>
struct LL;

template <>
struct LL<unsigned> {
    static __device__ void put(char* packed, unsigned unit, unsigned data, Word flag) {
        Word* to = reinterpret_cast<Word*>(packed) + unit;
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(flag | data) : "memory");
    }
    static __device__ bool get(const char* packed, unsigned unit, unsigned& data, Word flag) {
        const Word* at = reinterpret_cast<const Word*>(packed) + unit;
        Word seen;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
        data = static_cast<unsigned>(seen);
        return (seen ^ flag) >> 32 == 0;
    }
};

template <>
struct LL<Word> {
    static __device__ void put(char* packed, unsigned unit, Word data, Word flag) {
        Word* to = reinterpret_cast<Word*>(packed) + 2ull * unit;
        Word low = flag | static_cast<unsigned>(data), high = flag | data >> 32;
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high)
                     : "memory");
    }
    static __device__ bool get(const char* packed, unsigned unit, Word& data, Word flag) {
        const Word* at = reinterpret_cast<const Word*>(packed) + 2ull * unit;
        Word low, high;
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(low), "=l"(high) : "l"(at) : "memory");
        data = high << 32 | static_cast<unsigned>(low);
        return ((low ^ flag) | (high ^ flag)) >> 32 == 0;
    }
};

template <class Unit>
__device__ void put_ll(const Item& item, char* field, char* packed, Word epoch) {
    for (unsigned i = threadIdx.x; i < item.nunits; i += blockDim.x) {
        unsigned unit = item.first + i;
        Unit data = *reinterpret_cast<Unit*>(field + offset_of(item.part, unit));
        LL<Unit>::put(packed, unit, data, epoch << 32);
    }
}

template <class Unit>
__device__ void get_ll(const Item& item, char* field, const char* packed, Wait wait) {
    for (unsigned i = threadIdx.x; i < item.nunits; i += blockDim.x) {
        unsigned unit = item.first + i;
        Unit* to = reinterpret_cast<Unit*>(field + offset_of(item.part, unit));
        Unit data;
        while (!LL<Unit>::get(packed, unit, data, wait.epoch << 32))
            if (!wait.keep_waiting()) return;
        *to = data;
    }
    wait.end();
}

__device__ void run_item(
    const Item& item, const Fields& fields, Word epoch, State* state, const volatile Word* abort
) {
    char* packed = item.packed + (epoch & 1 ? item.parity_offset : 0);
    char* field = fields.at[item.part.field];
    const bool is_wide = item.part.unit == 8;
    switch (item.kind) {
        case PUT_LL:
            if (is_wide) put_ll<Word>(item, field, packed, epoch);
            else put_ll<unsigned>(item, field, packed, epoch);
            break;
        case GET_LL:
            if (is_wide) get_ll<Word>(item, field, packed, Wait(item, abort, state, epoch));
            else get_ll<unsigned>(item, field, packed, Wait(item, abort, state, epoch));
            break;
        case UNPACK: {
            bool is_ready = threadIdx.x || wait_for(item.flag, Wait(item, abort, state, epoch));
            if (__syncthreads_and(is_ready)) copy_item(item, fields, packed);
            break;
        }
        default:
            copy_item(item, fields, packed);
            __syncthreads();
            // Releases the stores of the whole block: the barrier orders them before this one.
            if (threadIdx.x == 0 && item.flag) store_release(item.flag, epoch);
    }
}

// Items are ordered so that each is packed before it is waited for, alike on all ranks. Blocks take
// them in that order, so that one resident block per rank is enough for progress: by block index
// where there is a block per item (blocks start in that order), else by tickets.
extern "C" __global__ void __launch_bounds__(512, 2) fused(
    const __grid_constant__ Fields fields, const Item* items, unsigned count, State* state,
    const volatile Word* abort
) {
    __shared__ Item item;
    __shared__ unsigned ticket;
    const Word epoch = *const_cast<volatile Word*>(&state->arrived) / EPOCH + 1;
    const bool is_one_each = count <= gridDim.x;
    unsigned index = blockIdx.x;
    while (true) {
        if (!is_one_each) {
            if (threadIdx.x == 0) ticket = atomicAdd(&state->tickets, 1);
            __syncthreads();
            index = ticket;
        }
        if (index >= count) break;
        if (threadIdx.x < sizeof(Item) / sizeof(uint4))
            reinterpret_cast<uint4*>(&item)[threadIdx.x] =
                reinterpret_cast<const uint4*>(items + index)[threadIdx.x];
        __syncthreads();
        run_item(item, fields, epoch, state, abort);
        if (is_one_each) break;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        // Resets the tickets with the last one: each block takes one beyond the items.
        if (!is_one_each && index == count + gridDim.x - 1) state->tickets = 0;
        atomicAdd(&state->arrived, blockIdx.x ? 1 : EPOCH - (gridDim.x - 1));
    }
}
