// Numbers that the compiler does not have. mpishare/memory/numbers.py names all, and `sources` makes
// EACH_ADDED of it.

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

// The upper half of a float. In integers: GPUs before sm_80 have no instruction for it.
struct OfBfloat16 {
    static __device__ __forceinline__ float value(unsigned short bits) {
        return __uint_as_float(static_cast<unsigned>(bits) << 16);
    }
    static __device__ __forceinline__ unsigned short bits(float wide) {
        const unsigned bits = __float_as_uint(wide);
        if (wide != wide) return bits >> 16 | 0x40;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; // to nearest, ties to even
    }
};
typedef Narrow<OfBfloat16> Bfloat16;

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
