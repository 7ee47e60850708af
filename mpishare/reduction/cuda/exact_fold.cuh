// The elements of all ranks, folded to their sum, rounded once: by two doubles, or by digits where
// these leave something.
#include "words.h"

// The same as `rounded_words` of a sum of a few numbers, with no digits in memory.
__device__ __noinline__ Bits rounded_sum(const double* numbers, int count, int is_float) {
    int first = DIGITS, last = 0, is_positive = 0, is_negative = 0, are_zeros = 1, exponent;
    for (int k = 0; k < count; ++k) {
        const double number = numbers[k];
        is_positive |= !is_finite(number) && !(number < 0);
        is_negative |= !is_finite(number) && !(number > 0);
        are_zeros &= bits_of(number) == 1ull << 63;
        mantissa_of(number, &exponent);
        first = min(first, (exponent - LOWEST) >> 5);
        last = max(last, ((exponent - LOWEST) >> 5) + 2);
    }
    if (is_positive || is_negative) return special(is_float, is_positive, is_negative);
    const Bits sign = 1ull << (is_float ? 31 : 63);
    for (int is_turned = 0; is_turned < 2; ++is_turned) {
        Digits sum = {};
        for (int at = first; at < last + 3; ++at) {
            long long digit = 0;
            for (int k = 0; k < count; ++k) {
                const Bits mantissa = mantissa_of(numbers[k], &exponent);
                const long long part = digit_of(mantissa, exponent - LOWEST - 32 * at);
                digit += (numbers[k] < 0) != is_turned ? -part : part;
            }
            take_digit(&sum, at, digit);
        }
        if (sum.carry < 0) continue;
        if (sum.digits[0]) return rounded(&sum, is_float) | (is_turned ? sign : 0);
    }
    return are_zeros ? sign : 0;
}

template <bool IS_FLOAT>
struct ExactSum {
    double numbers[RANKS];
    double high = -0.0, low = 0; // which leaves the sign of a zero
    bool is_left = false;
    __device__ __forceinline__ void take(int rank, double number) {
        if (rank >= RANKS) return;
        numbers[rank] = number;
        is_left |= two_sum(&low, two_sum(&high, number)) != 0;  // NaN beyond the range
    }
    __device__ __forceinline__ Bits bits() const {
        if (!is_left && is_decided(high, low)) return rounded_pair(high, low, IS_FLOAT);
        return rounded_sum(numbers, RANKS, IS_FLOAT);
    }
};

__device__ __forceinline__ float float_of(Bits bits) {
    return __uint_as_float(static_cast<unsigned>(bits));
}

// As `InOrder`.
template <class T>
struct Exact;

template <>
struct Exact<double> : ExactSum<false> {
    __device__ __forceinline__ void add(double&, int rank, double number) { take(rank, number); }
    __device__ __forceinline__ void end(double& total) { total = double_of(bits()); }
};

template <>
struct Exact<float> : ExactSum<true> {
    __device__ __forceinline__ void add(float&, int rank, float number) { take(rank, number); }
    __device__ __forceinline__ void end(float& total) { total = float_of(bits()); }
};

template <class Format>
struct Exact<Narrow<Format>> : ExactSum<true> {
    typedef Narrow<Format> Number16;
    __device__ __forceinline__ void add(Number16&, int rank, Number16 number) {
        take(rank, number.value());
    }
    __device__ __forceinline__ void end(Number16& total) { total = Number16::of(float_of(bits())); }
};

template <class Real>
struct Exact<Complex<Real>> {
    Exact<Real> re, im;
    __device__ __forceinline__ void add(Complex<Real>& total, int rank, Complex<Real> number) {
        re.add(total.re, rank, number.re);
        im.add(total.im, rank, number.im);
    }
    __device__ __forceinline__ void end(Complex<Real>& total) {
        re.end(total.re);
        im.end(total.im);
    }
};
