/* The numbers that C computes with, by the names of their dtypes, and how two become one: as in
 * NumPy, with NaN larger and smaller than everything. mpishare/memory/numbers.py has all of them. */

#ifndef MPISHARE_NUMBERS_H
#define MPISHARE_NUMBERS_H

#include <stdint.h>

/* Each number, its type, and the type in which it is added and multiplied: integers wrap. */
#define EACH_NUMBER(DO)                                                                            \
    DO(int8, int8_t, uint32_t)                                                                     \
    DO(int16, int16_t, uint32_t)                                                                   \
    DO(int32, int32_t, uint32_t)                                                                   \
    DO(int64, int64_t, uint64_t)                                                                   \
    DO(uint8, uint8_t, uint32_t)                                                                   \
    DO(uint16, uint16_t, uint32_t)                                                                 \
    DO(uint32, uint32_t, uint32_t)                                                                 \
    DO(uint64, uint64_t, uint64_t)                                                                 \
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

EACH_NUMBER(COMBINE)

#endif
