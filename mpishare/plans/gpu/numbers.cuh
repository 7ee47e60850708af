// Numbers that the compiler does not have, and those that kernels add; mpishare/memory/numbers.py
// names them.

// Kept in 16 bits, computed with as a float, rounded once.
template <class Format>
struct Narrow {
    unsigned short bits;
    __device__ __forceinline__ float value() const { return Format::value(bits); }
    static __device__ __forceinline__ Narrow of(float wide) { return {Format::bits(wide)}; }
};

struct OfHalf {
    static __device__ __forceinline__ float value(unsigned short bits) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
        return wide;
    }
    static __device__ __forceinline__ unsigned short bits(float wide) {
        unsigned short bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(wide));
        return bits;
    }
};
typedef Narrow<OfHalf> Half;

template <class F>
__device__ __forceinline__ Narrow<F> operator+(Narrow<F> a, Narrow<F> b) {
    return Narrow<F>::of(a.value() + b.value());
}
template <class F>
__device__ __forceinline__ Narrow<F> operator*(Narrow<F> a, Narrow<F> b) {
    return Narrow<F>::of(a.value() * b.value());
}
template <class F>
__device__ __forceinline__ bool operator>=(Narrow<F> a, Narrow<F> b) {
    return a.value() >= b.value();
}
template <class F>
__device__ __forceinline__ bool operator<=(Narrow<F> a, Narrow<F> b) {
    return a.value() <= b.value();
}
template <class F>
__device__ __forceinline__ bool operator!=(Narrow<F> a, Narrow<F> b) {
    return a.value() != b.value();
}

// Complex numbers are added as two reals, signed integers as unsigned ones.
#define EACH_ADDED(CASE)          \
    CASE(0, unsigned char)        \
    CASE(1, unsigned short)       \
    CASE(2, unsigned int)         \
    CASE(3, unsigned long long)   \
    CASE(4, Half)                 \
    CASE(5, float)                \
    CASE(6, double)
