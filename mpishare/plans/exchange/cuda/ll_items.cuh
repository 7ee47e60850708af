// Parts that travel by LL.
#include "work_items.cuh"
#include "ll.cuh"

// Returns in one thread whether the flag reached the value; false: aborted.
__device__ bool wait_for(const Word* flag, Word value, Wait wait) {
    while (is_below(flag, value))
        if (!wait.keep_waiting()) return false;
    wait.end();
    return true;
}

// Units of a part.
struct Range {
    unsigned first, nunits;
};

// Where the words of a unit are in the packed part.
template <class Unit>
__device__ __forceinline__ Word* words_of(char* packed, unsigned unit) {
    return reinterpret_cast<Word*>(packed) + static_cast<Word>(LL<Unit>::COUNT) * unit;
}

// A unit per store: one of 8 or 4 bytes.
template <class Unit>
__device__ __forceinline__ void put_ll(
    const Item& item, Range range, char* field, char* packed, Word epoch
) {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < range.nunits; i += blockDim.x) {
        unsigned unit = range.first + i;
        const long long at = offset_of(item.part, unit);
        Unit data = SLIDING && at < 0 ? Unit() : *reinterpret_cast<Unit*>(field + at);
        LL<Unit>::of(data).put(words_of<Unit>(packed, unit), epoch << 32);
        if (ADDING && item.kind == PUT_LL_AND_ZERO) *reinterpret_cast<Unit*>(field + at) = Unit();
    }
}

template <class Unit>
__device__ __forceinline__ void get_ll(
    const Item& item, Range range, char* field, char* packed, Wait wait
) {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < range.nunits; i += blockDim.x) {
        unsigned unit = range.first + i;
        const long long at = offset_of(item.part, unit);
        LL<Unit> words;
        while (!words.get(words_of<Unit>(packed, unit), wait.epoch << 32))
            if (!wait.keep_waiting()) return;
        if (!SLIDING || at >= 0) *reinterpret_cast<Unit*>(field + at) = words.value();
    }
    wait.end();
}

// As many units of 2 or 1 bytes per store as fill 4: the bytes of a part lie in the same places
// whatever its unit, which may be another one at the other end. Not inlined, to keep the code of
// the wider units small.
__device__ __noinline__ void put_ll_narrow(
    const Item& item, Range range, char* field, char* packed, Word epoch
) {
    const unsigned nbytes = item.part.unit, shift = nbytes == 2 ? 1 : 2, count = 1 << shift;
#pragma unroll 1
    for (unsigned i = threadIdx.x << shift; i < range.nunits; i += blockDim.x << shift) {
        unsigned unit = range.first + i, data = 0;
#pragma unroll 1
        for (unsigned k = 0; k < min(count, range.nunits - i); ++k) {
            const long long at = offset_of(item.part, unit + k);
            if (SLIDING && at < 0) continue;
            char* cell = field + at;
            unsigned bytes = nbytes == 2 ? *reinterpret_cast<const unsigned short*>(cell)
                                         : *reinterpret_cast<const unsigned char*>(cell);
            data |= bytes << 8 * nbytes * k;
            if (ADDING && item.kind == PUT_LL_AND_ZERO) memset(cell, 0, nbytes);
        }
        LL<unsigned>::of(data).put(words_of<unsigned>(packed, unit >> shift), epoch << 32);
    }
}

__device__ __noinline__ void get_ll_narrow(
    const Item& item, Range range, char* field, char* packed, Wait wait
) {
    const unsigned nbytes = item.part.unit, shift = nbytes == 2 ? 1 : 2, count = 1 << shift;
#pragma unroll 1
    for (unsigned i = threadIdx.x << shift; i < range.nunits; i += blockDim.x << shift) {
        unsigned unit = range.first + i;
        LL<unsigned> words;
        while (!words.get(words_of<unsigned>(packed, unit >> shift), wait.epoch << 32))
            if (!wait.keep_waiting()) return;
        unsigned data = words.value();
#pragma unroll 1
        for (unsigned k = 0; k < min(count, range.nunits - i); ++k, data >>= 8 * nbytes) {
            const long long at = offset_of(item.part, unit + k);
            if (SLIDING && at < 0) continue;
            char* cell = field + at;
            if (nbytes == 2) *reinterpret_cast<unsigned short*>(cell) = data;
            else *cell = data;
        }
    }
    wait.end();
}

#ifdef WIRE
const unsigned PER_WORD = 4 / sizeof(Wire);
struct Wires {
    Wire at[PER_WORD];
};

// As many numbers per store as fill 4 bytes.
template <class Number>
__device__ __noinline__ void put_ll_rounded(
    const Item& item, Range range, char* field, char* packed, Word epoch
) {
#pragma unroll 1
    for (unsigned i = threadIdx.x * PER_WORD; i < range.nunits; i += blockDim.x * PER_WORD) {
        const unsigned unit = range.first + i;
        Wires wires = {};
        for (unsigned k = 0; k < PER_WORD; ++k)
            if (i + k < range.nunits)
                wires.at[k] = Wire(*reinterpret_cast<Number*>(field + offset_of(item.part, unit + k)));
        LL<Wires>::of(wires).put(words_of<Wires>(packed, unit / PER_WORD), epoch << 32);
    }
}

template <class Number>
__device__ __noinline__ void get_ll_rounded(
    const Item& item, Range range, char* field, char* packed, Wait wait
) {
#pragma unroll 1
    for (unsigned i = threadIdx.x * PER_WORD; i < range.nunits; i += blockDim.x * PER_WORD) {
        const unsigned unit = range.first + i;
        LL<Wires> words;
        while (!words.get(words_of<Wires>(packed, unit / PER_WORD), wait.epoch << 32))
            if (!wait.keep_waiting()) return;
        const Wires wires = words.value();
        for (unsigned k = 0; k < PER_WORD; ++k)
            if (i + k < range.nunits)
                *reinterpret_cast<Number*>(field + offset_of(item.part, unit + k)) =
                    static_cast<Number>(wires.at[k]);
    }
    wait.end();
}

__device__ __forceinline__ void run_ll(
    const Item& item, Range range, char* field, char* packed, const Wait& wait
) {
    const bool is_double = item.part.unit == 8, puts = item.kind == PUT_LL;
    if (puts && is_double) put_ll_rounded<double>(item, range, field, packed, wait.epoch);
    else if (puts) put_ll_rounded<float>(item, range, field, packed, wait.epoch);
    else if (is_double) get_ll_rounded<double>(item, range, field, packed, wait);
    else get_ll_rounded<float>(item, range, field, packed, wait);
}
#else
__device__ __forceinline__ void put_cells(
    const Item& item, Range range, char* field, char* packed, Word epoch
) {
    if (item.part.unit == 8) put_ll<Word>(item, range, field, packed, epoch);
    else if (item.part.unit == 4) put_ll<unsigned>(item, range, field, packed, epoch);
    else put_ll_narrow(item, range, field, packed, epoch);
}

#if ADDING
#include "adding.cuh"
#endif

// Runs an item that travels by LL, by all threads of a block.
__device__ __forceinline__ void run_ll(
    const Item& item, Range range, char* field, char* packed, const Wait& wait
) {
    const int nbytes = item.part.unit;
#if ADDING
    if (item.kind == ADD || (GIVING && item.kind == SWAP_LL))
        return add_region(item, range, field, packed, wait);
#endif
    if (item.kind == PUT_LL || (ADDING && item.kind == PUT_LL_AND_ZERO)) {
        put_cells(item, range, field, packed, wait.epoch);
    } else {
        if (nbytes == 8) get_ll<Word>(item, range, field, packed, wait);
        else if (nbytes == 4) get_ll<unsigned>(item, range, field, packed, wait);
        else get_ll_narrow(item, range, field, packed, wait);
#if SCALED
        if (is_scaled(item)) scale_cells(item, item.part, field, range.first, range.nunits);
#endif
    }
}
#endif
