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

// The bits of a cell of less than 4 bytes, or rounded to a WIRE, the cell that has them, and the
// logarithm of how many of them fill 4 bytes.
#ifdef WIRE
__device__ __forceinline__ unsigned log_of_word(unsigned) { return sizeof(Wire) == 4 ? 0 : 1; }
__device__ __forceinline__ unsigned bits_of(const char* cell, unsigned unit) {
    const Wire wire = unit == 8 ? Wire(*reinterpret_cast<const double*>(cell))
                                : Wire(*reinterpret_cast<const float*>(cell));
    unsigned bits = 0;
    memcpy(&bits, &wire, sizeof wire);
    return bits;
}
__device__ __forceinline__ void store_bits(char* cell, unsigned unit, unsigned bits) {
    Wire wire;
    memcpy(&wire, &bits, sizeof wire);
    if (unit == 8) *reinterpret_cast<double*>(cell) = static_cast<double>(wire);
    else *reinterpret_cast<float*>(cell) = static_cast<float>(wire);
}
#else
__device__ __forceinline__ unsigned log_of_word(unsigned nbytes) { return nbytes == 2 ? 1 : 2; }
__device__ __forceinline__ unsigned bits_of(const char* cell, unsigned unit) {
    return unit == 2 ? *reinterpret_cast<const unsigned short*>(cell)
                     : *reinterpret_cast<const unsigned char*>(cell);
}
__device__ __forceinline__ void store_bits(char* cell, unsigned unit, unsigned bits) {
    if (unit == 2) *reinterpret_cast<unsigned short*>(cell) = bits;
    else *cell = bits;
}
#endif

// As many of them per store as fill 4 bytes: the bytes of a part lie in the same places whatever its
// unit, which may be another one at the other end. Not inlined, to keep the code of the wider units
// small.
__device__ __noinline__ void put_ll_narrow(
    const Item& item, Range range, char* field, char* packed, Word epoch
) {
    const unsigned whole = item.part.unit, nbytes = packed_unit(item.part);
    const unsigned shift = log_of_word(nbytes), count = 1 << shift;
#pragma unroll 1
    for (unsigned i = threadIdx.x << shift; i < range.nunits; i += blockDim.x << shift) {
        unsigned unit = range.first + i, data = 0;
#pragma unroll 1
        for (unsigned k = 0; k < min(count, range.nunits - i); ++k) {
            const long long at = offset_of(item.part, unit + k);
            if (SLIDING && at < 0) continue;
            char* cell = field + at;
            data |= bits_of(cell, whole) << 8 * nbytes * k;
            if (ADDING && item.kind == PUT_LL_AND_ZERO) memset(cell, 0, nbytes);
        }
        LL<unsigned>::of(data).put(words_of<unsigned>(packed, unit >> shift), epoch << 32);
    }
}

__device__ __noinline__ void get_ll_narrow(
    const Item& item, Range range, char* field, char* packed, Wait wait
) {
    const unsigned whole = item.part.unit, nbytes = packed_unit(item.part);
    const unsigned shift = log_of_word(nbytes), count = 1 << shift;
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
            store_bits(field + at, whole, data);
        }
    }
    wait.end();
}

__device__ __forceinline__ void put_cells(
    const Item& item, Range range, char* field, char* packed, Word epoch
) {
#ifndef WIRE
    if (item.part.unit == 8) put_ll<Word>(item, range, field, packed, epoch);
    else if (item.part.unit == 4) put_ll<unsigned>(item, range, field, packed, epoch);
    else
#endif
        put_ll_narrow(item, range, field, packed, epoch);
}

#if ADDING
#include "adding.cuh"
#endif

// Runs an item that travels by LL, by all threads of a block.
__device__ __forceinline__ void run_ll(
    const Item& item, Range range, char* field, char* packed, const Wait& wait
) {
#if ADDING
    if (item.kind == ADD || (GIVING && item.kind == SWAP_LL))
        return add_region(item, range, field, packed, wait);
#endif
    if (item.kind == PUT_LL || (ADDING && item.kind == PUT_LL_AND_ZERO)) {
        put_cells(item, range, field, packed, wait.epoch);
    } else {
#ifndef WIRE
        if (item.part.unit == 8) get_ll<Word>(item, range, field, packed, wait);
        else if (item.part.unit == 4) get_ll<unsigned>(item, range, field, packed, wait);
        else
#endif
            get_ll_narrow(item, range, field, packed, wait);
#if SCALED
        if (is_scaled(item)) scale_cells(item, item.part, field, range.first, range.nunits);
#endif
    }
}
