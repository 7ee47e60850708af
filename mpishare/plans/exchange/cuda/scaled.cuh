// Cells that have arrived, multiplied and added to where they lie, by the block that stored them: they
// are still in its cache. Plans whose cells only move have no such code.

// What cells are multiplied by, and what is added: elements of the type `element`.
struct __align__(16) Factors {
    char scale[16], offset[16];
    long long element;
    int has[2]; // either of them
};
static_assert(sizeof(Factors) == Factors_nbytes, "size of Factors");

__device__ __forceinline__ bool is_scaled(const Item& item) { return item.element >= 256; }
__device__ __forceinline__ const Factors& factors_of(const Item& item) {
    return *reinterpret_cast<const Factors*>(item.target + 1);
}

template <class Real>
struct Pair {
    Real re, im;
};

// A real factor is one of both parts, so that infinite ones stay what they are.
template <class Real>
__device__ __forceinline__ Pair<Real> operator*(Pair<Real> a, Pair<Real> b) {
    const Pair<Real> real = {a.re * b.re, a.im * b.re};
    if (b.im == 0) return real;
    return {real.re - a.im * b.im, a.re * b.im + real.im};
}
template <class Real>
__device__ __forceinline__ Pair<Real> operator+(Pair<Real> a, Pair<Real> b) {
    return {a.re + b.re, a.im + b.im};
}

#define EACH_SCALED(CASE) \
    EACH_ADDED(CASE) CASE(N_ADDED, Pair<float>) CASE(N_ADDED + 1, Pair<double>)

// Each product and each sum is rounded: the compiler is told not to contract them (work_items.py).
template <class Number>
__device__ void scale_as(
    const Factors& by, const Part* part, int nbytes, char* base, unsigned first, unsigned nunits
) {
    const Number scale = *reinterpret_cast<const Number*>(by.scale);
    const Number offset = *reinterpret_cast<const Number*>(by.offset);
    const unsigned long long begin = static_cast<unsigned long long>(first) * nbytes;
    const unsigned long long total = static_cast<unsigned long long>(nunits) * nbytes;
    const unsigned step = blockDim.x * sizeof(Number);
#pragma unroll 1
    for (unsigned long long i = threadIdx.x * sizeof(Number); i < total; i += step) {
        long long at = begin + i;
        if (part) {
            at = offset_of(*part, (begin + i) / nbytes);
            if (SLIDING && at < 0) continue;
            at += (begin + i) % nbytes;
        }
        Number& cell = *reinterpret_cast<Number*>(base + at);
        Number value = cell;
        if (by.has[0]) value = static_cast<Number>(value * scale);
        if (by.has[1]) value = static_cast<Number>(value + offset);
        cell = value;
    }
}

// By all threads of a block, once they have stored: units of a part in a field, or packed ones.
__device__ __noinline__ void scale_units(
    const Factors& by, const Part* part, int nbytes, char* base, unsigned first, unsigned nunits
) {
    __syncthreads();
#define CASE(element, Number) \
    case element: scale_as<Number>(by, part, nbytes, base, first, nunits); break;
    switch (by.element) { EACH_SCALED(CASE) }
#undef CASE
}

__device__ __forceinline__ void scale_cells(
    const Item& item, const Part& part, char* field, unsigned first, unsigned nunits
) {
    scale_units(factors_of(item), &part, part.unit, field, first, nunits);
}
