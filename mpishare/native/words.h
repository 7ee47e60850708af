// Exact sums as integers: digits of 32 bits, and how a row of them is rounded, once. For C and CUDA.
//
// A digit is kept in 64 bits, so that digits are added without carries, in any order. Digit 0 begins
// at 2^LOWEST; the products of all doubles are multiples of 2^-2148 and below 2^2048.
#ifdef __CUDACC__
#define SHARED __device__ __forceinline__
#else
#include <string.h>
#define SHARED static inline
#endif

// A row: digits, then terms that are +inf and -inf (a NaN counts as both), -0.0, and all.
enum { DIGITS = 136, POSITIVE = DIGITS, NEGATIVE, NEGATIVE_ZEROS, TERMS, WORDS, LOWEST = -2176 };

typedef unsigned long long Bits;

SHARED Bits bits_of(double number)
{
    Bits bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

SHARED double double_of(Bits bits)
{
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

SHARED int is_finite(double number)
{
    return (bits_of(number) >> 52 & 2047) < 2047;
}

// Splits a finite number: mantissa * 2^exponent, without its sign.
SHARED Bits mantissa_of(double number, int* exponent)
{
    const Bits bits = bits_of(number), fraction = bits & ((1ull << 52) - 1);
    const int field = (int)(bits >> 52 & 2047);
    *exponent = (field ? field : 1) - 1075;
    return field ? fraction | 1ull << 52 : fraction;
}

// The digit whose lowest bit is `shift` below that of an integer.
SHARED unsigned digit_of(Bits integer, int shift)
{
    if (shift >= 32 || shift <= -64) return 0;
    return (unsigned)(shift >= 0 ? integer << shift : integer >> -shift);
}

// A sum of digits, from the lowest on: its highest digit that is not 0, the two below, the rest.
typedef struct {
    long long carry;
    unsigned last[2];
    int has_lower, top, has_rest;
    unsigned digits[3];
} Digits;

SHARED void take_digit(Digits* sum, int at, long long digit)
{
    sum->carry += digit;
    const unsigned here = (unsigned)sum->carry;
    sum->carry >>= 32;
    if (here) {
        sum->top = at;
        sum->digits[0] = here;
        sum->digits[1] = sum->last[0];
        sum->digits[2] = sum->last[1];
        sum->has_rest = sum->has_lower;
    }
    sum->has_lower |= sum->last[1] != 0;
    sum->last[1] = sum->last[0];
    sum->last[0] = here;
}

// The bits of a float, or of a double, that are infinite or NaN.
SHARED Bits special(int is_float, int is_positive, int is_negative)
{
    const Bits infinity = is_float ? 255ull << 23 : 2047ull << 52;
    if (is_positive && is_negative) return infinity | (is_float ? 1ull << 22 : 1ull << 51);
    return infinity | (Bits)(is_negative != 0) << (is_float ? 31 : 63);
}

// The bits of a float, or of a double, next to a positive sum: of two that are, those that are even.
SHARED Bits rounded(const Digits* sum, int is_float)
{
    const int precision = is_float ? 24 : 53, least = is_float ? -149 : -1074;
    const Bits half = 1ull << 63, infinity = special(is_float, 1, 0);
    int lead = 0;
    while (!(sum->digits[0] << lead >> 31)) ++lead;
    // The sum is (integer + less than 1) * 2^exponent.
    Bits integer = ((Bits)sum->digits[0] << 32 | sum->digits[1]) << lead;
    if (lead) integer |= sum->digits[2] >> (32 - lead);
    const int has_rest = sum->has_rest || sum->digits[2] << lead;
    const int exponent = 32 * (sum->top - 1) + LOWEST - lead;
    const int unit = exponent + 64 - precision > least ? exponent + 64 - precision : least;
    const int dropped = unit - exponent; // bits
    if (dropped > 64) return 0;
    const Bits tail = dropped < 64 ? integer << (64 - dropped) : integer;
    Bits kept = dropped < 64 ? integer >> dropped : 0;
    kept += tail > half || (tail == half && (has_rest || kept & 1));
    // The highest bit of a normal number, and what comes of rounding it up, raises the exponent.
    const Bits bits = kept + ((Bits)(unit - least) << (precision - 1));
    return bits < infinity ? bits : infinity;
}

// The bits of what a row of words stands for; all of its digits but from `first` to `last` are 0.
SHARED Bits rounded_words(const long long* words, int first, int last, int is_float)
{
    if (words[POSITIVE] || words[NEGATIVE])
        return special(is_float, words[POSITIVE] != 0, words[NEGATIVE] != 0);
    const Bits sign = 1ull << (is_float ? 31 : 63);
    const int end = last + 3 < DIGITS ? last + 3 : DIGITS; // behind the last carry
    for (int is_negative = 0; is_negative < 2; ++is_negative) {
        Digits sum = {0};
        for (int at = first; at < end; ++at)
            take_digit(&sum, at, is_negative ? -words[at] : words[at]);
        if (sum.carry < 0) continue;
        if (sum.digits[0]) return rounded(&sum, is_float) | (is_negative ? sign : 0);
    }
    return words[TERMS] && words[TERMS] == words[NEGATIVE_ZEROS] ? sign : 0;
}

// Adds to a sum; returns what it lacks, exactly, unless it overflows.
SHARED double two_sum(double* sum, double number)
{
    const double old = *sum, now = old + number, part = now - old;
    *sum = now;
    return (old - (now - part)) + (number - part);
}

// Whether high + low is not 0, or has the sign of high: digits alone know that of another 0.
SHARED int is_decided(double high, double low)
{
    return high == 0 || high + low != 0;
}

// The bits of high + low, of a float or of a double.
SHARED Bits rounded_pair(double high, double low, int is_float)
{
    const double rest = low == 0 ? 0 : two_sum(&high, low);
    Bits bits = bits_of(high);
    if (!is_float) return bits;
    // To an odd neighbor: what is no double is not taken for the middle between two floats.
    if (rest != 0 && !(bits & 1)) bits += (rest > 0) == (high > 0) ? 1 : -1;
    const float narrow = (float)double_of(bits);
    unsigned found;
    memcpy(&found, &narrow, sizeof found);
    return found;
}
