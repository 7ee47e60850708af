// Elements and how two become one; which element of a field has which number.
//
// The compiler options name the type and the operation, so that a kernel has one of each. Compile
// without contraction (--fmad=false): then a fold gives the bits that NumPy gives.
#ifndef NUMBER
#define NUMBER double
#endif
#ifndef OPERATION
#define OPERATION SUM
#endif
// How many ranks reduce.
#ifndef RANKS
#define RANKS 2
#endif
// Whether element i lies at i * sizeof(NUMBER).
#ifndef CONTIGUOUS
#define CONTIGUOUS 1
#endif

#define SUM 0
#define PROD 1
#define MAX 2
#define MIN 3

typedef unsigned long long Word;

struct Half {
    unsigned short bits;
    __device__ __forceinline__ float value() const {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
        return wide;
    }
    static __device__ __forceinline__ Half of(float wide) {
        Half half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(wide));
        return half;
    }
};

// Rounded once: sums and products of two halves are exact in a float.
__device__ __forceinline__ Half operator+(Half a, Half b) { return Half::of(a.value() + b.value()); }
__device__ __forceinline__ Half operator*(Half a, Half b) { return Half::of(a.value() * b.value()); }
__device__ __forceinline__ bool operator>=(Half a, Half b) { return a.value() >= b.value(); }
__device__ __forceinline__ bool operator<=(Half a, Half b) { return a.value() <= b.value(); }
__device__ __forceinline__ bool operator!=(Half a, Half b) { return a.value() != b.value(); }

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

// As numpy.maximum and numpy.minimum: the first NaN wins.
template <class T>
__device__ __forceinline__ T combine(T a, T b) {
    if constexpr (OPERATION == SUM) return static_cast<T>(a + b);
    else if constexpr (OPERATION == PROD) return static_cast<T>(a * b);
    else if constexpr (OPERATION == MAX) return a >= b || a != a ? a : b;
    else return a <= b || a != a ? a : b;
}

const int MAX_AXES = 8;

// Where the elements of a field lie; last axis fastest in their numbers.
struct Shape {
    long long step[MAX_AXES]; // bytes
    Word extent[MAX_AXES];
    int axes;
    int unused;
};
#ifdef Shape_nbytes
static_assert(sizeof(Shape) == Shape_nbytes, "size of Shape");
#endif

// Adds the byte offsets of element i to `at`, in fields of the same extents.
template <class Index, int FIELDS>
__device__ __forceinline__ void add_offsets(
    const Shape* const (&shapes)[FIELDS], Index i, long long (&at)[FIELDS]
) {
#pragma unroll 1
    for (int axis = shapes[0]->axes - 1; axis >= 0; --axis) {
        const Index extent = static_cast<Index>(shapes[0]->extent[axis]);
        const Index rest = axis ? i / extent : 0;
        const long long here = static_cast<long long>(i - rest * extent);
#pragma unroll
        for (int field = 0; field < FIELDS; ++field) at[field] += shapes[field]->step[axis] * here;
        i = rest;
    }
}

// Not inlined: it would make the kernels twice as large, for fields that hardly anybody has.
template <int FIELDS>
__device__ __noinline__ void add_wide_offsets(
    const Shape* const (&shapes)[FIELDS], Word i, long long (&at)[FIELDS]
) {
    add_offsets(shapes, i, at);
}

template <int FIELDS>
__device__ __forceinline__ void elements(
    char* const (&fields)[FIELDS], const Shape* const (&shapes)[FIELDS], Word i,
    Number* (&found)[FIELDS]
) {
    long long at[FIELDS] = {};
    if (CONTIGUOUS) {
#pragma unroll
        for (int field = 0; field < FIELDS; ++field) at[field] = i * sizeof(Number);
    } else if (i >> 32) {
        add_wide_offsets(shapes, i, at);
    } else {
        add_offsets(shapes, static_cast<unsigned>(i), at); // divides five times as fast
    }
#pragma unroll
    for (int field = 0; field < FIELDS; ++field)
        found[field] = reinterpret_cast<Number*>(fields[field] + at[field]);
}

__device__ __forceinline__ Number* element(char* field, const Shape& shape, Word i) {
    char* const fields[1] = {field};
    const Shape* const shapes[1] = {&shape};
    Number* found[1];
    elements(fields, shapes, i, found);
    return found[0];
}
