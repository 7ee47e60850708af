/* The numbers that C computes with, by the names of their dtypes, and how two become one: as in
 * NumPy, with NaN larger and smaller than everything. mpishare/memory/numbers.py has all of them. */

#ifndef MPISHARE_NUMBERS_H
#define MPISHARE_NUMBERS_H

#include <stdint.h>
#include <string.h>

/* Each number, its type, and the type in which it is added and multiplied: integers wrap. */
#define EACH_INTEGER(DO)                                                                           \
    DO(int8, int8_t, uint32_t)                                                                     \
    DO(int16, int16_t, uint32_t)                                                                   \
    DO(int32, int32_t, uint32_t)                                                                   \
    DO(int64, int64_t, uint64_t)                                                                   \
    DO(uint8, uint8_t, uint32_t)                                                                   \
    DO(uint16, uint16_t, uint32_t)                                                                 \
    DO(uint32, uint32_t, uint32_t)                                                                 \
    DO(uint64, uint64_t, uint64_t)

#define EACH_NATIVE(DO)                                                                            \
    EACH_INTEGER(DO)                                                                               \
    DO(float32, float, float)                                                                      \
    DO(float64, double, double)

/* Pairs of numbers, which are added as such. */
#define EACH_PAIR(DO)                                                                              \
    DO(complex64, float32, float)                                                                  \
    DO(complex128, float64, double)

#define COMBINE(number, type, wide)                                                                \
    static inline type sum_##number(type a, type b) { return (type)((wide)a + (wide)b); }          \
    static inline type prod_##number(type a, type b) { return (type)((wide)a * (wide)b); }         \
    static inline type max_##number(type a, type b) { return a >= b || a != a ? a : b; }           \
    static inline type min_##number(type a, type b) { return a <= b || a != a ? a : b; }

EACH_NATIVE(COMBINE)

#define COMBINE_BITS(number, type, wide)                                                           \
    static inline type land_##number(type a, type b) { return a && b; }                            \
    static inline type lor_##number(type a, type b) { return a || b; }                             \
    static inline type lxor_##number(type a, type b) { return !a != !b; }                          \
    static inline type band_##number(type a, type b) { return (type)(a & b); }                     \
    static inline type bor_##number(type a, type b) { return (type)(a | b); }                      \
    static inline type bxor_##number(type a, type b) { return (type)(a ^ b); }

EACH_INTEGER(COMBINE_BITS)

/* Kept in 16 bits, the upper half of a float; computed with as a float, rounded once. */
typedef struct {
    uint16_t bits;
} bfloat16_t;

static inline float widened(bfloat16_t number)
{
    const uint32_t bits = (uint32_t)number.bits << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline bfloat16_t narrowed(float wide)
{
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    if (wide != wide)
        return (bfloat16_t){(uint16_t)(bits >> 16 | 0x40)};
    return (bfloat16_t){(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

#define COMBINE_BFLOAT16(operation)                                                                \
    static inline bfloat16_t operation##_bfloat16(bfloat16_t a, bfloat16_t b)                      \
    {                                                                                              \
        return narrowed(operation##_float32(widened(a), widened(b)));                              \
    }

COMBINE_BFLOAT16(sum)
COMBINE_BFLOAT16(prod)
COMBINE_BFLOAT16(max)
COMBINE_BFLOAT16(min)

#define EACH_NUMBER(DO) EACH_NATIVE(DO) DO(bfloat16, bfloat16_t, float)

#endif
