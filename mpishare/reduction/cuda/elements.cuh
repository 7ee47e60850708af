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

__device__ __forceinline__ Number* element(char* field, const Shape& shape, Word i) {
    if (CONTIGUOUS) return reinterpret_cast<Number*>(field) + i;
    long long at = 0;
    if (i >> 32) {
#pragma unroll 1
        for (int axis = shape.axes - 1; axis > 0; --axis) {
            Word rest = i / shape.extent[axis];
            at += shape.step[axis] * static_cast<long long>(i - rest * shape.extent[axis]);
            i = rest;
        }
        return reinterpret_cast<Number*>(field + at + shape.step[0] * static_cast<long long>(i));
    }
    unsigned here = static_cast<unsigned>(i); // 32-bit divisions take a fifth of the time
#pragma unroll 1
    for (int axis = shape.axes - 1; axis > 0; --axis) {
        unsigned extent = static_cast<unsigned>(shape.extent[axis]);
        unsigned rest = extent ? here / extent : 0;
        at += shape.step[axis] * static_cast<long long>(here - rest * extent);
        here = rest;
    }
    return reinterpret_cast<Number*>(field + at + shape.step[0] * static_cast<long long>(here));
}
