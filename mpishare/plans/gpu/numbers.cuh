// Numbers that the compiler does not have, and those that kernels add; mpishare/memory/numbers.py
// names them.

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

// Complex numbers are added as two reals, signed integers as unsigned ones.
#define EACH_ADDED(CASE)          \
    CASE(0, unsigned char)        \
    CASE(1, unsigned short)       \
    CASE(2, unsigned int)         \
    CASE(3, unsigned long long)   \
    CASE(4, Half)                 \
    CASE(5, float)                \
    CASE(6, double)
