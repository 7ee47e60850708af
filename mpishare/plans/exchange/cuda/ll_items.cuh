// Parts that travel by LL.
#include "work_items.cuh"
#include "ll.cuh"

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
        Unit data = *reinterpret_cast<Unit*>(field + offset_of(item.part, unit));
        LL<Unit>::of(data).put(words_of<Unit>(packed, unit), epoch << 32);
    }
}

template <class Unit>
__device__ __forceinline__ void get_ll(
    const Item& item, Range range, char* field, char* packed, Wait wait
) {
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < range.nunits; i += blockDim.x) {
        unsigned unit = range.first + i;
        Unit* to = reinterpret_cast<Unit*>(field + offset_of(item.part, unit));
        LL<Unit> words;
        while (!words.get(words_of<Unit>(packed, unit), wait.epoch << 32))
            if (!wait.keep_waiting()) return;
        *to = words.value();
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
            const char* cell = field + offset_of(item.part, unit + k);
            unsigned bytes = nbytes == 2 ? *reinterpret_cast<const unsigned short*>(cell)
                                         : *reinterpret_cast<const unsigned char*>(cell);
            data |= bytes << 8 * nbytes * k;
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
            char* cell = field + offset_of(item.part, unit + k);
            if (nbytes == 2) *reinterpret_cast<unsigned short*>(cell) = data;
            else *cell = data;
        }
    }
    wait.end();
}

// Runs an item of kind PUT_LL or GET_LL by all threads of a block.
__device__ __forceinline__ void run_ll(
    const Item& item, Range range, char* field, char* packed, const Wait& wait
) {
    const int nbytes = item.part.unit;
    if (item.kind == PUT_LL) {
        if (nbytes == 8) put_ll<Word>(item, range, field, packed, wait.epoch);
        else if (nbytes == 4) put_ll<unsigned>(item, range, field, packed, wait.epoch);
        else put_ll_narrow(item, range, field, packed, wait.epoch);
    } else {
        if (nbytes == 8) get_ll<Word>(item, range, field, packed, wait);
        else if (nbytes == 4) get_ll<unsigned>(item, range, field, packed, wait);
        else get_ll_narrow(item, range, field, packed, wait);
    }
}
