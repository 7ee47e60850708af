// What kernels that wait for other ranks share: flags, waits, and LL, whose words hold data and epoch.
#include "work_items.cuh"

typedef unsigned long long Word;

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

    __device__ __forceinline__ Wait(
        const Item& item, const volatile Word* abort, unsigned* aborted, Word epoch
    )
        : stalled_on(item.stalled_on), abort(abort), aborted(aborted), epoch(epoch), polls(0) {}
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

// Returns whether the flag reached the value; false: aborted. Epochs compare cyclically.
__device__ bool wait_for(const Word* flag, Word value, Wait wait) {
    while (static_cast<long long>(load_acquire(flag) - value) < 0)
        if (!wait.keep_waiting()) return false;
    wait.end();
    return true;
}

// One store of LL: 4 bytes of data in one word, 8 in two that are stored at once.
template <class Data>
struct LL;

template <>
struct LL<unsigned> {
    static __device__ void put(char* packed, unsigned at, unsigned data, Word flag) {
        Word* to = reinterpret_cast<Word*>(packed) + at;
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(flag | data) : "memory");
    }
    static __device__ bool get(const char* packed, unsigned at, unsigned& data, Word flag) {
        const Word* from = reinterpret_cast<const Word*>(packed) + at;
        Word seen;
        asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory");
        data = static_cast<unsigned>(seen);
        return (seen ^ flag) >> 32 == 0;
    }
};

template <>
struct LL<Word> {
    static __device__ void put(char* packed, unsigned at, Word data, Word flag) {
        Word* to = reinterpret_cast<Word*>(packed) + 2ull * at;
        Word low = flag | static_cast<unsigned>(data), high = flag | data >> 32;
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high)
                     : "memory");
    }
    static __device__ bool get(const char* packed, unsigned at, Word& data, Word flag) {
        const Word* from = reinterpret_cast<const Word*>(packed) + 2ull * at;
        Word low, high;
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(low), "=l"(high) : "l"(from) : "memory");
        data = high << 32 | static_cast<unsigned>(low);
        return ((low ^ flag) | (high ^ flag)) >> 32 == 0;
    }
};

// A unit per store: one of 8 or 4 bytes.
template <class Unit>
__device__ __forceinline__ void put_ll(const Item& item, char* field, char* packed, Word epoch) {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < item.nunits; i += blockDim.x) {
        unsigned unit = item.first + i;
        Unit data = *reinterpret_cast<Unit*>(field + offset_of(item.part, unit));
        LL<Unit>::put(packed, unit, data, epoch << 32);
    }
}

template <class Unit>
__device__ __forceinline__ void get_ll(
    const Item& item, char* field, const char* packed, Wait wait
) {
#pragma unroll 1
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

// As many units of 2 or 1 bytes per store as fill 4: the bytes of a part lie in the same places
// whatever its unit, which may be another one at the other end. Apart from the code of the wider
// units, of which there is better little.
__device__ __noinline__ void put_ll_narrow(
    const Item& item, char* field, char* packed, Word epoch
) {
    const unsigned nbytes = item.part.unit, shift = nbytes == 2 ? 1 : 2, count = 1 << shift;
#pragma unroll 1
    for (unsigned i = threadIdx.x << shift; i < item.nunits; i += blockDim.x << shift) {
        unsigned unit = item.first + i, data = 0;
#pragma unroll 1
        for (unsigned k = 0; k < min(count, item.nunits - i); ++k) {
            const char* cell = field + offset_of(item.part, unit + k);
            unsigned bytes = nbytes == 2 ? *reinterpret_cast<const unsigned short*>(cell)
                                         : *reinterpret_cast<const unsigned char*>(cell);
            data |= bytes << 8 * nbytes * k;
        }
        LL<unsigned>::put(packed, unit >> shift, data, epoch << 32);
    }
}

__device__ __noinline__ void get_ll_narrow(
    const Item& item, char* field, const char* packed, Wait wait
) {
    const unsigned nbytes = item.part.unit, shift = nbytes == 2 ? 1 : 2, count = 1 << shift;
#pragma unroll 1
    for (unsigned i = threadIdx.x << shift; i < item.nunits; i += blockDim.x << shift) {
        unsigned unit = item.first + i, data;
        while (!LL<unsigned>::get(packed, unit >> shift, data, wait.epoch << 32))
            if (!wait.keep_waiting()) return;
#pragma unroll 1
        for (unsigned k = 0; k < min(count, item.nunits - i); ++k, data >>= 8 * nbytes) {
            char* cell = field + offset_of(item.part, unit + k);
            if (nbytes == 2) *reinterpret_cast<unsigned short*>(cell) = data;
            else *cell = data;
        }
    }
    wait.end();
}

// Runs an item of kind PUT_LL or GET_LL by all threads of a block.
__device__ __forceinline__ void run_ll(
    const Item& item, char* field, char* packed, const Wait& wait
) {
    const int nbytes = item.part.unit;
    if (item.kind == PUT_LL) {
        if (nbytes == 8) put_ll<Word>(item, field, packed, wait.epoch);
        else if (nbytes == 4) put_ll<unsigned>(item, field, packed, wait.epoch);
        else put_ll_narrow(item, field, packed, wait.epoch);
    } else {
        if (nbytes == 8) get_ll<Word>(item, field, packed, wait);
        else if (nbytes == 4) get_ll<unsigned>(item, field, packed, wait);
        else get_ll_narrow(item, field, packed, wait);
    }
}
