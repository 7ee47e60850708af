// Elements and how two become one; which element of a field has which number.
//
// The compiler options have the type and the operation, so that a kernel has one of each. Compile
// without contraction (--fmad=false): then a fold gives the bits that NumPy gives.
#include "numbers.cuh"
#ifndef NUMBER
#define NUMBER double
#endif
#ifndef COMBINE
#define COMBINE a + b
#endif
// How many ranks reduce.
#ifndef RANKS
#define RANKS 2
#endif
// How elements lie: ROW, element i at i * sizeof(NUMBER); NEAR and FAR, along several axes, with
// numbers and steps below 2^31, and with any.
#ifndef FORM
#define FORM ROW
#endif

#define ROW 0
#define NEAR 1
#define FAR 2

typedef unsigned long long Word;

template <class Real>
struct __align__(2 * sizeof(Real)) Complex {
    Real re, im;
};

template <class Real>
__device__ __forceinline__ Complex<Real> operator+(Complex<Real> a, Complex<Real> b) {
    return {a.re + b.re, a.im + b.im};
}

template <class Real>
__device__ __forceinline__ Complex<Real> operator*(Complex<Real> a, Complex<Real> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

typedef NUMBER Number;

// Complex numbers are values with their indices: of equal values, and of NaNs, the lowest index.
template <class T>
__device__ __forceinline__ T locate(T a, T b, bool is_beyond) {
    const bool was_nan = a.re != a.re, is_nan = b.re != b.re;
    if (a.re == b.re || (was_nan && is_nan)) return b.im < a.im ? b : a;
    return is_nan || is_beyond ? b : a;
}

// The buffer of each rank, as this process maps it.
struct Peers {
    char* at[RANKS];
};

template <class T>
__device__ __forceinline__ T combine(T a, T b) {
    return static_cast<T>(COMBINE);
}

// Folds the elements of all ranks, which are given in their order, with what more a sum needs.
template <class T>
struct InOrder {
    __device__ __forceinline__ void add(T& total, int rank, T number) {
        if (rank == 0) total = number;
        else if (rank < RANKS) total = combine(total, number);
    }
    __device__ __forceinline__ void end(T&) {}
};

#ifdef EXACT
#include "exact_fold.cuh"
typedef Exact<Number> Fold;
#else
typedef InOrder<Number> Fold;
#endif

const int MAX_AXES = 8;

// Where the elements of a field lie; last axis fastest in their numbers.
struct Shape {
    long long step[MAX_AXES]; // bytes
    Word extent[MAX_AXES];
    // Divides a number below 2^31 by the extent: (n + (n * magic >> 32)) >> shift.
    unsigned magic[MAX_AXES];
    unsigned shift[MAX_AXES];
    int axes;
    int unused;
};
#ifdef Shape_nbytes
static_assert(sizeof(Shape) == Shape_nbytes, "size of Shape");
#endif

// The type in which indices of elements are divided.
template <int OF_FORM>
struct Index {
    typedef Word Number;
};
template <>
struct Index<NEAR> {
    typedef unsigned Number;
};

// Where elements `first`, `first` + `stride`, ... of several fields of the same extents lie.
template <int FIELDS, int COUNT>
__device__ __forceinline__ void elements(
    char* const (&fields)[FIELDS], const Shape* const (&shapes)[FIELDS], Word first, Word stride,
    Number* (&found)[FIELDS][COUNT]
) {
    long long at[FIELDS][COUNT] = {};
    if constexpr (FORM == ROW) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k)
#pragma unroll
            for (int field = 0; field < FIELDS; ++field)
                at[field][k] = (first + k * stride) * sizeof(Number);
    } else {
        typename Index<FORM>::Number i[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) i[k] = first + k * stride;
        // Axis by axis for all elements, so that what it reads of the shapes serves all.
#pragma unroll 1
        for (int axis = shapes[0]->axes - 1; axis >= 0; --axis) {
            const typename Index<FORM>::Number extent = shapes[0]->extent[axis];
            const unsigned magic = shapes[0]->magic[axis], shift = shapes[0]->shift[axis];
            long long step[FIELDS];
#pragma unroll
            for (int field = 0; field < FIELDS; ++field) step[field] = shapes[field]->step[axis];
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                typename Index<FORM>::Number rest = 0;
                if (axis) {
                    if constexpr (FORM == NEAR) rest = (i[k] + __umulhi(i[k], magic)) >> shift;
                    else rest = i[k] / extent;
                }
                const auto here = i[k] - rest * extent;
                i[k] = rest;
#pragma unroll
                for (int field = 0; field < FIELDS; ++field)
                    if constexpr (FORM == NEAR) // both factors have 31 bits
                        at[field][k] += static_cast<long long>(static_cast<int>(step[field])) *
                                        static_cast<int>(here);
                    else at[field][k] += step[field] * static_cast<long long>(here);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
#pragma unroll
        for (int field = 0; field < FIELDS; ++field)
            found[field][k] = reinterpret_cast<Number*>(fields[field] + at[field][k]);
}

__device__ __forceinline__ Number* element(char* field, const Shape& shape, Word i) {
    char* const fields[1] = {field};
    const Shape* const shapes[1] = {&shape};
    Number* found[1][1];
    elements(fields, shapes, i, 0, found);
    return found[0][0];
}
